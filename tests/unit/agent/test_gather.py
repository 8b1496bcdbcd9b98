"""Folders of a guest as one archive, for people to look at: nothing that cannot be read stops it."""

from __future__ import annotations

import io
import os
import socket
import tarfile
from pathlib import Path

import pytest

from belljar.agent.transfer.tar import DEEPEST, Gatherer


def gathered(*paths: Path | str) -> tarfile.TarFile:
    parts: list[bytes] = []
    Gatherer(parts.append).gather([os.fsencode(path) for path in paths])
    return tarfile.open(fileobj=io.BytesIO(b"".join(parts)))


def names(archive: tarfile.TarFile, folder: Path) -> set[str]:
    return {name.removeprefix(str(folder).strip("/")).strip("/") for name in archive.getnames()}


def test_every_folder_is_there_under_its_own_path(tmp_path: Path) -> None:
    for name in ("one/a", "two/deep/b"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(name)
    archive = gathered(tmp_path / "one", tmp_path / "two")
    assert names(archive, tmp_path) == {"one", "one/a", "two", "two/deep", "two/deep/b"}
    content = archive.extractfile(str(tmp_path / "two/deep/b").strip("/"))
    assert content is not None and content.read() == b"two/deep/b"


def test_a_path_that_is_not_there_costs_only_itself(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    assert names(gathered(tmp_path / "missing", tmp_path / "file" / "below", tmp_path / "file"), tmp_path) == {"file"}
    assert gathered(tmp_path / "missing").getnames() == []


def test_special_files_and_loops_are_left_out(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "file").write_text("x")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        assert names(gathered(tmp_path), tmp_path) == {"", "file", "loop"}


def test_a_file_that_cannot_be_opened_costs_only_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / name).write_text(name)
    real = os.open

    def refuse(path: bytes, flags: int, *rest: int) -> int:
        if path.endswith(b"/b"):
            raise PermissionError(13, "Permission denied")
        return real(path, flags, *rest)

    monkeypatch.setattr(os, "open", refuse)
    assert names(gathered(tmp_path), tmp_path) == {"", "a", "c"}


def test_a_log_that_shrinks_meanwhile_is_filled_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_bytes(b"x" * 1000)
    (tmp_path / "b").write_bytes(b"y")
    real = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, size, at: real(fd, min(size, 400), at) if at < 400 else b"")
    archive = gathered(tmp_path)
    first = archive.extractfile(str(tmp_path / "a").strip("/"))
    assert first is not None and first.read() == b"x" * 400 + bytes(600)
    assert len(archive.getnames()) == 3, "what follows is still found"


def test_a_folder_too_deep_is_cut_there(tmp_path: Path) -> None:
    here = tmp_path
    for _ in range(DEEPEST + 5):
        here = here / "d"
    os.makedirs(here)
    (tmp_path / "file").write_text("x")
    assert "file" in names(gathered(tmp_path), tmp_path)


def test_it_stops_when_nobody_takes_more(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / name).write_bytes(b"x" * 2000)
    taken: list[bytes] = []

    def take(data: bytes) -> None:
        taken.append(data)
        if len(taken) > 2:
            raise BrokenPipeError(32, "Broken pipe")

    with pytest.raises(BrokenPipeError):
        Gatherer(take).gather([os.fsencode(tmp_path)])
    assert len(taken) == 3, "it does not go on to the next file"
