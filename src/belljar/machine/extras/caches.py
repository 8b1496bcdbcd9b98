"""Disks that outlive a machine: a cache for what guests fetch again and again, such as CernVM-FS has.

    scratch/caches/N.raw     an ext4 disk labelled LABEL; sparse
    scratch/caches/N.lock    held by the machine that has it; else it says in which boot of the host it was left whole

Each user has its own caches; a machine has one at a time. The disk is never mounted here: its superblock tells whether
its guest unmounted it. If not, or if its size differs or the host was restarted, it is made anew, empty.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from belljar.errors import HostError
from belljar.host.commands import run
from belljar.host.files import private_folder
from belljar.host.locks import Lock, is_locked, try_lock
from belljar.host.processes import boot_id
from belljar.host.threads import in_thread
from belljar.hypervisor import ExtraDisk
from belljar.machine import Folders
from belljar.machine.extras import Equipment, Extra
from belljar.machine.extras.disks import FORMAT_TIMEOUT, LAZY, empty_ext4
from belljar.machine.life.life import Lifecycle
from belljar.model import MIB
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

    def state(self) -> str:
        """in use, ready, or to be made anew and why."""
        return "in use" if is_locked(self.lock) else trouble(self) or "ready"


class CacheDisk(Extra):
    """One that was left whole where there is one, else one made now. It is the machine's until its end."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._lock: Lock | None = None

    async def prepare(self, life: Lifecycle, there: Equipment) -> Equipment:
        """Raises NoSpace, CommandMissing, CommandFailed, HostError."""
        # Whoever does not wait for it any more has no lock on it: it is made anew by the next one where it was half made.
        folders, size = life.folders, self._size
        cache, lock, reason = await in_thread(lambda: take(folders, size), undo=lambda taken: taken[1].release())
        self._lock = lock
        life.record.write("cache", path=str(cache.path), number=cache.number, made=reason)
        return there.with_disk(ExtraDisk(CACHE, cache.path, "raw", readonly=False))

    def release(self) -> None:
        if self._lock is not None:
            leave(self._lock)


def take(folders: Folders, size: int) -> tuple[Cache, Lock, str]:
    """A cache of this size, locked, and why it was made now ("" when it was there)."""
    folder = private_folder(folder_of(folders))
    ready = [cache for cache in caches_of(folders) if not trouble(cache, size)]
    for cache in (*ready, *(Cache(number, folder / f"{number}.raw") for number in range(MOST))):
        if lock := try_lock(cache.lock):
            try:
                reason = trouble(cache, size)
                os.truncate(lock.descriptor, 0)  # who is killed does not leave it whole
                if reason:
                    cache.path.unlink(missing_ok=True)
                    argv = empty_ext4(cache.path, size, LEAST_ROOM, LABEL, f"{LAZY},root_owner=0:0", what="--cache")
                    run(argv, timeout=FORMAT_TIMEOUT, bound=True)
            except BaseException:  # re-raised: nobody else has the lock to release
                lock.release()
                raise
            return cache, lock, reason
    raise HostError(f"{folder}: all {MOST} caches are in use")


def leave(lock: Lock) -> None:
    """Its machine is gone: what the guest has written and unmounted can be used again."""
    with lock, suppress(OSError):
        os.pwrite(lock.descriptor, boot_id().encode(), 0)


def remove(folders: Folders) -> Iterator[Cache]:
    """Remove every cache that is not in use."""
    for cache in caches_of(folders):
        if lock := try_lock(cache.lock):
            with lock:
                for path in (cache.path, cache.lock):
                    path.unlink(missing_ok=True)
            yield cache


def caches_of(folders: Folders) -> list[Cache]:
    """Every cache of this user, by number."""
    numbers = (int(path.stem) for path in folder_of(folders).glob("*.raw") if path.stem.isdecimal())
    return [Cache(number, folder_of(folders) / f"{number}.raw") for number in sorted(numbers)]


def folder_of(folders: Folders) -> Path:
    return folders.scratch / "caches"


def trouble(cache: Cache, size: int | None = None) -> str:
    """Why it cannot be used as it is; "": it can."""
    try:
        with open(cache.path, "rb") as file:
            file.seek(SUPERBLOCK)
            magic, state = struct.unpack_from("<HH", file.read(1024).ljust(1024), 0x38)
            actual = os.fstat(file.fileno()).st_size
        left = cache.lock.read_text()
    except FileNotFoundError:
        return "there was none"
    reasons = {
        "it had another size": size not in (None, actual),
        "it has no file system any more": magic != MAGIC,
        "its file system was not unmounted": state != CLEAN,
        "its machine was killed, or the host was restarted": left != boot_id(),
    }
    return next((reason for reason, is_so in reasons.items() if is_so), "")
