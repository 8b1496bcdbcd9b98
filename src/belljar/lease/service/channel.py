"""The pilots' connections, at the service: who speaks is known by the lease's key, what is said is written down before it is
acknowledged, and what is ordered is sent until the pilot has it.

Nothing of a connection is kept: a pilot says what it has seen, and the store knows what it has said. So a service that starts anew
goes on where the last one was.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from asyncio import sslproto
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

from belljar.errors import BelljarError, HostError
from belljar.lease import Do, Order, Report
from belljar.lease.protocol import Broken, Inbox, Message, Opening, Outbox, frame, lease_key, number_of, receive
from belljar.model import to_json
from belljar.reading import from_json
from belljar.records import replace
from belljar.service.gate import Streams
from belljar.service.streams import first_of
from belljar.service.telling import Tell

BACKLOG = 4096
RECORD = 1 << 14  # bytes of one of TLS
OPENING = 15.0  # seconds for TLS and both openings
MOST_UNPROVED = 4096  # connections that have not shown yet who they are
CONSOLE = 2.0  # seconds for a pilot to send a console; one that is empty does not come
STREAM = 30.0  # seconds for a pilot to connect once more, at most

Applied = Callable[[str, str], Awaitable[int]]
Hear = Callable[[Report], Awaitable[Iterable[Order]]]


class Session:
    """A pilot's connection: who it is, what it has said, and what it is told."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, site_key: bytes) -> None:
        self.reader, self.writer, self.wake, self.owes = reader, writer, asyncio.Event(), False
        self._site_key = site_key

    async def greet(self, applied: Applied) -> None:
        """Until both sides know each other."""
        self.peer = peer = await Opening.heard(self.reader, self._key_of)
        self.slot = f"{peer.lease}.{peer.attempt}.{peer.slot}"
        self.outbox, self.inbox = Outbox(last=peer.seen), Inbox(await applied(self.slot, peer.instance))
        self.writer.write(replace(peer, instance="", seen=self.inbox.last).frame(self._key_of(peer)))

    def _key_of(self, opening: Opening) -> bytes:
        return lease_key(self._site_key, opening.lease)

    def order(self, order: Order) -> None:
        self.outbox.put({"order": to_json(order)})
        self.wake.set()

    async def speak(self) -> None:
        """Orders, and what was heard, until it is cancelled."""
        last = self.peer.seen
        while True:
            waiting = [message for message in self.outbox.messages if message["seq"] > last]
            for message in waiting or [{}] * self.owes:
                self.writer.write(frame({**message, "ack": self.inbox.last}))
                last, self.owes = message.get("seq", last), False
            await self.writer.drain()
            await self.wake.wait()
            self.wake.clear()


class Channel:
    """*applied*: number of the last report of this slot's pilot that is written down. *hear*: write a report down; what to answer.
    *moved*: somebody came, or went."""

    def __init__(self, site_key: bytes, applied: Applied, hear: Hear, moved: Callable[[], None], tell: Tell,
                 silence: float) -> None:  # fmt: skip
        self._site_key, self._applied, self._hear, self._moved = site_key, applied, hear, moved
        self._tell, self._silence = tell, silence
        self._sessions: dict[str, Session] = {}  # by slot
        self._streams: dict[str, tuple[str, asyncio.Future[Streams]]] = {}  # by name: the slot, and its new connection
        self._consoles: dict[str, asyncio.Event] = {}  # that pilots were asked for, by instance
        self._unproved, self._patience, self._came = 0, min(STREAM, 2 * silence), asyncio.Event()

    @property
    def connected(self) -> frozenset[str]:
        """Slots whose pilots are."""
        return frozenset(self._sessions)

    def order(self, slot: str, order: Order) -> bool:
        """False: its pilot is not connected. The same order is not given twice while the first one is on its way."""
        session = self._sessions.get(slot)
        if session is None:
            return False
        value = to_json(order)
        if not any(message["order"] == value for message in session.outbox.messages):
            session.order(order)
        return True

    async def console(self, slot: str, instance: str) -> None:
        """Return when its pilot has sent the machine's console and it is written down, or does not."""
        try:
            async with asyncio.timeout(CONSOLE if self.order(slot, Order(Do.CONSOLE, instance)) else 0):
                await self._consoles.setdefault(instance, asyncio.Event()).wait()
        except TimeoutError:
            self._consoles.pop(instance, None)

    @asynccontextmanager
    async def stream(self, slot: str, order: Order) -> AsyncIterator[Streams]:
        """A connection of its own to this slot's pilot, for bytes. Raises HostError."""
        name = os.urandom(16).hex()
        coming: asyncio.Future[Streams] = asyncio.get_running_loop().create_future()
        self._streams[name] = (slot, coming)
        writer = None
        try:
            try:
                async with asyncio.timeout(self._patience):
                    while not self.order(slot, replace(order, stream=name)):  # a service that just started waits for it
                        await self._came.wait()
                    reader, writer = await coming
            except TimeoutError:
                hint = "It comes back when the network does: try again."
                raise HostError(f"{slot}: its pilot is not connected", hint=hint) from None
            yield reader, writer
        finally:
            self._streams.pop(name, None)
            if writer is not None:
                writer.transport.abort()

    async def serve(self, listen: str, port: int, certificate: Path) -> asyncio.Server:
        """Raises HostError."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.load_cert_chain(certificate)
        # asyncio gives each connection a buffer for 16 records and writes zeros into all of it: 256 KiB of an idle pilot.
        sslproto.SSLProtocol.max_size = RECORD
        context.num_tickets = 0  # a pilot that comes again shakes hands again
        try:
            return await asyncio.start_server(self._take, listen or None, port, ssl=context, backlog=BACKLOG,
                                              ssl_handshake_timeout=OPENING)  # fmt: skip
        except OSError as exc:
            where = f"{listen or '*'}:{port}"
            raise HostError(f"{where}: {exc.strerror}", hint="Correct `lease.listen` and `lease.port`.") from exc

    # -- one connection ------------------------------------------------------------------------------------------------

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._talk(Session(reader, writer, self._site_key))
        except (ValueError, BelljarError) as exc:
            self._tell("pilot refused", peer=writer.get_extra_info("peername", ("?",))[0], why=exc)
        except (OSError, EOFError, asyncio.CancelledError):  # the service ends: nobody awaits this task
            pass
        finally:
            writer.transport.abort()

    async def _talk(self, session: Session) -> None:
        if self._unproved >= MOST_UNPROVED:
            return
        self._unproved += 1
        try:
            async with asyncio.timeout(OPENING):
                await session.greet(self._applied)
        finally:
            self._unproved -= 1
        if name := session.peer.stream:
            slot, coming = self._streams.get(name, ("", None))
            if coming is not None and not coming.done() and slot == session.slot:
                coming.set_result((session.reader, session.writer))
                await session.writer.wait_closed()  # by whoever has it now
            return
        try:
            await first_of(session.speak(), self._listen(session))
        finally:
            if self._sessions.get(session.slot) is session:
                del self._sessions[session.slot]
                self._moved()

    async def _listen(self, session: Session) -> None:
        while True:
            async with asyncio.timeout(self._silence):
                message = await receive(session.reader)
            await self._one(message, session)

    async def _one(self, message: Message, session: Session) -> None:
        """Hear a message. Raises ValueError, BelljarError."""
        session.outbox.acknowledged(number_of(message, "ack"))
        is_ours = False
        if "report" in message and session.inbox.is_new(message):
            report: Report = from_json(Report, message["report"])
            origin = (report.slot, report.pilot, report.seq)
            if origin != (session.slot, session.peer.instance, number_of(message, "seq")):
                raise Broken("a report in another pilot's name")
            orders = tuple(await self._hear(report))
            session.inbox.take(message)
            if report.console and (waiting := self._consoles.pop(report.instance, None)) is not None:
                waiting.set()
            for order in orders:
                session.order(order)
            is_ours = not any(order.do is Do.VOID for order in orders)
        session.owes = True
        session.wake.set()
        if is_ours and self._sessions.get(session.slot) is not session:  # this pilot has the slot
            self._sessions[session.slot] = session
            self._came.set()
            self._came = asyncio.Event()
            self._moved()
