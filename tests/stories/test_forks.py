"""A running machine becomes a template that has no name: who is refused, who holds it, and when it goes."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.guest import FakeGuest, Script
from tests.stories.conftest import Runtime
from tests.unit.hypervisor.test_cmdline import COLD

from belljar.errors import AgentLost, BelljarError, NoMemory, NoSpace, TemplateError
from belljar.host.room import Settings as HostSettings
from belljar.hypervisor import ExtraDisk
from belljar.machine.extras import Equipment
from belljar.machine.life.claim import claim
from belljar.machine.life.commands import Commands
from belljar.machine.life.forking import check, forked
from belljar.machine.life.life import Lifecycle
from belljar.machine.life.work import PayloadWorkload, Running
from belljar.machine.orders import Orders, Stop
from belljar.model import MIB, Cause, OwnWork, Request, RunPayload, Share, State

PARENT = "f" * 12


@asynccontextmanager
async def parent(runtime: Runtime, request: Request | None = None) -> AsyncIterator[tuple[Lifecycle, Running]]:
    """A machine that runs."""
    life = claim(request or runtime.request(id=PARENT), runtime.folders, lambda point: runtime._point(point))
    life.state, running = State.RUNNING, Running()
    running.spec = replace(COLD, id=PARENT, disk=runtime.folders.overlay(PARENT), folder=life.folder)
    running.spec.disk.write_bytes(b"an overlay")
    running.domain, running.guest = runtime.hypervisor.start(running.spec), FakeGuest()
    try:
        yield life, running
    finally:
        running.domain.kill()
        life.release()


def forks(runtime: Runtime) -> list[str]:
    """What is left of forks."""
    left = [template.key for template in runtime.hypervisor.templates() if "fork" in template.facts]
    return left + [path.name for path in runtime.hypervisor.folder.glob("*.draft")]


async def test_clones_of_a_fork_go_on_unheard_and_the_last_one_removes_it(runtime: Runtime) -> None:
    async with parent(runtime) as (life, running):
        async with forked(runtime.services(), life, running) as key:
            assert runtime.passed[-5:] == ["fork-begun", "fork-moving", "fork-split", "fork-moved", "fork-made"]
            runtime.plan(Script(runs_for=3600.0))
            request = runtime.request(machine={"fork": key})
            began = asyncio.Event()
            runtime.at = {"payload-started": began.set}
            child = asyncio.ensure_future(runtime._keep(request, ()))
            await asyncio.wait_for(began.wait(), 10)
            assert runtime.guests[-1].done[0] == "greet as heir" and "identify" in runtime.guests[-1].done
        assert forks(runtime) == [key] and runtime.hypervisor.expire_templates(0.0) == []
        runtime.orders.give(Stop())
        outcome = await child
        assert (outcome.start, outcome.cause) == ("clone", Cause.CANCELLED)
        assert forks(runtime) == []
        assert life.folders.attachment(PARENT, "layer1") in life.files


async def test_one_that_nobody_is_cloned_from_goes_when_whoever_asked_hangs_up(runtime: Runtime) -> None:
    async with parent(runtime) as (life, running):
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        theirs.setblocking(False)
        work = runtime.request().work
        assert isinstance(work, RunPayload)
        workload = PayloadWorkload(work, life, running, runtime.services())
        commands = Commands(life, Orders(), running, workload, runtime.services())
        with theirs:
            answering = asyncio.ensure_future(commands.answer({"do": "fork", "count": 2}, theirs))
            said = json.loads(await asyncio.get_running_loop().sock_recv(ours, 4096))
            assert forks(runtime) == [said["fork"]]
            ours.close()
            assert await asyncio.wait_for(answering, 10) is None
        assert forks(runtime) == []


@pytest.mark.parametrize("count", [0, -1, 1001])
async def test_a_number_that_is_none_is_refused(runtime: Runtime, count: Any) -> None:
    async with parent(runtime) as (life, running):
        commands = Commands(life, Orders(), running, None, runtime.services())  # type: ignore[arg-type]
        answer = await commands.answer({"do": "fork", "count": count}, None)  # type: ignore[arg-type]
        assert answer is not None and "not a number of machines" in answer["error"] and forks(runtime) == []


async def test_a_fork_that_fails_leaves_nothing_and_the_next_one_works(runtime: Runtime) -> None:
    for error in (NoSpace("full"), TemplateError("no"), AgentLost("gone")):
        runtime.hypervisor.faults.fork.append(error)
    async with parent(runtime) as (life, running):
        for _ in range(3):
            with pytest.raises(BelljarError):
                async with forked(runtime.services(), life, running):
                    pass
            assert forks(runtime) == [] and running.spec is not None
            assert running.spec.disk.read_bytes() == b"an overlay"
        async with forked(runtime.services(), life, running) as key:
            assert forks(runtime) == [key]
    assert forks(runtime) == []


async def test_a_reaper_removes_a_fork_whose_maker_died(runtime: Runtime) -> None:
    class Killed(BaseException):
        pass

    def die() -> None:
        raise Killed

    for point in ("fork-begun", "fork-moving", "fork-split", "fork-moved", "fork-made"):
        runtime.at = {point: die}
        runtime.hypervisor.expire_templates, kept = lambda now: [], runtime.hypervisor.expire_templates  # type: ignore[method-assign]
        with pytest.raises(Killed):
            async with parent(runtime) as (life, running), forked(runtime.services(), life, running):
                pass
        runtime.hypervisor.expire_templates = kept  # type: ignore[method-assign]
        runtime.reaper.full()
        assert forks(runtime) == [] and runtime.leftovers() == [], point


async def test_a_machine_of_a_fork_that_is_gone_is_refused_in_one_line(runtime: Runtime) -> None:
    outcome = await runtime._keep(runtime.request(machine={"fork": "0" * 20}), ())
    assert outcome.error == "TemplateError" and "goes with the last machine" in outcome.reason
    assert "fork again" in outcome.hint and runtime.leftovers() == []


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"machine": {"shares": (Share("/", "/mnt"),)}}, "shared folders"),
        ({"keep": True}, "outlast"),
        ({"work": OwnWork(agent=True, reboots=True)}, "reboot"),
    ],
)
async def test_what_a_fork_cannot_have_is_refused(runtime: Runtime, changes: dict[str, Any], says: str) -> None:
    work = changes.pop("work", None)
    request = runtime.request(id=PARENT, **changes)
    async with parent(runtime, replace(request, work=work) if work else request) as (life, running):
        await refused(runtime, life, running, says)


async def refused(runtime: Runtime, life: Lifecycle, running: Running, says: str, count: int = 1) -> None:
    with pytest.raises(BelljarError, match=says) as caught:
        await check(runtime.services(), life, running, count)
    assert caught.value.hint and "\n" not in caught.value.message and forks(runtime) == []


async def test_one_that_does_not_run_has_no_agent_or_has_a_silent_one_is_refused(runtime: Runtime) -> None:
    async with parent(runtime) as (life, running):
        life.state = State.STOPPING
        await refused(runtime, life, running, "it is stopping, not running")
        life.state = State.RUNNING
        running.equipment = Equipment((ExtraDisk("scratch", Path("/s"), "raw", readonly=False),))
        await refused(runtime, life, running, r"further disks \(scratch\)")
        running.equipment = Equipment()
        running.guest = FakeGuest(Script(refuses={"set_clock": AgentLost("silent")}))
        await refused(runtime, life, running, "its agent does not answer: silent")
        running.guest = None
        await refused(runtime, life, running, "no agent")


async def test_more_machines_than_there_is_memory_for_are_refused(runtime: Runtime) -> None:
    runtime.host = HostSettings(kept_memory=0, cpus_per_cpu=0.0)
    async with parent(runtime, runtime.request(id=PARENT, machine={"memory": 512 * MIB})) as (life, running):
        with pytest.raises(NoMemory):
            await check(runtime.services(), life, running, 100_000)
        await check(runtime.services(), life, running, 1)
