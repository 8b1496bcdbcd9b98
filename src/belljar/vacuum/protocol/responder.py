"""Answers what other factories and commands ask over UDP.

What it tells is a snapshot that it is handed; what it is sent is not trusted. A sender that may not ask, asks too much or sends
nonsense gets no answer: it is counted, and told once a minute. Nobody is sent more than a sender's budget, so that a forged source
address is of no use to whoever wants to flood a third one.
"""

from __future__ import annotations

import socket
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from ipaddress import ip_address, ip_network
from typing import Any, Final

from belljar.errors import PortRefused
from belljar.host.datagrams import Address, Datagrams, addresses_of, bound, is_numeric
from belljar.records import dataclass
from belljar.vacuum import Space
from belljar.vacuum.protocol.fields import Refused, Why
from belljar.vacuum.protocol.query import LONGEST_QUERY, Kind, Message, Snapshot, answer, bodies, read_query

EVERYWHERE: Final = ("0.0.0.0", "::")
PACKET: Final = 256  # bytes of its budget that each packet costs its sender, whatever comes of it
TELL_EVERY: Final = 60.0  # seconds between two lines about one sender
TELL_MOST: Final = 20  # senders that a line is written about in that time
REMEMBERED: Final = 4096  # senders

Tell = Callable[..., None]  # an event's name and facts, for the log


@dataclass(frozen=True)
class Budget:
    """Bytes that go to one sender, or to many: so many at once, and so many a second. Who has none left waits; an answer
    is given whole, and what it costs beyond the budget is waited for."""

    burst: float
    rate: float


ALLOWED: Final = Budget(4 << 20, 1 << 20)  # each sender of a network that the site named
STRANGER: Final = Budget(128 << 10, 32 << 10)  # each sender, where none are named
STRANGERS: Final = Budget(8 << 20, 2 << 20)  # all these together: their addresses may be made up


class Purse:
    """What is left of a budget."""

    def __init__(self, budget: Budget, now: float) -> None:
        self._budget, self._left, self._at = budget, budget.burst, now

    def has_any(self, now: float) -> bool:
        self._left = min(self._budget.burst, self._left + (now - self._at) * self._budget.rate)
        self._at = now
        return self._left > 0

    def pay(self, cost: float) -> None:
        self._left -= cost


class Sender:
    """What is known of one address."""

    def __init__(self, may_ask: bool, purse: Purse) -> None:
        self.may_ask, self.purse = may_ask, purse
        self.refused, self.told_at = 0, -TELL_EVERY


class Answering:
    """What becomes of a packet, but for the socket. Never raises. *counts*: answered queries, sent and unsent answers, and refused
    packets by reason."""

    def __init__(
        self,
        space: Space,
        snapshot: Callable[[], Snapshot],
        tell: Tell,
        *,
        key: bytes = b"",
        clock: Callable[[], float] = time.time,
        ticks: Callable[[], float] = time.monotonic,
    ) -> None:
        self._space, self._snapshot, self._tell, self._key = space, snapshot, tell, key
        self._clock, self._ticks = clock, ticks
        self._networks = [ip_network(one, strict=False) for one in space.allow]
        self._strangers = Purse(STRANGERS, ticks())
        self._senders: OrderedDict[bytes, Sender] = OrderedDict()
        self._lines, self._lines_since = 0, 0.0
        self._of: Snapshot | None = None
        self._made: dict[Kind, list[Message]] = {}
        self.counts: Counter[str] = Counter()

    def take(self, data: bytes, address: Address, send: Callable[[bytes, Address], bool]) -> None:
        """Answer it by *send*, or count why not."""
        now = self._ticks()
        sender = self._sender(address[0], now)
        try:
            answers = self._answers(data, sender, now)
        except Refused as exc:
            self._refuse(sender, address[0], exc.why, now)
            return
        except Exception as exc:  # whatever is wrong with the snapshot: the next query may be answered
            self._refuse(sender, address[0], Why.FAILED, now, error=repr(exc))
            return
        self.counts["answered"] += 1
        for one in answers:
            sender.purse.pay(len(one))
            self._strangers.pay(0 if self._networks else len(one))
            self.counts["sent" if send(one, address) else "unsent"] += 1

    def _answers(self, data: bytes, sender: Sender, now: float) -> list[bytes]:
        if not sender.may_ask:
            raise Refused(Why.NOT_ALLOWED)
        if not sender.purse.has_any(now) or not (self._networks or self._strangers.has_any(now)):
            raise Refused(Why.TOO_MANY)
        sender.purse.pay(PACKET)
        moment = self._clock()
        query = read_query(data, self._space.name, moment, self._key, signed_only=self._space.signed_only)
        return [answer(one, query.cookie, moment, self._key) for one in self._bodies(query.kind, moment)]

    def _bodies(self, kind: Kind, moment: float) -> list[Message]:
        """Made once for all who ask while the snapshot is the same value."""
        snapshot = self._snapshot()
        if snapshot is not self._of:
            self._of, self._made = snapshot, {}
        if kind not in self._made:
            self._made[kind] = bodies(kind, snapshot, moment)
        return self._made[kind]

    def _sender(self, host: str, now: float) -> Sender:
        """Of IPv6 a whole /64 is one: who has one address there has all. The one not heard of for longest is forgotten."""
        key = socket.inet_pton(socket.AF_INET6, host.partition("%")[0])[:8] if ":" in host else host.encode()
        sender = self._senders.get(key)
        if sender is None:
            address = ip_address(host.partition("%")[0])
            may_ask = not self._networks or any(address in network for network in self._networks)
            sender = self._senders[key] = Sender(may_ask, Purse(ALLOWED if self._networks else STRANGER, now))
            if len(self._senders) > REMEMBERED:
                self._senders.popitem(last=False)
        self._senders.move_to_end(key)
        return sender

    def _refuse(self, sender: Sender, host: str, why: Why, now: float, **facts: Any) -> None:
        self.counts[why.value] += 1
        sender.refused += 1
        if now - self._lines_since >= TELL_EVERY:
            self._lines, self._lines_since = 0, now
        if now - sender.told_at < TELL_EVERY or self._lines >= TELL_MOST:
            return
        self._tell("query refused", sender=host, why=why.value, refused=sender.refused, **facts)
        sender.refused, sender.told_at = 0, now
        self._lines += 1


@asynccontextmanager
async def responding(
    space: Space, snapshot: Callable[[], Snapshot], tell: Tell, *, key: bytes = b""
) -> AsyncIterator[Answering]:
    """Answers at this factory's own addresses until the end of the context. Raises PortRefused."""
    answering = Answering(space, snapshot, tell, key=key)
    sockets = [_listening(one, answering) for one in await _bound(space, tell)]
    try:
        yield answering
    finally:
        for one in sockets:
            one.close()


def _listening(sock: socket.socket, answering: Answering) -> Datagrams:
    listening: Datagrams = Datagrams(
        sock, lambda data, address: answering.take(data, address, listening.send), longest=LONGEST_QUERY + 1
    )
    return listening


async def _bound(space: Space, tell: Tell) -> list[socket.socket]:
    """At the addresses the site named; else at those of this factory's name, where that names this host as others see it; else
    at every address of this host."""
    if space.listen:
        return _all_bound(space.listen, space.port)
    if is_numeric(space.factory):
        return _all_bound((space.factory,), space.port)
    found = [address[0] for address in await addresses_of(space.factory, space.port)]
    outside = [one for one in found if not ip_address(one.partition("%")[0]).is_loopback]
    if outside:
        try:
            return _all_bound(outside, space.port)
        except PortRefused as exc:
            tell("listening everywhere", why=exc.message)
    return _all_bound(EVERYWHERE, space.port, least=1)


def _all_bound(hosts: Iterable[str], port: int, least: int | None = None) -> list[socket.socket]:
    """*least*: so many are enough, for a host may have no IPv6. Raises PortRefused."""
    sockets: list[socket.socket] = []
    problems = []
    for host in hosts:
        try:
            sockets.append(bound(host, port))
        except OSError as exc:
            problems.append(f"UDP port {port} of {host}: {exc.strerror or exc}")
    if problems and (least is None or len(sockets) < least):
        for one in sockets:
            one.close()
        raise PortRefused("; ".join(problems))
    return sockets
