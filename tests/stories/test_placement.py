"""Machines on processors of their own: pinned, or not and why, and never two on the same."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest
from tests.fakes.guest import Script
from tests.stories.conftest import Runtime

from belljar.errors import HostError
from belljar.guest import Streams
from belljar.host import room
from belljar.host.devices import topology
from belljar.hypervisor import Layout, Node
from belljar.journal import read
from belljar.machine.life.claim import taken
from belljar.machine.orders import Orders
from belljar.model import GIB, MIB, Outcome, OutcomeClass, Pages, Pin, Start, Topology

ID = "0123456789ab"


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """What a batch system gave: two cores, one on each of two nodes, of a host with eight."""
    allowed = {2, 5}
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(allowed))
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(
        topology, "read_cpus", lambda numbers: [room.Cpu(cpu, cpu, cpu // 4, cpu // 4) for cpu in sorted(numbers)]
    )
    return allowed


def last(runtime: Runtime, event: str, id: str = ID) -> dict[str, Any]:
    return next((line for line in reversed(read(runtime.folders.ended(id))) if line["event"] == event), {})


def placed(runtime: Runtime, id: str) -> dict[str, Any]:
    return last(runtime, "placement", id)


@pytest.mark.usefixtures("job")
def test_a_job_is_pinned_to_what_it_was_given(runtime: Runtime) -> None:
    kept: list[tuple[int, ...]] = []
    runtime.at["payload-started"] = lambda: kept.extend(tuple(it.need.pinned) for it in taken(runtime.folders))
    outcome = runtime.run(runtime.request(machine={"cpus": 2, "topology": Topology.FLAT}))
    assert (outcome.exit_code, outcome.start, kept) == (0, "clone", [(2, 5)])
    assert [word for word in runtime.domain().done if word.startswith("pin")] == ["pin 2,5"]
    placement = last(runtime, "placement")
    assert (placement["cpus"], placement["nodes"], placement["reason"]) == ([2, 5], [0, 1], "")
    assert sorted(last(runtime, "pinned")["threads"].values()) == [2, 5]


@pytest.mark.usefixtures("job")
def test_on_several_nodes_a_guest_sees_them_and_boots_cold(runtime: Runtime) -> None:
    outcome = runtime.run(runtime.request(machine={"cpus": 2, "memory": 64 * MIB}))
    assert (outcome.exit_code, outcome.start) == (0, "cold") and "NUMA nodes" in outcome.start_reason
    halves = Node(1, 32 * MIB, 0), Node(1, 32 * MIB, 1)
    assert runtime.domain().spec.layout == Layout(2, 1, 1, halves)
    for changes in ({"machine": {"cpus": 2, "start": Start.CLONE}}, {"machine": {"cpus": 2}, "checkpointable": True}):
        assert runtime.run(runtime.request(**changes)).start == "clone"
        assert runtime.domain().spec.layout is None


@pytest.mark.usefixtures("job")
def test_a_clone_with_the_hosts_topology_is_refused(runtime: Runtime) -> None:
    wanted = {"cpus": 2, "start": Start.CLONE, "topology": Topology.HOST}
    outcome = runtime.run(runtime.request(machine=wanted))
    assert outcome.error == "TemplateError" and "no template has" in outcome.reason
    assert runtime.hypervisor.domains == [] and runtime.leftovers() == []


def test_a_share_of_the_whole_host_floats(runtime: Runtime, job: set[int]) -> None:
    job.update(range(8))
    assert runtime.run(runtime.request(machine={"cpus": 2})).exit_code == 0
    assert last(runtime, "placement")["reason"] == "this process may use all 8 cpus of this host, as others may"
    assert not any(word.startswith("pin") for word in runtime.domain().done)
    assert runtime.run(runtime.request(machine={"cpus": 2, "pin": Pin.CPUS})).exit_code == 0
    assert "pin 0,1" in runtime.domain().done


@pytest.mark.usefixtures("job")
def test_machines_of_one_job_are_pinned_beside_each_other_or_not_at_all(runtime: Runtime) -> None:
    runtime.plan(Script(runs_for=100.0))
    kinds = [Pin.CPUS, Pin.CPUS, Pin.CPUS, Pin.NONE]
    requests = [runtime.request(id=f"{n:012x}", machine={"cpus": 1, "pin": kind}) for n, kind in enumerate(kinds)]
    whole = runtime.request(id="f" * 12, machine={"cpus": 2})  # by itself it does without

    async def at_once() -> list[Outcome]:
        supervisor, none = runtime.supervisor(), Streams(None, None, None)
        return await asyncio.gather(*(supervisor.keep(it, none, Orders()) for it in (*requests, whole)))

    outcomes = runtime.leap(at_once())
    assert sorted(outcome.error for outcome in outcomes) == ["", "", "", "", "NoProcessors"]
    pinned = sorted(word for domain in runtime.hypervisor.domains for word in domain.done if word.startswith("pin"))
    assert pinned == ["pin 2", "pin 5"]
    reasons = {placed(runtime, outcome.id).get("reason") for outcome in outcomes}
    assert reasons == {"", "asked for", "other machines of this user are pinned to 2 of 2 cpus", None}
    assert runtime.run(runtime.request(machine={"cpus": 2})).exit_code == 0  # they are free again
    assert placed(runtime, ID)["cpus"] == [2, 5] and runtime.leftovers() == []


def test_where_it_cannot_be_pinned_it_runs_or_is_refused_as_asked(runtime: Runtime, job: set[int]) -> None:
    job.discard(5)
    outcome = runtime.run(runtime.request(machine={"cpus": 2, "pin": Pin.CPUS}))
    assert (outcome.error, outcome.klass) == ("NoProcessors", OutcomeClass.NODE)
    assert "2 virtual cpus are more than the 1" in outcome.reason and runtime.hypervisor.domains == []
    runtime.hypervisor.faults.pin = [HostError("cpu 2: Invalid argument")]
    outcome = runtime.run()
    assert (outcome.error, outcome.klass) == ("HostError", OutcomeClass.NODE) and runtime.leftovers() == []
    runtime.hypervisor.can_pin = False  # as with libvirt
    assert runtime.run(runtime.request(machine={"pin": Pin.CPUS})).error == "NoProcessors"


def test_a_machine_of_large_pages_boots_cold_when_there_are_enough(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(topology, "check_pages", lambda *words: asked.append(words))
    outcome = runtime.run(runtime.request(machine={"memory": 513 * MIB, "pages": Pages.ONE_GIB}))
    assert (outcome.exit_code, outcome.start) == (0, "cold") and "large pages (1G)" in outcome.start_reason
    assert asked == [(Pages.ONE_GIB, [(None, GIB)])] and runtime.domain().spec.pages == GIB
    monkeypatch.undo()
    outcome = runtime.run(runtime.request(machine={"memory": 513 * MIB, "pages": Pages.ONE_GIB, "start": Start.CLONE}))
    assert outcome.error == "TemplateError" and runtime.leftovers() == []
