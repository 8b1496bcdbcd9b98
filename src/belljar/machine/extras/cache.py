"""Disks that outlive a machine: a cache for what guests fetch again and again, such as CernVM-FS has.

    scratch/caches/N.raw     an ext4 disk labelled LABEL; sparse
    scratch/caches/N.lock    held by the machine that has it
    scratch/caches/N.clean   its last guest powered itself off; gone while the disk is in use

Each user has caches of its own, one machine has one at a time. What a guest left is judged by its superblock's own marks and
never mounted here: a disk that was not left in order, that is of another size, or from before a restart of the host, is
made anew, empty.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from belljar.errors import CommandMissing, HostError, ImpossibleSize, NoSpace
from belljar.host.commands import run, which
from belljar.host.files import free_bytes, no_space_as_error, private_folder, read_json, write_whole
from belljar.host.locks import Lock, is_locked, try_lock
from belljar.host.processes import boot_id
from belljar.host.threads import in_thread
from belljar.hypervisor import ExtraDisk
from belljar.machine import Folders
from belljar.machine.life.life import Life
from belljar.model import GIB, MIB, dumps

CACHE, LABEL = "cache", "belljar-cache"
MOST = 256
SMALLEST, LARGEST, LEAST_ROOM = 16 * MIB, 4096 * GIB, 256 * MIB
FORMAT = ("-q", "-F", "-t", "ext4", "-O", "^has_journal,^resize_inode", "-m", "0", "-L", LABEL)
LAZY = ("-E", "lazy_itable_init=1,nodiscard,root_owner=0:0")
FORMAT_TIMEOUT = 60.0
SUPERBLOCK, MAGIC, CLEAN, NEEDS_RECOVERY = 1024, 0xEF53, 1, 4  # of ext4


@dataclass(frozen=True)
class Cache:
    """One cache, as it lies there."""

    number: int
    path: Path

    @property
    def lock(self) -> Path:
        return self.path.with_suffix(".lock")

    @property
    def mark(self) -> Path:
        return self.path.with_suffix(".clean")

    def state(self) -> str:
        """in use, ready, or to be made anew and why."""
        return "in use" if is_locked(self.lock) else trouble(self) or "ready"


async def attach(life: Life, size: int) -> None:
    """Give the machine a cache: one that was left in order where there is one, else one made now. It is the machine's until
    its end. Raises ImpossibleSize, NoSpace, CommandMissing, CommandFailed, HostError."""
    # Whoever does not wait for it any more has no lock on it: it is made anew by the next one where it was half made.
    cache, lock, reason = await in_thread(lambda: take(life.folders, size), undo=lambda taken: taken[1].release())
    life.held.append(lock)
    cache.mark.unlink(missing_ok=True)
    life.left_in_order.append(cache.mark)
    life.record.write("cache", path=str(cache.path), number=cache.number, made=reason)
    life.disks += (ExtraDisk(CACHE, cache.path, "raw", readonly=False),)


def left_in_order(life: Life) -> None:
    """The guest powered itself off: what it has written to its caches can be used again."""
    for mark in life.left_in_order:
        with suppress(OSError, HostError):
            write_whole(mark, dumps({"boot": boot_id()}))


def take(folders: Folders, size: int) -> tuple[Cache, Lock, str]:
    """A cache of this size, locked, and why it was made now ("" when it was there)."""
    check_size(size)
    folder = private_folder(folder_of(folders))
    for cache in found(folders):
        if not trouble(cache, size) and (lock := try_lock(cache.lock)):
            if not trouble(cache, size):
                return cache, lock, ""
            lock.release()
    for number in range(MOST):
        cache = Cache(number, folder / f"{number}.raw")
        if lock := try_lock(cache.lock):
            try:
                reason = trouble(cache, size) or "it was made meanwhile"
                make(cache, size)
            except BaseException:
                lock.release()
                raise
            return cache, lock, reason
    raise HostError(f"{folder}: all {MOST} caches are in use")


def prepare(folders: Folders, count: int, size: int) -> Iterator[Cache]:
    """Have so many caches ready. Those in use, and those in order, stay as they are."""
    check_size(size)
    folder = private_folder(folder_of(folders))
    for number in range(min(count, MOST)):
        cache = Cache(number, folder / f"{number}.raw")
        if lock := try_lock(cache.lock):
            try:
                if trouble(cache, size):
                    make(cache, size)
                    yield cache
            finally:
                lock.release()


def remove(folders: Folders) -> Iterator[Cache]:
    """Remove every cache that is not in use."""
    for cache in found(folders):
        if lock := try_lock(cache.lock):
            try:
                for path in (cache.mark, cache.path, cache.lock):
                    path.unlink(missing_ok=True)
            finally:
                lock.release()
            yield cache


def found(folders: Folders) -> list[Cache]:
    """Every cache of this user, by number."""
    with suppress(FileNotFoundError):
        names = [name.removesuffix(".raw") for name in os.listdir(folder_of(folders)) if name.endswith(".raw")]
        return [Cache(n, folder_of(folders) / f"{n}.raw") for n in sorted(int(one) for one in names if one.isdecimal())]
    return []


def folder_of(folders: Folders) -> Path:
    return folders.scratch / "caches"


def check_size(size: int) -> None:
    if not SMALLEST <= size <= LARGEST:
        raise ImpossibleSize(
            f"a cache of {size} bytes: at least {SMALLEST // MIB} MiB, at most {LARGEST // GIB} GiB",
            hint="Ask for another size with --cache.",
        )


def trouble(cache: Cache, size: int | None = None) -> str:
    """Why it cannot be used as it is; "": it can."""
    try:
        facts = os.stat(cache.path, follow_symlinks=False)
    except FileNotFoundError:
        return "there was none"
    if size is not None and facts.st_size != size:
        return "it had another size"
    try:
        if read_json(cache.mark).get("boot") != boot_id():
            return "the host was restarted"
    except (OSError, ValueError, HostError):
        return "its last guest did not power itself off"
    return _trouble_inside(cache.path)


def _trouble_inside(path: Path) -> str:
    """Three fields of the superblock, which tell whether it was unmounted, and as what."""
    with open(path, "rb") as file:
        file.seek(SUPERBLOCK)
        head = file.read(1024)
    if len(head) < 1024 or struct.unpack_from("<H", head, 0x38)[0] != MAGIC:
        return "it has no file system any more"
    (state,), (incompatible,) = struct.unpack_from("<H", head, 0x3A), struct.unpack_from("<I", head, 0x60)
    if head[0x78:0x88].rstrip(b"\0") != LABEL.encode():
        return "it has another label"
    return "" if state == CLEAN and not incompatible & NEEDS_RECOVERY else "its file system was not unmounted"


def make(cache: Cache, size: int) -> None:
    """Make it anew, empty. The caller holds its lock."""
    if which("mke2fs") is None:
        raise CommandMissing("mke2fs: no such program on this host", hint="Install e2fsprogs, or do without a cache.")
    if (free := free_bytes(cache.path.parent)) < LEAST_ROOM:
        raise NoSpace(f"{cache.path.parent}: {free // MIB} MiB free, a cache wants at least {LEAST_ROOM // MIB} MiB")
    cache.mark.unlink(missing_ok=True)
    with no_space_as_error(cache.path):
        cache.path.unlink(missing_ok=True)
        descriptor = os.open(cache.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.ftruncate(descriptor, size)
        finally:
            os.close(descriptor)
    run(["mke2fs", *FORMAT, *LAZY, str(cache.path)], timeout=FORMAT_TIMEOUT, bound=True)
    write_whole(cache.mark, dumps({"boot": boot_id()}))
