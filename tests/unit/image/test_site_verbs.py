"""`belljar image publish`, `sync`, `key`, `gc` as typed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.unit.image.site import Site

from belljar.cli.image import image as verb
from belljar.cli.parser import Parser
from belljar.errors import BadOption, ImageUnknown, InputMissing, SignatureRefused
from belljar.image.store.store import Store

Typed = Callable[..., int]


@pytest.fixture
def typed() -> Typed:
    def typed(store: Store, *words: object) -> int:
        parser = Parser(prog="belljar image")
        parser.take(verb.VERBS["image"])
        house = SimpleNamespace(images=store, settings=SimpleNamespace(image=store.settings))
        args = parser.parse_args([str(word) for word in words])
        return int(args.carry_out(args, house))

    return typed


def test_from_a_key_to_an_image_on_a_node(
    typed: Typed, site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    image = site.make("base", b"1", to=site.publisher)
    assert typed(site.publisher, "key", tmp_path / "k") == 0
    word = capsys.readouterr().out.strip()
    assert typed(site.publisher, "key", tmp_path / "k") == 0 and capsys.readouterr().out.strip() == word
    assert typed(site.publisher, "publish", "base", "--to", site.folder, "--key", tmp_path / "k") == 0
    assert capsys.readouterr().out == f"base {image.digest}\n"
    node = site.node
    node.settings = replace(node.settings, trust=(f"base {word}",))
    assert typed(node, "sync", "--from", site.folder, "base", "--format", "json") == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["name"], row["digest"], row["what"]) == ("base", image.digest, "new")
    assert node.resolve("base").digest == image.digest


def test_an_image_gets_another_name_there_and_goes_again(typed: Typed, site: Site) -> None:
    site.make("base", b"1", to=site.publisher)
    publish = ("publish", "--to", site.folder, "--unsigned")
    assert typed(site.publisher, *publish, "base", "--as", "site-base") == 0
    node = site.trusting("site-* unsigned")
    assert typed(node, "sync", "--all") == 0 and node.resolve("site-base").names == ("site-base",)
    assert typed(site.publisher, *publish, "--unpublish", "site-base") == 0
    with pytest.raises(ImageUnknown):
        typed(site.publisher, *publish, "--unpublish", "site-base")


def test_a_sync_that_fails_says_so_and_exits_1(typed: Typed, site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    site.put("base", b"1", by="stranger")
    node = site.trusting()
    assert typed(node, "sync", "base") == 1
    told = capsys.readouterr().out
    assert "SignatureRefused: " in told and "not signed by" in told
    assert typed(node, "sync", "base", "--format", "json") == 1
    assert [row["error"] for row in json.loads(capsys.readouterr().out)] == ["SignatureRefused"]
    assert typed(node, "sync", "--from", site.folder / "no such", "--format", "json") == 1
    (row,) = json.loads(capsys.readouterr().out)
    assert row["error"] == "DownloadFailed" and row["what"] == "failed"


def test_a_sync_without_names_on_a_new_node_says_what_to_do(
    typed: Typed, site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    site.put("base", b"1")
    node = site.trusting()
    assert typed(node, "sync") == 0
    assert "`belljar image sync NAME`" in (told := capsys.readouterr().err) and "--dry-run" in told and "--all" in told
    assert typed(node, "sync", "--format", "json") == 0
    assert json.loads(capsys.readouterr().out) == []
    assert typed(node, "sync", "--all") == 0
    assert "sync NAME" not in capsys.readouterr().err
    assert typed(node, "sync") == 0 and "sync NAME" not in capsys.readouterr().err


def test_a_master_store_made_anew_is_taken_when_one_forgets(typed: Typed, site: Site) -> None:
    site.moment = 5_000_000
    site.put("base", b"1")
    node = site.trusting()
    assert typed(node, "sync", "base") == 0
    import shutil

    shutil.rmtree(site.folder)
    site.moment = 1_000_000
    site.put("base", b"2")
    assert typed(node, "sync", "base") == 1
    assert typed(node, "sync", "base", "--forget") == 0


def test_gc_removes_what_the_limits_want_gone(typed: Typed, site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    site.put("base", b"1")
    node = site.trusting(cache_limit=1)
    node.ensure("base")
    capsys.readouterr()
    folder = str(node.find("base").disk.parent)
    assert typed(node, "gc", "--dry-run", "--format", "json") == 0
    assert folder in json.loads(capsys.readouterr().out) and node.images()
    assert typed(node, "gc") == 0 and node.images() == []


@pytest.mark.parametrize(
    "words",
    [
        ("publish", "base", "--to", "/x"),
        ("publish", "base", "--unsigned"),
        ("publish", "base", "--to", "/x", "--unsigned", "--key", "k"),
        ("publish", "base", "--to", "/x", "--unsigned", "--certificate", "c"),
        ("publish", "base", "base", "--to", "/x", "--unsigned", "--as", "y"),
        ("publish", "base", "--to", "https://example.org", "--unsigned"),
        ("sync",),
        ("sync", "--all", "base", "--from", "/x"),
        ("key",),
    ],
)
def test_a_command_line_that_means_nothing_is_refused(typed: Typed, site: Site, words: tuple[str, ...]) -> None:
    site.make("base", b"1", to=site.publisher)
    with pytest.raises(BadOption):
        typed(site.publisher, *words)


def test_without_its_key_nothing_is_published(typed: Typed, site: Site, tmp_path: Path) -> None:
    site.make("base", b"1", to=site.publisher)
    with pytest.raises(InputMissing):
        typed(site.publisher, "publish", "base", "--to", site.folder, "--key", tmp_path / "none")
    assert not site.folder.exists()


def test_a_node_without_a_policy_takes_nothing(typed: Typed, site: Site) -> None:
    site.put("base", b"1", signed=False)
    node = site.trusting()
    node.settings = replace(node.settings, trust=())
    with pytest.raises(SignatureRefused):
        node.ensure("base")
    assert typed(node, "sync", "base") == 1
