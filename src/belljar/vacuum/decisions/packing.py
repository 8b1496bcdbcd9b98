"""Which machine has a place on this host: superslots, as Vac has them, and a packing of our own.

Pure. Whose turn it is, the caller says. In superslots (compatible mode) machines join others that end at the same moment, so that
their processors come free together. In our packing, memory and disk count as well, and a large machine that finds no place gets a
reservation: until then only what ends in time, or what leaves it enough, is started."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf

from belljar.records import dataclass
from belljar.vacuum import MachineType, Space


@dataclass(frozen=True)
class Machine:
    """A machine that has a place here, or that is to be started."""

    machinetype: str
    processors: int
    ends: float  # its deadline; it may end sooner
    memory: int = 0
    disk: int = 0


@dataclass(frozen=True)
class Room:
    """What is free, of memory and disk where somebody looks."""

    processors: int
    memory: float = inf
    disk: float = inf

    def less(self, machine: Machine, by: int = 1) -> Room:
        """What is left when this machine is started; with -1, what is free when it has ended."""
        return Room(
            self.processors - by * machine.processors, self.memory - by * machine.memory, self.disk - by * machine.disk
        )

    def has(self, machine: Machine) -> bool:
        left = self.less(machine)
        return min(left.processors, left.memory, left.disk) >= 0

    def within(self, other: Room) -> Room:
        """For each the lesser."""
        return Room(min(self.processors, other.processors), min(self.memory, other.memory), min(self.disk, other.disk))


@dataclass(frozen=True)
class Reservation:
    """A machine that finds no place now, when it will, and what is free beside it then."""

    machine: Machine
    at: float
    lasts: float  # seconds that it will have at most
    beside: Room

    def idle(self, now: float, room: Room) -> float:
        """What is kept idle for it from now on, as a part of the processor time it will have."""
        return min(room.processors / self.machine.processors, 1.0) * (self.at - now) / self.lasts


def sizes(space: Space, kind: MachineType) -> tuple[int, int]:
    """Memory and disk per processor. What has no size takes no room."""
    return kind.memory or space.memory, kind.disk or space.disk or 0


def machine_of(space: Space, kind: MachineType, processors: int, ends: float) -> Machine:
    """One of this type with so many processors."""
    memory, disk = sizes(space, kind)
    return Machine(kind.name, processors, ends, processors * memory, processors * disk)


def largest(space: Space, kind: MachineType, room: Room) -> int:
    """Processors of the largest machine of this type for which there is room; 0: not even for the smallest."""
    memory, disk = sizes(space, kind)
    most = min(kind.max_processors, room.processors, room.memory / memory, room.disk / disk if disk else inf)
    return int(most) if most >= kind.min_processors else 0


def lacks(space: Space, kind: MachineType, room: Room) -> str:
    """For what there is too little for the smallest machine of this type."""
    if kind.min_processors > room.processors:
        return "processors"
    smallest = machine_of(space, kind, kind.min_processors, 0.0)
    if smallest.memory > room.memory:
        return "memory"
    return "disk" if smallest.disk > room.disk else "time"


def superslot(
    now: float, space: Space, running: Iterable[Machine], room: Room, order: Sequence[MachineType]
) -> Machine | None:
    """The one machine Vac would start: in the hole that closes first, else in a superslot of its own. A hole stays reserved
    though nobody can fill it."""
    group, free, given = space.processors_per_superslot, room.processors, dict[float, int]()
    for other in running:
        given[other.ends] = given.get(other.ends, 0) + other.processors
    for end in sorted(given):
        hole = min(free, -given[end] % group)
        if not hole:
            continue
        free, inside = free - hole, Room(hole, room.memory, room.disk)
        for kind in order:
            size = largest(space, kind, inside)
            if size and kind.least_wallclock <= end - now <= kind.max_wallclock:
                return machine_of(space, kind, size, end)
    outside = Room(min(free, group), room.memory, room.disk)
    for kind in order if free else ():
        if size := largest(space, kind, outside):
            return machine_of(space, kind, size, now + kind.max_wallclock)
    return None


def fitting(now: float, space: Space, kind: MachineType, room: Room, held: Reservation | None) -> Machine | None:
    """The largest machine of this type that may be started now: it leaves the reserved one its place, or ends before that."""
    size = largest(space, kind, room)
    if not size or held is None or held.machine.machinetype == kind.name:
        return machine_of(space, kind, size, now + kind.max_wallclock) if size else None
    left = held.at - now
    if kind.max_wallclock <= left:
        return machine_of(space, kind, size, now + kind.max_wallclock)
    if beside := largest(space, kind, room.within(held.beside)):
        return machine_of(space, kind, beside, now + kind.max_wallclock)
    return machine_of(space, kind, size, held.at) if kind.least_wallclock <= left else None


def reservation(
    now: float, space: Space, kind: MachineType, running: Iterable[Machine], room: Room
) -> Reservation | None:
    """Where one more of the smallest machines of this type has its place first, if nothing more is started; None: nowhere. Deadlines
    are what is known: when machines end sooner, it comes sooner. A place that a machine of this type leaves is not counted as one more."""
    machine = machine_of(space, kind, kind.min_processors, now + kind.max_wallclock)
    at, later = now, room
    for other in sorted((other for other in running if other.machinetype != kind.name), key=lambda other: other.ends):
        if later.has(machine) and other.ends > at:
            break
        at, later = max(now, other.ends), later.less(other, -1)
    return Reservation(machine, at, kind.max_wallclock, later.less(machine)) if later.has(machine) else None
