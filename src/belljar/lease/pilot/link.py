"""A pilot's connection to its service: made again whenever it breaks, for as long as the pilot lives. What is said is in the journal
first, and is sent until the service has it."""

from __future__ import annotations

import asyncio
import hmac
import random
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from hashlib import sha256
from typing import Any

from belljar.errors import NoSpace
from belljar.lease import Do, Order, Report, Tell
from belljar.lease.jobfile import JobFile
from belljar.lease.pilot.journal import Journal
from belljar.lease.protocol import PILOT, Broken, Connection, Inbox, Message, Opening, Outbox, nonce, number_of
from belljar.model import to_json
from belljar.reading import from_json

CHUNK = 1 << 16
CONNECT = 10.0  # seconds for one try, TLS and openings included
SOONEST, LATEST = 0.25, 15.0  # seconds between two tries
SILENCE = 3  # heartbeats without a word from the service: this connection is dead

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class WrongService(OSError):
    """Whoever answers at the service's address is not it."""


class Link:
    """*obey* gets each order once, in order. *moment* makes a hello and a heartbeat. *tell* hears of the connection's fate."""

    def __init__(
        self, job: JobFile, rank: int, pilot: str, journal: Journal, obey: Callable[[Order], None],
        moment: Callable[[Tell], Report], tell: Callable[..., None],
    ) -> None:  # fmt: skip
        self._job, self._rank, self._pilot, self._journal = job, rank, pilot, journal
        self._obey, self._moment, self._tell = obey, moment, tell
        self._outbox, self._inbox = Outbox(keep_all=True), Inbox()
        self._wake, self._acknowledged = asyncio.Event(), asyncio.Event()
        self._trouble = ""
        self.is_up = False
        self.down_since = asyncio.get_running_loop().time()

    @property
    def next_number(self) -> int:
        return self._outbox.last + 1

    def say(self, report: Report) -> None:
        """It is on disk when this returns, unless that is full; a pilot ends its machines all the same."""
        with suppress(NoSpace):
            self._journal.write("said", report=report)
        self._outbox.put({"report": to_json(report)})
        self._acknowledged.clear()
        self._wake.set()

    async def flushed(self, timeout: float) -> bool:
        """Does the service have all that was said, at last? One that is away for longer than that is not waited for."""
        if not self.is_up and asyncio.get_running_loop().time() - self.down_since > timeout:
            return False
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while self._outbox.seen < self._outbox.last:
                    self._acknowledged.clear()
                    await self._acknowledged.wait()
        return self._outbox.seen == self._outbox.last

    async def run(self) -> None:
        """Until it is cancelled."""
        delay = SOONEST
        while True:
            for address in self._job.service:
                try:
                    await self._talk(address)
                except (OSError, EOFError, TimeoutError, Broken) as exc:
                    self._note(f"{address}: {exc or type(exc).__name__}")
                if self.is_up:
                    self.is_up, delay = False, SOONEST
                    self.down_since = asyncio.get_running_loop().time()
                    self._obey(Order(Do.PING))  # whoever waits for something looks again
            await asyncio.sleep(delay * random.uniform(0.5, 1.0))
            delay = min(delay * 2, LATEST)

    @asynccontextmanager
    async def stream(self, name: str) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter, bytes]]:
        """A connection of its own that carries bytes, and those that have come already. Raises OSError, Broken, TimeoutError."""
        for address in self._job.service:
            async with self._opened(address, name) as (reader, writer, connection, _):
                writer.write(connection.send({"stream": name}))
                await writer.drain()
                yield reader, writer, connection.rest()
                return

    # -- one connection ------------------------------------------------------------------------------------------------

    async def _talk(self, address: str) -> None:
        async with self._opened(address) as (reader, writer, connection, early):
            assert connection.peer is not None
            seen = connection.peer.seen
            self._outbox.after(seen)  # Broken where the service speaks of another pilot
            self._take({"ack": seen})
            self.is_up = True
            self._note("")
            for message in early:
                self._take(message)
            await _first(self._speak(writer, connection, seen), self._listen(reader, connection))

    async def _speak(self, writer: asyncio.StreamWriter, connection: Connection, said: int) -> None:
        what = Tell.HELLO
        while True:
            waiting = self._outbox.after(said)
            if not waiting or what is Tell.HELLO:
                writer.write(connection.send({"ack": self._inbox.last, "report": to_json(self._moment(what))}))
                what = Tell.HEARTBEAT
            for message in waiting:
                writer.write(connection.send({**message, "ack": self._inbox.last}))
                said = message["seq"]
            await writer.drain()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._job.heartbeat):
                    await self._wake.wait()
            self._wake.clear()

    async def _listen(self, reader: asyncio.StreamReader, connection: Connection) -> None:
        while True:
            async with asyncio.timeout(SILENCE * self._job.heartbeat):
                data = await reader.read(CHUNK)
            if not data:
                raise EOFError("the service closed the connection")
            for message in connection.receive(data):
                self._take(message)

    def _take(self, message: Message) -> None:
        """Raises Broken."""
        self._outbox.acknowledged(number_of(message, "ack"))
        self._acknowledged.set()
        if "order" not in message or not self._inbox.take(message):
            return
        try:
            order: Order = from_json(Order, message["order"])
        except ValueError as exc:
            raise Broken(f"an order: {exc}") from exc
        with suppress(NoSpace):
            self._journal.write("told", order=order)
        self._obey(order)
        self._wake.set()

    @asynccontextmanager
    async def _opened(
        self, address: str, stream: str = ""
    ) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter, Connection, list[Message]]]:
        async with asyncio.timeout(CONNECT):
            reader, writer = await dial(address, self._job.pin)
        try:
            connection = Connection(PILOT, lambda _: self._job.secret)
            own = Opening(
                self._job.lease, self._rank, self._job.attempt, self._pilot, nonce(), self._inbox.last, stream
            )
            writer.write(connection.open(own))
            messages = list[Message]()
            async with asyncio.timeout(CONNECT):
                while connection.peer is None:
                    data = await reader.read(CHUNK)
                    if not data:
                        raise EOFError("the service closed the connection at once")
                    messages += connection.receive(data)
            yield reader, writer, connection, messages
        finally:
            writer.transport.abort()

    def _note(self, trouble: str) -> None:
        """Once, until it is another."""
        if trouble != self._trouble:
            self._trouble = trouble
            self._tell("service away" if trouble else "service there", why=trouble)


async def dial(address: str, pin: str) -> Streams:
    """By TLS, to whoever has the certificate of this SHA-256. Raises OSError."""
    host, _, port = address.rpartition(":")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # the pin says more than any name
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    reader, writer = await asyncio.open_connection(host.strip("[]"), int(port), ssl=context)
    found: bytes | None = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    if found is None or not hmac.compare_digest(sha256(found).hexdigest(), pin.lower()):
        writer.transport.abort()
        raise WrongService("the certificate is not that of the service: its pin is another")
    return reader, writer


async def _first(*works: Coroutine[Any, Any, None]) -> None:
    """Until one ends; what it raised is raised."""
    tasks = [asyncio.ensure_future(one) for one in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for one in done:
            one.result()
    finally:
        for one in tasks:
            one.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
