"""Whole files, private folders, capped reads."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from belljar.errors import HostError, NoSpace, UnsafeFolder
from belljar.host import files


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
