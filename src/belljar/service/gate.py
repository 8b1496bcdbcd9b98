"""Connections of programs on several hosts, by TLS with certificates that each side knows beforehand: a port that only certain hosts
reach as far as a handshake, and the way to one."""

from __future__ import annotations

import asyncio
import hmac
import socket
import ssl
from collections.abc import Callable, Container, Coroutine, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

from belljar.errors import HostError
from belljar.host.streams import Works, as_streams
from belljar.service.credentials.certificates import own_certificate
from belljar.service.streams import accepted

MOST = 300  # connections at a time
HANDSHAKE = 10.0  # seconds
CHUNK = 1 << 17
LOST = 20_000  # milliseconds without an answer of the other host's kernel
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]


class Gate:
    """Made with the first free one of *ports*, FIRST-LAST, or any for 0, at this address. Raises HostError."""

    def __init__(self, address: str, ports: str, folder: Path) -> None:
        first, _, last = ports.partition("-")
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        for number in range(int(first), int(last or first) + 1):
            with suppress(OSError):
                self._end = socket.create_server((address, number), family=family, backlog=MOST)
                break
        else:
            raise HostError(f"{address or '*'}: no port of {ports} is free", hint="Give `lease.private_ports` more.")
        self._end.setblocking(False)
        self.number: int = self._end.getsockname()[1]
        self.at = f"[{address}]:{self.number}" if ":" in address else f"{address}:{self.number}"
        file, self._context = folder / "port.pem", ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.pin = own_certificate(file, ("belljar",))
        self._context.minimum_version = ssl.TLSVersion.TLSv1_3
        self._context.load_cert_chain(file)
        file.unlink()

    async def serve(self, hosts: Container[str], talk: Talk) -> None:
        """Until it is cancelled, with all its connections. *hosts*: addresses of those that may connect."""
        works = Works()
        try:
            async for end, address in accepted(self._end):
                if len(works) < MOST and address in hosts:
                    works.begin(self._take(end, talk))
                else:
                    end.close()
        finally:
            self._end.close()
            await works.end()

    async def _take(self, end: socket.socket, talk: Talk) -> None:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, LOST)
        with suppress(OSError):
            reader, writer = await as_streams(end, self._context, HANDSHAKE, CHUNK)
            try:
                await talk(reader, writer)
            finally:
                writer.transport.abort()


def own_address(others: Sequence[str]) -> str:
    """For this host, as the first of those HOST:PORT would see it that it has a route to. Raises HostError."""
    for other in others:
        host, _, port = other.rpartition(":")
        with suppress(OSError, ValueError):
            (family, kind, _, _, place), *_ = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)
            with socket.socket(family, kind) as end:
                end.connect(place)  # sends nothing
                return str(end.getsockname()[0])
    raise HostError(f"this host has no route to {', '.join(others)}", hint="Is its name known here, the network up?")


async def dial(address: str, pin: str, own: str = "") -> Streams:
    """By TLS, to whoever has the certificate of this SHA-256. *own*: from this address. Raises OSError."""
    host, _, port = address.rpartition(":")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # the pin says more than any name
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    reader, writer = await asyncio.open_connection(
        host.strip("[]"), int(port), ssl=context, local_addr=(own, 0) if own else None
    )
    certificate: bytes | None = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    if certificate is None or not hmac.compare_digest(sha256(certificate).hexdigest(), pin.lower()):
        writer.transport.abort()
        raise ConnectionError(f"{address}: whoever answers there has another certificate than was told")
    return reader, writer
