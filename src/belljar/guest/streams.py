"""The host's end of a payload's streams: from a source to the guest, from the guest to a sink, by credit."""

from __future__ import annotations

import asyncio
import errno
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from belljar.agent.wire import DATA, EOF, MAX_CREDIT, RESET, WINDOW, WireError, credit, frame, portions
from belljar.guest import Sink, Source

Send = Callable[[bytes], None]
GONE = (errno.EPIPE, errno.ECONNRESET, errno.EIO)  # EIO: a terminal that hung up


class Wakeup:
    """One waiter, who looks whether there is a reason to wait before it does."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._future: asyncio.Future[None] | None = None

    def wake(self) -> None:
        if self._future is not None and not self._future.done():
            self._future.set_result(None)

    async def wait(self) -> None:
        self._future = self._loop.create_future()
        await self._future


class Upstream:
    """From a source to the guest, as far as the guest gives credit."""

    def __init__(self, number: int, source: Source, send: Send) -> None:
        self._number, self._source, self._send = number, source, send
        self._credit = WINDOW
        self._wakeup = Wakeup()

    def grant(self, amount: int) -> None:
        self._credit += amount
        if self._credit > MAX_CREDIT:
            raise WireError(f"stream {self._number}: too much credit")
        self._wakeup.wake()

    async def run(self) -> None:
        """Carry to the source's end. A source that cannot be read has ended."""
        while True:
            while not self._credit:
                await self._wakeup.wait()
            try:
                data = await self._source.read(min(self._credit, WINDOW))
            except OSError:
                data = b""
            if not data:
                self._send(frame(EOF, self._number))
                return
            self._credit -= len(data)
            for part in portions(data):
                self._send(frame(DATA, self._number, part))


class Downstream:
    """From the guest to a sink. The guest may have a window of bytes on the way that the sink has not taken."""

    def __init__(self, number: int, sink: Sink, send: Send) -> None:
        self._number, self._sink, self._send = number, sink, send
        self._queue: deque[bytes] = deque()
        self._held = 0  # bytes received and not yet given back as credit
        self._owed = 0  # of these, bytes the sink has taken
        self._is_ended = False
        self._wakeup = Wakeup()
        self.error: OSError | None = None  # why the sink took no more, where that is worth telling

    def feed(self, data: bytes) -> None:
        self._held += len(data)
        if self._held > WINDOW or self._is_ended:
            raise WireError(f"stream {self._number}: data without credit or after its end")
        self._queue.append(data)
        self._wakeup.wake()

    def end(self) -> None:
        """Nothing more comes."""
        self._is_ended = True
        self._wakeup.wake()

    async def run(self) -> None:
        """Carry to the stream's end, or to the sink's: then the payload finds nobody reading."""
        try:
            while await self._carry():
                pass
        except OSError as exc:
            if exc.errno not in GONE and not isinstance(exc, (BrokenPipeError, ConnectionResetError)):
                self.error = exc
            self._send(frame(RESET, self._number))
        finally:
            with suppress(OSError):
                await self._sink.close()

    async def _carry(self) -> bool:
        while not self._queue:
            if self._is_ended:
                return False
            await self._wakeup.wait()
        data = self._queue[0] if len(self._queue) == 1 else b"".join(self._queue)
        self._queue.clear()
        await self._sink.write(data)
        self._owed += len(data)
        if self._owed >= WINDOW // 4 and not self._is_ended:
            self._send(credit(self._number, self._owed))
            self._held -= self._owed
            self._owed = 0
        return True
