"""May a machine of this type be started, or did the last ones find no work? And what a factory remembers for that.

Vac blocks a type for `backoff` seconds after an aborted machine, and while a young one runs, for `fizzle` more; then every factory
with room starts one. In improved mode the delay grows with each test that fails, one factory after the other is entitled to test,
and the type is open again when a machine that began after the abort has found work. All factories reckon the same, for they
reckon from what all are told. Pure."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from enum import Enum
from functools import lru_cache
from math import inf
from typing import Final

from belljar.records import dataclass, replace
from belljar.vacuum import MachineType, Mode, Space, TypeStatus, code_of, is_abort

MOST_DELAY: Final = 8  # times `backoff`
JITTER: Final = 0.25  # of the delay, at most, is added to it
UNPROVEN: Final = 64  # young machines, or one for each factory, of a type that nobody has seen find work
AHEAD: Final = 300  # seconds that the clock of another factory may be fast; later moments do not count


@dataclass(frozen=True)
class Total:
    """What all factories together tell of a type."""

    hs06: float = 0.0
    young: int = 0
    last_abort: float = 0.0  # 0: none is known
    proved: float = 0.0  # when the latest machine began that found work


@dataclass(frozen=True)
class View:
    """What all factories together tell."""

    totals: Mapping[str, Total]
    room: float = 0.0  # processors that the other factories will give away next


@dataclass(frozen=True)
class TypePast:
    """What a factory remembers of a type, also over its own restart."""

    last_abort: float = 0.0
    failures: int = 0  # tests that were aborted, one after the other
    usage: float = 0.0  # HS06, averaged over the past
    at: float = 0.0  # the moment of that average


Past = Mapping[str, TypePast]
NOTHING, NO_PAST = Total(), TypePast()


def past_of(past: Past, kind: MachineType) -> TypePast:
    return past.get(kind.name, NO_PAST)


@dataclass(frozen=True)
class Failing:
    """A type that failed on this host: it could not be started, or the host ended its machine."""

    until: float  # none is started here before
    times: int  # in a row
    why: str


def after_failure(before: Failing | None, kind: MachineType, space: Space, now: float, why: str) -> Failing:
    """This type has failed once more. Machines that failed together are one failure."""
    if before is not None and now < before.until:
        return replace(before, why=why)
    times = 1 if before is None else before.times + 1
    return Failing(now + max(kind.backoff, space.cycle) * min(2.0 ** (times - 1), MOST_DELAY), times, why)


class Gate(str, Enum):
    """How a type stands."""

    OPEN = "open"
    NEW = "new"  # open for some, until one has found work
    BLOCKED = "blocked"
    TESTED = "tested"  # a test machine is at it
    OTHERS = "others"  # another factory is entitled to test
    TEST = "test"  # this factory may start one machine


def view_of(statuses: Iterable[TypeStatus], space: Space) -> View:
    """What the factories told, added up."""
    sums, room = defaultdict[str, list[float]](lambda: [0.0, 0.0, 0.0, 0.0]), dict[str, float]()
    for status in statuses:
        so_far, at = sums[status.machinetype], float(status.message_time or 0)
        so_far[0] += status.running_hs06
        so_far[1] += status.young
        so_far[2] = max(so_far[2], float(status.last_abort or 0), at if is_abort(status.message) else 0.0)
        so_far[3] = max(so_far[3], _proof(status, at))
        if status.room and status.factory != space.factory:
            room[status.factory] = status.room
    totals = {name: Total(hs06, int(young), *rest) for name, (hs06, young, *rest) in sums.items()}
    return View(totals, sum(room.values()))


def _proof(status: TypeStatus, at: float) -> float:
    """Factories that do not tell it have at least said how their last machine ended."""
    if status.proved is not None:
        return float(status.proved)
    return at if 200 <= (code_of(status.message) or 0) < 300 else 0.0


def learn(now: float, space: Space, view: View, past: Past) -> Past:
    """The past, with what is new; the same value where nothing is."""
    new = dict[str, TypePast]()
    for kind in space.types:
        known, total = past_of(past, kind), view.totals.get(kind.name, NOTHING)
        if known.last_abort < total.last_abort <= now + AHEAD:
            failures = _failures(kind, known, total)
            known = new[kind.name] = replace(known, last_abort=total.last_abort, failures=failures)
        if space.history and now > known.at:
            kept = 0.5 ** ((now - known.at) / space.history) if known.at else 0.0
            new[kind.name] = replace(known, usage=known.usage * kept + total.hs06 * (1.0 - kept), at=now)
    return {**past, **new} if new else past


def _failures(kind: MachineType, known: TypePast, total: Total) -> int:
    """A failed test is one more; a machine from before the back-off changes nothing; between them work was found."""
    if not known.last_abort or total.proved > known.last_abort:
        return 0
    return known.failures + (total.last_abort > blocked_until(kind, known))


def blocked_until(kind: MachineType, past: TypePast) -> float:
    """The end of the delay after the last abort. Its jitter is the same for all factories, and another for each abort."""
    delay = kind.backoff * min(MOST_DELAY, 2.0 ** min(past.failures, 9))
    return past.last_abort + delay * (1 + JITTER * drawn(kind.name, int(past.last_abort)))


def over_since(now: float, space: Space, kind: MachineType, totals: Mapping[str, Total], past: Past) -> float:
    """Since when it is known that a type which backed off together with this one finds work again: what stopped both may be over.
    Infinite: there is no such type, or this one was tested since, or has had the time for it."""
    mine, moments = past_of(past, kind), [inf]
    if mine.last_abort and now < blocked_until(kind, mine) + kind.fizzle + 10 * space.cycle:
        for other in space.types:
            known, proved = past_of(past, other), totals.get(other.name, NOTHING).proved
            if 0 < known.last_abort < proved and mine.last_abort < blocked_until(other, known):
                moments.append(proved + other.fizzle)
    return inf if totals.get(kind.name, NOTHING).proved > mine.last_abort else min(moments)


def gate(
    now: float, space: Space, kind: MachineType, total: Total, past: TypePast, over: float = inf
) -> tuple[Gate, float]:
    """How the type stands, and until when: the moment at which that may change by itself (0: it is open). *over*: see `over_since`."""
    if space.mode is Mode.COMPATIBLE:
        until = total.last_abort + kind.backoff + (kind.fizzle if total.young else 0)
        return (Gate.OPEN, 0.0) if total.last_abort == 0 or until < now else (Gate.BLOCKED, until)
    if total.proved > past.last_abort:
        return Gate.OPEN, 0.0
    if not past.last_abort:
        return (Gate.NEW, 0.0) if most(Gate.NEW, space, total) else (Gate.TESTED, now + space.cycle)
    until = min(blocked_until(kind, past), max(over, past.last_abort + kind.backoff))
    if now <= until:
        return Gate.BLOCKED, until
    if total.young:
        return Gate.TESTED, now + space.cycle
    turn = until + space.cycle * rank(kind.name, past.last_abort, space).bit_length()
    return (Gate.TEST, turn) if now >= turn else (Gate.OTHERS, turn)


def most(how: Gate, space: Space, total: Total) -> int:
    """So many machines of the type may be started by one decision, where there is room."""
    new = max(UNPROVEN, len(space.factories)) - total.young
    return {Gate.OPEN: 1 << 30, Gate.NEW: max(0, new), Gate.TEST: 1}.get(how, 0)


def rank(machinetype: str, period: float, space: Space) -> int:
    """This factory's place in the order in which factories may test a type: 0 is the first. After each cycle without a test
    twice as many are entitled, for those before may be full or gone."""
    return _ranks(machinetype, int(period), space.factories).get(space.factory, 0)


@lru_cache(maxsize=64)
def _ranks(machinetype: str, period: int, factories: tuple[str, ...]) -> Mapping[str, int]:
    order = sorted(factories, key=lambda factory: _hashed(machinetype, period, factory))
    return {factory: place for place, factory in enumerate(order)}


@lru_cache(maxsize=1024)
def drawn(*words: object) -> float:
    """A number from 0 to 1 that everybody draws who knows the same words."""
    return _hashed(*words) / 2.0**64


def _hashed(*words: object) -> int:
    text = "\0".join(map(str, words)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")
