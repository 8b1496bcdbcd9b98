"""A small server of HTTP/1.1 for whole requests: `host.http` speaks, this counts connections and hands requests over."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from belljar.errors import BadSetting, HostError
from belljar.host.http import BROKEN, Answer, Limits, Rejected, Request, Talk
from belljar.host.streams import Works, as_streams
from belljar.records import dataclass
from belljar.service.streams import accepted


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
        values = [" ".join(value.split()) for key, value in self.headers if key == name]
        return ",".join(values) if values else None


Respond = Callable[[Sent], Awaitable[Answer]]
Refuse = Callable[[int, str], Answer]  # of what is not a request, or too large: a fitting status, and why


@asynccontextmanager
async def serving(
    where: str, respond: Respond, refuse: Refuse, *, setting: str, limits: Limits, tls: ssl.SSLContext | None = None
) -> AsyncIterator[tuple[str, int]]:  # fmt: skip
    """The address and port at which it is answered, while the block lasts; connections end with it. *setting*: what *where* is
    called in errors. Raises BadSetting, HostError."""
    end = listener(where, setting, "Give another address or port.", limits.connections)
    end.setblocking(False)
    door = asyncio.ensure_future(_Door(respond, refuse, limits, tls).open(end))
    try:
        yield end.getsockname()[:2]
    finally:
        door.cancel()
        await asyncio.gather(door, return_exceptions=True)
        end.close()


def listener(where: str, setting: str, hint: str, backlog: int | None = None) -> socket.socket:
    """At ADDRESS:PORT. Raises BadSetting, HostError."""
    address, port = place(where, setting)
    try:
        return socket.create_server(
            (address, port), family=socket.AF_INET6 if ":" in address else socket.AF_INET, backlog=backlog
        )
    except OSError as exc:
        raise HostError(f"{setting}: {where}: {exc.strerror}", hint=hint) from exc


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
    """A client counts from its first byte: also while TLS, which it may draw out, shakes hands."""

    def __init__(self, respond: Respond, refuse: Refuse, limits: Limits, tls: ssl.SSLContext | None) -> None:
        self._respond, self._refuse, self._limits, self._tls = respond, refuse, limits, tls
        self._works, self._peers = Works(*BROKEN), Counter[str]()

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
            talk = Talk(*await as_streams(connection, self._tls, self._limits.request), self._limits)
            await talk.serve(lambda request: self._answer(talk, request, peer), self._refused)
        finally:
            self._peers -= Counter((peer,))  # and no zeros are kept

    async def _answer(self, talk: Talk, request: Request, peer: str) -> Answer:
        headers = tuple((name.decode("ascii"), value.decode("latin-1")) for name, value in request.headers)
        method, target = request.method.decode("ascii"), request.target.decode("ascii")
        return await self._respond(Sent(method, target, headers, await talk.body(request), peer))

    def _refused(self, rejected: Rejected) -> Answer | None:
        """A client that is silent is hung up on."""
        return None if rejected.status == 408 else self._refuse(rejected.status, str(rejected))


def counted(address: str) -> str:
    """The name it counts by. A whole /64 of IPv6 counts as one: a client with one address there has all."""
    return str(ipaddress.ip_interface(f"{address.partition('%')[0]}/64").network) if ":" in address else address
