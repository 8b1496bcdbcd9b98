"""Scratch disks and packed folders as files of the host: what is made, what is refused, what is in them."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import stat
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.fakes.image import fake_image

from belljar.errors import CommandFailed, CommandMissing, InputMissing, NoSpace
from belljar.host import commands
from belljar.host.commands import run
from belljar.host.threads import in_thread
from belljar.machine import Settings
from belljar.machine.extras import disks, inputs
from belljar.machine.extras.disks import empty_ext4
from belljar.machine.extras.inputs import folders_to_pack, is_large, pack_folder
from belljar.machine.life.runner import extras_of
from belljar.machine.services import Rules
from belljar.model import GIB, MIB, Account, MachineSpec, Payload, Request, RunPayload, Share, Transfer

ALICE = Account("alice", 1234, 2345, "alice")
needs_mksquashfs = pytest.mark.skipif(shutil.which("mksquashfs") is None, reason="no mksquashfs")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    folder = tmp_path / "tree"
    (folder / "sub").mkdir(parents=True)
    (folder / "file").write_bytes(b"content")
    (folder / "file").chmod(0o640)
    os.utime(folder / "file", (1_000_000_000, 1_000_000_000))
    os.link(folder / "file", folder / "sub/hard")
    (folder / "link").symlink_to("nowhere/at all")
    (folder / "name\nwith ü").write_bytes(b"")
    (folder / os.fsdecode(b"8-bit \xff")).write_bytes(b"raw")
    os.mkfifo(folder / "pipe")
    with socket.socket(socket.AF_UNIX) as end:
        end.bind(str(folder / "socket"))
    return folder


def unpacked(image: Path, target: Path) -> Path:
    """What the file system holds, as files again."""
    subprocess.run(["unsquashfs", "-q", "-n", "-d", str(target), str(image)], check=True, capture_output=True)
    return target / "r"


def pack(item: Transfer, target: Path, account: Account = ALICE) -> None:
    asyncio.run(pack_folder(item, target, account, 1))


def scratch(path: Path, size: int) -> None:
    run(empty_ext4(path, size, size, "scratch", disks.LAZY, what="--scratch"), timeout=60)


# -- scratch -----------------------------------------------------------------------------------------------------------


def test_a_scratch_disk_is_a_private_file_system_that_takes_no_room(tmp_path: Path) -> None:
    path = tmp_path / "id.scratch"
    scratch(path, 8 * GIB if disks.free_bytes(tmp_path) > 8 * GIB else 64 * MIB)
    facts = path.stat()
    assert stat.S_IMODE(facts.st_mode) == 0o600 and facts.st_blocks * 512 < 4 * MIB
    with path.open("rb") as file:
        assert file.seek(1080) and file.read(2) == b"\x53\xef"  # ext4's superblock


def test_more_scratch_than_the_host_has_is_refused_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disks, "free_bytes", lambda folder: 10 * MIB)
    with pytest.raises(NoSpace, match="10 MiB free"):
        scratch(tmp_path / "id.scratch", 11 * MIB)
    assert list(tmp_path.iterdir()) == []


def test_a_host_without_mke2fs_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "which", lambda name: None)
    with pytest.raises(CommandMissing, match="mke2fs"):
        scratch(tmp_path / "id.scratch", MIB)
    assert list(tmp_path.iterdir()) == []


# -- which folders are packed ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (Settings(pack_files=5, pack_size=0), True),
        (Settings(pack_files=100, pack_size=0), False),
        (Settings(pack_files=0, pack_size=3000), True),
        (Settings(pack_files=0, pack_size=3001), False),
        (Settings(pack_files=0, pack_size=0), False),
    ],
)
def test_a_folder_is_large_by_its_files_or_its_bytes(tmp_path: Path, settings: Settings, expected: bool) -> None:
    for number in range(3):
        (tmp_path / f"folder{number}").mkdir()
        (tmp_path / f"folder{number}/file").write_bytes(bytes(1000))
    assert is_large(str(tmp_path), settings) is expected


def test_holes_do_not_make_a_folder_large(tmp_path: Path) -> None:
    with (tmp_path / "holes").open("wb") as file:
        file.truncate(1 << 40)
        file.write(bytes(5000))
    assert not is_large(str(tmp_path), Settings(pack_size=100_000))
    (tmp_path / "full").write_bytes(bytes(100_000))
    assert is_large(str(tmp_path), Settings(pack_size=100_000))


def test_counting_stops_where_the_answer_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(20):
        (tmp_path / f"{number}").mkdir()
    seen: list[str] = []
    scan = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: seen.append(path) or scan(path))
    assert is_large(str(tmp_path), Settings(pack_files=3))
    assert seen == [str(tmp_path)]


def test_links_and_holes_in_a_folder_do_not_make_it_endless(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path)
    assert not is_large(str(tmp_path), Settings(pack_files=2))
    assert not is_large(str(tmp_path / "missing"), Settings(pack_files=1))


def test_only_folders_are_packed_and_only_where_the_program_is(
    tmp_path: Path, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "large").write_bytes(bytes(MIB))
    items = (Transfer(str(tmp_path / "large"), "large"), Transfer(str(tree), "tree"))
    payload, settings = Payload((b"true",), ALICE, inputs=items), Settings(pack_files=1, pack_size=1)
    monkeypatch.setattr(inputs, "which", lambda program: program)
    assert list(folders_to_pack(payload, settings)) == [items[1]]
    monkeypatch.setattr(inputs, "which", lambda program: None)
    assert list(folders_to_pack(payload, settings)) == []


def test_a_machine_has_only_what_was_asked_for() -> None:
    def kinds(*inputs: Transfer, **asked: Any) -> list[str]:
        payload = Payload((b"x",), ALICE, inputs=inputs)
        request = Request("0" * 12, MachineSpec("i", 1, MIB, **asked), RunPayload(payload))
        services: Any = SimpleNamespace(rules=Rules(), networks=None)
        return [type(extra).__name__ for extra in extras_of(request, fake_image("i"), services)]

    assert kinds() == []
    assert kinds(Transfer("/etc/passwd", "file")) == ["Exchange", "Inputs"]
    assert kinds(scratch=MIB, cache=MIB, shares=(Share("/", "/x"),)) == ["Shares", "ScratchDisk", "CacheDisk"]


# -- packing -----------------------------------------------------------------------------------------------------------


@needs_mksquashfs
def test_a_packed_folder_holds_what_a_copy_would(tmp_path: Path, tree: Path) -> None:
    pack(Transfer(str(tree), "tree", skip=("sub/not there",)), tmp_path / "image")
    assert stat.S_IMODE((tmp_path / "image").stat().st_mode) == 0o600
    found = unpacked(tmp_path / "image", tmp_path / "out")
    assert sorted(os.listdir(os.fsencode(found))) == [
        b"8-bit \xff", b"file", b"link", "name\nwith ü".encode(), b"sub",
    ]  # fmt: skip
    facts = (found / "file").stat()
    assert stat.S_IMODE(facts.st_mode) == 0o640 and facts.st_mtime == 1_000_000_000
    assert facts.st_ino == (found / "sub/hard").stat().st_ino
    assert os.readlink(found / "link") == "nowhere/at all"
    assert (found / os.fsdecode(b"8-bit \xff")).read_bytes() == b"raw"
    listed = subprocess.run(["unsquashfs", "-lln", str(tmp_path / "image")], capture_output=True, check=True).stdout
    owners = {line.split()[1] for line in listed.splitlines() if line[:1] in (b"-", b"d", b"l") and b"/r" in line}
    assert owners == {b"1234/2345"}


@needs_mksquashfs
@pytest.mark.parametrize("at", [0, 5 * MIB])
def test_a_file_with_holes_is_packed_as_it_is_or_not_at_all(tmp_path: Path, tree: Path, at: int) -> None:
    with (tree / "holes").open("wb") as file:
        file.truncate(9 * MIB)
        file.seek(at)
        file.write(b"content")
    try:
        pack(Transfer(str(tree), "tree"), tmp_path / "image")
    except CommandFailed:
        return  # then the folder is copied
    assert (unpacked(tmp_path / "image", tmp_path / "out") / "holes").read_bytes() == (tree / "holes").read_bytes()


@needs_mksquashfs
def test_what_is_to_stay_outside_is_not_packed(tmp_path: Path, tree: Path) -> None:
    pack(Transfer(str(tree), "tree", skip=("sub", "link")), tmp_path / "image")
    assert not {"sub", "link"} & set(os.listdir(unpacked(tmp_path / "image", tmp_path / "out")))


@needs_mksquashfs
def test_a_folder_that_went_away_is_a_missing_input(tmp_path: Path) -> None:
    with pytest.raises(InputMissing, match="No such file"):
        pack(Transfer(str(tmp_path / "gone"), "x"), tmp_path / "image")


@needs_mksquashfs
def test_a_folder_that_is_too_deep_is_refused_in_the_words_of_a_copy(tmp_path: Path) -> None:
    deep = tmp_path / "deep"
    (deep / "/".join(["d"] * 220)).mkdir(parents=True)
    with pytest.raises(InputMissing, match="200 folders deep"):
        pack(Transfer(str(deep), "x"), tmp_path / "image")


@needs_mksquashfs
def test_a_file_that_grows_while_it_is_packed_leaves_the_rest_whole(
    tmp_path: Path, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tree / "growing").write_bytes(b"a" * 1000)
    read = os.pread

    def pread(fd: int, size: int, at: int) -> bytes:
        with (tree / "growing").open("ab") as file:
            file.write(b"b" * 5000)
        return read(fd, size, at)

    monkeypatch.setattr(os, "pread", pread)
    pack(Transfer(str(tree), "tree"), tmp_path / "image")
    monkeypatch.undo()
    found = unpacked(tmp_path / "image", tmp_path / "out")
    assert (found / "file").read_bytes() == b"content" and (found / "growing").read_bytes().startswith(b"a" * 1000)


def impostor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Another program under mksquashfs's name."""
    program = tmp_path / "mksquashfs"
    program.write_text(f"#!/bin/sh\n{text}\n")
    program.chmod(0o755)
    monkeypatch.setattr(inputs, "which", lambda name: str(program))


def test_a_program_that_fails_is_quoted(tmp_path: Path, tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    impostor(tmp_path, monkeypatch, "cat > /dev/null; echo first >&2; echo 'FATAL ERROR: no' >&2; exit 1")
    with pytest.raises(CommandFailed, match="exit 1: FATAL ERROR: no"):
        pack(Transfer(str(tree), "tree"), tmp_path / "image")


def test_a_full_disk_is_called_that(tmp_path: Path, tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    impostor(
        tmp_path, monkeypatch, "echo 'Write failed because No space left on device' >&2; echo 'FATAL ERROR' >&2; exit 1"
    )
    with pytest.raises(NoSpace, match="no space left to pack"):
        pack(Transfer(str(tree), "tree"), tmp_path / "image")


def test_a_program_that_hangs_is_killed_when_nobody_waits_any_more(
    tmp_path: Path, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tree / "large").write_bytes(bytes(MIB))  # more than a pipe holds
    os.mkfifo(tmp_path / "pid")
    impostor(tmp_path, monkeypatch, f"echo $$ > {tmp_path}/pid; exec sleep 1000")
    said: list[bytes] = []

    async def cancelled() -> None:
        packing_it = asyncio.ensure_future(pack_folder(Transfer(str(tree), "t"), tmp_path / "image", ALICE, 1))
        said.append(await in_thread(lambda: (tmp_path / "pid").read_bytes()))  # until the program has begun
        packing_it.cancel()
        with pytest.raises(asyncio.CancelledError):
            await packing_it

    asyncio.run(cancelled())
    assert not Path("/proc", said[0].decode().strip()).exists()


def test_a_program_that_takes_too_long_is_killed(tmp_path: Path, tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    impostor(tmp_path, monkeypatch, "exec sleep 1000")
    monkeypatch.setattr(inputs, "LONGEST", 0.2)
    with pytest.raises(CommandFailed, match="not packed within"):
        pack(Transfer(str(tree), "tree"), tmp_path / "image")


def test_a_place_that_is_taken_is_not_written_to(tmp_path: Path, tree: Path) -> None:
    (tmp_path / "image").symlink_to(tree / "file")
    with pytest.raises(FileExistsError):
        pack(Transfer(str(tree), "tree"), tmp_path / "image")
    assert (tree / "file").read_bytes() == b"content"


def test_the_tools_of_these_tests_are_there() -> None:
    assert shutil.which("mke2fs", path="/usr/sbin:/sbin:/usr/bin")


@needs_mksquashfs
def test_a_packed_folder_has_files_of_the_kernel_whole(tmp_path: Path) -> None:
    pack(Transfer("/proc/sys/kernel/random", "/data"), tmp_path / "image")
    inside = unpacked(tmp_path / "image", tmp_path / "out")
    assert (inside / "boot_id").read_text() == Path("/proc/sys/kernel/random/boot_id").read_text()
