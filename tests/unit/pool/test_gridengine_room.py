"""What machines take of an execution host with native jobs, in the host's own consumables."""

from __future__ import annotations

import pytest

from belljar.model import GIB, MIB
from belljar.pool import JobState, JobView, NodeView, Part, load
from belljar.pool.gridengine.nodes import GridEngineNodes
from belljar.pool.gridengine.room import whole_host
from belljar.records import replace

PARTS = (Part("0" * 12, 2, 3 * GIB), Part("1" * 12, 1, GIB))
NATIVE = JobView("7", JobState.RUNNING, cpus=1, memory=GIB, on=("wn01",))
NODES = load("gridengine").of_bait("vm.q@wn01", "belljar", "f", ("10.9.9.9 vm9",), "slots=4,h_vmem=8G").nodes


def hosts(slots: int, used: int, size: str = "") -> dict[str, NodeView]:
    """qhost's words: what is left."""
    more = f"<resourcevalue name='h_vmem' dominance='hc'>{size}</resourcevalue>" if size else ""
    return NODES.nodes(
        f"<?xml version='1.0'?><qhost><host name='wn01'><hostvalue name='load_avg'>1</hostvalue>"
        f"<resourcevalue name='slots' dominance='hc'>{slots}.000000</resourcevalue>{more}<queue name='all.q'>"
        f"<queuevalue qname='all.q' name='slots_used'>{used}</queuevalue></queue></host></qhost>".encode()
    )


def test_jobs_are_left_what_machines_do_not_take() -> None:
    assert hosts(2, 1)["wn01"].cpus == 3 and hosts(-2, 2)["wn01"].free_cpus == 0
    (command,) = NODES.reserve("wn01", PARTS, {}, hosts(4, 0, "8.000G"), "")
    assert command == ("qconf", "-mattr", "exechost", "complex_values", "slots=1,h_vmem=4096M", "wn01")
    assert NODES.reserve("wn01", PARTS, {"7": NATIVE}, hosts(0, 1, "3.001G"), "") == ()  # a job has one of each
    assert NODES.reserve("wn01", PARTS, {}, hosts(1, 0, "6.000G"), "") == (
        command,
    )  # one of the same size in slots has gone
    (grown,) = NODES.reserve("wn01", (), {}, hosts(1, 0, "4.000G"), "")
    assert grown[4] == "slots=4,h_vmem=8192M"
    uncounted = GridEngineNodes().nodes(b"<?xml version='1.0'?><qhost><host name='wn01'></host></qhost>")
    assert uncounted["wn01"].free_cpus == -1 and len(NODES.reserve("wn01", (), {}, uncounted, "")) == 1
    assert NODES.reserve("wn02", PARTS, {}, hosts(4, 0), "") == ()


def test_a_machine_has_its_part_when_native_jobs_leave_it() -> None:
    first, second = (one.machine for one in PARTS)
    assert NODES.reserved("wn01", PARTS, {}, hosts(4, 0, "8.000G")) == frozenset()  # nobody has said so yet
    assert NODES.reserved("wn01", PARTS, {"7": NATIVE}, hosts(0, 1, "3.000G")) == {first, second}
    two = replace(NATIVE, cpus=2, memory=2 * GIB)
    assert NODES.reserved("wn01", PARTS, {"7": two}, hosts(-1, 2, "2.000G")) == {first}
    greedy = replace(NATIVE, memory=6 * GIB, on=("all.q@wn01",))
    assert NODES.reserved("wn01", PARTS, {"7": greedy}, hosts(0, 1, "-2.000G")) == frozenset()
    assert NODES.reserved("wn01", PARTS, {"7": replace(greedy, on=("wn02",))}, hosts(1, 0, "4.000G")) == {first, second}


def test_a_host_without_a_size_is_refused() -> None:
    assert whole_host("slots=16, h_vmem=512M") == (16, 512 * MIB) and whole_host("slots=2") == (2, 0)
    for text in ("", "belljar-room", "slots=0", "slots=2,cpus=3", "h_vmem=2G", "slots=2,h_vmem=much"):
        with pytest.raises(ValueError) as caught:
            whole_host(text)
        assert caught.value.args[0] == "room"
