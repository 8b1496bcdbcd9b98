"""Which machines to start now, and for every type why it is or is not started. One pure function, `decide`.

Compatible mode is Vac's: the type furthest below its share, by what runs in the whole space, that is not backing off and finds a
superslot; one machine. Improved mode starts machines until nothing fits. A group's score is its HS06 by its share, whatever the
number of its types. What is small next to a share (SLACK) may wait for a better fit: large machines take large places.

Factories decide at the same time and see the same. So each reckons that the others do as it does: one machine here stands for as
many as there is room elsewhere, and where a machine stands between two of its kind is drawn. With empty factories all round, each
starts a fair sample of the shares; with one free place, the type that is furthest behind."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from math import inf
from typing import Final

from belljar.records import dataclass, field, replace
from belljar.vacuum import MachineType, Mode, Space
from belljar.vacuum.decisions.backoff import Gate, Past, Total, View, drawn, gate, learn, most, over_since, past_of
from belljar.vacuum.decisions.packing import Machine, Reservation, Room, fitting, lacks, largest, reservation, superslot

SLACK: Final = 0.01  # of its share a type may be ahead and still take the place that fits it best
TURN: Final = 14400.0  # so long a factory keeps room, or does not
KEENNESS: Final = 16.0  # so many times the factories that are needed keep room for a type: not all find one soon


class Reason(str, Enum):
    """Why a type is or is not started. Values are for programs, texts for people."""

    text: str

    def __new__(cls, value: str, text: str = "") -> Reason:
        member = str.__new__(cls, value)
        member._value_, member.text = value, text
        return member

    STARTED = "started", "{started} started"
    NO_SHARE = "no-share", "it has no share"
    DRAINING = "draining", "the factory is draining"
    SHUTDOWN = "shutdown", "the factory shuts down before a machine of this type could do its work"
    LOAD = "load", "the host's load is too high ({detail})"
    FULL = "full", "no processors are free"
    STARTING = "starting", "as many machines are starting as may at a time"
    FAILED = "failed", "it failed on this host: {detail}"
    BACKING_OFF = "backing-off", "it backs off: its last machines found no work"
    TESTED = "tested", "it is being tested: a machine younger than its fizzle time runs"
    OTHERS_TEST = "others-test", "another factory is to test it first"
    SIZE = "size", "there is no place of its size: too little of {detail}, or of time"
    RESERVED = "reserved", "what is free is kept for {detail}"
    TURN = "turn", "others are further below their shares"


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
    why: str = ""  # a sentence, without the moment


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
        self.kind, self.total, self.group, self.share = kind, total, kind.belongs_to, max(0.0, kind.share)
        self.usage = total.hs06  # with the past, and with what is being started
        self.score = total.hs06 / self.share if self.share else 0.0
        self.group_score = self.target = self.luck = 0.0
        self.sought = 0.0  # the target that places are looked for by
        self.reason, self.until, self.detail = Reason.TURN, 0.0, ""
        self.most, self.started = 1 << 30, 0  # machines
        self.may_take = 1 << 30  # processors
        self.is_awaited = False  # its work may be back: others leave it its part

    @property
    def is_open(self) -> bool:
        return self.reason in (Reason.TURN, Reason.STARTED, Reason.SIZE, Reason.RESERVED) and self.started < self.most


def by_group(claims: Iterable[Claim], of: Callable[[Claim], float]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for claim in claims:
        sums[claim.group] = sums.get(claim.group, 0.0) + of(claim)
    return sums


class Case:
    """What one decision is about."""

    def __init__(
        self, now: float, space: Space, running: Sequence[Machine], view: View, past: Past, host: Host, random: Callable[[], float]
    ) -> None:  # fmt: skip
        self.now, self.space, self.running, self.host, self.random = now, space, running, host, random
        self.ends = inf if space.shutdown_time is None else space.shutdown_time
        self.past, self.others = learn(now, space, view, past), view.room
        self.totals = view.totals
        self.claims = [Claim(kind, view.totals.get(kind.name, Total())) for kind in space.types]
        self.given = sum(machine.processors for machine in running)
        self.room = Room(space.processors - self.given, host.memory, host.disk)
        self.closed = self._closed()
        for claim in self.claims:
            self._admit(claim)

    def _closed(self) -> tuple[Reason, str] | None:
        """Why this factory starts nothing at all."""
        host, space = self.host, self.space
        busy = min(self.given, host.processors) if self.given > 4 else host.processors
        if host.load > space.overload * busy:
            return Reason.LOAD, f"{host.load:.2f} for {busy} processors"
        if self.now >= self.ends:
            return Reason.SHUTDOWN, ""
        if space.draining:
            return Reason.DRAINING, ""
        if self.given >= space.processors:
            return Reason.FULL, ""
        return (Reason.STARTING, "") if host.starts <= 0 else None

    def _admit(self, claim: Claim) -> None:
        if not claim.share:
            claim.reason = Reason.NO_SHARE
            return
        over = over_since(self.now, self.space, claim.kind, self.totals, self.past)
        how, until = gate(self.now, self.space, claim.kind, claim.total, past_of(self.past, claim.kind), over)
        claim.is_awaited = over < inf
        failing, why = self.host.failing.get(claim.kind.name, (0.0, ""))
        if self.closed is not None:
            claim.reason, claim.detail = self.closed
        elif self.now + claim.kind.least_wallclock >= self.ends:
            claim.reason = Reason.SHUTDOWN
        elif self.now < failing:
            claim.reason, claim.detail, claim.until = Reason.FAILED, why, failing
        elif how in GATES:
            claim.reason, claim.until = GATES[how], until
        else:
            claim.most = most(how, self.space, claim.total)


def decide(
    now: float, space: Space, running: Sequence[Machine], view: View, past: Past, host: Host, random: Callable[[], float]
) -> Decision:  # fmt: skip
    """*running*: this factory's own machines, those that are starting too. *view*: what all factories told, this one among
    them. *past*: the one of the decision before. *random*: numbers from 0 to 1."""
    case = Case(now, space, running, view, past, host, random)
    if space.mode is Mode.COMPATIBLE:
        _score_as_vac(case.claims)
        starts = _one(case) if case.closed is None else []
    else:
        shares = Shares(case)
        starts = _all(case, shares) if case.closed is None else []
    starts = [replace(machine, ends=min(machine.ends, case.ends)) for machine in starts]
    return Decision(tuple(starts), tuple(_verdict(case, claim) for claim in case.claims), case.past, _again(case))


def _score_as_vac(claims: Sequence[Claim]) -> None:
    """A group's score is the sum of its types': a group of n types gets an nth of its share. Kept for spaces shared with Vac."""
    scores = by_group(claims, lambda claim: claim.score)
    for claim in claims:
        claim.group_score = scores[claim.group]


def _one(case: Case) -> list[Machine]:
    space, room, is_open = case.space, case.room, [claim for claim in case.claims if claim.is_open]
    order = sorted(is_open, key=lambda claim: (claim.group_score, claim.score, case.random()))
    machine = superslot(case.now, space, case.running, room, [claim.kind for claim in order])
    for claim in order:
        if machine is not None and machine.machinetype == claim.kind.name:
            claim.reason, claim.started = Reason.STARTED, 1
            break
        claim.reason, claim.detail = Reason.SIZE, lacks(space, claim.kind, room)
    return [] if machine is None else [machine]


class Shares:
    """What each type should have now, and whose turn it is."""

    def __init__(self, case: Case) -> None:
        self.now, self.space, self.claims = case.now, case.space, case.claims
        self.shares = by_group(case.claims, lambda claim: claim.share)
        self.hs06 = case.space.hs06_per_processor
        free = max(1, case.room.processors)
        self.scale = (free + case.others) / free  # for so many machines in the space each of ours stands
        self.left = self.hs06 * (free + case.others)
        for claim in case.claims:
            claim.most = max(1, int(claim.most / self.scale))  # the others start theirs
            if case.space.history:
                claim.usage += past_of(case.past, claim.kind).usage
            claim.luck = case.random() * self._step(min(claim.kind.max_processors, free))
        self.aim()
        self._keep(case.running)

    def _step(self, processors: int) -> float:
        return processors * self.hs06 * self.scale

    def _keep(self, running: Sequence[Machine]) -> None:
        """Nobody takes the part of this host that types are to have whose work may be back."""
        if any(claim.is_awaited for claim in self.claims):
            wanting = [claim for claim in self.claims if claim.is_open or claim.is_awaited]
            targets = self._targets(by_group(self.claims, lambda claim: claim.usage), wanting)
            for claim in (claim for claim in wanting if not claim.is_awaited):
                part = self.space.processors * targets[claim.kind.name] / sum(targets.values())
                here = sum(machine.processors for machine in running if machine.machinetype == claim.kind.name)
                claim.may_take = int(part + SLACK) - here

    def aim(self) -> None:
        """Set the scores of all, and the targets of those that may be started. A type of which one machine only may be started, as a
        test, is to have that one, and takes nothing from the others' targets; its place is looked for as if its work were back."""
        groups = by_group(self.claims, lambda claim: claim.usage)
        tests = [claim for claim in self.claims if claim.is_open and claim.most == 1]
        targets = self._targets(groups, [claim for claim in self.claims if claim.is_open and claim.most > 1])
        by_share = self._targets(groups, [claim for claim in self.claims if claim.is_open]) if tests else {}
        for claim in self.claims:
            of_group = self.shares[claim.group]
            claim.score = claim.usage / claim.share if claim.share else 0.0
            claim.group_score = groups[claim.group] / of_group if of_group else 0.0
            claim.target = claim.sought = targets.get(claim.kind.name, 0.0)
        for claim in tests:
            claim.target, claim.sought = claim.usage + self._step(claim.kind.max_processors), by_share[claim.kind.name]

    def _targets(self, groups: Mapping[str, float], open_: Sequence[Claim]) -> dict[str, float]:
        """What each of these types is to have by the shares of their groups: of what these have, and what is left for them."""
        wanting = by_group(open_, lambda claim: claim.share)
        whole = self.left + sum(groups[name] for name in wanting)
        parts = sum(self.shares[name] for name in wanting)
        return {
            claim.kind.name: whole / parts * self.shares[claim.group] * claim.share / wanting[claim.group]
            for claim in open_
        }

    def order(self) -> list[Claim]:
        """Those that may be started: first who is behind its target, the largest before all, then by how far."""

        def key(claim: Claim) -> tuple[int, float, float]:
            behind = claim.usage + claim.luck <= claim.target * (1 + SLACK)
            group_score = claim.group_score + claim.luck / self.shares[claim.group]
            return -claim.kind.min_processors if behind else 1, group_score, claim.score + claim.luck / claim.share

        return sorted((claim for claim in self.claims if claim.is_open), key=key)

    def take(self, claim: Claim, machine: Machine) -> None:
        step = self._step(machine.processors)
        claim.started, claim.reason, claim.detail = claim.started + 1, Reason.STARTED, ""
        claim.usage += step
        self.left -= step
        claim.may_take -= machine.processors
        self.aim()

    def wants_place(self, claim: Claim) -> bool:
        """Is it this factory's part to keep room for the type? As many factories do as are needed for what it lacks."""
        lack, machine = claim.sought - claim.usage, claim.kind.min_processors * self.hs06
        has_any = claim.total.hs06 > 0  # lacks below half a machine are rounded away, but not from a type without any
        needed = max(lack / machine, not has_any) if lack > max(SLACK * claim.sought, has_any * machine / 2) else 0.0
        words = claim.kind.name, self.space.factory
        place = drawn(*words, int(self.now / TURN + drawn(*words)))
        return place * max(1, len(self.space.factories)) < KEENNESS * needed


def _all(case: Case, shares: Shares) -> list[Machine]:
    """Machines, one after the other, until nothing fits or there are as many as may be started at a time. What would be kept idle
    for a large one for too long is given away."""
    now, space, room, starts, may_keep = case.now, case.space, case.room, list[Machine](), True
    while room.processors > 0:
        order = shares.order()
        if len(starts) >= case.host.starts:
            for claim in order:
                claim.reason = claim.reason if claim.started else Reason.STARTING
            break
        held = None
        if may_keep and (first := _first_to_wait(space, shares, order, room)):
            held = reservation(now, space, first, [*case.running, *starts], room)
        for claim in order:
            if machine := fitting(now, space, claim.kind, room.within(Room(claim.may_take)), held):
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


def _first_to_wait(space: Space, shares: Shares, order: Sequence[Claim], room: Room) -> MachineType | None:
    """The first type that finds no place and has this factory's word for one."""
    waiting = (claim.kind for claim in order if not largest(space, claim.kind, room) and shares.wants_place(claim))
    return next(waiting, None)


def _tell_unfit(space: Space, order: Sequence[Claim], room: Room, held: Reservation | None) -> None:
    for claim in order:
        if claim.started:
            continue
        if claim.may_take < claim.kind.min_processors:
            claim.reason, claim.detail = Reason.RESERVED, "types that are tested first"
        elif held is not None and largest(space, claim.kind, room):
            claim.reason, claim.detail, claim.until = Reason.RESERVED, held.machine.machinetype, held.at
        else:
            claim.reason, claim.detail = Reason.SIZE, lacks(space, claim.kind, room)


def _verdict(case: Case, claim: Claim) -> Verdict:
    kind, known = claim.kind, past_of(case.past, claim.kind)
    abort = max(claim.total.last_abort, known.last_abort)
    return Verdict(
        kind.name, claim.reason, claim.started, claim.until or None, claim.detail, kind.share, kind.belongs_to,
        claim.total.hs06, claim.score, claim.group_score, claim.target or None, claim.total.young, abort or None, known.failures,
        claim.reason.text.format(started=claim.started, detail=claim.detail),
    )  # fmt: skip


def _again(case: Case) -> float:
    """When something may have changed by itself. What waits for processors waits for the end of a machine."""
    soon, late = case.now + case.space.cycle, case.now + 10 * case.space.cycle
    if case.space.mode is Mode.COMPATIBLE or (case.closed is not None and case.closed[0] is Reason.LOAD):
        return soon
    if case.closed is not None:
        return late
    is_soon = (Reason.RESERVED, Reason.STARTED)
    moments = [soon if claim.reason in is_soon else claim.until or late for claim in case.claims]
    return max(case.now + 1.0, min([late, *moments]))
