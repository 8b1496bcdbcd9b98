"""Answers what other factories and commands ask over UDP.

What it tells is a snapshot that it is handed; what it is sent is not trusted. A sender that may not ask, asks too much or sends
nonsense gets no answer (`service.senders`)."""

from __future__ import annotations

import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import ExitStack, asynccontextmanager, closing
from typing import Any, Final

from belljar.service.datagrams import Address, Datagrams, own_sockets
from belljar.service.senders import Sender, Senders
from belljar.service.telling import Tell
from belljar.vacuum import Space
from belljar.vacuum.protocol.fields import Refused, Why
from belljar.vacuum.protocol.query import LONGEST_QUERY, Kind, Message, Snapshot, answer, bodies, read_query

PACKET: Final = 256  # bytes of its budget that each packet costs its sender, whatever comes of it


class Answering:
    """What becomes of a packet, but for the socket. Never raises. *factories*: addresses of the space's own. *counts*: answered
    queries, sent and unsent answers, and refused packets by reason."""

    def __init__(
        self, space: Space, snapshot: Callable[[], Snapshot], tell: Tell, *, key: bytes = b"", factories: Collection[str] = (),
        clock: Callable[[], float] = time.time, ticks: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._space, self._snapshot, self._tell, self._key = space, snapshot, tell, key
        self._clock, self._ticks = clock, ticks
        self._senders = Senders(space.allow, ticks(), factories)
        self._of: Snapshot | None = None
        self._made: dict[Kind, list[Message]] = {}
        self.counts: Counter[str] = Counter()

    def take(self, data: bytes, address: Address, send: Callable[[bytes, Address], bool]) -> None:
        """Answer it by *send*, or count why not."""
        now = self._ticks()
        sender = self._senders.find(address[0], now)
        try:
            answers = self._answers(data, sender, now)
        except Refused as exc:
            self._refuse(sender, address[0], exc.why, now)
            return
        except Exception as exc:  # whatever is wrong with the snapshot: the next query may be answered
            self._refuse(sender, address[0], Why.FAILED, now, error=repr(exc))
            return
        self.counts["answered"] += 1
        for packet in answers:
            self._senders.pay(sender, len(packet))
            self.counts["sent" if send(packet, address) else "unsent"] += 1

    def _answers(self, data: bytes, sender: Sender, now: float) -> list[bytes]:
        if not sender.may_ask:
            raise Refused(Why.NOT_ALLOWED)
        if not self._senders.may_be_sent(sender, now):
            raise Refused(Why.TOO_MANY)
        sender.purse.pay(PACKET)
        moment = self._clock()
        query = read_query(data, self._space.name, moment, self._key, signed_only=self._space.signed_only)
        return [answer(message, query.cookie, moment, self._key) for message in self._bodies(query.kind, moment)]

    def _bodies(self, kind: Kind, moment: float) -> list[Message]:
        """Made once for all who ask while the snapshot is the same value."""
        snapshot = self._snapshot()
        if snapshot is not self._of:
            self._of, self._made = snapshot, {}
        if kind not in self._made:
            self._made[kind] = bodies(kind, snapshot, moment)
        return self._made[kind]

    def _refuse(self, sender: Sender, host: str, why: Why, now: float, **details: Any) -> None:
        self.counts[why.value] += 1
        if count := self._senders.refuse(sender, now):
            self._tell("query refused", sender=host, why=why.value, refused=count, **details)


@asynccontextmanager
async def responding(
    space: Space, snapshot: Callable[[], Snapshot], tell: Tell, *, key: bytes = b"", factories: Collection[str] = ()
) -> AsyncIterator[Answering]:
    """Answers at this factory's own addresses until the end of the context. Raises HostError."""
    answering = Answering(space, snapshot, tell, key=key, factories=factories)
    with ExitStack() as sockets:
        for sock in await own_sockets(space.listen, space.factory, space.port):
            sockets.enter_context(closing(_listening(sock, answering)))
        yield answering


def _listening(sock: socket.socket, answering: Answering) -> Datagrams:
    listening: Datagrams = Datagrams(
        sock, lambda data, address: answering.take(data, address, listening.send), longest=LONGEST_QUERY + 1
    )
    return listening
