"""`belljar image publish`, `sync`, `key`, `gc` as typed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.unit.image.site import Site

from belljar.cli.image import image as verb
from belljar.cli.parser import Parser
from belljar.errors import BadOption, BadSetting, ImageUnknown
from belljar.image.store.store import Store

Typed = Callable[..., int]


@pytest.fixture
def typed() -> Typed:
    def typed(store: Store, *words: object) -> int:
        parser = Parser(prog="belljar image")
        parser.take(verb.VERBS["image"])
        runtime = SimpleNamespace(images=store, settings=SimpleNamespace(image=store.settings))
        args = parser.parse_args([str(word) for word in words])
        return int(args.carry_out(args, runtime))

    return typed


def test_from_a_new_repository_to_an_image_on_a_node(
    typed: Typed, site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    image = site.make("base", b"1", to=site.publisher)
    assert typed(site.publisher, "publish", "--init", "--to", tmp_path / "r", "--key", tmp_path / "k") == 0
    line = capsys.readouterr().out.strip()
    assert line.startswith(f"{tmp_path}/r#sha256=") and len(list((tmp_path / "k").iterdir())) == 3
    assert typed(site.publisher, "publish", "base", "--to", line, "--key", tmp_path / "k") == 0
    assert capsys.readouterr().out == f"base {image.digest}\n"
    assert typed(site.node, "sync", "--from", line, "base", "--format", "json") == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["name"], row["digest"], row["what"]) == ("base", image.digest, "new")
    assert site.node.resolve("base").digest == image.digest


def test_a_delegate_a_rotation_another_name_and_a_revocation(
    typed: Typed, site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    site.make("base", b"1", to=site.publisher)
    publish = ("publish", "--to", site.line, "--key")
    assert typed(site.publisher, "key", tmp_path / "alice") == 0
    word = capsys.readouterr().out.strip()
    assert typed(site.publisher, *publish, site.keys, "--delegate", "alice", "alice-*", word) == 0
    assert typed(site.publisher, *publish, tmp_path / "alice", "base", "--as", "alice-1") == 0
    assert "next `belljar image publish --refresh`" in capsys.readouterr().err
    assert typed(site.publisher, *publish, site.keys / "online.pem", "--refresh") == 0
    assert typed(site.publisher, *publish, site.keys, "base", "--as", "site-base", "--rotate", "online") == 0
    node = site.trusting()
    assert typed(node, "sync", "--all") == 0 and node.images()[0].names == ("alice-1", "site-base")
    assert typed(site.publisher, *publish, site.keys, "--unpublish", "site-base", "--delegate", "alice") == 0
    capsys.readouterr()
    assert typed(node, "sync") == 0 and node.images() == []
    assert "retired" in capsys.readouterr().out
    with pytest.raises(ImageUnknown):
        typed(site.publisher, *publish, site.keys, "--unpublish", "site-base")


def test_a_sync_that_fails_says_so_and_exits_1(typed: Typed, site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    site.put("base", b"1")
    site.forge("timestamp", lambda signed: setattr(signed, "version", 7))
    node = site.trusting()
    assert typed(node, "sync", "base") == 1
    assert "RepositoryRefused: " in capsys.readouterr().out
    assert typed(node, "sync", "base", "--format", "json") == 1
    assert [row["error"] for row in json.loads(capsys.readouterr().out)] == ["RepositoryRefused"]
    assert typed(node, "sync", "--from", f"/no such#sha256={'0' * 64}", "--format", "json") == 1
    (row,) = json.loads(capsys.readouterr().out)
    assert row["error"] == "DownloadFailed" and row["what"] == "failed"


def test_a_sync_without_names_on_a_new_node_says_what_to_do(
    typed: Typed, site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    site.put("base", b"1")
    node = site.trusting()
    assert typed(node, "sync") == 0
    said = capsys.readouterr().err
    assert "`belljar image sync NAME`" in said and "--dry-run" in said and "--all" in said
    assert typed(node, "sync", "--format", "json") == 0
    assert json.loads(capsys.readouterr().out) == []
    assert typed(node, "sync", "--all") == 0
    assert typed(node, "sync") == 0 and "sync NAME" not in capsys.readouterr().err


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
        ("publish", "base", "--key", "k"),
        ("publish", "--to", "/x", "--key", "k"),
        ("publish", "--refresh", "--to", f"https://example.org#sha256={'0' * 64}", "--key", "k"),
        ("publish", "base", "base", "--to", "/x", "--key", "k", "--as", "y"),
        ("sync",),
        ("sync", "--all", "base", "--from", "/x"),
        ("key",),
    ],
)
def test_a_command_line_that_means_nothing_is_refused(
    typed: Typed, site: Site, tmp_path: Path, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    site.make("base", b"1", to=site.publisher)
    site.key("k").rename(tmp_path / "k")
    with pytest.raises(BadOption):
        typed(site.publisher, *words)


def test_without_its_key_nothing_is_published(typed: Typed, site: Site, tmp_path: Path) -> None:
    site.make("base", b"1", to=site.publisher)
    with pytest.raises(BadSetting):
        typed(site.publisher, "publish", "base", "--to", site.line, "--key", tmp_path / "none")
    assert site.files() == []
