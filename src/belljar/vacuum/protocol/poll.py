"""Asks the factories of a space over UDP what they run: in rounds, until all is told or the time is over.

Each factory is asked with a cookie of its own, and only who sends it back is listened to. A round ends when nothing new came for some
seconds; who has not told all by then is asked again. Whatever else comes, however much, makes no round longer."""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import closing
from typing import Final

from belljar.records import dataclass, field, replace
from belljar.service.datagrams import Address, Names, Outgoing, is_numeric
from belljar.service.streams import at_most
from belljar.vacuum import MachineStatus, Space, TypeStatus
from belljar.vacuum.protocol.fields import Refused, Status, Why
from belljar.vacuum.protocol.query import LONGEST_DATAGRAM, Kind, cookie, query, read_reply

ROUNDS: Final = 6
ROUNDS_FOR_THE_SILENT: Final = 2  # for a factory that did not answer the last time
IN_VAIN: Final = 2  # rounds that brought nothing new: Vac 03.00.01post10 announces types of which it tells nothing
KEEP: Final = 600.0  # seconds that a silent factory's use is taken for what it was
AT_ONCE: Final = 32  # questions, before answers have their turn
TURN: Final = 0.01  # seconds of it
BUFFER: Final = 16 << 20  # bytes of answers that may wait: those of thousands come at once
SHARE: Final = 0.5  # of the event loop's time that goes to packets, at most
COOKIE: Final = re.compile(rb'"cookie"\s*:\s*"([0-9a-f]{64})"')


@dataclass(frozen=True)
class Answers:
    """What a poll brought. *silent*: factories that did not answer; *short*: told less than they announced."""

    found: Mapping[str, tuple[Status, ...]]
    silent: tuple[str, ...] = ()
    short: tuple[str, ...] = ()
    refused: Mapping[str, int] = field(default_factory=dict)  # packets, by reason
    rounds: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Known:
    """What a factory told the last time, and when."""

    at: float
    types: tuple[TypeStatus, ...]


Memory = Mapping[str, Known]


def remember(memory: Memory, answers: Answers, now: float) -> tuple[tuple[TypeStatus, ...], Memory]:
    """All that is known of types in the space: what factories told now and, of silent ones, what they told not long ago.
    The second value is the memory for the next time."""
    answered = {
        factory: Known(now, tuple(status for status in statuses if isinstance(status, TypeStatus)))
        for factory, statuses in answers.found.items()
    }
    kept = {
        factory: memory[factory]
        for factory in answers.silent
        if factory in memory and now - KEEP < memory[factory].at <= now
    }
    after = kept | answered
    return tuple(status for known in after.values() for status in known.types), after


def full_name(name: str, own: str) -> str:
    """For a factory as it stands in the settings: `.` is this one, and a name without a dot is in its domain."""
    if name == ".":
        return own
    return name if "." in name or is_numeric(name) else f"{name}.{own.partition('.')[2]}".rstrip(".")


class Peer:
    """One factory during a poll."""

    def __init__(self, name: str, salt: str, *, was_silent: bool, was_short: bool) -> None:
        self.name, self.cookie = name, cookie(salt, name)
        self.rounds = ROUNDS_FOR_THE_SILENT if was_silent else ROUNDS
        self.in_vain_left = 0 if was_short else IN_VAIN
        self.told: dict[str, Status] = {}
        self.announced, self.asked = 1, 0
        self.has_answered = False  # in this round

    @property
    def has_told_all(self) -> bool:
        return len(self.told) >= self.announced

    @property
    def is_wanted(self) -> bool:
        """Is it worth another question?"""
        return not self.has_told_all and self.asked < self.rounds and (not self.told or self.in_vain_left > 0)

    def take(self, status: Status) -> bool:
        """Is it news?"""
        which = "machine" if isinstance(status, MachineStatus) else "machinetype"
        key = getattr(status, which, "")
        is_new = key not in self.told
        self.told[key] = status if status.factory == self.name else replace(status, factory=self.name)
        self.announced = max(1, getattr(status, "of", 1))
        self.has_answered = True
        return is_new


class Poller:
    """Asks the factories of one space, again and again. It remembers where they are, and who told nothing the last time, or less
    than announced: for these the next poll does not wait as long."""

    def __init__(self, space: Space, *, client: str, key: bytes = b"") -> None:
        self.space, self.client, self.key = space, client, key
        self._names = tuple(dict.fromkeys(full_name(name, space.factory) for name in space.factories))
        self.places = Names(self._names, space.port)
        self._silent: tuple[str, ...] = ()
        self._short: tuple[str, ...] = ()

    async def ask(self, kind: Kind) -> Answers:
        """What the factories tell of this now. Takes no longer than the space's `poll_limit`."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        await self.places.look_up(min(self.space.poll_silence, self.space.poll_limit))
        salt = secrets.token_hex(32)
        peers = [
            Peer(name, salt, was_silent=name in self._silent, was_short=name in self._short) for name in self._names
        ]
        poll = _Poll(self, kind, peers)
        with closing(poll.sockets):
            await at_most(began + self.space.poll_limit - loop.time(), poll.rounds())
        self._silent = tuple(peer.name for peer in peers if not peer.told)
        self._short = tuple(peer.name for peer in peers if peer.told and not peer.has_told_all)
        answers = {peer.name: tuple(peer.told.values()) for peer in peers if peer.told}
        return Answers(answers, self._silent, self._short, dict(poll.refused), poll.round, loop.time() - began)


class _Poll:
    """One poll: its sockets, and what came so far."""

    def __init__(self, poller: Poller, kind: Kind, peers: Iterable[Peer]) -> None:
        self._poller, self._space, self._kind = poller, poller.space, kind
        self._peers = {peer.cookie.encode(): peer for peer in peers}
        self.sockets = Outgoing(self._take, longest=LONGEST_DATAGRAM, share=SHARE, buffer=BUFFER)
        self._clock, self._news_at = asyncio.get_running_loop().time, 0.0
        self._awaited, self._all_told = set[Peer](), asyncio.Event()
        self.round = 0
        self.refused: Counter[str] = Counter()

    async def rounds(self) -> None:
        while unfinished := [peer for peer in self._peers.values() if peer.is_wanted]:
            self.round += 1
            before = {peer: len(peer.told) for peer in unfinished}
            await self._ask(unfinished)
            await self._listen()
            for peer in unfinished:
                peer.in_vain_left -= peer.has_answered and len(peer.told) == before[peer]

    async def _ask(self, peers: list[Peer]) -> None:
        self._awaited = set(peers)
        self._all_told.clear()
        for peer in peers:
            peer.asked, peer.has_answered = peer.asked + 1, False
        asker, space = self._poller, self._space.name
        for count, peer in enumerate(peers):
            if places := asker.places.of(peer.name):  # of several, it may listen at one only
                asked = query(self._kind, space, peer.cookie, time.time(), client=asker.client, key=asker.key)
                self.sockets.send(asked, places[(peer.asked - 1) % len(places)])
            if count % AT_ONCE == AT_ONCE - 1:
                await asyncio.sleep(TURN)
        self._news_at = self._clock()

    async def _listen(self) -> None:
        """Until all is told, or nothing new came for a while."""
        while self._awaited and (left := self._news_at + self._space.poll_silence - self._clock()) > 0:
            await at_most(left, self._all_told.wait())

    def _take(self, data: bytes, address: Address) -> None:
        try:
            peer, status = self._read(data)
        except Refused as exc:
            self.refused[exc.why.value] += 1
            return
        if peer.take(status):
            self._news_at = self._clock()
        if peer.has_told_all:
            self._awaited.discard(peer)
            if not self._awaited:
                self._all_told.set()

    def _read(self, data: bytes) -> tuple[Peer, Status]:
        """Whose words these are. What does not have a cookie of this poll is not looked at any closer. Raises Refused."""
        match = COOKIE.search(data)
        peer = self._peers.get(match[1]) if match else None
        if peer is None:
            raise Refused(Why.STRANGE_COOKIE)
        space, key = self._space, self._poller.key
        now, signed_only = time.time(), space.signed_only
        back, status = read_reply(data, self._kind, space.name, now, key, signed_only=signed_only)
        if back != peer.cookie:
            raise Refused(Why.STRANGE_COOKIE)
        if status.factory.lower() != peer.name.lower():
            raise Refused(Why.OTHER_FACTORY)
        return peer, status
