"""What a guest sees of the processors that it is pinned to."""

from __future__ import annotations

import pytest

from belljar.host.room import Cpu
from belljar.hypervisor import Layout, Node
from belljar.machine.planning.placement import layout_of, regular
from belljar.model import GIB, MIB, Topology

CORE = [Cpu(0, 0, 0, 0), Cpu(8, 0, 0, 0)]  # two threads of a core
SECOND = [Cpu(2, 2, 0, 0), Cpu(10, 2, 0, 0)]
OTHER = [Cpu(1, 1, 1, 1), Cpu(9, 1, 1, 1)]  # of the other socket, on its node
BLOCK = 2 * MIB


def layout(cpus: list[Cpu], topology: Topology = Topology.AUTO, **changes: object) -> Layout | None:
    words = {"memory": 3 * GIB, "block": BLOCK, "must_clone": False, **changes}
    return layout_of(topology, cpus, **words)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("cpus", "shape"),
    [
        (CORE, (1, 1, 2)),
        (CORE + SECOND, (1, 2, 2)),
        (CORE + OTHER, (2, 1, 2)),
        (CORE[:1] + OTHER[:1], (2, 1, 1)),
        (CORE + SECOND[:1], (1, 3, 1)),  # one core has a thread less
        (CORE + SECOND + OTHER, (1, 6, 1)),  # one socket has a core less
    ],
)
def test_sockets_cores_and_threads_are_as_they_are_where_all_are_alike(
    cpus: list[Cpu], shape: tuple[int, int, int]
) -> None:
    assert regular(cpus) == shape


def test_by_itself_a_guest_sees_them_where_they_span_nodes() -> None:
    assert layout(CORE + SECOND) is None
    assert layout(CORE + OTHER) == Layout(2, 1, 2, (Node(2, 3 * GIB // 2, 0), Node(2, 3 * GIB // 2, 1)))
    assert layout(CORE + OTHER, must_clone=True) is None


def test_asked_for_it_sees_them_anywhere_and_turned_off_nowhere() -> None:
    assert layout(CORE + SECOND, Topology.HOST) == Layout(1, 2, 2)
    assert layout(CORE + OTHER, Topology.HOST, must_clone=True) is not None  # and is refused as a clone
    assert layout(CORE + OTHER, Topology.FLAT) is None


def test_memory_follows_the_cpus_in_whole_blocks() -> None:
    uneven = layout(CORE + SECOND + OTHER, memory=6 * BLOCK)
    assert uneven is not None and uneven.nodes == (Node(4, 4 * BLOCK, 0), Node(2, 2 * BLOCK, 1))
    least = layout(OTHER[:1] + CORE + SECOND, memory=2 * GIB, block=GIB)
    assert least is not None and [node.memory for node in least.nodes] == [GIB, GIB]
    whole = layout(CORE[:1] + OTHER, memory=1001 * BLOCK)
    assert whole is not None and sum(node.memory for node in whole.nodes) == 1001 * BLOCK


def test_memory_is_not_divided_where_a_node_can_have_none() -> None:
    assert layout(CORE + OTHER, memory=GIB, block=GIB) is None
    assert layout(CORE + OTHER, Topology.HOST, memory=GIB, block=GIB) == Layout(2, 1, 2)
