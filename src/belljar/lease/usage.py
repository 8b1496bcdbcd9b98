"""What owners used: when each machine began, and for how long it ran. Sums are rounded up."""

from __future__ import annotations

from math import ceil

from belljar.errors import RecordsLost
from belljar.lease import Instance, Lease
from belljar.lease.store import Book
from belljar.model import GIB
from belljar.records import dataclass

MOST = 500  # events of one answer


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
    return [_usage(book, one, now) for one in book.machines(owner, since) if one.launched is not None]


def over(book: Book, after: str) -> tuple[list[Usage], str]:
    """Machines that ended behind this position of the events ("": from the first on), and the next position; the same one where there
    is nothing new. Where these are not the records that the position is of, as they were of an older day, all are told again."""
    number, _, wall = after.partition(":")
    position = int(number) if number.isdecimal() and len(number) < 19 else 0
    here = book.events(position - 1, limit=1) if position else []
    if not here or (here[0][0], str(here[0][1].wall)) != (position, wall):
        position = 0
    events = book.events(position, limit=MOST)
    found = [_usage(book, book.get(Instance, one.of), 0.0) for _, one in events if one.charged]
    return found, f"{events[-1][0]}:{events[-1][1].wall}" if events else after


def _usage(book: Book, machine: Instance | None, now: float) -> Usage:
    lease = book.get(Lease, machine.lease) if machine is not None else None
    if machine is None or lease is None:
        raise RecordsLost("a machine has events, and is not there itself")
    size, began = machine.size, machine.launched or machine.created
    seconds = max(0, ceil(now - began)) if machine.is_live else machine.charged
    return Usage(machine.id, lease.id, lease.owner, lease.group, lease.wanted.image_of(machine.index), size.cpus, size.memory,
                 size.disk, began, machine.ended, seconds)  # fmt: skip
