"""One connection of an HTTP/1.1 server: h11 parses. Whatever a client can make large, slow or many has a limit; what a request means
is for its server to say."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress

import h11

from belljar.records import dataclass

CHUNK, LINGER_BYTES = 1 << 16, 1 << 20
Request = h11.Request
BROKEN = (OSError, h11.ProtocolError)  # what a client's end of the connection raises, and concerns nobody else


@dataclass(frozen=True)
class Limits:
    """Bytes and seconds."""

    head: int = 16 << 10
    body: int = 64 << 10
    connections: int = 512
    of_one: int = 128  # connections of one address: nobody alone keeps all others out
    requests: int = 10000  # of one connection
    idle: float = 75.0  # until a request begins
    request: float = 30.0  # for a whole head, and for a whole body that is held in memory
    stall: float = 30.0  # without a byte of a body
    send: float = 30.0
    linger: float = 2.0  # what still arrives is dropped for so long, so that a client that still sends sees its answer


@dataclass(frozen=True)
class Answer:
    status: int
    body: bytes = b""
    headers: tuple[tuple[str, str], ...] = ()
    reason: str = ""


class Rejected(Exception):
    """A request is refused: with this HTTP status, for this reason; and it is the last one, where its end is not clear."""

    def __init__(self, status: int, why: str, *, is_last: bool = False) -> None:
        super().__init__(why)
        self.status, self.is_last = status, is_last


Refuse = Callable[[Rejected], Answer | None]  # None hangs up


class Talk:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, limits: Limits) -> None:
        self._reader, self._writer, self._limits, self._is_head = reader, writer, limits, False
        self._writer.transport.set_write_buffer_limits(0)  # what is written is sent when `drain` returns
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=limits.head)

    async def serve(self, respond: Callable[[Request], Awaitable[Answer]], refuse: Refuse) -> None:
        """Until the client closes, is silent for too long, or asks for the end; then it is hung up on. Raises `BROKEN`."""
        try:
            for number in range(1, self._limits.requests + 1):
                try:
                    if (request := await self._request()) is None:
                        return
                    await self._reply(await respond(request), is_last=number == self._limits.requests)
                except (h11.RemoteProtocolError, TimeoutError, Rejected) as exc:
                    await self._refuse(exc, refuse)
                if self._http.our_state is not h11.DONE or self._http.their_state is not h11.DONE:
                    return await self._linger()
                self._http.start_next_cycle()
        finally:
            self._writer.transport.abort()

    async def body(self, request: Request) -> bytes:
        """The request's body. Raises Rejected, TimeoutError."""
        whole, too_large = bytearray(), Rejected(413, f"a body has at most {self._limits.body} bytes")
        if int(dict(request.headers).get(b"content-length", b"0")) > self._limits.body:
            raise too_large
        async with asyncio.timeout(self._limits.request):
            async for part in self.parts():
                whole += part
                if len(whole) > self._limits.body:
                    raise too_large
        return bytes(whole)

    async def parts(self) -> AsyncIterator[bytes]:
        """The request's body, part by part. Raises Rejected, TimeoutError."""
        while True:
            async with asyncio.timeout(self._limits.stall):
                event = await self._next()
            if not isinstance(event, h11.Data):
                break
            yield bytes(event.data)
        if not isinstance(event, h11.EndOfMessage):
            raise Rejected(400, "the body ended too soon")

    async def _request(self) -> Request | None:
        """The next request's head; None: the client closed, or was silent. Raises Rejected, TimeoutError."""
        if not self._http.trailing_data[0]:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._limits.idle):
                    self._http.receive_data(await self._reader.read(CHUNK))
        if self._http.trailing_data == (b"", False):
            return None
        async with asyncio.timeout(self._limits.request):
            head = await self._next()
        if not isinstance(head, h11.Request):
            return None
        self._is_head = head.method == b"HEAD"
        if len(head.target) + sum(len(name) + len(value) + 4 for name, value in head.headers) > self._limits.head:
            raise Rejected(431, "the head is too large", is_last=True)
        if {b"content-length", b"transfer-encoding"} <= dict(head.headers).keys():  # RFC 9112, 6.1
            raise Rejected(400, "a content length, and chunks", is_last=True)
        return head

    async def _next(self) -> object:
        while (event := self._http.next_event()) is h11.NEED_DATA:
            if self._http.they_are_waiting_for_100_continue:
                await self._send(h11.InformationalResponse(status_code=100, headers=[]))
            self._http.receive_data(await self._reader.read(CHUNK))
        return event

    async def _refuse(self, exc: Exception, refuse: Refuse) -> None:
        if isinstance(exc, h11.RemoteProtocolError):
            exc = Rejected(exc.error_status_hint, str(exc))
        rejected = exc if isinstance(exc, Rejected) else Rejected(408, "that took too long")
        if (answer := refuse(rejected)) is None or self._http.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            return
        if self._http.their_state is h11.SEND_BODY and not self._http.they_are_waiting_for_100_continue:
            with suppress(h11.RemoteProtocolError):
                self._http.next_event()  # a request without a body is over with this
        await self._reply(answer, is_last=rejected.is_last or self._http.their_state is not h11.DONE)

    async def _reply(self, answer: Answer, *, is_last: bool) -> None:
        headers = [(name.encode(), value.encode("latin-1")) for name, value in answer.headers]
        headers += [(b"content-length", b"%d" % len(answer.body)), *([(b"connection", b"close")] if is_last else [])]
        head = h11.Response(status_code=answer.status, headers=headers, reason=answer.reason.encode("latin-1"))
        await self._send(head, h11.Data(data=b"" if self._is_head else answer.body), h11.EndOfMessage())

    async def _send(self, *events: h11.Event) -> None:
        self._writer.write(b"".join(self._http.send(event) or b"" for event in events))
        try:
            async with asyncio.timeout(self._limits.send):
                await self._writer.drain()
        except TimeoutError as exc:
            raise ConnectionAbortedError("the client does not read its answer") from exc

    async def _linger(self) -> None:
        """Send no more, and drop what still arrives for a moment."""
        with suppress(OSError, TimeoutError):
            if self._writer.can_write_eof():
                self._writer.write_eof()
            left = LINGER_BYTES
            async with asyncio.timeout(self._limits.linger):
                while left > 0 and (data := await self._reader.read(CHUNK)):
                    left -= len(data)
