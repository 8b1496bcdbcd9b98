"""Wait for files to grow or to go, by inotify. Used by the `-f` of reading verbs, never on the way of a job."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

IN_MODIFY, IN_MOVE_SELF, IN_DELETE_SELF, IN_ATTRIB, IN_CREATE, IN_MOVED_TO, IN_DELETE, IN_MOVED_FROM = (
    0x2, 0x800, 0x400, 0x4, 0x100, 0x80, 0x200, 0x40,
)  # fmt: skip
CHUNK = 1 << 16


class Watch:
    """An inotify descriptor. `wait` returns after something happened to one of the watched paths."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._descriptor = self._libc.inotify_init1(os.O_CLOEXEC)
        if self._descriptor < 0:
            raise OSError(ctypes.get_errno(), "inotify_init1")

    def add(self, path: Path, mask: int) -> bool:
        """Watch *path* too; False when it is not there."""
        return bool(self._libc.inotify_add_watch(self._descriptor, os.fsencode(path), mask) >= 0)

    def wait(self) -> None:
        os.read(self._descriptor, CHUNK)

    def fileno(self) -> int:
        return int(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)


def changes(path: Path) -> Iterator[bytes]:
    """The whole lines of a growing file, as they come; ends when the file is moved or removed. Missing file: nothing."""
    rest = b""
    for data in growth(path):
        lines, newline, rest = (rest + data).rpartition(b"\n")
        if newline:
            yield lines + newline
    if rest:
        yield rest


def growth(path: Path) -> Iterator[bytes]:
    """The bytes of a growing file, as they come; ends when the file is moved or removed. Missing file: nothing."""
    watch = Watch()
    try:
        if not watch.add(path, IN_MODIFY | IN_MOVE_SELF | IN_DELETE_SELF | IN_ATTRIB):
            return
        watch.add(path.parent, IN_MOVE_SELF | IN_DELETE_SELF)  # the file is told nothing when its folder is renamed
        with open(path, "rb", buffering=0) as file:
            while True:
                is_last = not _is_same(path, file.fileno())  # asked before reading: what was written before counts
                while data := file.read(CHUNK):
                    yield data
                if is_last:
                    return
                watch.wait()
    except FileNotFoundError:
        return
    finally:
        watch.close()


def _is_same(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False
