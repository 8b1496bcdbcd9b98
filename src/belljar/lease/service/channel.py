"""The pilots' connections, at the service: who speaks is known by the lease's key, what is said is written down before it is
acknowledged, and what is ordered is sent until the pilot has it.

Nothing of a connection is kept: a pilot says what it has seen, and the store knows what it has said. So a service that starts anew
goes on where the last one was.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from belljar.errors import BelljarError, HostError
from belljar.lease import Order, Report
from belljar.lease.protocol import (
    SERVICE,
    Broken,
    Connection,
    Inbox,
    Message,
    Opening,
    Outbox,
    lease_key,
    nonce,
    number_of,
)
from belljar.model import to_json
from belljar.reading import from_json
from belljar.records import replace

BACKLOG = 4096
CHUNK = 1 << 16
OPENING = 15.0  # seconds for TLS and both openings
MOST_UNPROVED = 4096  # connections that have not shown yet who they are
STREAM = 30.0  # seconds for a pilot to connect once more, at most

Bytes = tuple[asyncio.StreamReader, asyncio.StreamWriter, bytes]  # with those that have come already
Hear = Callable[[Report], Awaitable[Iterable[Order]]]


class Session:
    """A pilot, while it is connected."""

    def __init__(self, seen: int) -> None:
        self.seen = seen  # the last order of a connection before this one that it has
        self.outbox, self.wake, self.owes = Outbox(last=seen), asyncio.Event(), False

    def order(self, order: Order) -> None:
        self.outbox.put({"order": to_json(order)})
        self.wake.set()


class Channel:
    """*applied*: number of the last report of this slot's pilot that is written down. *hear*: write a report down; what to answer.
    *moved*: somebody came, or went."""

    def __init__(
        self, site_key: bytes, applied: Callable[[str, str], Awaitable[int]], hear: Hear, moved: Callable[[], None],
        tell: Callable[..., None], silence: float,
    ) -> None:  # fmt: skip
        self._site_key, self._applied, self._hear, self._moved = site_key, applied, hear, moved
        self._tell, self._silence = tell, silence
        self._sessions: dict[str, Session] = {}  # by slot
        self._streams: dict[str, tuple[str, asyncio.Future[Bytes]]] = {}  # by name: the slot, and its new connection
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
        wanted = to_json(order)
        if not any(one["order"] == wanted for one in session.outbox.messages):
            session.order(order)
        return True

    @asynccontextmanager
    async def stream(self, slot: str, order: Order) -> AsyncIterator[Bytes]:
        """A connection of its own to this slot's pilot, for bytes. Raises HostError."""
        name = nonce()
        coming: asyncio.Future[Bytes] = asyncio.get_running_loop().create_future()
        self._streams[name] = (slot, coming)
        writer = None
        try:
            try:
                async with asyncio.timeout(self._patience):
                    while not self.order(slot, replace(order, stream=name)):  # a service that just started waits for it
                        await self._came.wait()
                    reader, writer, early = await coming
            except TimeoutError:
                raise HostError(
                    f"{slot}: its pilot is not connected", hint="It comes back when the network does: try again."
                ) from None
            yield reader, writer, early
        finally:
            self._streams.pop(name, None)
            if writer is not None:
                writer.transport.abort()

    async def serve(self, listen: str, port: int, certificate: Path) -> asyncio.Server:
        """Raises HostError."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.load_cert_chain(certificate)
        try:
            return await asyncio.start_server(
                self._take, listen or None, port, ssl=context, backlog=BACKLOG, ssl_handshake_timeout=OPENING
            )
        except OSError as exc:
            raise HostError(
                f"{listen or '*'}:{port}: {exc.strerror or exc}", hint="Correct `lease.listen` and `lease.port`."
            ) from exc

    # -- one connection ------------------------------------------------------------------------------------------------

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        is_handed_over = False
        sock = writer.get_extra_info("socket")
        with suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            is_handed_over = await self._talk(reader, writer)
        except (OSError, EOFError, TimeoutError, Broken, BelljarError) as exc:
            if isinstance(exc, (Broken, BelljarError)):
                self._tell("pilot refused", peer=writer.get_extra_info("peername", ("?",))[0], why=exc)
        except asyncio.CancelledError:  # the service ends: nobody awaits this task
            pass
        finally:
            if not is_handed_over:
                writer.transport.abort()

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """True: somebody else has the connection now."""
        connection = Connection(SERVICE, lambda opening: lease_key(self._site_key, opening.lease))
        if self._unproved >= MOST_UNPROVED:
            return False
        self._unproved += 1
        try:
            async with asyncio.timeout(OPENING):
                peer, seen, messages = await self._greet(reader, writer, connection)
        finally:
            self._unproved -= 1
        if peer.stream:
            return self._hand_over(peer, reader, writer, connection)
        slot = f"{peer.lease}.{peer.attempt}.{peer.slot}"
        session, inbox = Session(peer.seen), Inbox(seen)
        speaking = asyncio.ensure_future(self._speak(writer, connection, session, inbox))
        try:
            while not speaking.done():
                for message in messages:
                    if await self._one(message, peer, slot, session, inbox):
                        self._enter(slot, session)
                async with asyncio.timeout(self._silence):
                    data = await reader.read(CHUNK)
                if not data:
                    break
                messages = connection.receive(data)
        finally:
            speaking.cancel()
            await asyncio.gather(speaking, return_exceptions=True)
            if self._sessions.get(slot) is session:
                del self._sessions[slot]
                self._moved()
        return False

    async def _greet(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, connection: Connection
    ) -> tuple[Opening, int, list[Message]]:
        """Until the other side has proved that it speaks now: number of its last report that is written down, and its first messages."""
        while connection.peer is None:
            connection.receive(await _some(reader))
        peer = connection.peer
        seen = await self._applied(f"{peer.lease}.{peer.attempt}.{peer.slot}", peer.instance)
        writer.write(
            connection.open(Opening(peer.lease, peer.slot, peer.attempt, nonce=nonce(), seen=seen, stream=peer.stream))
        )
        messages = connection.receive(b"")
        while not connection.is_proved:
            messages += connection.receive(await _some(reader))
        return peer, seen, messages

    def _hand_over(
        self, peer: Opening, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, connection: Connection
    ) -> bool:
        slot, coming = self._streams.get(peer.stream, ("", None))
        if coming is None or coming.done() or slot != f"{peer.lease}.{peer.attempt}.{peer.slot}":
            return False
        coming.set_result((reader, writer, connection.rest()))
        return True

    async def _one(self, message: Message, peer: Opening, slot: str, session: Session, inbox: Inbox) -> bool:
        """Hear a message. True: this pilot has the slot. Raises Broken."""
        session.outbox.acknowledged(number_of(message, "ack"))
        is_ours = False
        if "report" in message:
            number = number_of(message, "seq")
            if number and number <= inbox.last:
                session.owes = True
            else:
                try:
                    report: Report = from_json(Report, message["report"])
                except ValueError as exc:
                    raise Broken(f"a report: {exc}") from exc
                who = (report.lease, report.attempt, report.rank, report.pilot, report.seq)
                if who != (peer.lease, peer.attempt, peer.slot, peer.instance, number):
                    raise Broken("a report in another pilot's name")
                orders = tuple(await self._hear(report))
                inbox.take(message)
                for order in orders:
                    session.order(order)
                is_ours = not any(one.do.value == "void" for one in orders)
        session.owes = True
        session.wake.set()
        return is_ours

    def _enter(self, slot: str, session: Session) -> None:
        if self._sessions.get(slot) is not session:
            self._sessions[slot] = session
            self._came.set()
            self._came = asyncio.Event()
            self._moved()

    async def _speak(
        self, writer: asyncio.StreamWriter, connection: Connection, session: Session, inbox: Inbox
    ) -> None:
        said = session.seen
        while True:
            for message in [one for one in session.outbox.messages if one["seq"] > said]:
                writer.write(connection.send({**message, "ack": inbox.last}))
                said, session.owes = message["seq"], False
            if session.owes:
                session.owes = False
                writer.write(connection.send({"ack": inbox.last}))
            await writer.drain()
            await session.wake.wait()
            session.wake.clear()


async def _some(reader: asyncio.StreamReader) -> bytes:
    data = await reader.read(CHUNK)
    if not data:
        raise EOFError("the pilot closed the connection")
    return data
