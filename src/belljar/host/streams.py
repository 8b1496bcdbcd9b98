"""Connections of asyncio: an accepted one as streams, and carried to its end; and tasks beside what somebody does."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Coroutine

from belljar.hints import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import ssl

CHUNK = 1 << 16


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


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """All that comes, to its end. Raises OSError."""
    while data := await reader.read(CHUNK):
        writer.write(data)
        await writer.drain()
