"""Connections of asyncio: accepted, and watched with other work until one of them ends."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import AsyncIterator, Awaitable, Coroutine
from contextlib import suppress
from typing import Any

from belljar.host.streams import CHUNK

FULL = 1.0  # seconds after which a host that had nothing left for a connection is asked again
SCARCE = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


async def first_of(*works: Coroutine[Any, Any, object]) -> None:
    """Until one ends; what it raised is raised. The others are cancelled, and gone when this returns."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def at_most(seconds: float | None, awaited: Awaitable[object]) -> None:
    """Until it ends, or for so long."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await awaited


async def accepted(end: socket.socket) -> AsyncIterator[tuple[socket.socket, str]]:
    """Connections with their addresses, before anything is said. What breaks one, or that there is no descriptor for it, ends nothing.
    Raises OSError where the socket listens no more."""
    loop = asyncio.get_running_loop()
    while True:
        try:
            connection, address = await loop.sock_accept(end)
        except OSError as exc:
            if exc.errno in (errno.EBADF, errno.EINVAL, errno.ENOTSOCK):  # it listens no more
                raise
            await asyncio.sleep(FULL if exc.errno in SCARCE else 0)
        else:
            yield connection, str(address[0])


async def some(reader: asyncio.StreamReader) -> bytes:
    """Raises EOFError where there is no more."""
    data = await reader.read(CHUNK)
    if not data:
        raise EOFError("the connection was closed")
    return data


class StreamSink:
    """A guest's `Sink`."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer

    async def write(self, data: bytes) -> None:
        """Raises BrokenPipeError."""
        try:
            self._writer.write(data)
            await self._writer.drain()
        except OSError as exc:
            raise BrokenPipeError from exc

    async def close(self) -> None:
        with suppress(OSError, RuntimeError):
            if self._writer.can_write_eof():
                self._writer.write_eof()
