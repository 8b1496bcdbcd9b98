"""Answers that are held back until there is something new in them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from hashlib import sha256
from typing import Any

from belljar.model import dumps
from belljar.service.streams import at_most

Answer = dict[str, Any]
TAG = "tag"


class News:
    """Of one service: who waits looks again after each `ring`."""

    def __init__(self) -> None:
        self._next = asyncio.Event()

    def ring(self) -> None:
        """Something may be another now."""
        self._next.set()
        self._next = asyncio.Event()

    async def held(self, look: Callable[[], Awaitable[Answer]], tag: object, seconds: float) -> Answer:
        """What *look* gives, with its own `tag`: once that is another than the caller's *tag*, or after so many seconds."""
        clock = asyncio.get_running_loop().time
        end = clock() + seconds
        while True:
            rung = self._next  # before the look: what comes meanwhile is not missed
            answer = await look()
            known = sha256(dumps(answer)).hexdigest()
            if known != tag or (left := end - clock()) <= 0:
                return {**answer, TAG: known}
            await at_most(left, rung.wait())
