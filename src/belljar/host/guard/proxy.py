"""The proxy of a user network: hosts that a guest reaches by their names, over HTTP and TLS.

Whatever address the guest connects to, what counts is the name that it says: in TLS's first message, in the head of a request,
or in CONNECT. The name is looked up here for every connection, and the address that was judged is the one that is connected to.
A connection carries one request where its head can be seen, so that no second one names another host.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress

import h11

from belljar.errors import HostError
from belljar.hints import TYPE_CHECKING
from belljar.host.guard.egress import Egress, obstacle
from belljar.host.guard.names import HANDSHAKE, WEB, name, server_name
from belljar.host.guard.traffic import Call, Refusal, Refusals
from belljar.host.threads import in_thread

if TYPE_CHECKING:
    from belljar.host.guard.vault import Vault

CHUNK, LARGEST_HEAD, MOST, LOOKING = 1 << 16, 1 << 16, 512, 8  # bytes; connections, and threads that look names up
PATIENCE, LINGER = 30.0, 2.0  # seconds: until bytes are carried; for a client to read its refusal
UNKNOWN_NAME = bytes((21, 3, 3, 0, 2, 2, 112))  # an alert of TLS: fatal, unrecognized_name
NOTHING_THERE = (OSError, HostError)  # where the guest may go. ValueError: it may not, or does not say where it goes
Headers = list[tuple[bytes, bytes]]


class Line:
    """One side of a connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer, self.outer = reader, writer, writer
        self.carrying: asyncio.Task[None] | None = None  # what TLS that ends here sends and gets

    async def end_tls(self, context: ssl.SSLContext, sent: bytes) -> None:
        """From now on it is what is within the TLS that has begun with these bytes. Raises OSError."""
        ours, theirs = socket.socketpair()  # asyncio's TLS wants a socket where nothing was read yet
        other = Line(*await asyncio.open_connection(sock=theirs))
        other.writer.write(sent)
        self.carrying = asyncio.create_task(carry(Line(self.reader, self.writer), other))
        loop, reader = asyncio.get_running_loop(), asyncio.StreamReader(LARGEST_HEAD)
        protocol = asyncio.StreamReaderProtocol(reader)
        transport, _ = await loop.connect_accepted_socket(lambda: protocol, ours, ssl=context)
        self.reader, self.writer = reader, asyncio.StreamWriter(transport, protocol, reader, loop)

    async def close(self) -> None:
        """TLS has a moment to end."""
        self.writer.close()
        if self.carrying is not None:
            await asyncio.wait({self.carrying}, timeout=LINGER)
            self.carrying.cancel()
            await asyncio.gather(self.carrying, return_exceptions=True)
        self.outer.close()


def addresses_of(host: str) -> list[str]:
    """Now, of this family alone. Raises OSError."""
    return [str(found[4][0]) for found in socket.getaddrinfo(host, 0, socket.AF_INET, socket.SOCK_STREAM)]


class Proxy:
    """Of one machine. *tell*: gets what is refused."""

    def __init__(
        self, egress: Egress, tell: Callable[[Refusal], object], vault: Vault | None = None,
        look_up: Callable[[str], list[str]] = addresses_of,
    ) -> None:  # fmt: skip
        self._egress, self._vault, self._look_up = egress, vault, look_up
        self._refusals, self._room, self._looking = Refusals(tell), asyncio.Semaphore(MOST), asyncio.Semaphore(LOOKING)

    async def answer(self, call: Call) -> None:
        """One connection of the guest's, to its end. Raises OSError."""
        if self._room.locked():
            return
        async with self._room:
            line = Line(*await asyncio.open_connection(sock=call.connection.dup(), limit=LARGEST_HEAD))
            try:
                await self._route(line, call.port)
            finally:
                await line.close()

    async def _route(self, line: Line, port: int) -> None:
        """Carry it to the host that the guest names, also within a tunnel, or within TLS that ends here. Raises OSError."""
        host = ended = ""  # the host whose TLS ended here
        outward, is_tls = None, False
        try:
            async with asyncio.timeout(PATIENCE):
                while outward is None:
                    sent = await line.reader.readexactly(1)
                    if is_tls := sent[0] == HANDSHAKE and not ended:
                        sent, host = await hello_of(line.reader, sent)
                        self._check(host, port)
                        if self._vault is not None and self._vault.has(host, port):
                            await self._end_tls(line, self._vault.inward, sent, host, port)
                            ended = host
                        else:
                            outward = await self._connected(host, port)
                            outward.writer.write(sent)
                        continue
                    request = await head_of(line.reader, sent)
                    host, wanted_port = wanted(request, port)
                    if ended not in ("", host):
                        raise ValueError(f"TLS for another host than the request's, {ended}")
                    port = port if ended else wanted_port
                    self._check(host, port)
                    if request.method == b"CONNECT":
                        line.writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
                    else:
                        outward = await self._sent(request, host, port, self._vault if ended else None)
        except (ValueError, *NOTHING_THERE) as exc:
            return await answer(line, self._explained(exc, host, port, is_tls))
        except EOFError:
            return
        await carry(line, outward)

    async def _end_tls(self, line: Line, context: ssl.SSLContext, sent: bytes, host: str, port: int) -> None:
        """Raises EOFError where the guest does not trust us."""
        try:
            await line.end_tls(context, sent)
        except OSError as exc:
            reason = "the guest's program does not trust the certificate that it was shown"
            self._refusals.add(host, port, "tcp", reason)
            raise EOFError from exc

    async def _sent(self, request: h11.Request, host: str, port: int, ends: Vault | None) -> Line:
        """The connection to a host, where this request was sent. *ends*: its TLS. Raises ValueError, OSError, HostError."""
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
            raise ValueError("not allowed")

    async def _connected(self, host: str, port: int, tls: ssl.SSLContext | None = None) -> Line:
        """Raises ValueError, OSError, HostError."""
        async with self._looking:
            addresses = await in_thread(lambda: self._look_up(host))
        why: Exception = OSError("it has no IPv4 address")
        for address in addresses:
            try:
                if reason := obstacle(self._egress, address, port):
                    raise ValueError(f"{address}: {reason}")
                line = await asyncio.open_connection(address, port, ssl=tls, server_hostname=host if tls else None)
                return Line(*line)
            except (OSError, ValueError) as exc:
                why = exc
        raise why

    def _explained(self, exc: Exception, host: str, port: int, is_tls: bool) -> bytes:
        """To the guest. What is refused is told."""
        if is_refused := not isinstance(exc, NOTHING_THERE):
            self._refusals.add(host, port, "tcp", str(exc))
        if is_tls:
            return UNKNOWN_NAME if is_refused else b""
        status = "403 Forbidden" if is_refused else "502 Bad Gateway"
        body = f"belljar: {host}:{port}: {str(exc) or 'it took too long'}\n"
        fields = f"Content-Type: text/plain\r\nContent-Length: {len(body.encode())}\r\nConnection: close"
        return f"HTTP/1.1 {status}\r\n{fields}\r\n\r\n{body}".encode()


async def hello_of(reader: asyncio.StreamReader, sent: bytes) -> tuple[bytes, str]:
    """The beginning of TLS, and the host that it names. Raises EOFError, ValueError, OSError."""
    while (host := server_name(sent)) is None:
        if len(sent) > LARGEST_HEAD or not (more := await reader.read(CHUNK)):
            raise EOFError
        sent += more
    return sent, host


def wanted(request: h11.Request, port: int) -> tuple[str, int]:
    """Host and port that a request is for. *port*: where it came. Raises ValueError."""
    target, hosts = request.target, [value for key, value in request.headers if key == b"host"]
    usual = 80 if port not in WEB else port
    if request.method == b"CONNECT":
        authority, usual = target, 443
    elif target.lower().startswith(b"http://"):
        authority, usual = target[7:].partition(b"/")[0], 80
        if any(value.lower() != authority.lower() for value in hosts):
            raise ValueError("it names two hosts")
    elif target[:1] in (b"/", b"*") and hosts:
        authority = hosts[0]
    else:
        raise ValueError("it names no host")
    text = authority[:300].decode("latin-1")
    if (place := name(text)) is None or place.host.startswith("*"):
        raise ValueError(f"{text!r} is not the name of a host")
    return place.host, place.port or usual


async def head_of(reader: asyncio.StreamReader, first: bytes) -> h11.Request:
    """The head of a request; what follows it stays. Raises EOFError, ValueError."""
    http = h11.Connection(h11.SERVER, max_incomplete_event_size=LARGEST_HEAD)
    try:
        http.receive_data(first + await reader.readuntil(b"\r\n\r\n"))
        if isinstance(request := http.next_event(), h11.Request):
            return request
    except (asyncio.LimitOverrunError, h11.RemoteProtocolError) as exc:
        raise ValueError(f"not HTTP: {exc}") from None
    raise ValueError("not HTTP")


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


async def answer(line: Line, data: bytes) -> None:
    """Send this, and no more; what still arrives is dropped for a moment. Raises OSError."""
    line.writer.write(data)
    end(line.writer)
    with suppress(TimeoutError):
        async with asyncio.timeout(LINGER):
            while await line.reader.read(CHUNK):
                pass


async def carry(one: Line, other: Line) -> None:
    """Both ways, to both ends, or until one of them breaks."""
    try:
        async with asyncio.TaskGroup() as ways:
            ways.create_task(pour(one.reader, other.writer))
            ways.create_task(pour(other.reader, one.writer))
    except* OSError:
        pass
    finally:
        other.writer.close()


async def pour(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """All that comes, to its end. Raises OSError."""
    while data := await reader.read(CHUNK):
        writer.write(data)
        await writer.drain()
    end(writer)


def end(writer: asyncio.StreamWriter) -> None:
    if writer.can_write_eof():
        writer.write_eof()
    else:  # TLS has no half of a connection
        writer.close()
