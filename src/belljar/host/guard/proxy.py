"""The proxy of a user network: hosts that a guest reaches by their names, over HTTP and TLS.

Whatever address the guest connects to, what counts is the name that it says: in TLS's first message, in the head of a request,
or in CONNECT. The name is looked up here for every connection, and the address that was judged is the one that is connected to.
A connection carries one request where its head can be seen, so that no second one names another host.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
from collections.abc import Callable
from contextlib import suppress

import h11

from belljar.errors import HostError
from belljar.hints import TYPE_CHECKING
from belljar.host.guard.egress import Egress, obstacle
from belljar.host.guard.names import WEB, name, server_name
from belljar.host.guard.traffic import Call, Refusal, Refusals
from belljar.host.streams import as_streams, pump
from belljar.host.threads import in_thread

if TYPE_CHECKING:
    from belljar.host.guard.vault import Vault

CHUNK, LARGEST_HEAD, MOST, LOOKING = 1 << 16, 1 << 16, 512, 8  # bytes; connections, and threads that look names up
PATIENCE, LINGER = 30.0, 2.0  # seconds: until bytes are carried; for a client to read its refusal
HANDSHAKE, RECORD = 22, 5  # TLS (RFC 8446, 5.1): what a record begins with, and how long that beginning is
UNKNOWN_NAME = bytes((21, 3, 3, 0, 2, 2, 112))  # an alert of TLS: fatal, unrecognized_name
NOTHING_THERE = (OSError, HostError)  # where the guest may go. ValueError: it may not, or does not say where it goes
Line = tuple[asyncio.StreamReader, asyncio.StreamWriter]  # one side of a connection
OF_A_HOP = (b"connection", b"keep-alive", b"proxy-authorization", b"proxy-connection")  # headers that go no further


def addresses_of(host: str) -> list[str]:
    """Now, of this family alone. Raises OSError."""
    return [str(info[4][0]) for info in socket.getaddrinfo(host, 0, socket.AF_INET, socket.SOCK_STREAM)]


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
        if not self._room.locked():
            async with self._room:
                line = await asyncio.open_connection(sock=call.connection.dup(), limit=LARGEST_HEAD)
                await self._route(line, call.port)

    async def _route(self, line: Line, port: int, within: str = "") -> None:
        """Carry it to the host that the guest names, also through a tunnel. *within*: the host whose TLS ended here."""
        (reader, writer), host, is_tls = line, within, False
        vault, outward = self._vault, None
        try:
            async with asyncio.timeout(PATIENCE):
                while outward is None:
                    sent = await reader.readexactly(RECORD)
                    if is_tls := sent[0] == HANDSHAKE and not within:
                        sent, host = await hello_of(reader, sent)
                    else:
                        request = await head_of(reader, sent)
                        host, port = wanted(request, port, within)
                    if not self._egress.reaches(host, port):
                        raise ValueError("not allowed")
                    if is_tls and vault is not None and self._egress.secret.has(host, port):
                        break
                    if not is_tls and request.method == b"CONNECT":
                        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
                        continue
                    if not is_tls:
                        sent = self._head(request, host, port, within)
                    outward = await self._connected(host, port, vault.outward if vault and within else None)
                    outward[1].write(sent)
        except (ValueError, *NOTHING_THERE) as exc:
            await self._refuse(line, exc, host, port, is_tls)
        except EOFError:
            pass
        else:
            if outward is not None:
                await carry(line, outward)
            elif vault is not None:
                await self._end_tls(line, vault.inward, sent, host, port)
        finally:
            writer.close()

    async def _end_tls(self, line: Line, context: ssl.SSLContext, sent: bytes, host: str, port: int) -> None:
        """End the TLS that has begun with these bytes: what is within it has a route of its own. Raises OSError."""
        ours, theirs = socket.socketpair()  # asyncio's TLS wants a socket where nothing was read yet
        other = await asyncio.open_connection(sock=theirs)
        other[1].write(sent)
        async with asyncio.TaskGroup() as tasks:
            carrying = tasks.create_task(carry(line, other))
            try:
                inner = await as_streams(ours, context, PATIENCE, LARGEST_HEAD)
            except OSError:
                reason = "the guest's program does not trust the certificate that it was shown"
                self._refusals.add(host, port, "tcp", reason)
            else:
                await self._route(inner, port, host)
            asyncio.get_running_loop().call_later(PATIENCE, carrying.cancel)  # of a guest that holds its end open

    def _head(self, request: h11.Request, host: str, port: int, within: str) -> bytes:
        """As a request is sent on: it is its connection's last, unless that is to become another protocol's."""
        headers, target = list(request.headers.raw_items()), request.target
        if self._vault is not None:
            headers, strays = self._vault.filled(headers, within, port)
            for stray in strays:
                self._refusals.add(host, port, "tcp", f"{stray} is sent as its placeholder")
        if not target.startswith((b"/", b"*")):
            target = b"/" + target[len(b"http://") :].partition(b"/")[2]
        own = (b"%s: %s" % pair for pair in headers if pair[0].lower() not in OF_A_HOP)
        last = b"Connection: " + (b"upgrade" if b"upgrade" in dict(request.headers) else b"close")
        first = b"%s %s HTTP/%s" % (request.method, target, request.http_version)
        return b"\r\n".join((first, *own, last, b"\r\n"))

    async def _connected(self, host: str, port: int, tls: ssl.SSLContext | None = None) -> Line:
        """Raises ValueError, OSError, HostError."""
        async with self._looking:
            addresses = await in_thread(lambda: self._look_up(host))
        why: Exception = OSError("it has no IPv4 address")
        for address in addresses:
            try:
                if reason := obstacle(self._egress, address, port):
                    raise ValueError(f"{address}: {reason}")
                return await asyncio.open_connection(address, port, ssl=tls, server_hostname=host if tls else None)
            except (OSError, ValueError) as exc:
                why = exc
        raise why

    async def _refuse(self, line: Line, exc: Exception, host: str, port: int, is_tls: bool) -> None:
        """Say why, and no more; what still arrives is dropped for a moment. What is refused is told."""
        (reader, writer), is_refused = line, not isinstance(exc, NOTHING_THERE)
        if is_refused:
            self._refusals.add(host, port, "tcp", str(exc))
        if is_tls:
            writer.write(UNKNOWN_NAME if is_refused else b"")
        else:
            status, why = "403 Forbidden" if is_refused else "502 Bad Gateway", str(exc) or "it took too long"
            writer.write(f"HTTP/1.1 {status}\r\nConnection: close\r\n\r\nbelljar: {host}:{port}: {why}\n".encode())
        end(writer)
        with suppress(OSError):
            async with asyncio.timeout(LINGER):
                while await reader.read(CHUNK):
                    pass


async def hello_of(reader: asyncio.StreamReader, sent: bytes) -> tuple[bytes, str]:
    """TLS up to the end of its first message, whose first record begins so, and the host that it names. Raises EOFError, ValueError,
    OSError."""
    message, record = b"", sent
    while True:
        kind, version, length = struct.unpack(">BBxH", record)
        if (kind, version) != (HANDSHAKE, 3) or not length or len(sent) > LARGEST_HEAD:
            raise ValueError("not the beginning of TLS")
        message += (part := await reader.readexactly(length))
        sent += part
        if len(message) >= 4 and len(message) >= 4 + int.from_bytes(message[1:4], "big"):
            return sent, server_name(message)
        sent += (record := await reader.readexactly(RECORD))


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


def wanted(request: h11.Request, port: int, within: str) -> tuple[str, int]:
    """Host and port that a request is for, which came to this port, *within* TLS for that host. Raises ValueError."""
    target, usual = request.target, port if port in WEB else 80
    authority = dict(request.headers).get(b"host", b"")  # h11 takes no second one
    if request.method == b"CONNECT":
        authority, usual = target, 443
    elif not authority or not (target + b"/").lower().startswith((b"/", b"*", b"http://%s/" % authority.lower())):
        raise ValueError("it names no host, or two hosts")
    text = authority.decode("latin-1")
    if (place := name(text)) is None or place.host.startswith("*"):
        raise ValueError(f"{text[:300]!r} is not the name of a host")
    if within not in ("", place.host):
        raise ValueError(f"the request is for another host than its TLS, {place.host}")
    return place.host, port if within else place.port or usual


async def carry(inner: Line, outer: Line) -> None:
    """Both ways, to both ends, or until one of them breaks."""
    try:
        async with asyncio.TaskGroup() as ways:
            ways.create_task(pour(inner[0], outer[1]))
            ways.create_task(pour(outer[0], inner[1]))
    except* OSError:
        pass
    finally:
        outer[1].close()


async def pour(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """All that comes, and its end. Raises OSError."""
    await pump(reader, writer)
    end(writer)


def end(writer: asyncio.StreamWriter) -> None:
    if writer.can_write_eof():
        writer.write_eof()
    else:  # TLS has no half of a connection
        writer.close()
