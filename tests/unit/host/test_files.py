"""Whole files, private folders, capped reads."""

from __future__ import annotations

import errno
import os
import signal
import stat
from pathlib import Path
from typing import Any

import pytest

from belljar.errors import HostError, NoSpace, UnsafeFolder
from belljar.host import files
from belljar.host.files import named_when_whole


def test_a_reader_never_sees_a_draft_and_a_failed_write_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "facts.json"
    files.write_whole(target, b"old")

    def full(descriptor: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(NoSpace, match=r"facts\.json"):
            files.write_whole(target, b"new")
    assert target.read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["facts.json"]


def test_a_written_file_is_for_its_owner_alone(tmp_path: Path) -> None:
    files.write_whole(tmp_path / "secret", b"x", durable=True)
    assert (tmp_path / "secret").stat().st_mode & 0o777 == 0o600


def test_a_file_that_is_larger_than_what_we_wrote_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "huge").write_bytes(b"x" * 101)
    with pytest.raises(UnsafeFolder, match="larger than 100"):
        files.read_capped(tmp_path / "huge", 100)


def test_a_pipe_in_place_of_a_file_does_not_hang_the_reader(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UnsafeFolder, match="not a regular file"):
        files.read_capped(tmp_path / "pipe", 100)


def test_json_that_is_no_object_is_refused(tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text("[1]")
    with pytest.raises(ValueError, match="not a JSON object"):
        files.read_json(tmp_path / "list.json")


def test_a_folder_is_made_with_its_parents_for_its_owner_alone(tmp_path: Path) -> None:
    made = files.private_folder(tmp_path / "a/b")
    assert made.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_a_folder_that_others_may_write_to_is_refused(tmp_path: Path, mode: int) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(mode)
    with pytest.raises(UnsafeFolder, match="others may write"):
        files.private_folder(tmp_path / "open")


def test_a_link_in_place_of_our_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to("real")
    with pytest.raises(UnsafeFolder, match="symbolic link"):
        files.private_folder(tmp_path / "link")


def test_a_file_on_the_way_to_our_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UnsafeFolder, match="not a folder"):
        files.private_folder(tmp_path / "file/below")


def test_a_read_only_file_system_is_told_apart_from_a_full_one(tmp_path: Path) -> None:
    with pytest.raises(HostError) as caught, files.no_space_as_error(tmp_path):
        raise OSError(errno.EROFS, "x")
    assert not isinstance(caught.value, NoSpace)
    with pytest.raises(NoSpace), files.no_space_as_error(tmp_path):
        raise OSError(errno.EDQUOT, "x")


def test_other_errors_pass_through_unchanged(tmp_path: Path) -> None:
    with pytest.raises(PermissionError), files.no_space_as_error(tmp_path):
        raise PermissionError(errno.EPERM, "x")


def test_removing_a_tree_that_is_not_there_is_success(tmp_path: Path) -> None:
    files.remove_tree(tmp_path / "nothing")


def test_free_space_is_asked_of_the_nearest_folder_that_exists(tmp_path: Path) -> None:
    assert files.free_bytes(tmp_path / "not/yet") == files.free_bytes(tmp_path)


# -- files that get their name when they are whole ---------------------------------------------------------------------------


def no_nameless(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a file system that gives every file a name."""
    real = os.open

    def refuse(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "not supported")
        return real(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", refuse)


@pytest.mark.parametrize("can", [True, False])
def test_a_file_gets_its_name_when_it_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can: bool) -> None:
    if not can:
        no_nameless(monkeypatch)
    for text in (b"first", b"second"):  # the second in the place of the first
        with named_when_whole(tmp_path / "file") as descriptor:
            os.write(descriptor, text)
            assert len(list(tmp_path.iterdir())) == (text == b"second") + (not can)
        assert (tmp_path / "file").read_bytes() == text
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o600
    with pytest.raises(ZeroDivisionError), named_when_whole(tmp_path / "file"):
        raise ZeroDivisionError
    assert [one.name for one in tmp_path.iterdir()] == ["file"] and (tmp_path / "file").read_bytes() == b"second"


@pytest.mark.parametrize("can", [True, False])
def test_a_name_that_cannot_be_had_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can: bool) -> None:
    if not can:
        no_nameless(monkeypatch)
    (tmp_path / "taken").mkdir()
    with pytest.raises(OSError), named_when_whole(tmp_path / "taken"):
        pass
    with pytest.raises(FileNotFoundError), named_when_whole(tmp_path / "no such/file"):
        pass
    assert [one.name for one in tmp_path.iterdir()] == ["taken"]


def test_nothing_is_left_of_a_file_whose_writer_was_killed(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        with named_when_whole(tmp_path / "file") as descriptor:
            os.write(descriptor, b"half")
            os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL and list(tmp_path.iterdir()) == []


def test_a_tree_is_copied_with_modes_and_times(tmp_path: Path) -> None:
    (tmp_path / "from/below").mkdir(parents=True)
    (tmp_path / "from/below/file").write_bytes(b"x" * 100_000)
    (tmp_path / "from/empty").touch(0o640)
    (tmp_path / "from/link").symlink_to("empty")
    os.mkfifo(tmp_path / "from/pipe")
    os.utime(tmp_path / "from/below/file", (1, 2))
    files.copy_tree(tmp_path / "from", tmp_path / "to/it")
    assert sorted(p.name for p in (tmp_path / "to/it").rglob("*")) == ["below", "empty", "file"]
    copied = tmp_path / "to/it/below/file"
    assert copied.read_bytes() == b"x" * 100_000 and copied.stat().st_mtime == 2
    assert (tmp_path / "to/it/empty").stat().st_mode & 0o777 == 0o640
    files.copy_tree(tmp_path / "from", tmp_path / "to/it")  # a copy that was broken off is begun anew


def test_a_tree_is_removed_and_nothing_that_a_link_in_it_leads_to(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept/file").touch()
    (tmp_path / "gone/below/deeper").mkdir(parents=True)
    (tmp_path / "gone/below/file").touch(0o400)
    (tmp_path / "gone/below/link").symlink_to(tmp_path / "kept")
    files.remove_tree(tmp_path / "gone")
    assert [path.name for path in tmp_path.rglob("*")] == ["kept", "file"]
    (tmp_path / "link").symlink_to("kept")
    with pytest.raises(OSError):
        files.remove_tree(tmp_path / "link")
    assert (tmp_path / "kept/file").exists()
