"""Logs that keep the latest bytes of an endless stream: the serial console, and what a detached payload writes."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from io import FileIO
from pathlib import Path

from belljar.host.files import private, write_all
from belljar.machine import CONSOLE_LOG

HALF = 1 << 20  # the console's log and its predecessor hold the last one to two MiB a guest wrote
BEFORE = ".1"  # the name of what was written before, behind the file's own
NEXT = ".new"


class RollingFile:
    """A log and its predecessor: the last *half* to twice *half* bytes. A file of this name is there at all times."""

    def __init__(self, path: Path, half: int) -> None:
        self._path, self._half = path, half
        self._file = _log(path)
        self._written = self._file.tell()

    def write(self, data: bytes) -> None:
        """All of it. Raises OSError where the disk is full, and nothing when only a new file cannot be begun."""
        write_all(self._file.fileno(), data)
        self._written += len(data)
        if self._written > self._half:
            with suppress(OSError):  # the old one then goes on
                self._roll()

    def close(self) -> None:
        self._file.close()

    def _roll(self) -> None:
        coming, before = (self._path.with_name(self._path.name + end) for end in (NEXT, BEFORE))
        before.unlink(missing_ok=True)
        with ExitStack() as failed:
            file = failed.enter_context(_log(coming))
            os.link(self._path, before)
            os.rename(coming, self._path)
            failed.pop_all()
        self._file.close()
        self._file, self._written = file, 0


def _log(path: Path) -> FileIO:
    return open(path, "ab", buffering=0, opener=private)


class FileSink:
    """Takes a payload's stream into such a file, which is opened with the first byte."""

    def __init__(self, path: Path, limit: int) -> None:
        self._path, self._half = path, max(limit // 2, 1)
        self._file: RollingFile | None = None

    async def write(self, data: bytes) -> None:
        """Raises OSError where the bytes cannot be kept: the payload learns that at its next write."""
        if self._file is None:
            self._file = RollingFile(self._path, self._half)
        self._file.write(data)

    async def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


class CappedSink:
    """Hands the first *most* bytes of a stream to *take*. What is more is refused, and `is_cut` tells so."""

    def __init__(self, take: Callable[[bytes], object], most: int) -> None:
        self._take, self._most, self.size, self.is_cut = take, most, 0, False

    async def write(self, data: bytes) -> None:
        part = data[: self._most - self.size]
        self._take(part)
        self.size += len(part)
        if len(part) < len(data):
            self.is_cut = True
            raise BrokenPipeError

    async def close(self) -> None: ...


def kept(path: Path, *, follow: bool = False) -> Iterator[bytes]:
    """What is kept of a stream, oldest first; with *follow* what comes, too, until its folder is gone or put away."""
    before = path.with_name(path.name + BEFORE)
    for part in (before,) if follow else (before, path):
        with suppress(FileNotFoundError), open(part, "rb") as file:
            yield from iter(partial(file.read, 1 << 16), b"")
    if follow:
        from belljar.host.watch import growth

        while path.exists():
            yield from growth(path)


class Console:
    """Reads the domain's console until it ends. A guest that floods it fills no disk."""

    def __init__(self, folder: Path, line: socket.socket, awaited: bytes = b"") -> None:
        self._line = line
        self._viewers: set[socket.socket] = set()
        self._log = RollingFile(folder / CONSOLE_LOG, HALF)
        self._awaited, self._end = awaited, b""
        self.seen = asyncio.Event()  # *awaited* was written

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        with suppress(OSError):
            while data := await loop.sock_recv(self._line, 1 << 16):
                with suppress(OSError):  # a full disk costs us the log, not the machine
                    self._log.write(data)
                self._watch(data)
                for viewer in list(self._viewers):
                    try:
                        viewer.send(data)  # a viewer that does not read misses something; the guest does not wait
                    except BlockingIOError:
                        pass
                    except OSError:
                        self._viewers.discard(viewer)

    async def attach(self, viewer: socket.socket) -> None:
        """Show the console to this connection and type what it sends, until it closes."""
        loop = asyncio.get_running_loop()
        self._viewers.add(viewer)
        try:
            while data := await loop.sock_recv(viewer, 4096):
                await loop.sock_sendall(self._line, data)
        finally:
            self._viewers.discard(viewer)

    def close(self) -> None:
        self._log.close()

    def _watch(self, data: bytes) -> None:
        if self._awaited and not self.seen.is_set():
            text = self._end + data
            self._end = text[-len(self._awaited) :]
            if self._awaited in text:
                self.seen.set()
