"""Exports of NFS servers: how they are written, and whether one answers that a guest could reach. Nothing is mounted here."""

from __future__ import annotations

import asyncio
import os
import re
import socket

from belljar.errors import ServerSilent, ShareMissing
from belljar.host.threads import in_thread
from belljar.model import FileServer
from belljar.network import Link, seen_by_guest
from belljar.records import dataclass

SCHEME, PORT = "nfs://", 2049
LONGEST = 1024  # of an export's path
HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9.])?")
FORBIDDEN = " ,:%?\\"  # separators here or in a mount's options, and a URL's escapes, which are not understood
PATIENCE = 30.0  # seconds to resolve the name and to connect; the kernel asks again and again meanwhile


@dataclass(frozen=True)
class Export:
    """A folder that a server offers. As text: nfs://HOST:PORT/PATH, an IPv6 address in brackets."""

    host: str
    port: int
    path: str

    def __str__(self) -> str:
        return f"{SCHEME}{self.server}{self.path}"

    @property
    def server(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def read(text: str) -> Export:
    """nfs://HOST[:PORT]/EXPORT. Raises ValueError with a sentence that says what is wrong."""
    if not text.startswith(SCHEME):
        raise ValueError(f"an export is written {SCHEME}HOST[:PORT]/EXPORT")
    place, slash, path = text[len(SCHEME) :].partition("/")
    if place.startswith("["):
        host, bracket, rest = place[1:].partition("]")
        _check_ipv6(host if bracket else "")
    else:
        host, colon, number = place.partition(":")
        rest = colon + number
        if not HOST.fullmatch(host) or ":" in number:
            raise ValueError(f"{place!r} is no name or address of a server (an IPv6 address stands in brackets)")
    if not slash:
        raise ValueError("the path of the export is missing")
    port = _port(rest)
    _check_path("/" + path)
    return Export(host, port, ("/" + path).rstrip("/") or "/")


def _check_ipv6(host: str) -> None:
    import ipaddress

    try:
        if "%" in host:
            raise ValueError
        ipaddress.IPv6Address(host)
    except ValueError:
        raise ValueError(f"[{host}] is no IPv6 address") from None


def _port(text: str) -> int:
    if not text:
        return PORT
    digits = text[1:]
    if text[0] != ":" or not (digits.isascii() and digits.isdigit() and len(digits) <= 5 and 1 <= int(digits) <= 65535):
        raise ValueError(f"{text!r} is no port: a number from 1 to 65535 follows a colon")
    return int(digits)


def _check_path(path: str) -> None:
    for char in path:
        if char in FORBIDDEN or not char.isprintable():
            raise ValueError(f"the path of the export must not hold {char!r}")
    parts = path[1:].rstrip("/").split("/") if path.strip("/") else []
    if any(part in ("", ".", "..") for part in parts):
        raise ValueError("the path of the export must not hold an empty part, `.` or `..`")
    if len(path.encode()) > LONGEST:
        raise ValueError(f"the path of the export is longer than {LONGEST} bytes")


async def find(source: str, link: Link) -> FileServer:
    """The server of an export, by an address at which it answered just now and that the guest can reach.

    Raises ShareMissing where no guest of this network could reach it, ServerSilent when it did not answer within PATIENCE
    seconds, or its name is not known."""
    export = read(source)
    try:
        async with asyncio.timeout(PATIENCE):
            return await _connected(export, link)
    except TimeoutError:
        trouble = f"no answer within {PATIENCE:g} s"
    except socket.gaierror as exc:
        trouble = f"its name cannot be resolved: {exc.strerror}"
    except OSError as exc:
        trouble = os.strerror(exc.errno) if exc.errno else str(exc)
    raise ServerSilent(f"{export}: the NFS server {export.server} does not answer: {trouble}")


async def _connected(export: Export, link: Link) -> FileServer:
    """Resolve and connect. Raises OSError of the last address tried, or ShareMissing."""
    addresses = await in_thread(lambda: _resolve(export))
    inside = {address: seen_by_guest(link, address) for address in addresses}
    if not any(inside.values()):
        raise ShareMissing(
            f"{export}: a machine with network {link.mode.value} cannot reach {', '.join(addresses)}",
            hint="Name the server by an IPv4 address outside of 10.0.2.0/24; on this host itself, 127.0.0.1 or a card's.",
        )
    trouble: OSError | None = None
    for address, seen in inside.items():
        if seen:
            try:
                await _connect(address, export.port)
                return FileServer(seen, export.port, export.path)
            except OSError as exc:
                trouble = exc
    assert trouble is not None
    raise trouble


def _resolve(export: Export) -> list[str]:
    """Every address of the server, IPv4 first, each once."""
    found = socket.getaddrinfo(export.host, export.port, type=socket.SOCK_STREAM)
    ordered = sorted(found, key=lambda one: one[0] != socket.AF_INET)
    return list(dict.fromkeys(str(one[4][0]) for one in ordered))


async def _connect(address: str, port: int) -> None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC) as connection:
        await asyncio.get_running_loop().sock_connect(connection, (address, port))
