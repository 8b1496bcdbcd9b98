"""A payload and all that came of it: what the contract's tests are told with."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from socket import socket

from belljar.agent.wire import Parser
from belljar.guest import ExitStatus, Guest, Identity, Process, Settings, Source, Streams
from belljar.guest.conversation import Conversation
from belljar.model import Account, Payload, StdinKind

ME = Account("tester", os.getuid(), os.getgid(), "testers", home="/")
ENV = ((b"PATH", b"/usr/local/bin:/usr/bin:/bin"),)
ECHO = Path("/bin/echo").read_bytes()
IDENTITY = Identity("belljar-0123456789ab", "a1" * 16, "b2" * 16, os.urandom(64))


class Bytes:
    """A `Source` of known bytes; with *rest* it stays open behind them until that future is done."""

    def __init__(self, data: bytes = b"", rest: asyncio.Future[None] | None = None) -> None:
        self._data, self._rest = memoryview(data), rest

    async def read(self, limit: int) -> bytes:
        if not self._data and self._rest is not None:
            await self._rest
        part, self._data = bytes(self._data[:limit]), self._data[limit:]
        return part


class Collector:
    """A `Sink` that keeps what it gets."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self.is_closed = False
        self.arrived: Callable[[], None] | None = None  # called after each write

    @property
    def data(self) -> bytes:
        return b"".join(self._parts)

    async def write(self, data: bytes) -> None:
        self._parts.append(data)
        if self.arrived is not None:
            self.arrived()

    async def close(self) -> None:
        self.is_closed = True


def fed(parser: Parser, data: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Every frame that is whole once these bytes came."""
    parser.feed(data)
    yield from iter(parser.take, None)


@asynccontextmanager
async def talking(channel: socket) -> AsyncIterator[Conversation]:
    guest = Conversation(channel, Settings())
    await guest.greet()
    try:
        yield guest
    finally:
        guest.close()


@dataclass
class Ran:
    """A payload and all that came of it."""

    process: Process
    stdout: Collector
    stderr: Collector
    status: ExitStatus | None = field(default=None)

    @property
    def out(self) -> bytes:
        return self.stdout.data

    @property
    def err(self) -> bytes:
        return self.stderr.data

    @property
    def code(self) -> int | None:
        assert self.status is not None
        return self.status.exit_code


def payload(*argv: bytes, **changes: object) -> Payload:
    return replace(Payload(argv, ME, env=ENV, cwd=b"/", stdin=StdinKind.NULL), **changes)  # type: ignore[arg-type]


async def begin(guest: Guest, asked: Payload, stdin: bytes | Source | None = None, **streams: object) -> Ran:
    if stdin is not None:
        asked = replace(asked, stdin=StdinKind.STREAM)
    stdout, stderr = Collector(), Collector()
    ends = Streams(
        Bytes(stdin) if isinstance(stdin, bytes) else stdin,
        stdout if asked.stdout is StdinKind.STREAM else None,
        stderr if asked.stderr is StdinKind.STREAM and not asked.terminal else None,
    )
    return Ran(await guest.start(asked, replace(ends, **streams)), stdout, stderr)  # type: ignore[arg-type]


async def ran(guest: Guest, asked: Payload, stdin: bytes | Source | None = None, **streams: object) -> Ran:
    done = await begin(guest, asked, stdin, **streams)
    done.status = await done.process.wait()
    return done


def shell(script: str, **changes: object) -> Payload:
    return payload(b"/bin/sh", b"-c", script.encode(), **changes)


def python(code: str, **changes: object) -> Payload:
    return payload(b"/usr/bin/python3", b"-ISc", code.encode(), **changes)


async def said(done: Ran, text: bytes) -> None:
    """Until the payload said it."""
    while text not in done.out:
        arrived = asyncio.Event()
        done.stdout.arrived = arrived.set
        if text not in done.out:
            await arrived.wait()


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except (FileNotFoundError, ProcessLookupError):
        return False
