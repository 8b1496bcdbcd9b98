"""A pilot and its service, over a real connection: what goes wrong between them, and what comes of it."""

from __future__ import annotations

import asyncio
import calendar
import json
import signal
import time
from pathlib import Path

import pytest
from tests.stories.lease.house import LEASE, Running, Service, job_for

from belljar.errors import HostError
from belljar.lease import Cause, Do, MachineOrder, Order, Tell
from belljar.lease.protocol import lease_key
from belljar.model import dumps

START = Order(Do.START, "i-1", dumps(MachineOrder("debian12")).decode())


async def test_a_machine_runs_until_its_owner_gives_it_back(tmp_path: Path) -> None:
    service = Service(tmp_path, (Order(Do.GO), START))
    async with service.up():
        run = Running(job_for(service), tmp_path)
        await service.until(lambda: "running" in service.states("i-1"))
        assert run.machines.expects == 1  # before it was ordered
        hello = service.heard[0]
        assert (hello.tell, hello.seq, hello.facts and hello.facts.host) == (Tell.HELLO, 0, "node1")
        assert service.channel.connected == {f"{LEASE}.1.0"}
        service.channel.order(f"{LEASE}.1.0", Order(Do.RELEASE))
        await run.ended()
    assert run.machines.expects == 0
    assert service.states("i-1") == ["staging", "booting", "running", "stopping", "terminated"]
    assert [one.seq for one in service.heard if one.seq] == list(range(1, 7))
    assert (service.heard[-1].tell, service.heard[-1].cause) == (Tell.ENDED, Cause.USER)


async def test_a_pilot_that_nobody_wants_leaves_at_once(tmp_path: Path) -> None:
    service = Service(tmp_path, (Order(Do.VOID, why="cancelled"),))
    async with service.up():
        begin = time.monotonic()
        await Running(job_for(service), tmp_path).ended()
        assert time.monotonic() - begin < 2 and [one.tell for one in service.heard] == [Tell.HELLO]


async def test_a_second_pilot_of_a_node_is_void_and_the_first_goes_on(tmp_path: Path) -> None:
    service = Service(tmp_path, (Order(Do.GO), START))
    async with service.up():
        first = Running(job_for(service), tmp_path)
        await service.until(lambda: "running" in service.states("i-1"))
        await Running(job_for(service), tmp_path).ended()
        assert not first.task.done() and first.machines.living == {"i-1"}
        service.channel.order(f"{LEASE}.1.0", Order(Do.RELEASE))
        await first.ended()


async def test_a_service_that_never_answers_ends_the_pilot_with_a_clear_error(tmp_path: Path) -> None:
    service = Service(tmp_path)
    async with service.up():
        pass
    run = Running(job_for(service, claim=0.3), tmp_path)
    with pytest.raises(HostError, match="an answer of its service") as error:
        await run.ended()
    assert "belljar lease serve" in error.value.hint
    assert run.machines.started == {}


async def test_a_service_that_comes_later_is_found(tmp_path: Path) -> None:
    service = Service(tmp_path, (Order(Do.VOID),))
    async with service.up():
        pass
    run = Running(job_for(service), tmp_path)
    await asyncio.sleep(0.1)
    async with service.up():
        await run.ended()


async def test_the_others_of_a_group_do_not_come(tmp_path: Path) -> None:
    service = Service(tmp_path, (Order(Do.WAIT),))
    async with service.up():
        run = Running(job_for(service, barrier=0.3), tmp_path)
        with pytest.raises(HostError, match="the other nodes"):
            await run.ended()
        assert (service.heard[-1].tell, service.heard[-1].cause) == (Tell.ENDED, Cause.CAPACITY)


async def test_another_certificate_or_another_key_is_not_talked_to(tmp_path: Path) -> None:
    service = Service(tmp_path)
    async with service.up():
        for wrong in ({"pin": "0" * 64}, {"key": lease_key(b"x" * 32, LEASE).hex()}):
            with pytest.raises(HostError):
                await Running(job_for(service, claim=0.5, **wrong), tmp_path).ended()
        assert service.heard == []


async def test_the_service_goes_away_and_nothing_that_happened_meanwhile_is_lost(tmp_path: Path) -> None:
    """Nor is anything told twice, whatever the connection had carried."""
    service = Service(tmp_path, (Order(Do.GO), START))
    async with service.up():
        run = Running(job_for(service), tmp_path)
        await service.until(lambda: "running" in service.states("i-1"))
    run.machines.end("i-1")
    assert "terminated" not in service.states("i-1")
    async with service.up():
        await service.until(lambda: "terminated" in service.states("i-1"))
        service.channel.order(f"{LEASE}.1.0", Order(Do.RELEASE))
        await run.ended()
    assert [one.seq for one in service.heard if one.seq] == list(range(1, 6))


async def test_a_service_whose_records_are_of_yesterday_hears_again_what_it_lost(tmp_path: Path) -> None:
    service = Service(tmp_path, (Order(Do.GO), START))
    async with service.up():
        run = Running(job_for(service), tmp_path)
        await service.until(lambda: "running" in service.states("i-1"))
    service.heard = [one for one in service.heard if one.seq <= 1]
    async with service.up():
        await service.until(lambda: "running" in service.states("i-1"))
        service.channel.order(f"{LEASE}.1.0", Order(Do.RELEASE))
        await run.ended()
    assert [one.seq for one in service.heard if one.seq] == list(range(1, 7))


@pytest.mark.parametrize("hangs", [False, True])
async def test_a_guest_learns_when_it_is_killed_before_it_is_asked_to_shut_down(tmp_path: Path, hangs: bool) -> None:
    service = Service(tmp_path, (Order(Do.GO), START))
    async with service.up():
        run = Running(job_for(service, notice=5.0, report=1.0, grace=8.0), tmp_path)
        await service.until(lambda: "running" in service.states("i-1"))
        run.machines.hangs = hangs
        begin = time.time()
        run.pilot.signalled(signal.SIGTERM)
        await run.ended()
    ((*which, moment),) = run.machines.told
    until = calendar.timegm(time.strptime(moment.decode(), "%Y-%m-%dT%H:%M:%SZ\n"))
    assert which == ["i-1", "notice"] and begin + 2 <= until <= begin + 4
    (grace,) = run.machines.graces
    assert 0.9 < grace < 1.6 if hangs else 2 < grace <= 3  # what the notice took is no longer there


async def test_a_pilot_without_service_and_machines_gives_its_node_back(tmp_path: Path) -> None:
    service = Service(tmp_path, (Order(Do.GO), START))
    async with service.up():
        run = Running(job_for(service, claim=0.4), tmp_path)
        await service.until(lambda: "running" in service.states("i-1"))
    await asyncio.sleep(0.6)
    assert not run.task.done()  # it keeps a machine
    run.machines.end("i-1")
    await run.ended(3)


async def test_its_own_clock_ends_it_though_nobody_says_so(tmp_path: Path) -> None:
    service = Service(tmp_path, (Order(Do.GO), START))
    async with service.up():
        begin = time.monotonic()
        run = Running(job_for(service, deadline=4.0, grace=2.5, report=0.5), tmp_path)
        await service.until(lambda: "running" in service.states("i-1"))
    await run.ended()
    assert 0.9 < time.monotonic() - begin < 4.0
    said = [json.loads(line) for line in next(run.folder.glob("*.jsonl")).read_text().splitlines()]
    reports = [one["report"] for one in said if one["event"] == "said"]
    assert (reports[-1]["tell"], reports[-1]["cause"]) == ("ended", "Server.LeaseExpired")


async def test_a_machine_has_its_own_time_and_gets_more_when_its_lease_does(tmp_path: Path) -> None:
    brief = Order(Do.START, "i-1", START.request, seconds=0.3)
    service = Service(tmp_path, (Order(Do.GO), brief))
    async with service.up():
        run = Running(job_for(service), tmp_path)
        await service.until(lambda: "running" in service.states("i-1"))
        service.channel.order(f"{LEASE}.1.0", Order(Do.EXTEND, "i-1", seconds=0.8))
        await asyncio.sleep(0.5)
        assert run.machines.living == {"i-1"}
        await service.until(lambda: "terminated" in service.states("i-1"))
        assert [one.cause for one in service.heard if one.instance][-1] is Cause.EXPIRED
        service.channel.order(f"{LEASE}.1.0", Order(Do.RELEASE))
        await run.ended()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2, signal.SIGINT])
async def test_told_to_end_it_leaves_as_soon_as_its_guest_is_gone(tmp_path: Path, number: int) -> None:
    service = Service(tmp_path, (Order(Do.GO), START))
    async with service.up():
        run = Running(job_for(service), tmp_path)
        await service.until(lambda: "running" in service.states("i-1"))
        begin = time.monotonic()
        run.pilot.signalled(number)
        await run.ended()
        assert time.monotonic() - begin < 1 and run.machines.killed == []
    assert run.machines.graces == [5.0]
    assert (service.heard[-1].tell, service.heard[-1].cause) == (Tell.ENDED, Cause.PREEMPTED)


async def test_a_guest_that_does_not_shut_down_is_killed_before_the_batch_system_kills(tmp_path: Path) -> None:
    service = Service(tmp_path, (Order(Do.GO), START))
    async with service.up():
        run = Running(job_for(service, notice=5.0, report=3.0), tmp_path, shutdown=30)
        await service.until(lambda: "running" in service.states("i-1"))
        begin = time.monotonic()
        run.pilot.signalled(signal.SIGTERM)
        await run.ended()
        assert 0.9 < time.monotonic() - begin < 4.0 and run.machines.killed == ["i-1"]


async def test_told_twice_it_ends_at_once_but_srun_that_passes_the_same_on_is_no_second_time(tmp_path: Path) -> None:
    service = Service(tmp_path, (Order(Do.GO), START))
    async with service.up():
        run = Running(job_for(service, notice=30, grace=20), tmp_path, shutdown=30)
        await service.until(lambda: "running" in service.states("i-1"))
        run.pilot.signalled(signal.SIGTERM)
        run.pilot.signalled(signal.SIGTERM)
        await asyncio.sleep(1.1)
        assert not run.task.done()
        begin = time.monotonic()
        run.pilot.signalled(signal.SIGTERM)
        await run.ended()
        assert time.monotonic() - begin < 1


async def test_a_signal_before_the_gate_opens_leaves_nothing(tmp_path: Path) -> None:
    service = Service(tmp_path, (Order(Do.WAIT),))
    async with service.up():
        run = Running(job_for(service), tmp_path)
        await service.until(lambda: service.heard)
        run.pilot.signalled(signal.SIGTERM)
        await run.ended()
        assert (service.heard[-1].tell, service.heard[-1].cause) == (Tell.ENDED, Cause.PREEMPTED)


async def test_orders_may_come_twice_and_for_machines_that_never_were(tmp_path: Path) -> None:
    service = Service(
        tmp_path, (Order(Do.GO), START, START, Order(Do.STOP, "i-2"), Order(Do.START, "i-2", START.request))
    )
    async with service.up():
        run = Running(job_for(service), tmp_path)
        await service.until(lambda: service.states("i-2"))
        await service.until(lambda: "running" in service.states("i-1"))
        assert service.states("i-2") == ["terminated"] and list(run.machines.started) == ["i-1"]
        service.channel.order(f"{LEASE}.1.0", Order(Do.START, "i-3", "{"))
        await service.until(lambda: service.states("i-3") == ["terminated"])
        service.channel.order(f"{LEASE}.1.0", Order(Do.CONSOLE, "i-1"))
        await service.until(lambda: service.heard[-1].console == b"login:")
        service.channel.order(f"{LEASE}.1.0", Order(Do.RELEASE))
        await run.ended()


async def test_times_beyond_all_measure_end_no_pilot(tmp_path: Path) -> None:
    service = Service(tmp_path, (Order(Do.GO), START))
    async with service.up():
        run = Running(job_for(service), tmp_path)
        await service.until(lambda: "running" in service.states("i-1"))
        for order in (Do.EXTEND, 1e299), (Do.GO, 1e299), (Do.EXTEND, 1e200), (Do.EXTEND, -1e299), (Do.GO, 0.0):
            service.channel.order(f"{LEASE}.1.0", Order(order[0], "i-1", seconds=order[1]))
        service.channel.order(f"{LEASE}.1.0", Order(Do.CONSOLE, "i-1"))
        await service.until(lambda: service.heard[-1].console)
        assert run.machines.living == {"i-1"}
        service.channel.order(f"{LEASE}.1.0", Order(Do.RELEASE))
        await run.ended()


async def test_a_console_that_is_looked_at_all_day_stays_nowhere_at_its_pilot(tmp_path: Path) -> None:
    service = Service(tmp_path, (Order(Do.GO), START))
    async with service.up():
        run = Running(job_for(service), tmp_path)
        await service.until(lambda: "running" in service.states("i-1"))
        for count in range(1, 6):
            service.channel.order(f"{LEASE}.1.0", Order(Do.CONSOLE, "i-1"))
            await service.until(lambda: sum(one.console == b"login:" for one in service.heard) == count)  # noqa: B023
        said = list(run.folder.glob("*.jsonl"))
        service.channel.order(f"{LEASE}.1.0", Order(Do.RELEASE))
        await run.ended()
    assert said and not any("login:" in one.read_text() for one in said)
    assert [one.seq for one in service.heard if one.seq] == list(range(1, 7))


async def test_bytes_go_both_ways_on_a_connection_of_their_own(tmp_path: Path) -> None:
    service = Service(tmp_path, (Order(Do.GO), START))
    async with service.up() as channel:
        run = Running(job_for(service), tmp_path)
        await service.until(lambda: "running" in service.states("i-1"))
        async with channel.stream(f"{LEASE}.1.0", Order(Do.STREAM, "i-1")) as (reader, writer):
            writer.write(b"hello" * 50_000)
            await writer.drain()
            assert await reader.readexactly(250_000) == b"HELLO" * 50_000
        channel.order(f"{LEASE}.1.0", Order(Do.RELEASE))
        await run.ended()


async def test_a_pilot_that_does_not_come_is_not_waited_for_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("belljar.lease.service.channel.STREAM", 0.2)
    async with Service(tmp_path, (Order(Do.GO),)).up() as channel:
        with pytest.raises(HostError, match="not connected"):
            async with channel.stream(f"{LEASE}.1.7", Order(Do.STREAM, "i-1")):
                pass


async def test_an_owner_who_asks_while_a_pilot_comes_back_is_connected_then(tmp_path: Path) -> None:
    service = Service(tmp_path, (Order(Do.GO), START))
    async with service.up():
        run = Running(job_for(service), tmp_path)
        await service.until(lambda: "running" in service.states("i-1"))
    async with service.up() as channel:
        async with channel.stream(f"{LEASE}.1.0", Order(Do.STREAM, "i-1")) as (reader, writer):
            writer.write(b"x")
            assert await reader.readexactly(1) == b"X"
        channel.order(f"{LEASE}.1.0", Order(Do.RELEASE))
        await run.ended()


async def test_a_flood_of_strangers_leaves_the_service_to_its_pilots(tmp_path: Path) -> None:
    service = Service(tmp_path, (Order(Do.GO), START))
    async with service.up():
        strangers = [await asyncio.open_connection("127.0.0.1", service.port) for _ in range(50)]
        for _, writer in strangers:
            writer.write(b"\xff" * 100)
        run = Running(job_for(service), tmp_path)
        await service.until(lambda: "running" in service.states("i-1"))
        service.channel.order(f"{LEASE}.1.0", Order(Do.RELEASE))
        await run.ended()
        for _, writer in strangers:
            writer.close()
