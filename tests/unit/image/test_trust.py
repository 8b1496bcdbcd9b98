"""Signatures of images at registries. The program cosign is a stand-in here: only how it is called, and what becomes of its answer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from belljar.errors import BadSetting, CommandMissing, NotPermitted
from belljar.image import Settings
from belljar.image.container import trust

DIGEST = f"sha256:{'5' * 64}"
RULES = (
    "hub.example.org/team cosign --key=/etc/team.pub --insecure-ignore-tlog=true",
    "hub.example.org/free/ cosign --key=/k",
)


@pytest.fixture
def cosign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Writes its words down, and refuses what is signed by nobody."""
    program = tmp_path / "bin/cosign"
    program.parent.mkdir()
    program.write_text(
        '#!/bin/sh\nprintf "%s\\n" "$@" >called\ncase $* in *unsigned*)\n'
        'echo WARNING: look >&2; echo "Error: no matching signatures:" >&2; echo "main.go:74: error" >&2; exit 1;; esac\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    return program


def settings(*rules: str) -> Settings:
    return replace(Settings(), trust=rules)


def check(place: str, folder: Path, *rules: str) -> list[str]:
    """The words that cosign was called with."""
    trust.check(f"{place}@{DIGEST}", settings(*rules), folder, {})
    called = folder / "called"
    return called.read_text().splitlines() if called.exists() else []


def test_cosign_is_asked_for_the_digest_that_will_be_fetched(tmp_path: Path, cosign: Path) -> None:
    words = check("hub.example.org/team/tool", tmp_path, *RULES)
    image = f"hub.example.org/team/tool@{DIGEST}"
    assert words == ["verify", "--key=/etc/team.pub", "--insecure-ignore-tlog=true", image]


def test_what_it_refuses_is_refused_in_one_line(tmp_path: Path, cosign: Path) -> None:
    with pytest.raises(
        NotPermitted, match=r"unsigned@sha256:5+: not signed as .* cosign: Error: no matching signatures:$"
    ):
        check("hub.example.org/team/unsigned", tmp_path, *RULES)


@pytest.mark.parametrize(
    "place", ["hub.example.org/teams/x", "hub.example.org:5000/team/x", "other.org/hub.example.org/team/x"]
)
def test_what_no_rule_is_for_is_not_asked_for(tmp_path: Path, cosign: Path, place: str) -> None:
    assert check(place, tmp_path, *RULES) == []
    assert check(place, tmp_path, *RULES, "* cosign --key=/any")[1] == "--key=/any"


@pytest.mark.parametrize(
    ("place", "whole"),
    [
        ("alpine", "docker.io/library/alpine"),
        ("team/tool", "docker.io/team/tool"),
        ("index.docker.io/team/tool", "docker.io/team/tool"),
        ("Hub.Example.org/team/tool", "hub.example.org/team/tool"),
        ("localhost/tool", "localhost/tool"),
        ("hub:5000/tool", "hub:5000/tool"),
    ],
)
def test_a_registry_has_one_name(place: str, whole: str) -> None:
    assert trust.whole(place) == whole


def test_without_cosign_nothing_is_taken_unseen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CommandMissing, match="cosign") as caught:
        check("hub.example.org/team/tool", tmp_path, *RULES)
    assert "image.trust" in caught.value.hint


@pytest.mark.parametrize(
    "line", ["", "hub.example.org", "hub.example.org cosign", "* cosign /k", "* gpg --key=/k", "a b cosign --key=/k"]
)
def test_a_rule_that_is_none_names_the_setting(line: str) -> None:
    with pytest.raises(BadSetting, match=r"image\.trust.*REGISTRY cosign"):
        trust.rules(settings(line))
