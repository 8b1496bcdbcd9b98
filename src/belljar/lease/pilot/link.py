"""A pilot's connection to its service: made again whenever it breaks, for as long as the pilot lives. What is said is in the journal
first, and is sent until the service has it."""

from __future__ import annotations

import asyncio
import random
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

from belljar.journal import Record
from belljar.lease import Do, Order, Report, Tell
from belljar.lease.jobfile import JobFile
from belljar.lease.protocol import Inbox, Message, Opening, Outbox, frame, number_of, receive
from belljar.model import to_json
from belljar.reading import from_json
from belljar.records import replace
from belljar.service.gate import Streams, dial
from belljar.service.streams import at_most, first_of
from belljar.service.telling import Troubles

CONNECT = 10.0  # seconds for one try, and for the openings
SOONEST, LATEST = 0.25, 15.0  # seconds between two tries
SILENCE = 3  # heartbeats without a word from the service: this connection is dead


class Link:
    """*obey* gets each order once, in order. *moment* makes a hello and a heartbeat. *tell* is called when the connection comes or goes."""

    def __init__(
        self, job: JobFile, rank: int, pilot: str, journal: Record, obey: Callable[[Order], None],
        moment: Callable[[Tell], Report], tell: Callable[..., None],
    ) -> None:  # fmt: skip
        self._job, self._rank, self._pilot, self._journal = job, rank, pilot, journal
        self._obey, self._moment, self._troubles = obey, moment, Troubles(tell)
        self._outbox, self._inbox, self._shown = Outbox(keep_all=True), Inbox(), dict[str, Report]()
        self._wake, self._acknowledged = asyncio.Event(), asyncio.Event()
        self.is_up, self._at = False, job.service[0]  # where it is connected, or was last
        self.down_since = asyncio.get_running_loop().time()

    def say(self, report: Report) -> None:
        """With its number, it is on disk when this returns, unless that is full; a pilot ends its machines all the same."""
        report = replace(report, seq=self._outbox.last + 1)
        self._journal.tell("said", report=report)
        self._outbox.put({"report": to_json(report)})
        self._acknowledged.clear()
        self._wake.set()

    def show(self, report: Report) -> None:
        """For this moment, and kept nowhere: only the last of an instance is sent, and is lost where the service is away."""
        self._shown[report.instance] = report
        self._wake.set()

    async def flush(self, timeout: float) -> None:
        """Until the service has all that was said, or that time is over. One that is away for longer than that is not waited for."""
        is_there = self.is_up or asyncio.get_running_loop().time() - self.down_since <= timeout
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while is_there and self._outbox.seen < self._outbox.last:
                    self._acknowledged.clear()
                    await self._acknowledged.wait()

    async def run(self) -> None:
        """Until it is cancelled."""
        delay = SOONEST
        while True:
            for address in self._job.service:
                try:
                    await self._talk(address)
                except (OSError, EOFError, TimeoutError, ValueError, OverflowError) as exc:
                    self._troubles.note("service", f"{address}: {str(exc) or type(exc).__name__}")
                if self.is_up:
                    self.is_up, delay = False, SOONEST
                    self.down_since = asyncio.get_running_loop().time()
                    self._obey(Order(Do.PING))  # whoever waits for something looks again
            await asyncio.sleep(delay * random.uniform(0.5, 1.0))
            delay = min(delay * 2, LATEST)

    @asynccontextmanager
    async def stream(self, name: str) -> AsyncIterator[Streams]:
        """A connection of its own that carries bytes. Raises OSError, EOFError, Broken, TimeoutError."""
        async with self._opened(self._at, name) as (reader, writer, _):
            yield reader, writer

    # -- one connection ------------------------------------------------------------------------------------------------

    async def _talk(self, address: str) -> None:
        async with self._opened(address) as (reader, writer, seen):
            self._outbox.after(seen)  # Broken where the service speaks of another pilot
            self._take({"ack": seen})
            self.is_up, self._at = True, address
            self._troubles.note("service")
            await first_of(self._speak(writer, seen), self._listen(reader))

    async def _speak(self, writer: StreamWriter, last: int) -> None:
        what = Tell.HELLO
        while True:
            waiting = self._outbox.after(last)
            moments = [self._moment(what)] if not waiting or what is Tell.HELLO else []
            for report in (*moments, *self._shown.values()):
                writer.write(frame({"ack": self._inbox.last, "report": to_json(report)}))
            what = Tell.HEARTBEAT
            self._shown.clear()
            for message in waiting:
                writer.write(frame({**message, "ack": self._inbox.last}))
                last = message["seq"]
            await writer.drain()
            await at_most(self._job.heartbeat, self._wake.wait())
            self._wake.clear()

    async def _listen(self, reader: StreamReader) -> None:
        while True:
            async with asyncio.timeout(SILENCE * self._job.heartbeat):
                message = await receive(reader)
            self._take(message)

    def _take(self, message: Message) -> None:
        """Raises ValueError."""
        self._outbox.acknowledged(number_of(message, "ack"))
        self._acknowledged.set()
        if "order" not in message or not self._inbox.take(message):
            return
        order: Order = from_json(Order, message["order"])
        self._journal.tell("told", order=order)
        self._obey(order)
        self._wake.set()

    @asynccontextmanager
    async def _opened(self, address: str, stream: str = "") -> AsyncIterator[tuple[StreamReader, StreamWriter, int]]:
        """With the number of the last message that the service has."""
        job, key = self._job, self._job.secret
        async with asyncio.timeout(CONNECT):
            reader, writer = await dial(address, job.pin)
        try:
            own = Opening(job.lease, self._rank, job.attempt, self._pilot, self._inbox.last, stream)
            writer.write(own.frame(key))
            async with asyncio.timeout(CONNECT):
                seen = (await Opening.heard(reader, lambda _: key)).seen
            yield reader, writer, seen
        finally:
            writer.transport.abort()
