"""Wait for files to grow or to go, by inotify. Used by the `-f` of reading verbs and by services, never on the way of a job."""

from __future__ import annotations

import ctypes
import os
import select
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from belljar.host.files import is_still_there

IN_MODIFY, IN_CLOSE_WRITE, IN_MOVE_SELF, IN_DELETE_SELF, IN_ATTRIB, IN_CREATE, IN_MOVED_TO, IN_DELETE, IN_MOVED_FROM = (
    0x2, 0x8, 0x800, 0x400, 0x4, 0x100, 0x80, 0x200, 0x40,
)  # fmt: skip
IN_Q_OVERFLOW = 0x4000
HEAD = struct.Struct("iIII")  # inotify(7)
CHUNK = 1 << 16


class Happened(NamedTuple):
    """One thing the kernel tells of."""

    watch: int  # as `add` returned it; -1 after an overflow
    mask: int
    name: str  # of what is in a watched folder; "" for what is watched itself


class Watch:
    """An inotify descriptor: readable when something happened to one of the watched paths."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._descriptor = self._libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
        if self._descriptor < 0:
            raise OSError(ctypes.get_errno(), f"inotify_init1: {os.strerror(ctypes.get_errno())}")

    def add(self, path: Path, mask: int) -> int:
        """Watch *path* too; 0 when it is not there."""
        return max(int(self._libc.inotify_add_watch(self._descriptor, os.fsencode(path), mask)), 0)

    def remove(self, watch: int) -> None:
        """Watch that no more. What is gone is watched no more anyway."""
        self._libc.inotify_rm_watch(self._descriptor, watch)

    def wait(self) -> None:
        """Return after something happened."""
        select.select([self._descriptor], [], [])
        self.read()

    def read(self) -> list[Happened]:
        """What happened since; nothing when nothing did."""
        events: list[Happened] = []
        with suppress(BlockingIOError):
            while data := os.read(self._descriptor, CHUNK):
                while data:
                    watch, mask, _, length = HEAD.unpack_from(data)
                    name = os.fsdecode(data[HEAD.size : HEAD.size + length].rstrip(b"\0"))
                    events.append(Happened(watch, mask, name))
                    data = data[HEAD.size + length :]
        return events

    def fileno(self) -> int:
        return int(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)


@contextmanager
def watching(folder: Path, name: str, act: Callable[[], object]) -> Iterator[None]:
    """*act*, in this event loop, whenever a file of this name comes, changes or goes."""
    import asyncio  # the `-f` of a verb has no event loop

    watch, loop = Watch(), asyncio.get_running_loop()
    watch.add(folder, IN_CREATE | IN_MODIFY | IN_MOVED_TO | IN_DELETE)

    def look() -> None:
        if any(event.name == name for event in watch.read()):
            act()

    loop.add_reader(watch.fileno(), look)
    try:
        yield
    finally:
        loop.remove_reader(watch.fileno())
        watch.close()


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
                is_last = not is_still_there(path, file.fileno())  # asked before reading: nothing comes after it
                while data := file.read(CHUNK):
                    yield data
                if is_last:
                    return
                watch.wait()
    except FileNotFoundError:
        return
    finally:
        watch.close()
