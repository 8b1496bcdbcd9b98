"""What users of one node hand each other of the packed files they download: one download per node, whoever misses it first.

    POOL                  root's, mode 1777, named by `image.pool`
    POOL/<digest>.lock    held by the one who downloads this file; made by whoever came first, and anybody may wait on it
    POOL/<uid>/           that user's own: <key>.part and <key>.json of downloads, <digest> of whole ones

Users do not trust each other, so nothing here is believed: a neighbour's file is copied, and the copy counts when it has the
digest that was ordered. A neighbour can waste time, no more than `image.stall_timeout` at once without a byte coming; then
everybody helps himself as if there were no pool.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from belljar.errors import LockTimeout
from belljar.host.files import no_space_as_error, remove_tree
from belljar.host.locks import Lock, lock_of_anybody, wait_for_anybody
from belljar.image import Settings
from belljar.image.fetch import Part
from belljar.image.manifest import sha256_of
from belljar.image.progress import Progress

READABLE, FOLDER = 0o644, 0o755
VALIDATOR = re.compile(r'"[!#-~]{1,200}"|[A-Za-z]{3}, [0-9A-Za-z: ]{8,30}')  # a strong ETag, or a date: RFC 9110
LARGEST_NOTE = 4096
CHUNK = 1 << 24
DAY = 86400.0


def open_pool(settings: Settings, progress: Progress) -> Pool | None:
    """The pool of the settings; None where there is none, or one that is not to be trusted, which is told."""
    if settings.pool is None:
        return None
    if why := complaint(settings.pool):
        progress.step(f"The pool is not used: {why}")
        return None
    return Pool(settings.pool, settings, os.geteuid())


def complaint(folder: Path) -> str:
    """Why this folder is no pool; "" when it is one. In one that is not sticky, or not root's, others could exchange what
    lies in it while it is looked at."""
    try:
        facts = os.lstat(folder)
    except OSError as exc:
        return f"{folder}: {exc.strerror}"
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != 0 or stat.S_IMODE(facts.st_mode) != 0o1777:
        return f"{folder}: must be a folder of root's with mode 1777"
    return ""


class Pool:
    """One user's view of a pool."""

    def __init__(self, folder: Path, settings: Settings, uid: int) -> None:
        self._folder, self._settings, self._uid = folder, settings, uid
        self.own = folder / str(uid)

    @contextmanager
    def turn(self, digest: str, size: int, progress: Progress) -> Iterator[None]:
        """Be the only one of this node who downloads this file, or go on without being so: when whoever is at it has not a
        byte more to show after `image.stall_timeout`, or all has taken longer than `image.lock_timeout`."""
        path = self._folder / f"{digest}.lock"
        lock: Lock | None = None
        with suppress(OSError):  # something else has the lock's name: nobody waits for anybody
            lock = lock_of_anybody(path) or self._wait(path, size, progress)
        try:
            yield
        finally:
            if lock is not None:
                lock.release()

    def _wait(self, path: Path, size: int, progress: Progress) -> Lock | None:
        """The lock, or None when waiting longer is of no use."""
        progress.step("Waiting for another user of this host, who downloads the same image")
        deadline, seen = time.monotonic() + self._settings.lock_timeout, self._begun_by_others(size)
        while time.monotonic() < deadline:
            with suppress(LockTimeout):
                return wait_for_anybody(path, timeout=self._settings.stall_timeout, what="download an image")
            now = self._begun_by_others(size)
            if now <= seen:
                break
            seen = now
        progress.step("Not waiting any longer: nothing comes of it")
        return None

    def take(self, digest: str, size: int, to: Path, progress: Progress) -> bool:
        """Copy a neighbour's file to *to*, if one has the right bytes. False: nobody has."""
        for name, neighbour in self._neighbours():
            with suppress(OSError):
                source = _open_regular(neighbour, digest)
                try:
                    if os.fstat(source).st_size != size:
                        continue
                    progress.step(f"Copying what uid {name} has downloaded")
                    _copy(source, to, size, 0o600)
                finally:
                    os.close(source)
                if sha256_of(to) == digest:
                    return True
                to.unlink(missing_ok=True)
        return False

    def prepare(self) -> Path | None:
        """Our own folder; None where somebody else has its name. Raises NoSpace."""
        with no_space_as_error(self.own), suppress(FileExistsError):
            os.mkdir(self.own, FOLDER)
            os.chmod(self.own, FOLDER)
        facts = os.lstat(self.own)
        is_ours = stat.S_ISDIR(facts.st_mode) and facts.st_uid == self._uid and not facts.st_mode & 0o022
        return self.own if is_ours else None

    def go_on(self, key: str, url: str, size: int) -> bool:
        """Begin our own download with what a neighbour, who is not at it any more, has of it, where that is more than we
        have. False: there is nothing of that kind. Raises NoSpace."""
        mine = self.own / f"{key}.part"
        best, chosen = mine.stat().st_size if mine.exists() else 0, None
        for name, _ in self._neighbours():
            with suppress(OSError):
                facts = os.lstat(self._folder / name / mine.name)
                if stat.S_ISREG(facts.st_mode) and best < facts.st_size < size:
                    best, chosen = facts.st_size, name
        for name, folder in self._neighbours():
            if name == chosen:
                with suppress(OSError, ValueError, RecursionError):
                    return self._begin_with(folder, mine, url, size)
        return False

    def _begin_with(self, folder: int, mine: Path, url: str, size: int) -> bool:
        """Raises ValueError for a note that is none."""
        with os.fdopen(_open_regular(folder, mine.with_suffix(".json").name), "rb") as file:
            note = json.loads(file.read(LARGEST_NOTE))
        validator = note.get("validator") if isinstance(note, dict) and note.get("url") == url else None
        if not isinstance(validator, str) or not VALIDATOR.fullmatch(validator):
            return False
        source = _open_regular(folder, mine.name)
        try:
            length = os.fstat(source).st_size
            if not 0 < length < size:
                return False
            _copy(source, mine, length, READABLE)
        finally:
            os.close(source)
        Part(mine, validator, size, READABLE).note(url)
        return True

    def keep(self, path: Path, digest: str) -> Path:
        """A whole file of ours, for neighbours from now on. What is ours and old goes."""
        kept = path.rename(self.own / digest)
        expire(self.own, self._settings.pool_days)
        return kept

    def _neighbours(self) -> Iterator[tuple[str, int]]:
        """The folders of the others, open; each is closed when the next is asked for. Links are not followed."""
        for name in sorted(os.listdir(self._folder)):
            if not (name.isascii() and name.isdecimal()) or name == str(self._uid):
                continue
            with suppress(OSError):
                folder = os.open(self._folder / name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
                try:
                    yield name, folder
                finally:
                    os.close(folder)

    def _begun_by_others(self, size: int) -> int:
        """Bytes of all unfinished downloads of others that could be this one's, together."""
        found = 0
        for _, folder in self._neighbours():
            with suppress(OSError):
                for name in os.listdir(folder):
                    if name.endswith(".part"):
                        found += min(os.stat(name, dir_fd=folder, follow_symlinks=False).st_size, size)
        return found


def expire(folder: Path, days: float, *, now: float | None = None, dry_run: bool = False) -> list[Path]:
    """Remove files of one user's folder that nobody wrote for so many days. Returns them."""
    now, old = time.time() if now is None else now, []
    with suppress(OSError):
        for name in sorted(os.listdir(folder)):
            with suppress(OSError):
                if now - os.lstat(folder / name).st_mtime > days * DAY:
                    if not dry_run:
                        os.unlink(folder / name)
                    old.append(folder / name)
    return old


def sweep(settings: Settings, *, now: float, dry_run: bool) -> Iterator[Path]:
    """What is too old: of our own folder, as root of everybody's, with the locks nobody holds."""
    pool, uid = settings.pool, os.geteuid()
    if pool is None or complaint(pool):
        return
    for name in sorted(os.listdir(pool)):
        path = pool / name
        if name == str(uid):
            yield from expire(path, settings.pool_days, now=now, dry_run=dry_run)
        elif uid == 0 and (gone := _too_old(path, settings.pool_days * DAY, now)):
            if not dry_run:
                remove_tree(path) if gone == "folder" else path.unlink(missing_ok=True)
            yield path


def _too_old(path: Path, age: float, now: float) -> str:
    """As root, who walks into no user's folder: a whole folder goes, when nothing in it was made or taken away for so
    long; of other things, the name."""
    with suppress(OSError):
        facts = os.lstat(path)
        if now - facts.st_mtime > age:
            return "folder" if stat.S_ISDIR(facts.st_mode) else "file"
    return ""


def _open_regular(folder: int, name: str) -> int:
    """A descriptor to read a regular file. Raises OSError; never waits for the other end of a pipe."""
    descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file")
    return descriptor


def _copy(source: int, to: Path, size: int, mode: int) -> None:
    """The first *size* bytes, by the file system's own means where it has them. Raises NoSpace, OSError."""
    with no_space_as_error(to):
        target = os.open(to, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
        try:
            os.fchmod(target, mode)
            at = 0
            while at < size and (count := os.sendfile(target, source, at, min(CHUNK, size - at))):
                at += count
        finally:
            os.close(target)
