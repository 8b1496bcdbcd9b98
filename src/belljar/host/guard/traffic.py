"""What a guard has to tell of a machine's traffic, and the way it comes from the guard's thread into the event loop."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable

from belljar.records import dataclass

PENDING = 64  # calls that wait to be taken
TOLD = 16  # refusals that are told
TENS = frozenset(10**power for power in range(2, 10))


@dataclass(frozen=True)
class Call:
    """The guest connected to a place that is answered here (`Egress.answers`). Whoever is told owns the connection."""

    address: str
    port: int
    connection: socket.socket  # a stream, non-blocking; its other end is the guest's


@dataclass(frozen=True)
class Refusal:
    """The guest was kept from going somewhere. The first few places are told, each once, and each power of ten of tries."""

    address: str  # or the name that was asked for
    port: int
    transport: str
    reason: str
    count: int  # of all refusals so far


Tell = Callable[[Call | Refusal], bool]  # False: nobody will take it


class Refusals:
    """Counts them, and tells some."""

    def __init__(self, tell: Callable[[Refusal], object]) -> None:
        self.count = 0
        self._tell = tell
        self._told: set[tuple[str, int, str]] = set()

    def add(self, host: str, port: int, transport: str, reason: str) -> None:
        self.count += 1
        place = (host, port, transport)
        if (place not in self._told and len(self._told) < TOLD) or self.count in TENS:
            self._told.add(place)
            self._tell(Refusal(*place, reason, self.count))


class Traffic:
    """Of one guard. Made in the event loop that listens to it; `end` when nothing more is to be heard."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._news: asyncio.Queue[Call | Refusal | None] = asyncio.Queue()
        self._is_over = False

    async def items(self) -> AsyncIterator[Call | Refusal]:
        """All that is told, to one listener, until the end."""
        while (item := await self._news.get()) is not None:
            yield item

    def tell(self, item: Call | Refusal) -> bool:
        """From the guard's thread. False: nobody will take it."""
        if self._news.qsize() >= PENDING or self._is_over:
            return False
        try:
            self._loop.call_soon_threadsafe(self._news.put_nowait, item)
        except RuntimeError:  # the loop is closed
            return False
        return True

    def end(self) -> None:
        self._is_over = True
        self._news.put_nowait(None)
