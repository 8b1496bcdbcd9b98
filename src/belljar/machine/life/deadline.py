"""When a machine's work is to end: its time limit, or the moment that an order gave it while it lived.

Measured by the event loop's clock, which leaves out the time in which a job was suspended.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress


class Deadline:
    """Set when the work begins, and by orders; waited for by who carries the work out."""

    def __init__(self) -> None:
        self.why = ""  # in words, once it has passed
        self.is_moved = False
        self.has_passed = False
        self._end: float | None = None  # by the loop's clock
        self._changed = asyncio.Event()

    @property
    def at(self) -> float | None:
        """Seconds since the epoch, as it looks now."""
        return None if self._end is None else time.time() + self._end - asyncio.get_running_loop().time()

    def begin(self, limit: float | None) -> None:
        """The work's time counts from now on. An order of before stands."""
        if limit is not None and not self.is_moved:
            self._end, self.why = (
                asyncio.get_running_loop().time() + limit,
                f"the time limit of {limit:g} s was reached",
            )

    def move(self, at: float) -> None:
        """It is this moment now, which may have been."""
        self.is_moved, self.why = True, f"the deadline was reached, which was moved to {stamp(at)}"
        self._end = asyncio.get_running_loop().time() + at - time.time()
        self._changed.set()

    async def passed(self) -> None:
        """Returns when it has passed; never where there is none."""
        loop = asyncio.get_running_loop()
        while self._end is None or self._end > loop.time():
            self._changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout_at(self._end):
                    await self._changed.wait()
        self.has_passed = True


def stamp(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
