"""Disks that outlive a machine: a cache for what guests fetch again and again, such as CernVM-FS has.

    scratch/caches/N.raw     an ext4 disk labelled LABEL; sparse
    scratch/caches/N.lock    held by the machine that has it
    scratch/caches/N.clean   its last guest powered itself off; gone while the disk is in use

Each user has its own caches; a machine has one at a time. The disk is never mounted here: its superblock tells whether
it was left in order. If not, or if its size differs or the host was restarted, it is made anew, empty.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from belljar.errors import HostError
from belljar.host.commands import run
from belljar.host.files import private_folder, read_json, write_whole
from belljar.host.locks import Lock, is_locked, try_lock
from belljar.host.processes import boot_id
from belljar.host.threads import in_thread
from belljar.hypervisor import ExtraDisk
from belljar.machine import Folders
from belljar.machine.extras import Equipment, Extra
from belljar.machine.extras.disks import FORMAT_TIMEOUT, LAZY, empty_ext4
from belljar.machine.life.life import Lifecycle
from belljar.model import MIB, dumps
from belljar.records import dataclass

CACHE, LABEL = "cache", "belljar-cache"
MOST = 256
LEAST_ROOM = 256 * MIB
SUPERBLOCK, MAGIC, CLEAN = 1024, 0xEF53, 1  # of ext4


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


class CacheDisk(Extra):
    """One that was left in order where there is one, else one made now. It is the machine's until its end."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._taken: tuple[Cache, Lock] | None = None

    async def prepare(self, life: Lifecycle, there: Equipment) -> Equipment:
        """Raises NoSpace, CommandMissing, CommandFailed, HostError."""
        # Whoever does not wait for it any more has no lock on it: it is made anew by the next one where it was half made.
        folders, size = life.folders, self._size
        cache, lock, reason = await in_thread(lambda: take(folders, size), undo=lambda taken: taken[1].release())
        self._taken = cache, lock
        cache.mark.unlink(missing_ok=True)
        life.record.write("cache", path=str(cache.path), number=cache.number, made=reason)
        return there.with_disk(ExtraDisk(CACHE, cache.path, "raw", readonly=False))

    def left_in_order(self) -> None:
        """What the guest has written to it can be used again."""
        if self._taken is not None:
            with suppress(OSError, HostError):
                write_whole(self._taken[0].mark, dumps({"boot": boot_id()}))

    def release(self) -> None:
        if self._taken is not None:
            self._taken[1].release()


def take(folders: Folders, size: int) -> tuple[Cache, Lock, str]:
    """A cache of this size, locked, and why it was made now ("" when it was there)."""
    folder = private_folder(folder_of(folders))
    ready = [cache for cache in caches_of(folders) if not trouble(cache, size)]
    for cache in (*ready, *(Cache(number, folder / f"{number}.raw") for number in range(MOST))):
        if lock := try_lock(cache.lock):
            try:
                if reason := trouble(cache, size):
                    make(cache, size)
            except BaseException:  # re-raised: nobody else has the lock to release
                lock.release()
                raise
            return cache, lock, reason
    raise HostError(f"{folder}: all {MOST} caches are in use")


def remove(folders: Folders) -> Iterator[Cache]:
    """Remove every cache that is not in use."""
    for cache in caches_of(folders):
        if lock := try_lock(cache.lock):
            with lock:
                for path in (cache.mark, cache.path, cache.lock):
                    path.unlink(missing_ok=True)
            yield cache


def caches_of(folders: Folders) -> list[Cache]:
    """Every cache of this user, by number."""
    paths = (path for path in folder_of(folders).glob("*.raw") if path.stem.isdecimal())
    return [Cache(int(path.stem), path) for path in sorted(paths, key=lambda path: int(path.stem))]


def folder_of(folders: Folders) -> Path:
    return folders.scratch / "caches"


def trouble(cache: Cache, size: int | None = None) -> str:
    """Why it cannot be used as it is; "": it can."""
    try:
        actual = os.stat(cache.path, follow_symlinks=False).st_size
    except FileNotFoundError:
        return "there was none"
    if size is not None and actual != size:
        return "it had another size"
    try:
        if read_json(cache.mark).get("boot") != boot_id():
            return "the host was restarted"
    except (OSError, ValueError, HostError):
        return "its last guest did not power itself off"
    with open(cache.path, "rb") as file:
        file.seek(SUPERBLOCK)
        magic, state = struct.unpack_from("<HH", file.read(1024).ljust(1024), 0x38)
    if magic != MAGIC:
        return "it has no file system any more"
    return "" if state == CLEAN else "its file system was not unmounted"


def make(cache: Cache, size: int) -> None:
    """Make it anew, empty. The caller holds its lock."""
    cache.mark.unlink(missing_ok=True)
    cache.path.unlink(missing_ok=True)
    argv = empty_ext4(cache.path, size, LEAST_ROOM, LABEL, f"{LAZY},root_owner=0:0", what="--cache")
    run(argv, timeout=FORMAT_TIMEOUT, bound=True)
    write_whole(cache.mark, dumps({"boot": boot_id()}))
