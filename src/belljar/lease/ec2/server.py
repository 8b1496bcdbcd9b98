"""The front end's door: HTTP/1.1 by TLS, or without it on loopback alone. h11 parses; what a request means is `front`'s.

Private keys and user data pass here, and Signature Version 2 signs no body: without TLS no other host is spoken to.
"""

from __future__ import annotations

import asyncio
import ipaddress
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress

import h11

from belljar.errors import BadSetting, HostError
from belljar.lease.ec2.front import Answer
from belljar.lease.ec2.query import LARGEST_BODY, Sent
from belljar.lease.ec2.refusals import Refused

LARGEST_HEAD = 64 << 10  # a GET with user data in its query
MOST_CONNECTIONS, MOST_REQUESTS, THREADS = 512, 10000, 4
IDLE, REQUEST_TIMEOUT, SEND_TIMEOUT, LINGER = 75.0, 30.0, 30.0, 2.0
CHUNK = 1 << 16
NOBODY = "00000000-0000-0000-0000-000000000000"  # the id of what was no request
Respond = Callable[[Sent, str], Answer]  # a request, and its client's address; called in threads
_Respond = Callable[[Sent, str], Awaitable[Answer]]


@asynccontextmanager
async def listening(where: str, respond: Respond, tls: ssl.SSLContext | None = None) -> AsyncIterator[tuple[str, int]]:
    """The address and port at which it is answered, while the block lasts; connections end with it.
    Raises BadSetting, HostError."""
    address, port = place(where)
    if tls is None and not ipaddress.ip_address(address).is_loopback:
        raise BadSetting(
            f"lease.ec2_listen: {where} needs TLS: without it only this host is served",
            hint="Give `lease.ec2_certificate`, or listen at 127.0.0.1 behind a proxy that has one.",
        )
    # Records are on disks, which may be slow; and each thread has a connection of its own to them.
    threads, loop = ThreadPoolExecutor(THREADS, "ec2"), asyncio.get_running_loop()
    door = _Door(lambda sent, peer: loop.run_in_executor(threads, respond, sent, peer))
    try:
        server = await asyncio.start_server(door.serve, address, port, ssl=tls, limit=CHUNK)
    except OSError as exc:
        raise HostError(f"lease.ec2_listen: {where}: {exc.strerror}", hint="Give another address or port.") from exc
    try:
        async with server:
            yield server.sockets[0].getsockname()[:2]
    finally:
        await door.close()
        threads.shutdown(wait=False, cancel_futures=True)


def place(where: str) -> tuple[str, int]:
    """ADDRESS:PORT; an IPv6 address is in brackets. Raises BadSetting."""
    host, _, port = where.rpartition(":")
    try:
        return str(ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))), int(port)
    except ValueError:
        raise BadSetting(f"lease.ec2_listen: {where!r} is no ADDRESS:PORT", hint="As in 127.0.0.1:8444.") from None


class _Door:
    def __init__(self, respond: _Respond) -> None:
        self._respond, self._open = respond, set[asyncio.Task[None]]()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        try:
            if len(self._open) <= MOST_CONNECTIONS:
                await _Talk(self._respond, reader, writer).run()
        except (OSError, TimeoutError, h11.ProtocolError, asyncio.CancelledError):
            pass  # the client went away, was silent, or does not speak HTTP; or we end
        finally:
            writer.close()
            with suppress(OSError, TimeoutError, ssl.SSLError):
                async with asyncio.timeout(LINGER):
                    await writer.wait_closed()
            self._open.discard(task)

    async def close(self) -> None:
        for one in self._open:
            one.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)


class _Talk:
    """One connection."""

    def __init__(self, respond: _Respond, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._respond, self._reader, self._writer = respond, reader, writer
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=LARGEST_HEAD)
        self._peer = str((writer.get_extra_info("peername") or ("",))[0])

    async def run(self) -> None:
        for _ in range(MOST_REQUESTS):
            try:
                async with asyncio.timeout(IDLE):
                    head = await self._next()
                if not isinstance(head, h11.Request):
                    return
                async with asyncio.timeout(REQUEST_TIMEOUT):
                    sent = await self._sent(head)
                answer = await self._respond(sent, self._peer)
                await self._reply(answer, is_head=head.method == b"HEAD")
            except h11.RemoteProtocolError as exc:
                if self._http.our_state in (h11.IDLE, h11.SEND_RESPONSE):
                    await self._refuse(Refused("MalformedHTTPRequest", str(exc)), exc.error_status_hint)
            except Refused as refused:
                await self._refuse(refused, refused.status)
            if self._http.our_state is not h11.DONE or self._http.their_state is not h11.DONE:
                return await self._linger()
            self._http.start_next_cycle()

    async def _sent(self, head: h11.Request) -> Sent:
        """The whole request. Raises Refused."""
        body, told = bytearray(), dict(head.headers)
        if int(told.get(b"content-length", b"0")) > LARGEST_BODY:
            raise Refused("RequestEntityTooLarge", f"a body has at most {LARGEST_BODY} bytes")
        while isinstance(event := await self._next(), h11.Data):
            body += event.data
            if len(body) > LARGEST_BODY:
                raise Refused("RequestEntityTooLarge", f"a body has at most {LARGEST_BODY} bytes")
        headers = tuple((name.decode("ascii"), value.decode("latin-1")) for name, value in head.headers)
        return Sent(head.method.decode("ascii"), head.target.decode("ascii"), headers, bytes(body))

    async def _next(self) -> object:
        while (event := self._http.next_event()) is h11.NEED_DATA:
            if self._http.they_are_waiting_for_100_continue:
                await self._send(h11.InformationalResponse(status_code=100, headers=[]))
            self._http.receive_data(await self._reader.read(CHUNK))
        return event

    async def _refuse(self, refused: Refused, status: int) -> None:
        await self._reply(Answer(status, refused.xml(NOBODY), NOBODY), [(b"connection", b"close")])

    async def _reply(
        self, answer: Answer, more: list[tuple[bytes, bytes]] | None = None, *, is_head: bool = False
    ) -> None:
        headers = [
            (b"content-type", b"text/xml;charset=UTF-8"), (b"content-length", b"%d" % len(answer.body)),
            (b"x-amzn-requestid", answer.id.encode()), (b"cache-control", b"no-store"), *(more or ()),
        ]  # fmt: skip
        head = h11.Response(status_code=answer.status, headers=headers)
        await self._send(head, h11.Data(data=b"" if is_head else answer.body), h11.EndOfMessage())

    async def _send(self, *events: h11.Event) -> None:
        self._writer.write(b"".join(self._http.send(event) or b"" for event in events))
        async with asyncio.timeout(SEND_TIMEOUT):
            await self._writer.drain()

    async def _linger(self) -> None:
        """Send no more, and drop what still arrives for a moment, so that a client that still sends sees its answer."""
        with suppress(OSError, TimeoutError):
            if self._writer.can_write_eof():
                self._writer.write_eof()
            async with asyncio.timeout(LINGER):
                while await self._reader.read(CHUNK):
                    pass
