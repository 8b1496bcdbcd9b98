"""A pilot's side of the channel, spoken by hand: what an honest one says, and what a lying one can."""

from __future__ import annotations

import asyncio
import os
from typing import Any

from belljar.lease.jobfile import JobFile
from belljar.lease.orders import Facts, Order, Report, Tell
from belljar.lease.protocol import Opening, frame, receive
from belljar.model import GIB, to_json
from belljar.reading import from_json
from belljar.service.gate import dial

LARGE = Facts("node1", boot="b", cpus=8, memory=32 * GIB)


class Wire:
    """One connection. *opening*: in place of what an honest pilot of this job file would say."""

    def __init__(self, job: JobFile, rank: int = 0, pilot: str = "", **opening: Any) -> None:
        self.job, self.rank, self.pilot = job, rank, pilot or os.urandom(16).hex()
        self._opening = {"lease": job.lease, "slot": rank, "attempt": job.attempt, "instance": self.pilot, **opening}
        self.first: bytes | None = None  # said in place of an opening
        self.orders: list[Order] = []
        self.acked = 0

    async def open(self) -> Wire:
        """Raises EOFError, OSError where the service does not talk to it."""
        self.reader, self.writer = await dial(self.job.service[0], self.job.pin)
        own = Opening(**self._opening).frame(self.job.secret)
        self.write(own if self.first is None else self.first)
        self.peer = await Opening.heard(self.reader, lambda _: self.job.secret)
        return self

    def write(self, data: bytes) -> None:
        self.writer.write(data)

    def frame(self, tell: Tell, seq: int = 0, *, ack: int = 0, **facts: Any) -> bytes:
        """A report, as it goes over the wire. *facts*: of the report, lies included."""
        told = {
            "lease": self.job.lease,
            "attempt": self.job.attempt,
            "rank": self.rank,
            "pilot": self.pilot,
            "seq": seq,
        }
        report = Report(**{"tell": tell, "wall": 0.0, "mono": 1.0, **told, **facts})
        return frame({"seq": seq, "ack": ack, "report": to_json(report)})

    def say(self, tell: Tell, seq: int = 0, **facts: Any) -> None:
        self.write(self.frame(tell, seq, **facts))

    def hello(self, facts: Facts = LARGE, **more: Any) -> None:
        import time

        self.say(Tell.HELLO, **{"facts": facts, "wall": time.time(), **more})

    async def hears(self, limit: float = 10.0) -> list[Order]:
        """The orders of the service's next words, which may be none. Raises EOFError when it closes the connection."""
        async with asyncio.timeout(limit):
            found = [await receive(self.reader)]
        self.acked = max([self.acked, *(int(one.get("ack", 0)) for one in found)])
        orders: list[Order] = [from_json(Order, one["order"]) for one in found if "order" in one]
        self.orders += orders
        return orders

    async def is_told(self, do: str, limit: float = 10.0) -> Order:
        """The first order of this kind."""
        async with asyncio.timeout(limit):
            while not (found := [one for one in self.orders if one.do.value == do]):
                await self.hears(limit)
        return found[0]

    async def is_closed(self, limit: float = 10.0) -> bool:
        """Does the service end this connection?"""
        try:
            async with asyncio.timeout(limit):
                while True:
                    await self.hears(limit)
        except (EOFError, OSError):
            return True
        except TimeoutError:
            return False

    def close(self) -> None:
        if hasattr(self, "writer"):
            self.writer.transport.abort()
