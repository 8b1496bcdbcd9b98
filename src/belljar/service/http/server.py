"""A small server of HTTP/1.1: h11 parses; what a request means, and what is said to whom does not speak HTTP, is for who serves.

Whatever a client can make large, slow or many has a limit.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import h11

from belljar.errors import BadSetting, HostError
from belljar.records import dataclass
from belljar.service.streams import Works, accepted, as_streams

CHUNK = 1 << 16


@dataclass(frozen=True)
class Sent:
    """A request, as it was received."""

    method: str
    target: str
    headers: tuple[tuple[str, str], ...]  # names in small letters
    body: bytes = b""
    peer: str = ""  # its client, as `counted` has it

    @property
    def path(self) -> str:
        return self.target.partition("?")[0]

    @property
    def query(self) -> str:
        return self.target.partition("?")[2]

    def header(self, name: str) -> str | None:
        """Those of the same name joined, blanks at its ends taken off and inner ones collapsed."""
        found = [" ".join(value.split()) for key, value in self.headers if key == name]
        return ",".join(found) if found else None


@dataclass(frozen=True)
class Answer:
    status: int
    body: bytes = b""
    headers: tuple[tuple[str, str], ...] = ()
    reason: str = ""


@dataclass(frozen=True)
class Limits:
    """Bytes and seconds."""

    head: int = 16 << 10
    body: int = 64 << 10
    connections: int = 512
    of_one: int = 128  # connections of one address: nobody alone keeps all others out
    requests: int = 10000  # of one connection
    idle: float = 75.0  # until a request begins
    request: float = 30.0  # for a whole one
    send: float = 30.0
    linger: float = 2.0  # what still arrives is dropped for so long, so that a client that still sends sees its answer


Respond = Callable[[Sent], Awaitable[Answer]]
Refuse = Callable[[int, str], Answer]  # of what is no request, or too large: a fitting status, and why


@asynccontextmanager
async def serving(
    where: str, respond: Respond, refuse: Refuse, *, setting: str, limits: Limits, tls: ssl.SSLContext | None = None
) -> AsyncIterator[tuple[str, int]]:  # fmt: skip
    """The address and port at which it is answered, while the block lasts; connections end with it. *setting*: what *where* is
    called in errors. Raises BadSetting, HostError."""
    address, port = place(where, setting)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        end = socket.create_server((address, port), family=family, backlog=limits.connections)
    except OSError as exc:
        raise HostError(f"{setting}: {where}: {exc.strerror}", hint="Give another address or port.") from exc
    end.setblocking(False)
    door = asyncio.ensure_future(_Door(respond, refuse, limits, tls).open(end))
    try:
        yield end.getsockname()[:2]
    finally:
        door.cancel()
        await asyncio.gather(door, return_exceptions=True)
        end.close()


def place(where: str, setting: str) -> tuple[str, int]:
    """ADDRESS:PORT; an IPv6 address is in brackets. Raises BadSetting."""
    host, _, port = where.rpartition(":")
    try:
        address, number = ipaddress.ip_address(host.removeprefix("[").removesuffix("]")), int(port)
        if not 0 <= number < 1 << 16:
            raise ValueError(where)
    except ValueError:
        raise BadSetting(f"{setting}: {where!r} is no ADDRESS:PORT", hint="As in 127.0.0.1:8444.") from None
    return str(address), number


def tls_by(path: Path, setting: str) -> ssl.SSLContext:
    """By a PEM file. Raises BadSetting."""
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        tls.load_cert_chain(path)
    except (OSError, ssl.SSLError) as exc:
        why = f"{setting}: {path}: {exc.strerror or exc}"
        raise BadSetting(why, hint="A PEM file with the chain of certificates and the key.") from exc
    return tls


class _Door:
    """Who is counted is so from the first moment: also while TLS, which a client may draw out, shakes hands."""

    def __init__(self, respond: Respond, refuse: Refuse, limits: Limits, tls: ssl.SSLContext | None) -> None:
        self._respond, self._refuse, self._limits, self._tls = respond, refuse, limits, tls
        # The client went away, was silent, or does not speak HTTP.
        self._works, self._peers = Works(OSError, TimeoutError, h11.ProtocolError), Counter[str]()

    async def open(self, end: socket.socket) -> None:
        """Until it is cancelled, with all its connections."""
        try:
            async for connection, address in accepted(end):
                peer = counted(address)
                if len(self._works) < self._limits.connections and self._peers[peer] < self._limits.of_one:
                    self._peers[peer] += 1
                    self._works.begin(self._serve(connection, peer))
                else:
                    connection.close()
        finally:
            await self._works.end()

    async def _serve(self, connection: socket.socket, peer: str) -> None:
        try:
            reader, writer = await as_streams(connection, self._tls, self._limits.request)
            try:
                await _Talk(self._respond, self._refuse, self._limits, reader, writer, peer).run()
            finally:
                await self._hang_up(writer)
        finally:
            self._peers -= Counter((peer,))  # and no zeros are kept

    async def _hang_up(self, writer: asyncio.StreamWriter) -> None:
        writer.close()
        try:
            async with asyncio.timeout(self._limits.linger):
                await writer.wait_closed()
        except (OSError, TimeoutError, asyncio.CancelledError):
            writer.transport.abort()  # it does not read what is left for it


def counted(address: str) -> str:
    """As whom it is counted. Of IPv6 a whole /64 is one: who has one address there has all."""
    return str(ipaddress.ip_interface(f"{address.partition('%')[0]}/64").network) if ":" in address else address


class _TooLarge(Exception):
    pass


class _Talk:
    """One connection."""

    def __init__(
        self, respond: Respond, refuse: Refuse, limits: Limits, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, peer: str
    ) -> None:  # fmt: skip
        self._respond, self._refuse, self._limits = respond, refuse, limits
        self._reader, self._writer, self._peer = reader, writer, peer
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=limits.head)

    async def run(self) -> None:
        for _ in range(self._limits.requests):
            try:
                if not self._http.trailing_data[0]:
                    async with asyncio.timeout(self._limits.idle):
                        self._http.receive_data(await self._reader.read(CHUNK))
                async with asyncio.timeout(self._limits.request):
                    head = await self._next()
                    if not isinstance(head, h11.Request):
                        return
                    sent = await self._sent(head)
                await self._reply(await self._respond(sent), is_head=head.method == b"HEAD")
            except h11.RemoteProtocolError as exc:
                if self._http.our_state in (h11.IDLE, h11.SEND_RESPONSE):
                    await self._reply(self._refuse(exc.error_status_hint, str(exc)), is_last=True)
            except _TooLarge:
                why = f"a body has at most {self._limits.body} bytes"
                await self._reply(self._refuse(413, why), is_last=True)
            if self._http.our_state is not h11.DONE or self._http.their_state is not h11.DONE:
                return await self._linger()
            self._http.start_next_cycle()

    async def _sent(self, head: h11.Request) -> Sent:
        """The whole request. Raises _TooLarge."""
        body = bytearray()
        if {b"content-length", b"transfer-encoding"} <= dict(head.headers).keys():  # RFC 9112, 6.1
            raise h11.RemoteProtocolError("a content length, and chunks", error_status_hint=400)
        size = int(dict(head.headers).get(b"content-length", b"0"))
        while size <= self._limits.body and isinstance(event := await self._next(), h11.Data):
            body += event.data
            size = max(size, len(body))
        if size > self._limits.body:
            raise _TooLarge
        headers = tuple((name.decode("ascii"), value.decode("latin-1")) for name, value in head.headers)
        return Sent(head.method.decode("ascii"), head.target.decode("ascii"), headers, bytes(body), self._peer)

    async def _next(self) -> object:
        while (event := self._http.next_event()) is h11.NEED_DATA:
            if self._http.they_are_waiting_for_100_continue:
                await self._send(h11.InformationalResponse(status_code=100, headers=[]))
            self._http.receive_data(await self._reader.read(CHUNK))
        return event

    async def _reply(self, answer: Answer, *, is_head: bool = False, is_last: bool = False) -> None:
        headers = [(name.encode(), value.encode("latin-1")) for name, value in answer.headers]
        headers += [(b"content-length", b"%d" % len(answer.body)), *([(b"connection", b"close")] if is_last else [])]
        head = h11.Response(status_code=answer.status, headers=headers, reason=answer.reason.encode("latin-1"))
        await self._send(head, h11.Data(data=b"" if is_head else answer.body), h11.EndOfMessage())

    async def _send(self, *events: h11.Event) -> None:
        self._writer.write(b"".join(self._http.send(event) or b"" for event in events))
        async with asyncio.timeout(self._limits.send):
            await self._writer.drain()

    async def _linger(self) -> None:
        with suppress(OSError, TimeoutError):
            if self._writer.can_write_eof():
                self._writer.write_eof()
            async with asyncio.timeout(self._limits.linger):
                while await self._reader.read(CHUNK):
                    pass
