"""Connections of asyncio: accepted, carried through, and watched with other work until one of them ends."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import AsyncIterator, Awaitable, Coroutine
from contextlib import suppress

from belljar.hints import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import ssl

CHUNK = 1 << 16
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


class Works:
    """Tasks beside what somebody does, until all of them are cancelled. *harmless*: what ends one, and concerns nobody else."""

    def __init__(self, *harmless: type[BaseException]) -> None:
        self._tasks, self._harmless = set[asyncio.Task[None]](), harmless

    def __len__(self) -> int:
        return len(self._tasks)

    def begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._over)

    def _over(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and not isinstance(exc := task.exception(), (*self._harmless, type(None))):
            asyncio.get_running_loop().call_exception_handler({"message": "defect", "exception": exc, "task": task})

    async def end(self) -> None:
        """They are gone when it returns."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


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


async def as_streams(
    connection: socket.socket, tls: ssl.SSLContext | None, handshake: float, chunk: int = CHUNK
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """An accepted connection, after that of TLS, which may take so many seconds. Raises OSError."""
    loop, reader = asyncio.get_running_loop(), asyncio.StreamReader(chunk)
    protocol = asyncio.StreamReaderProtocol(reader)
    transport, _ = await loop.connect_accepted_socket(
        lambda: protocol, connection, ssl=tls, ssl_handshake_timeout=handshake if tls else None
    )
    return reader, asyncio.StreamWriter(transport, protocol, reader, loop)


async def some(reader: asyncio.StreamReader) -> bytes:
    """Raises EOFError where there is no more."""
    data = await reader.read(CHUNK)
    if not data:
        raise EOFError("the connection was closed")
    return data


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """All that comes, to its end. Raises OSError."""
    while data := await reader.read(CHUNK):
        writer.write(data)
        await writer.drain()


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
