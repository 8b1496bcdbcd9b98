"""The proxy of a user network: hosts that a guest reaches by their names, over HTTP and TLS.

Whatever address the guest connects to, what counts is the name that it says: in TLS's first message, in the head of a request,
or in CONNECT. The name is looked up here for every connection, and the address that was judged is the one that is connected to.
A connection carries one request where its head can be seen, so that no second one names another host.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable, Coroutine
from contextlib import suppress

import h11

from belljar.errors import HostError
from belljar.hints import TYPE_CHECKING, Any, TypeVar
from belljar.host.guard.egress import Egress, obstacle
from belljar.host.guard.names import HANDSHAKE, WEB, name, server_name
from belljar.host.guard.traffic import Call, Refusal, Refusals
from belljar.host.threads import in_thread

if TYPE_CHECKING:
    from belljar.host.guard.vault import Vault

CHUNK, LARGEST_HEAD, MOST, LOOKING = 1 << 16, 1 << 16, 512, 8  # bytes; connections, and threads that look names up
PATIENCE, LINGER = 30.0, 2.0  # seconds: for each step before bytes are carried; for a client to read its refusal
UNKNOWN_NAME = bytes((21, 3, 3, 0, 2, 2, 112))  # an alert of TLS: fatal, unrecognized_name
Headers = list[tuple[bytes, bytes]]
T = TypeVar("T")


class Refused(ValueError):
    """The guest may not go there, or does not say where it goes."""


class Unreachable(Exception):
    """It may, but there is nothing."""


DECLINED = (ValueError, Unreachable, TimeoutError)


class Line:
    """One side of a connection: what has come already, and what comes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, early: bytes = b"") -> None:
        self.reader, self.writer, self.early = reader, writer, early

    async def more(self) -> None:
        """Raises EOFError, Refused."""
        data = await self.reader.read(CHUNK)
        if not data:
            raise EOFError("the connection was closed")
        self.early += data
        if len(self.early) > LARGEST_HEAD + CHUNK:
            raise Refused("its beginning is too long")

    async def head(self) -> h11.Request:
        """The head of a request; what follows it stays. Raises EOFError, Refused."""
        while (end := self.early.find(b"\r\n\r\n")) < 0:
            await self.more()
        http = h11.Connection(h11.SERVER, max_incomplete_event_size=LARGEST_HEAD)
        http.receive_data(self.early[: end + 4])
        try:
            request = http.next_event()
        except h11.RemoteProtocolError as exc:
            raise Refused(f"not HTTP: {exc}") from None
        if not isinstance(request, h11.Request):
            raise Refused("not HTTP")
        self.early = self.early[end + 4 :]
        return request

    async def pour(self, other: Line) -> None:
        """All that comes, into another line, to its end. Raises OSError."""
        data, self.early = self.early, b""
        while data or (data := await self.reader.read(CHUNK)):
            other.writer.write(data)
            await other.writer.drain()
            data = b""
        if other.writer.can_write_eof():
            other.writer.write_eof()
        else:  # TLS has no half of a connection
            other.writer.close()

    async def answer(self, data: bytes) -> None:
        """Send this, and no more; what still arrives is dropped for a moment. Raises OSError."""
        self.writer.write(data)
        await self.writer.drain()
        if self.writer.can_write_eof():
            self.writer.write_eof()
        with suppress(TimeoutError):
            async with asyncio.timeout(LINGER):
                while await self.reader.read(CHUNK):
                    pass


def addresses_of(host: str) -> list[str]:
    """Now, of this family alone. Raises OSError, UnicodeError."""
    return [str(found[4][0]) for found in socket.getaddrinfo(host, 0, socket.AF_INET, socket.SOCK_STREAM)]


class Proxy:
    """Of one machine. *tell*: gets what is refused."""

    def __init__(
        self, egress: Egress, tell: Callable[[Refusal], object], vault: Vault | None = None,
        look_up: Callable[[str], list[str]] = addresses_of,
    ) -> None:  # fmt: skip
        self._egress, self._vault, self._look_up = egress, vault, look_up
        self._refusals, self._count, self._looking = Refusals(tell), 0, asyncio.Semaphore(LOOKING)

    async def answer(self, call: Call) -> None:
        """One connection of the guest's, to its end. Raises OSError."""
        if self._count >= MOST:
            return
        self._count += 1
        try:
            line = Line(*await asyncio.open_connection(sock=call.connection.dup()))
            try:
                with suppress(EOFError):
                    await self._route(line, call.port)
            finally:
                line.writer.close()
        finally:
            self._count -= 1

    async def _route(self, line: Line, port: int, *, is_tunnel: bool = False) -> None:
        if not line.early:
            await _soon(line.more())
        if line.early[0] == HANDSHAKE:
            return await self._tls(line, port)
        host = ""
        try:
            request = await _soon(line.head())
            host, port = wanted(request, port)
            self._check(host, port)
            is_connect = request.method == b"CONNECT"
            if is_connect and is_tunnel:
                raise Refused("a tunnel in a tunnel")
            outward = None if is_connect else await self._asked(request, host, port)
        except DECLINED as exc:
            return await line.answer(self._explained(exc, host, port))
        if outward is not None:
            return await carry(line, outward)
        line.writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        await self._route(line, port, is_tunnel=True)

    async def _tls(self, line: Line, port: int) -> None:
        host = ""
        try:
            while (found := server_name(line.early)) is None:
                await _soon(line.more())
            host = found
            self._check(host, port)
            if self._vault is not None and self._vault.has(host, port):
                return await self._ended(line, host, port, self._vault.inward)
            outward = await self._connected(host, port)
        except DECLINED as exc:
            self._explained(exc, host, port)
            return await line.answer(UNKNOWN_NAME if isinstance(exc, ValueError) else b"")
        await carry(line, outward)

    async def _ended(self, line: Line, host: str, port: int, inward: ssl.SSLContext) -> None:
        """TLS with the guest ends here, and begins anew towards the host."""
        ours, theirs = socket.socketpair()
        outer = Line(*await asyncio.open_connection(sock=theirs))
        carrying = asyncio.ensure_future(carry(line, outer))  # asyncio's TLS wants a socket where nothing was read yet
        try:
            try:
                inner = await _accepted(ours, inward)
            except OSError:
                raise Refused("the guest's program does not trust the certificate that it was shown") from None
            try:
                request = await _soon(inner.head())
                if (named := wanted(request, port)[0]) != host:
                    raise Refused(f"TLS for another host than the request's, {named}")
                outward = await self._asked(request, host, port, self._vault)
            except DECLINED as exc:
                await inner.answer(self._explained(exc, host, port))
            else:
                await carry(inner, outward)
            finally:
                inner.writer.close()
                with suppress(OSError, TimeoutError):
                    await _soon(inner.writer.wait_closed())
            await asyncio.wait({carrying}, timeout=LINGER)
        finally:
            carrying.cancel()
            await asyncio.gather(carrying, return_exceptions=True)

    async def _asked(self, request: h11.Request, host: str, port: int, ends: Vault | None = None) -> Line:
        """The connection to a host, where this request was sent. *ends*: its TLS. Raises Refused, Unreachable, OSError."""
        headers = list(request.headers.raw_items())
        if self._vault is not None:
            headers, strays = self._vault.filled(headers, host, port if ends else None)
            for stray in strays:
                self._refusals.add(host, port, "tcp", f"{stray} is sent as its placeholder")
        outward = await self._connected(host, port, ends.outward if ends else None)
        outward.writer.write(head(request, headers))
        return outward

    def _check(self, host: str, port: int) -> None:
        if not self._egress.reaches(host, port):
            raise Refused("not allowed")

    async def _connected(self, host: str, port: int, tls: ssl.SSLContext | None = None) -> Line:
        """Raises Refused, Unreachable."""
        try:
            async with self._looking:
                addresses = await _soon(in_thread(lambda: self._look_up(host)))
        except (OSError, UnicodeError, HostError) as exc:
            raise Unreachable(f"its address is not known: {exc}") from None
        why: Exception = Unreachable("it has no IPv4 address")
        for address in addresses:
            if reason := obstacle(self._egress, address, port):
                why = Refused(f"{address}: {reason}")
                continue
            try:
                opening = asyncio.open_connection(address, port, ssl=tls, server_hostname=host if tls else None)
                return Line(*await _soon(opening))
            except ssl.SSLError as exc:
                raise Unreachable(f"{exc.reason}: {getattr(exc, 'verify_message', '')}") from None
            except (OSError, TimeoutError) as exc:
                why = Unreachable(f"{address}: {exc or 'no answer'}")
        raise why

    def _explained(self, exc: Exception, host: str, port: int) -> bytes:
        """As the answer to a request. What is refused is told."""
        if is_refused := isinstance(exc, ValueError):
            self._refusals.add(host, port, "tcp", str(exc))
        status = "403 Forbidden" if is_refused else "502 Bad Gateway"
        body = f"belljar: {host}:{port}: {exc or 'it took too long'}\n".encode()
        fields = f"Content-Type: text/plain\r\nContent-Length: {len(body)}\r\nConnection: close"
        return f"HTTP/1.1 {status}\r\n{fields}\r\n\r\n".encode() + body


def wanted(request: h11.Request, port: int) -> tuple[str, int]:
    """Host and port that a request is for. *port*: where it came. Raises Refused."""
    target, hosts = request.target, [value for key, value in request.headers if key == b"host"]
    usual = 80 if port not in WEB else port
    if request.method == b"CONNECT":
        authority, usual = target, 443
    elif target.lower().startswith(b"http://"):
        authority, usual = target[7:].partition(b"/")[0], 80
        if any(value.lower() != authority.lower() for value in hosts):
            raise Refused("it names two hosts")
    elif target[:1] in (b"/", b"*") and hosts:
        authority = hosts[0]
    else:
        raise Refused("it names no host")
    place = None
    with suppress(ValueError):
        place = name(authority.decode("ascii"))
    if place is None or place.host.startswith("*"):
        raise Refused(f"{authority[:100].decode('latin-1')!r} is not the name of a host")
    return place.host, place.port or usual


def head(request: h11.Request, headers: Headers) -> bytes:
    """As it is sent on: for one request, unless its connection is to become another protocol's."""
    target, keys = request.target, {key.lower() for key, _ in headers}
    if target.lower().startswith(b"http://"):
        target = b"/" + target[7:].partition(b"/")[2]
    if b"upgrade" not in keys:
        headers = [(key, value) for key, value in headers if key.lower() not in (b"connection", b"keep-alive")]
        headers.append((b"Connection", b"close"))
    own = (b"%s: %s" % pair for pair in headers if not pair[0].lower().startswith(b"proxy-"))
    first = b"%s %s HTTP/%s" % (request.method, target, request.http_version)
    return b"\r\n".join((first, *own, b"\r\n"))


async def carry(one: Line, other: Line) -> None:
    """Both ways, to both ends; or until one of them breaks, which raises OSError."""
    tasks = [asyncio.ensure_future(one.pour(other)), asyncio.ensure_future(other.pour(one))]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        other.writer.close()


async def _accepted(connection: socket.socket, tls: ssl.SSLContext) -> Line:
    loop, reader = asyncio.get_running_loop(), asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    transport, _ = await loop.connect_accepted_socket(
        lambda: protocol, connection, ssl=tls, ssl_handshake_timeout=PATIENCE
    )
    return Line(reader, asyncio.StreamWriter(transport, protocol, reader, loop))


async def _soon(work: Coroutine[Any, Any, T]) -> T:
    """Raises TimeoutError."""
    async with asyncio.timeout(PATIENCE):
        return await work
