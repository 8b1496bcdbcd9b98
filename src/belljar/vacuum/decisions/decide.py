"""Which machines to start now, and for every type why it is or is not started. One pure function, `decide`.

Compatible mode is Vac's: the type furthest below its share, by what runs in the whole space, that is not backing off and finds a
superslot; one machine. Improved mode starts machines until nothing fits. A group's score is its HS06 by its share, whatever the
number of its types. What is small next to a share (SLACK) may wait for a better fit: large machines take large places.

Factories decide at the same time and see the same. So each reckons that the others do as it does: one machine here stands for as
many as there is room elsewhere, and where a machine stands between two of its kind is drawn. With empty factories all round, each
starts a fair sample of the shares; with one free place, the type that is furthest behind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from math import inf
from typing import Final

from belljar.records import dataclass, field, replace
from belljar.vacuum import MachineType, Mode, Space
from belljar.vacuum.decisions.backoff import NO_PAST, NOTHING, Gate, Past, Total, View, drawn, gate, learn, most
from belljar.vacuum.decisions.packing import Machine, Reservation, Room, fitting, lacks, largest, reservation, superslot

SLACK: Final = 0.01  # of its share a type may be ahead and still take the place that fits it best
TURN: Final = 14400.0  # so long a factory keeps room, or does not
KEENNESS: Final = (
    16.0  # so many times the factories that are needed keep room for a type that finds none: not all can soon
)


class Reason(str, Enum):
    """Why a type is or is not started. Values are for programs, `Verdict.why` for people."""

    STARTED = "started"
    NO_SHARE = "no-share"
    DRAINING = "draining"
    SHUTDOWN = "shutdown"
    LOAD = "load"
    FULL = "full"
    STARTING = "starting"
    FAILED = "failed"
    BACKING_OFF = "backing-off"
    TESTED = "tested"
    OTHERS_TEST = "others-test"
    SIZE = "size"
    RESERVED = "reserved"
    TURN = "turn"


TEXTS: Final = {
    Reason.STARTED: "{started} started",
    Reason.NO_SHARE: "it has no share",
    Reason.DRAINING: "the factory is draining",
    Reason.SHUTDOWN: "the factory shuts down before such a machine is of use",
    Reason.LOAD: "the host's load is too high ({detail})",
    Reason.FULL: "no processors are free",
    Reason.STARTING: "as many machines are starting as may at a time",
    Reason.FAILED: "none could be started here: {detail}",
    Reason.BACKING_OFF: "it backs off: its last machines found no work",
    Reason.TESTED: "it is being tested: a machine younger than its fizzle time runs",
    Reason.OTHERS_TEST: "another factory is to test it first",
    Reason.SIZE: "there is no place of its size: too little of {detail}, or of time",
    Reason.RESERVED: "what is free is kept for {detail}",
    Reason.TURN: "others are further below their shares",
}
GATES: Final = {Gate.BLOCKED: Reason.BACKING_OFF, Gate.TESTED: Reason.TESTED, Gate.OTHERS: Reason.OTHERS_TEST}


@dataclass(frozen=True)
class Host:
    """What this host has."""

    processors: int  # all of them
    load: float = 0.0  # average: of the last minute in improved mode, the highest of the three in compatible mode
    memory: float = inf  # that new machines may take; infinite: nobody looks
    disk: float = inf
    starts: int = 1 << 30  # machines that may be started now: those that are starting already count
    failing: Mapping[str, tuple[float, str]] = field(default_factory=dict)  # by type: until when none is tried, and why


@dataclass(frozen=True)
class Verdict:
    """Why a type is or is not started now."""

    machinetype: str
    reason: Reason
    started: int = 0
    until: float | None = None  # when the reason may pass by itself
    detail: str = ""
    share: float = 0.0
    group: str = ""
    hs06: float = 0.0  # that it has in the whole space
    score: float = 0.0  # HS06 by share; the lowest is served first
    group_score: float = 0.0
    target: float | None = None  # HS06 that it should have now
    young: int = 0
    last_abort: float | None = None
    failures: int = 0  # tests in a row that found no work

    @property
    def why(self) -> str:
        """A sentence, without the moment."""
        return TEXTS[self.reason].format(started=self.started, detail=self.detail)


@dataclass(frozen=True)
class Decision:
    """What to do now, why, and what to hand to the next decision."""

    starts: tuple[Machine, ...]
    verdicts: tuple[Verdict, ...]
    past: Past
    again: float  # before this moment another decision is of no use, unless a machine ends or settings change


class Claim:
    """What a type may claim, while a decision is made."""

    def __init__(self, kind: MachineType, total: Total) -> None:
        self.kind, self.total = kind, total
        self.usage = total.hs06  # with the past, and with what is being started
        self.score = total.hs06 / kind.share if kind.share > 0 else 0.0
        self.group_score = self.target = self.luck = 0.0
        self.reason, self.until, self.detail = Reason.TURN, 0.0, ""
        self.most, self.started = 1 << 30, 0  # machines

    @property
    def is_open(self) -> bool:
        return self.reason in (Reason.TURN, Reason.STARTED, Reason.SIZE, Reason.RESERVED) and self.started < self.most


def decide(
    now: float,
    space: Space,
    running: Sequence[Machine],
    view: View,
    past: Past,
    host: Host,
    random: Callable[[], float],
) -> Decision:
    """*running*: this factory's own machines, those that are starting too. *view*: what all factories told, this one among
    them. *past*: the one of the decision before. *random*: numbers from 0 to 1."""
    past = learn(now, space, view, past)
    claims = [Claim(kind, view.totals.get(kind.name, NOTHING)) for kind in space.types]
    given = sum(one.processors for one in running)
    room = Room(space.processors - given, host.memory, host.disk)
    closed = _closed(now, space, given, host)
    for claim in claims:
        _admit(now, space, claim, past, closed, host)
    starts: list[Machine] = []
    if space.mode is Mode.COMPATIBLE:
        _score_as_vac(claims)
        if closed is None:
            starts = _one(now, space, claims, running, room, random)
    else:
        shares = Shares(now, space, claims, past, view.room, room, random)
        if closed is None:
            starts = _all(now, space, shares, running, room, host.starts)
    if space.shutdown_time is not None:
        starts = [replace(one, ends=min(one.ends, space.shutdown_time)) for one in starts]
    verdicts = tuple(_verdict(claim, past) for claim in claims)
    return Decision(tuple(starts), verdicts, past, _again(now, space, claims, closed))


# -- who may ---------------------------------------------------------------------------------------------------------------


def _closed(now: float, space: Space, given: int, host: Host) -> tuple[Reason, str] | None:
    """Why this factory starts nothing at all."""
    least = given if given > 4 else host.processors
    if host.load > space.overload * min(least, host.processors):
        return Reason.LOAD, f"{host.load:.2f} for {min(least, host.processors)} processors"
    if space.shutdown_time is not None and now >= space.shutdown_time:
        return Reason.SHUTDOWN, ""
    if space.draining:
        return Reason.DRAINING, ""
    if given >= space.processors:
        return Reason.FULL, ""
    return (Reason.STARTING, "") if host.starts <= 0 else None


def _admit(now: float, space: Space, claim: Claim, past: Past, closed: tuple[Reason, str] | None, host: Host) -> None:
    kind = claim.kind
    if kind.share <= 0:
        claim.reason = Reason.NO_SHARE
        return
    known = past.get(kind.name, NO_PAST)
    how, until = gate(now, space, kind, claim.total, known)
    failing, why = host.failing.get(kind.name, (0.0, ""))
    if closed is not None:
        claim.reason, claim.detail = closed
    elif space.shutdown_time is not None and now + kind.least_wallclock >= space.shutdown_time:
        claim.reason = Reason.SHUTDOWN
    elif now < failing:
        claim.reason, claim.detail, claim.until = Reason.FAILED, why, failing
    elif how in GATES:
        claim.reason, claim.until = GATES[how], until
    else:
        claim.most = most(how, space, claim.total)


# -- as Vac ----------------------------------------------------------------------------------------------------------------


def _score_as_vac(claims: Sequence[Claim]) -> None:
    """A group's score is the sum of its types': a group of n types gets an nth of its share. Kept for spaces shared with Vac."""
    scores = dict[str, float]()
    for claim in claims:
        scores[claim.kind.belongs_to] = scores.get(claim.kind.belongs_to, 0.0) + claim.score
    for claim in claims:
        claim.group_score = scores[claim.kind.belongs_to]


def _one(
    now: float,
    space: Space,
    claims: Sequence[Claim],
    running: Sequence[Machine],
    room: Room,
    random: Callable[[], float],
) -> list[Machine]:
    order = sorted((claim for claim in claims if claim.is_open), key=lambda one: (one.group_score, one.score, random()))
    machine = superslot(now, space, running, room, [claim.kind for claim in order])
    for claim in order:
        if machine is not None and machine.machinetype == claim.kind.name:
            claim.reason, claim.started = Reason.STARTED, 1
            break
        claim.reason, claim.detail = Reason.SIZE, lacks(space, claim.kind, room)
    return [] if machine is None else [machine]


# -- improved --------------------------------------------------------------------------------------------------------------


class Shares:
    """What each type should have now, and whose turn it is."""

    def __init__(
        self,
        now: float,
        space: Space,
        claims: Sequence[Claim],
        past: Past,
        others: float,
        room: Room,
        random: Callable[[], float],
    ) -> None:
        self.now, self.space, self.claims, self.past = now, space, claims, past
        self.hs06 = space.hs06_per_processor
        free = max(1, room.processors)
        self.scale = (free + others) / free  # for so many machines in the space each of ours stands
        self.left = self.hs06 * (free + others)
        for claim in claims:
            claim.most = max(1, int(claim.most / self.scale))  # the others start theirs
            if space.history:
                claim.usage += past.get(claim.kind.name, NO_PAST).usage
            claim.luck = random() * self._step(min(claim.kind.max_processors, free))
        self.aim()

    def _step(self, processors: int) -> float:
        return processors * self.hs06 * self.scale

    def aim(self) -> None:
        """Set the scores of all, and the targets of those that may be started: what a group has, and what is left for it."""
        groups, shares, open_ = dict[str, float](), dict[str, float](), dict[str, float]()
        for claim in self.claims:
            name, share = claim.kind.belongs_to, max(0.0, claim.kind.share)
            groups[name] = groups.get(name, 0.0) + claim.usage
            shares[name] = shares.get(name, 0.0) + share
            open_[name] = open_.get(name, 0.0) + (share if claim.is_open else 0.0)
        wanting = [name for name in groups if open_[name]]
        whole, parts = self.left + sum(groups[name] for name in wanting), sum(shares[name] for name in wanting)
        for claim in self.claims:
            name, share = claim.kind.belongs_to, claim.kind.share
            claim.score = claim.usage / share if share > 0 else 0.0
            claim.group_score = groups[name] / shares[name] if shares[name] else 0.0
            claim.target = whole / parts * shares[name] * share / open_[name] if claim.is_open else 0.0

    def order(self) -> list[Claim]:
        """Those that may be started: first who is behind its target, the largest before all, then by how far."""
        shares = dict[str, float]()
        for claim in self.claims:
            shares[claim.kind.belongs_to] = shares.get(claim.kind.belongs_to, 0.0) + max(0.0, claim.kind.share)

        def key(claim: Claim) -> tuple[int, float, float]:
            behind = claim.usage + claim.luck <= claim.target * (1 + SLACK)
            group_score = claim.group_score + claim.luck / shares[claim.kind.belongs_to]
            return (
                -claim.kind.min_processors if behind else 1,
                group_score,
                claim.score + claim.luck / claim.kind.share,
            )

        return sorted((claim for claim in self.claims if claim.is_open), key=key)

    def take(self, claim: Claim, machine: Machine) -> None:
        step = self._step(machine.processors)
        claim.started, claim.reason, claim.detail = claim.started + 1, Reason.STARTED, ""
        claim.usage += step
        self.left -= step
        self.aim()

    def wants_place(self, claim: Claim) -> bool:
        """Is it this factory's part to keep room for the type? As many factories do as are needed for what it lacks."""
        lack, machine = claim.target - claim.usage, claim.kind.min_processors * self.hs06
        needed = lack / machine if lack > max(SLACK * claim.target, machine / 2) else 0.0
        words = claim.kind.name, self.space.factory
        place = drawn(*words, int(self.now / TURN + drawn(*words)))
        return place * max(1, len(self.space.factories)) < KEENNESS * needed


def _all(now: float, space: Space, shares: Shares, running: Sequence[Machine], room: Room, most: int) -> list[Machine]:
    """Machines, one after the other, until nothing fits or there are as many as may be started at a time. What would be kept idle for a large one for too long is given away."""
    starts: list[Machine] = []
    may_keep = True
    while room.processors > 0:
        order = shares.order()
        if len(starts) >= most:
            for claim in order:
                claim.reason = claim.reason if claim.started else Reason.STARTING
            break
        held = _held(now, space, shares, order, [*running, *starts], room) if may_keep else None
        for claim in order:
            if machine := fitting(now, space, claim.kind, room, held):
                shares.take(claim, machine)
                starts.append(machine)
                room = room.less(machine)
                break
        else:
            may_keep = held is not None and held.idle(now, room) <= space.reserve
            if may_keep or held is None:
                _tell_unfit(space, order, room, held)
                break
    return starts


def _held(
    now: float, space: Space, shares: Shares, order: Sequence[Claim], running: Sequence[Machine], room: Room
) -> Reservation | None:
    """The place that is kept for the first type that finds none and has this factory's word."""
    for claim in order:
        if not largest(space, claim.kind, room) and shares.wants_place(claim):
            return reservation(now, space, claim.kind, running, room)
    return None


def _tell_unfit(space: Space, order: Sequence[Claim], room: Room, held: Reservation | None) -> None:
    for claim in order:
        if claim.started:
            continue
        if held is not None and largest(space, claim.kind, room):
            claim.reason, claim.detail, claim.until = Reason.RESERVED, held.machine.machinetype, held.at
        else:
            claim.reason, claim.detail = Reason.SIZE, lacks(space, claim.kind, room)


# -- what is told ----------------------------------------------------------------------------------------------------------


def _verdict(claim: Claim, past: Past) -> Verdict:
    kind, known = claim.kind, past.get(claim.kind.name, NO_PAST)
    abort = max(claim.total.last_abort, known.last_abort)
    return Verdict(
        kind.name, claim.reason, claim.started, claim.until or None, claim.detail, kind.share, kind.belongs_to,
        claim.total.hs06, claim.score, claim.group_score, claim.target or None, claim.total.young, abort or None, known.failures,
    )  # fmt: skip


def _again(now: float, space: Space, claims: Sequence[Claim], closed: tuple[Reason, str] | None) -> float:
    """When something may have changed by itself. What waits for processors waits for the end of a machine."""
    soon, late = now + space.cycle, now + 10 * space.cycle
    if space.mode is Mode.COMPATIBLE or (closed is not None and closed[0] is Reason.LOAD):
        return soon
    if closed is not None:
        return late
    moments = [late]
    for claim in claims:
        if claim.reason in (Reason.RESERVED, Reason.STARTED):
            moments.append(soon)
        elif claim.until:
            moments.append(claim.until)
    return max(now + 1.0, min(moments))
