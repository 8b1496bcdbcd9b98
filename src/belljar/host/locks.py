"""Locks that die with their holder, on a file that stays. A free lock means that the holder is dead.

flock gives an exclusive lock to whoever can open the file. A file that others may open, as a site's images have, is locked by
F_OFD_SETLK, whose exclusive lock needs the right to write: a user keeps an image from being removed, and nobody from using it.
"""

from __future__ import annotations

import fcntl
import os
import struct
from pathlib import Path

from belljar.errors import LockTimeout
from belljar.host.files import is_still_there


class Lock:
    """One lock. Held by the open file: released by `release` or at the end of a `with`, by the end of the process, by nothing else."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def release(self) -> None:
        """Give it up. Releasing twice is fine."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def __enter__(self) -> Lock:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()


def try_lock(path: Path, *, shared: bool = False) -> Lock | None:
    """The lock, or None when somebody else holds it. The file is made when it is missing and its folder exists."""
    try:
        return _lock(path, shared, wait=False)
    except BlockingIOError:
        return None


def is_locked(path: Path) -> bool:
    """Does somebody hold it? A file that is missing, or that we may not open, is not. Never creates anything."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (FileNotFoundError, PermissionError):
        return False
    try:
        _take(descriptor, shared=True, wait=False)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def locked(path: Path, *, timeout: float, what: str, shared: bool = False) -> Lock:
    """The lock. Waits for its holder's end, in the kernel, until *timeout* seconds passed: LockTimeout."""
    return try_lock(path, shared=shared) or _wait(path, timeout, what, shared)


def _wait(path: Path, timeout: float, what: str, shared: bool) -> Lock:
    """The lock, once its holder gives it up. The kernel's wait has no deadline, so a thread waits: one that gets the lock
    when nobody wants it any more gives it back at once."""
    if timeout <= 0:
        raise LockTimeout(f"{path}: held by another process, and nobody waits to {what}")
    from concurrent.futures import Future

    from belljar.host.threads import begin_thread

    turn: Future[Lock] = Future()

    def wait() -> None:
        try:
            lock = _lock(path, shared, wait=True)
        except BaseException as exc:
            if turn.set_running_or_notify_cancel():
                turn.set_exception(exc)
            return
        if turn.set_running_or_notify_cancel():
            turn.set_result(lock)
        else:
            lock.release()

    begin_thread(wait)
    try:
        return turn.result(timeout)
    except BaseException as exc:  # a signal's handler's, too
        if not turn.cancel() and turn.exception() is None:
            turn.result().release()
        if isinstance(exc, TimeoutError):
            raise LockTimeout(f"{path}: held by another process for {timeout:.0f} s while waiting to {what}") from None
        raise


def _lock(path: Path, shared: bool, *, wait: bool) -> Lock:
    while True:
        descriptor = _open(path, shared)
        try:
            _take(descriptor, shared, wait=wait)
            if is_still_there(path, descriptor):
                return Lock(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # it was removed before it was locked: that was a lock on nothing


def _take(descriptor: int, shared: bool, *, wait: bool) -> None:
    """Lock the open file. Raises BlockingIOError where that would mean to wait."""
    if os.fstat(descriptor).st_mode & 0o077:
        whole_file = struct.pack("hhqqi4x", fcntl.F_RDLCK if shared else fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLKW if wait else fcntl.F_OFD_SETLK, whole_file)
    else:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))


def _open(path: Path, shared: bool) -> int:
    if shared:
        try:  # a shared lock on somebody's read-only store needs no right to write
            return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            pass
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
