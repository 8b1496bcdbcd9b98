"""Names of other hosts that are asked again and again: looked up a few at a time, and again when they are old."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Final

from belljar.service.udp.datagrams import Address, addresses_of

LASTS: Final = 600.0  # seconds until a name is looked up again
AT_ONCE: Final = 16


class Names:
    """Where UDP for these goes. *hosts*: all addresses that were ever found."""

    def __init__(self, names: Iterable[str], port: int) -> None:
        self._names, self._port = tuple(names), port
        self._places: dict[str, tuple[float, list[Address]]] = {}
        self._looking: dict[str, asyncio.Task[None]] = {}
        self._gate = asyncio.Semaphore(AT_ONCE)
        self.hosts: set[str] = set()

    async def look_up(self, timeout: float) -> None:
        """Addresses that are old serve until there are new ones; those that were never known are waited for."""
        now = asyncio.get_running_loop().time()
        for name in self._names:
            if name not in self._looking and (name not in self._places or now - self._places[name][0] > LASTS):
                self._looking[name] = asyncio.create_task(self._find(name))
        unknown = [self._looking[name] for name in self._looking if name not in self._places]
        if unknown:
            await asyncio.wait(unknown, timeout=timeout)

    def of(self, name: str) -> list[Address]:
        """What is known now."""
        return self._places.get(name, (0.0, []))[1]

    async def close(self) -> None:
        """They are looked up no more."""
        for task in self._looking.values():
            task.cancel()
        await asyncio.gather(*self._looking.values(), return_exceptions=True)

    async def _find(self, name: str) -> None:
        try:
            async with self._gate:
                if addresses := await addresses_of(name, self._port):
                    self._places[name] = (asyncio.get_running_loop().time(), addresses)
                    self.hosts.update(address[0] for address in addresses)
        finally:
            del self._looking[name]
