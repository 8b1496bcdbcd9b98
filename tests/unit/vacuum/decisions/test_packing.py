"""Places for machines: superslots as Vac fills them, row by row, and reservations of our own."""

from __future__ import annotations

import pytest

from belljar.model import GIB
from belljar.records import replace
from belljar.vacuum import MachineType, Space
from belljar.vacuum.decisions.packing import Machine, Reservation, Room, fitting, lacks, largest, reservation, superslot

M8 = MachineType("m8", 1.0, min_processors=8, max_processors=8, min_wallclock=9000.0)
S1 = MachineType("s1", 1.0, min_wallclock=9000.0)
E8 = MachineType("e8", 1.0, max_processors=8, min_wallclock=3600.0)
PLAIN = MachineType("plain", 1.0)  # its least wall clock time is its most: it never joins anything
SPACE = Space("vac.example.org", "f1.example.org", types=(M8, S1, E8, PLAIN), processors=16, processors_per_superslot=8)
DAY = 86400.0


def running(*groups: tuple[int, int, float]) -> list[Machine]:
    """(how many, of how many processors, the end of all)"""
    return [Machine("some", processors, end) for count, processors, end in groups for _ in range(count)]


def packed(order: tuple[MachineType, ...], *groups: tuple[int, int, float]) -> tuple[str, int, float] | None:
    there = running(*groups)
    room = Room(SPACE.processors - sum(one.processors for one in there))
    found = superslot(0.0, SPACE, there, room, order)
    return (found.machinetype, found.processors, found.ends) if found else None


@pytest.mark.parametrize(
    ("groups", "order", "result"),
    [
        ((), (M8, S1), ("m8", 8, DAY)),
        (((1, 1, DAY),), (M8, S1), ("s1", 1, DAY)),
        (((1, 8, 20000.0), (3, 1, 30000.0)), (M8, S1), ("s1", 1, 30000.0)),
        (((1, 8, 20000.0), (3, 1, 30000.0)), (E8, S1), ("e8", 5, 30000.0)),
        (((3, 1, 8000.0),), (M8, S1), ("m8", 8, DAY)),
        (((3, 1, 8000.0), (1, 8, DAY)), (M8, S1), None),
        (((12, 1, 50000.0),), (M8, S1), ("s1", 1, 50000.0)),
        (((3, 1, 30000.0),), (PLAIN,), ("plain", 1, DAY)),
    ],
)
def test_superslots_are_filled_as_vac_fills_them(
    groups: tuple[tuple[int, int, float], ...], order: tuple[MachineType, ...], result: tuple[str, int, float] | None
) -> None:
    assert packed(order, *groups) == result


def test_a_host_without_superslots_has_single_machines() -> None:
    alone = replace(SPACE, processors_per_superslot=1)
    found = superslot(0.0, alone, running((2, 1, 500.0)), Room(14), (S1,))
    assert found == Machine("s1", 1, DAY, memory=2 * GIB)


def test_memory_and_disk_bound_a_machine() -> None:
    kind = replace(E8, memory=4 * GIB, disk=10 * GIB)
    assert largest(SPACE, kind, Room(16)) == 8
    assert largest(SPACE, kind, Room(16, 13 * GIB)) == 3
    assert largest(SPACE, kind, Room(16, 13 * GIB, 25 * GIB)) == 2
    assert largest(SPACE, kind, Room(16, 1 * GIB)) == 0
    assert largest(SPACE, M8, Room(7)) == 0


def test_what_is_lacking_is_named() -> None:
    assert lacks(SPACE, M8, Room(7)) == "processors"
    assert lacks(SPACE, M8, Room(8, GIB)) == "memory"
    assert lacks(SPACE, replace(M8, disk=GIB), Room(8, 99 * GIB, GIB)) == "disk"
    assert lacks(SPACE, M8, Room(8)) == "time"


def test_a_place_is_reserved_where_enough_processors_and_memory_come_free_first() -> None:
    there = [Machine("s1", 1, float(end), 2 * GIB) for end in range(1000, 17000, 1000)]
    held = reservation(0.0, SPACE, M8, there, Room(0, 0))
    assert held is not None and (held.at, held.beside.processors, held.beside.memory) == (8000.0, 0, 0)
    held = reservation(0.0, SPACE, replace(M8, memory=3 * GIB), there, Room(0, 0))
    assert held is not None and held.at == 12000.0
    assert reservation(0.0, SPACE, replace(M8, min_processors=17), there, Room(0)) is None


def test_a_place_that_a_machine_of_the_same_type_leaves_is_none_more() -> None:
    there = [Machine("m8", 8, 500.0), *(Machine("s1", 1, float(end)) for end in range(1000, 9000, 1000))]
    held = reservation(0.0, SPACE, M8, there, Room(0))
    assert held is not None and held.at == 8000.0
    assert reservation(0.0, SPACE, M8, there[:1], Room(0)) is None


def test_beside_a_reservation_is_started_what_ends_in_time_or_leaves_it_its_place() -> None:
    there = running((1, 4, 20000.0), (1, 8, 99000.0))
    held = reservation(0.0, SPACE, M8, there, Room(4))
    assert held is not None and (held.at, held.beside.processors) == (20000.0, 0)
    assert fitting(0.0, SPACE, S1, Room(4), held) == Machine("s1", 1, 20000.0, 2 * GIB)
    assert fitting(0.0, SPACE, PLAIN, Room(4), held) is None
    assert fitting(0.0, SPACE, replace(PLAIN, max_wallclock=600.0), Room(4), held) == Machine(
        "plain", 1, 600.0, 2 * GIB
    )
    assert fitting(12000.0, SPACE, S1, Room(4), held) is None
    both = reservation(0.0, SPACE, M8, running((1, 4, 20000.0), (1, 6, 20000.0)), Room(6))
    assert both is not None and both.beside.processors == 8
    assert fitting(0.0, SPACE, PLAIN, Room(6), both) == Machine("plain", 1, DAY, 2 * GIB)


def test_what_is_kept_idle_is_reckoned_against_what_waits() -> None:
    held = Reservation(Machine("m8", 8, DAY), 43200.0, DAY, Room(0))
    assert held.idle(0.0, Room(4)) == 0.25
    assert held.idle(0.0, Room(8)) == 0.5
    assert held.idle(43200.0, Room(8)) == 0.0
