"""What owners used, from the events alone: when each machine began, and for how long it ran. Sums are rounded up."""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil

from belljar.errors import RecordsLost
from belljar.lease import Event, Instance, Lease
from belljar.lease.store import Book
from belljar.model import GIB
from belljar.records import dataclass


@dataclass(frozen=True)
class Usage:
    """Of one machine, as its lease describes it. Sizes in bytes, durations in seconds."""

    machine: str
    lease: str
    owner: str
    group: str
    image: str
    cpus: int
    memory: int
    disk: int
    began: float
    ended: float | None  # None: it runs
    seconds: int

    @property
    def sums(self) -> dict[str, int]:
        return {
            "core_seconds": self.cpus * self.seconds, "gb_seconds": -(-self.memory * self.seconds // GIB),
            "vm_minutes": -(-self.seconds // 60),
        }  # fmt: skip


def used(book: Book, now: float, owner: str = "", since: float = 0.0) -> list[Usage]:
    """By an owner, or everybody: machines that run, and those that ended *since* then. What never ran is not there."""
    found = _usages(book, book.events_of(owner, since), now)
    return [one for one in found if one.ended is None or one.ended >= since]


def over(book: Book, after: str, limit: int = 500) -> tuple[list[Usage], str]:
    """Machines that ended behind this position of the events ("": from the first on), and the next position; the same one where there
    is nothing new. Where these are not the records that the position is of, as they were of an older day, all are told again."""
    number, _, wall = after.partition(":")
    position = int(number) if number.isdecimal() and len(number) < 19 else 0
    here = book.events(position - 1, limit=1) if position else []
    if not here or (here[0][0], str(here[0][1].wall)) != (position, wall):
        position = 0
    events = book.events(position, limit=limit)
    new = {one.of: one.lease for _, one in events if one.charged}
    whole = (one for lease in dict.fromkeys(new.values()) for _, one in book.events(lease=lease, limit=1 << 20))
    found = [one for one in _usages(book, whole, 0.0) if one.machine in new]
    return found, f"{events[-1][0]}:{events[-1][1].wall}" if events else after


def _usages(book: Book, events: Iterable[Event], now: float) -> list[Usage]:
    began, ends = dict[str, float](), dict[str, Event]()
    for one in events:
        if one.of.startswith("i-") and one.after in ("running", "terminated"):
            if one.after == "terminated":
                ends[one.of] = one
            if one.after == "running" or one.charged:
                began.setdefault(one.of, one.wall - one.charged)
    return [_usage(book, id, start, ends.get(id), now) for id, start in began.items()]


def _usage(book: Book, id: str, start: float, end: Event | None, now: float) -> Usage:
    machine = book.get(Instance, id)
    lease = book.get(Lease, machine.lease) if machine is not None else None
    if machine is None or lease is None:
        raise RecordsLost(f"{id}: it has events, and is not there itself")
    seconds = end.charged if end is not None else max(0, ceil(now - start))
    size = machine.size
    return Usage(id, lease.id, lease.owner, lease.group, lease.wanted.image_of(machine.index), size.cpus, size.memory,
                 size.disk, start, end.wall if end is not None else None, seconds)  # fmt: skip
