"""This process's own descriptors as sources and sinks, whatever they are: pipe, file, terminal, socket, /dev/null.

They are shared with other processes, so they are never made non-blocking: a daemon thread per call blocks in their place, and
never keeps this process from ending.
"""

from __future__ import annotations

import asyncio
import errno
import os
import select

from belljar.host.threads import in_thread

LOOK_AGAIN = 0.1  # seconds


class FdSource:
    """Reads only what was asked for: the rest stays for whoever is next. The next read gets what a cancelled one took."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._taken = b""
        self._reading: asyncio.Future[None] | None = None  # goes on when its reader is cancelled

    async def read(self, limit: int) -> bytes:
        """Up to *limit* bytes; b"" at the end. Raises OSError."""
        if not self._taken:
            if self._reading is None or self._reading.done():
                self._reading = asyncio.ensure_future(in_thread(lambda: self._read(limit)))
                self._reading.add_done_callback(lambda reading: reading.cancelled() or reading.exception())
            await asyncio.shield(self._reading)
        data, self._taken = self._taken[:limit], self._taken[limit:]
        return data

    def _read(self, limit: int) -> None:
        while True:
            if os.isatty(self._descriptor):
                wait_for_our_turn(self._descriptor)
            try:
                self._taken = os.read(self._descriptor, limit)
                return
            except BlockingIOError:  # somebody else made it non-blocking
                _wait(self._descriptor, select.POLLIN)
            except OSError as exc:
                if exc.errno != errno.EIO or is_in_front(self._descriptor):
                    raise  # otherwise: put into the background since we looked


def wait_for_our_turn(terminal: int) -> None:
    """Return when something was typed for us, or the terminal hung up. What is typed while we are in the background is
    for somebody else; and a payload that does not read must not be stopped because we do."""
    with select.epoll() as typed:
        typed.register(terminal, select.EPOLLIN | select.EPOLLET)
        look_again: float | None = None
        while True:
            typed.poll(look_again)
            is_there = bool(select.select([terminal], [], [], 0)[0])
            if is_there and is_in_front(terminal):
                return
            # Nothing tells when we come to the front. Only while something typed waits for its reader do we look.
            look_again = LOOK_AGAIN if is_there else None


def is_in_front(terminal: int) -> bool:
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return True  # not the terminal that controls us: anybody may read it


class FdSink:
    """Returns from `write` once the kernel has every byte."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    async def write(self, data: bytes) -> None:
        """Raises BrokenPipeError when the reader is gone, another OSError when the bytes cannot be taken."""
        await in_thread(lambda: self._write(data))

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(self._descriptor, view) :]
            except BlockingIOError:
                _wait(self._descriptor, select.POLLOUT)

    async def close(self) -> None:
        """The descriptor is this process's own and stays open."""


def _wait(descriptor: int, events: int) -> None:
    poller = select.poll()
    poller.register(descriptor, events)
    poller.poll()
