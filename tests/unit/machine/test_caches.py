"""Disks that outlive a machine: found again when they were left in order, made anew when they were not."""

from __future__ import annotations

import asyncio
import os
import subprocess
from pathlib import Path

import pytest

from belljar.errors import CommandMissing
from belljar.host import commands
from belljar.hypervisor import ExtraDisk
from belljar.machine import Folders
from belljar.machine.extras import Equipment, caches
from belljar.machine.extras.caches import Cache, CacheDisk, leave, remove, take, trouble
from belljar.machine.life.claim import claim
from belljar.machine.life.life import Lifecycle
from belljar.model import MIB, MachineSpec, OwnWork, Request

SIZE = 16 * MIB


@pytest.fixture
def folders(tmp_path: Path) -> Folders:
    return Folders(tmp_path / "run", tmp_path / "scratch", tmp_path / "store", tmp_path / "logs")


def machine(folders: Folders, id: str) -> Lifecycle:
    return claim(Request(id, MachineSpec("cernvm", 1, 64 * MIB, cache=SIZE), OwnWork()), folders, lambda point: None)


def attach(life: Lifecycle, size: int) -> tuple[CacheDisk, ExtraDisk]:
    extra = CacheDisk(size)
    (disk,) = asyncio.run(extra.prepare(life, Equipment())).disks
    return extra, disk


def write_into(cache: Path) -> None:
    """As a guest would, without mounting it here."""
    done = subprocess.run(
        ["debugfs", "-w", "-R", "mkdir seen", str(cache)], capture_output=True, timeout=60, check=True
    )
    assert b"seen" not in done.stdout


def has_been_seen(cache: Path) -> bool:
    return (
        b"seen"
        in subprocess.run(["debugfs", "-R", "ls", str(cache)], capture_output=True, timeout=60, check=True).stdout
    )


def made(folders: Folders, size: int) -> Cache:
    """One that is ready, and nobody's."""
    cache, lock, _ = take(folders, size)
    leave(lock)
    return cache


def test_a_cache_is_sparse_private_and_labelled(folders: Folders) -> None:
    cache = made(folders, 1 << 30)
    facts = cache.path.stat()
    assert (facts.st_size, facts.st_mode & 0o777) == (1 << 30, 0o600) and facts.st_blocks * 512 < 8 * MIB
    told = subprocess.run(["blkid", "-p", "-o", "export", str(cache.path)], capture_output=True, timeout=60, check=True)
    assert b"LABEL=belljar-cache" in told.stdout and b"TYPE=ext4" in told.stdout
    assert cache.state() == "ready"


def test_what_a_guest_left_in_order_is_found_again(folders: Folders) -> None:
    first = machine(folders, "000000000001")
    cache, disk = attach(first, SIZE)
    assert (disk.name, disk.format, disk.readonly) == ("cache", "raw", False)
    assert caches.caches_of(folders)[0].state() == "in use"
    write_into(disk.path)
    cache.release()
    cache, again = attach(machine(folders, "000000000002"), SIZE)
    assert again.path == disk.path and has_been_seen(disk.path)
    assert cache._lock is not None
    cache._lock.release()  # it was killed: nothing says that the guest was done with it
    cache, again = attach(machine(folders, "000000000003"), SIZE)
    assert again.path == disk.path and not has_been_seen(disk.path)
    cache.release()


def test_two_machines_never_have_the_same(folders: Folders) -> None:
    lives = [machine(folders, f"00000000000{number}") for number in range(3)]
    taken = [attach(life, SIZE) for life in lives]
    assert len({disk.path for _, disk in taken}) == 3
    for extra, _ in taken:
        extra.release()


@pytest.mark.parametrize(
    ("at", "data", "why"),
    [
        (1024 + 0x38, b"\0\0", "no file system"), (1024 + 0x3A, b"\0\0", "not unmounted"), (1024 + 0x3A, b"\3\0", "not unmounted"),
    ],
)  # fmt: skip
def test_a_damaged_one_is_made_anew(folders: Folders, at: int, data: bytes, why: str) -> None:
    cache = made(folders, SIZE)
    with open(cache.path, "r+b") as file:
        file.seek(at)
        file.write(data)
    assert why in trouble(cache)
    again, lock, reason = take(folders, SIZE)
    leave(lock)
    assert again == cache and why in reason and trouble(cache) == ""


def test_one_of_another_size_or_cut_off_is_made_anew(folders: Folders) -> None:
    cache = made(folders, SIZE)
    _, lock, reason = take(folders, 2 * SIZE)
    leave(lock)
    assert reason == "it had another size" and cache.path.stat().st_size == 2 * SIZE
    os.truncate(cache.path, 100)
    assert trouble(cache) == "it has no file system any more"


def test_one_from_before_a_restart_of_the_host_is_made_anew(folders: Folders) -> None:
    cache = made(folders, SIZE)
    for text in ("another", ""):
        cache.lock.write_text(text)
        assert "restarted" in trouble(cache)


def test_those_in_use_are_not_removed(folders: Folders) -> None:
    cache, lock, _ = take(folders, SIZE)
    made(folders, SIZE)
    assert [one.number for one in remove(folders)] == [1]
    lock.release()
    assert list(remove(folders)) == [cache] and os.listdir(folders.scratch / "caches") == []


def test_without_mke2fs_the_hint_names_it(folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "which", lambda name: None)
    with pytest.raises(CommandMissing, match="mke2fs"):
        take(folders, SIZE)
    assert Cache(0, folders.scratch / "caches/0.raw").state() == "there was none"  # and its lock is free
