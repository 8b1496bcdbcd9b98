"""What has happened to a domain, for whoever asks, early or late."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from belljar.hypervisor import DomainEvent, EventKind


class History:
    """Everything since the start. EXITED is the last of it."""

    def __init__(self) -> None:
        self._all: list[DomainEvent] = []
        self._news = asyncio.Event()

    def tell(self, event: DomainEvent) -> None:
        self._all.append(event)
        self._news.set()

    @property
    def last(self) -> DomainEvent:
        """Raises IndexError before anything has happened."""
        return self._all[-1]

    async def events(self) -> AsyncIterator[DomainEvent]:
        """From the first to EXITED; waits for what is still to come."""
        seen = 0
        while True:
            while seen < len(self._all):
                yield self._all[seen]
                if self._all[seen].kind is EventKind.EXITED:
                    return
                seen += 1
            self._news.clear()
            await self._news.wait()
