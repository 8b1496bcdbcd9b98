"""What may fail between a request and its end, each fault injected: F1 to F19 of the reference, and where each is shown.

      | what fails                                        | here (virtual time, or real connections)          | with a real batch system and real guests
    --+---------------------------------------------------+---------------------------------------------------+-----------------------------------------
    F1  policy says no                                      test_f1, contracts/test_lease_desk, unit/test_policy
    F2  the batch system refuses, or names no job           test_f2, test_service                               test_slurm_lease: cannot be had
    F3  the records fail after the submission               test_f3
    F4  the service is killed after the submission          test_f4                                             storms
    F5  the job never starts                                test_f5, unit/test_advance
    F6  the node is less than was asked for                 test_f6, unit/test_advance
    F7  the service is away when a pilot comes              test_f7, test_pilot                                 test_slurm_lease_faults
    F8  the service is away until the end                   test_f8, test_pilot                                 test_slurm_lease_faults
    F9  the service starts again                            test_f9, test_pilot, test_service                   test_slurm_lease, storms
    F10 preempted, cancelled, shut down                     test_f10, test_pilot                                test_slurm_lease, storms
    F11 a pilot is killed                                   test_f11                                            test_slurm_lease, storms
    F12 a guest does not go                                 test_f12, test_pilot                                test_slurm_lease_faults
    F13 one of a group dies                                 test_f13                                            test_slurm_lease
    F14 one of a group never comes                          test_f14, test_service                              test_slurm_lease_faults
    F15 a pilot answers twice                               test_f15, test_liars
    F16 one of a waiting group is given up                  test_f16, contracts/test_lease_desk
    F17 the job's limit is less than its pilot's time       test_f17, unit/test_margins
    F18 clocks that differ                                  test_f18, test_service, test_liars
    F19 a machine cannot be ended                           test_f19                                            test_slurm_lease_faults

After each the world settles, and its observer's I1 to I9 hold.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest
from tests.stories.lease.house import NoGuests, Running, Service, job_for
from tests.stories.lease.sim_pilot import SETTINGS, SimPilot
from tests.stories.lease.test_a_leases_life import ups
from tests.stories.lease.test_pilot import START
from tests.stories.lease.test_service import OWNER, House
from tests.stories.lease.world import OWNERS, POLICY, World

from belljar.errors import HostError, LeaseDenied
from belljar.lease import Cause, Instance, Lease, LeaseState, Size, Wanted
from belljar.lease.decisions.margins import margins
from belljar.lease.orders import Do, Order, Tell
from belljar.lease.pilot.machines import Changed
from belljar.pool import JobState

ADA = OWNERS[0]
L = LeaseState


@pytest.fixture
def world() -> Iterator[World]:
    """In the end all is released, and the observer judges."""
    made = World()
    try:
        yield made
        made.settle()
    finally:
        made.close()


def asked(world: World, count: int = 1, **more: object) -> str:
    wanted = Wanted("alma", count=count, size=Size(1), **{"seconds": 400, **more})  # type: ignore[arg-type]
    lease, _ = world.desk.run(ADA, wanted)
    world.passes(SETTINGS.cycle + 1)
    return lease.id


def started(world: World, missing: int = 0, is_small: bool = False) -> list[SimPilot]:
    """The batch system starts what waits; its pilots connect, and machines run if they may."""
    before = len(world.pilots)
    for job in [one for one in world.jobs.values() if one.state is JobState.WAITING]:
        world.start(job, missing, is_small)
    for pilot in world.pilots[before:]:
        pilot.connect()
    world.passes(SETTINGS.cycle + 1)
    for pilot in world.pilots[before:]:
        ups(pilot)
    return world.pilots[before:]


def lease(world: World, id: str) -> Lease:
    found = world.store_lease(id)
    assert found is not None
    return found


def machines(world: World, id: str) -> list[Instance]:
    return sorted(world.store.read(lambda book: book.find(Instance, lease=id)), key=lambda one: one.index)


def states(world: World, id: str) -> list[str]:
    return [one.state.value for one in machines(world, id)]


def causes(world: World, id: str) -> list[Cause | None]:
    return [one.cause for one in machines(world, id)]


def test_f1_a_request_that_policy_denies_leaves_no_trace(world: World) -> None:
    assert POLICY.machines is not None
    with pytest.raises(LeaseDenied, match=str(POLICY.machines)):
        asked(world, POLICY.machines + 1)
    world.passes(20)
    assert world.jobs == {} and world.desk.leases(ADA) == []


def test_f2_what_the_batch_system_never_takes_fails_in_its_words(world: World) -> None:
    world.refuses = True
    id = asked(world)
    world.passes(20)
    assert (lease(world, id).state, lease(world, id).cause) == (L.FAILED, Cause.REJECTED)
    assert "no such partition" in lease(world, id).why and causes(world, id) == [Cause.REJECTED]


@pytest.mark.parametrize("answer", [b"", b"Submitted, perhaps\n", b"\xff\xfe", b"1\n2\n3\n"])
async def test_f2_a_submission_whose_answer_names_no_job_is_found_by_its_name(tmp_path: Path, answer: bytes) -> None:
    async with House(tmp_path).up() as house:
        honest = house.slurm.command

        async def garbled(argv: tuple[str, ...]) -> bytes:
            said = await honest(argv)
            return answer if argv[0] == "sbatch" else said

        house.jobs._command = garbled
        id = house.ask()
        await house.until_state(id, L.QUEUED)
        await asyncio.sleep(0.5)
        assert (len(house.slurm.jobs), house.lease(id).job) == (1, "1")


async def test_f3_records_that_fail_after_the_submission_do_not_lose_the_job(tmp_path: Path) -> None:
    async with House(tmp_path).up() as house:
        honest = house.slurm.command

        async def then_full(argv: tuple[str, ...]) -> bytes:
            said = await honest(argv)
            house.disk.is_full |= argv[0] == "sbatch"
            return said

        house.jobs._command = then_full
        id = house.ask()
        await house.until(lambda: house.slurm.jobs)
        await asyncio.sleep(1.0)
        assert house.lease(id).state is L.REQUESTED
        house.jobs._command = honest
        house.disk.is_full = False
        await house.until_state(id, L.QUEUED)
        assert (len(house.slurm.jobs), house.lease(id).job) == (1, "1")


def test_f4_a_service_killed_between_submission_and_record_finds_its_job_by_name(world: World) -> None:
    world.loses_answers = True
    id = asked(world)
    assert not world.is_up and lease(world, id).state is L.REQUESTED and len(world.jobs) == 1
    (pilot,) = started(world)  # meanwhile it starts
    world.loses_answers = False
    world.restart()
    world.passes(6)
    pilot.connect()
    world.passes(6)
    ups(pilot)
    assert states(world, id) == ["running"] and len(world.jobs) == 1


def test_f4_a_pilot_of_a_lease_that_nobody_knows_leaves_at_once(world: World) -> None:
    """A database of yesterday."""
    id = asked(world)
    world.store.write(lambda book: (book.drop(Lease, id), [book.drop(Instance, one.id) for one in machines(world, id)]))
    (job,) = world.jobs.values()
    world.start(job, 0, False)
    (pilot,) = world.pilots
    pilot.connect()
    assert not pilot.is_alive and pilot.ran == {}
    world.passes(6)
    assert job.state is JobState.ENDED


def test_f5_a_job_that_never_starts_ends_in_time_with_what_the_batch_system_said(world: World) -> None:
    id = asked(world)
    world.passes(SETTINGS.queue_time + 2 * SETTINGS.cycle)
    assert (lease(world, id).state, lease(world, id).cause) == (L.FAILED, Cause.CAPACITY)
    assert all(one.state is JobState.ENDED for one in world.jobs.values())


def test_f6_a_node_that_has_too_little_is_shunned_and_another_one_is_asked_for(world: World) -> None:
    id = asked(world)
    (small,) = started(world, is_small=True)
    assert not small.is_alive and lease(world, id).attempt == 2 and lease(world, id).shunned == ("small",)
    world.passes(6)
    started(world)
    assert states(world, id) == ["running"]


def test_f7_a_pilot_that_finds_no_service_holds_nothing_and_gives_its_node_back(world: World) -> None:
    id = asked(world)
    world.crash()
    (job,) = world.jobs.values()
    world.start(job, 0, False)
    (pilot,) = world.pilots
    world.passes(90)
    assert not pilot.is_alive and pilot.ran == {} and job.state is JobState.ENDED
    world.restart()
    world.passes(30)
    started(world)
    assert lease(world, id).attempt == 2 and states(world, id) == ["running"]


def test_f8_a_service_that_stays_away_keeps_no_machine_alive(world: World) -> None:
    id = asked(world, seconds=60)
    (pilot,) = started(world)
    world.crash()
    world.passes(60 + SETTINGS.grace + 70)
    assert not pilot.living and not pilot.is_alive and pilot.job.state is JobState.ENDED
    world.restart()
    world.passes(40)
    (one,) = machines(world, id)
    assert lease(world, id).state not in (L.ACTIVE, L.CLAIMING) and one.state.value == "terminated"


@pytest.mark.parametrize("away", [1, 10, 50])
def test_f9_what_happened_while_the_service_was_away_is_heard_afterwards(world: World, away: int) -> None:
    id = asked(world)
    (pilot,) = started(world)
    world.crash()
    pilot.gone(pilot.living[0], Cause.GUEST)
    world.passes(away)
    world.restart()
    pilot.connect()
    world.passes(3 * SETTINGS.cycle)
    assert causes(world, id) == [Cause.GUEST] and lease(world, id).state is L.RELEASED


def restore(records: Path, copy: Path) -> None:
    for old in records.parent.glob(f"{records.name}*"):
        old.unlink()
    copy.rename(records)


async def test_f9_records_of_yesterday_leave_nothing_running_that_nobody_knows(tmp_path: Path) -> None:
    """What was leased since is cancelled; what was leased then has an end, or goes on."""
    house, yesterday = House(tmp_path), tmp_path / "yesterday.sqlite"
    async with house.up():
        known = house.ask()
        await house.until_state(known, L.QUEUED)
        with closing(sqlite3.connect(tmp_path / "leases.sqlite")) as now, closing(sqlite3.connect(yesterday)) as then:
            now.backup(then)
        unknown = house.ask()
        await house.until_state(unknown, L.QUEUED)
        runs = [run for number in ("1", "2") for run in house.slurm.start(number)]
        await house.until(lambda: house.states(known) == house.states(unknown) == ["running"])
    restore(tmp_path / "leases.sqlite", yesterday)
    async with house.up():
        await runs[1].ended()
        assert house.slurm.jobs["2"][1] != "RUNNING" and [one.id for one in house.desk.leases(OWNER)] == [known]
        house.desk.release(OWNER, known)
        await house.until(lambda: not house.lease(known).is_live)
        await runs[0].ended()
        assert runs[0].machines.living == runs[1].machines.living == frozenset()
        assert "RUNNING" not in [job[1] for job in house.slurm.jobs.values()]


@pytest.mark.parametrize("cut", [1, 10, 60])
def test_f9_a_connection_that_is_away_for_a_while_changes_nothing(world: World, cut: int) -> None:
    id = asked(world)
    (pilot,) = started(world)
    pilot.cut()
    world.passes(cut)
    assert states(world, id) == ["running"]
    pilot.connect()
    world.passes(6)
    assert states(world, id) == ["running"] and pilot.is_alive


def test_f10_a_preempted_lease_uses_its_notice_and_says_so(world: World) -> None:
    id = asked(world, 2)
    first, second = started(world)
    world.terminate(first.job)
    assert [one.living != [] for one in (first, second)] == [True, True]  # they shut down
    world.passes(SETTINGS.grace + 3 * SETTINGS.cycle)
    assert lease(world, id).state is L.PREEMPTED and causes(world, id) == [Cause.PREEMPTED] * 2
    assert all(one.charged >= SETTINGS.grace for one in machines(world, id))


def test_f11_a_pilot_that_is_killed_is_missed_and_charged_for_what_was_heard(world: World) -> None:
    id = asked(world)
    (pilot,) = started(world)
    world.passes(50)
    pilot.exit()
    world.passes(SETTINGS.silence + SETTINGS.unseen + 3 * SETTINGS.cycle)
    (one,) = machines(world, id)
    assert (lease(world, id).state, one.cause) == (L.FAILED, Cause.NODE_LOST) and one.charged <= 60


async def test_f12_a_guest_that_does_not_go_is_killed_and_no_other_is(tmp_path: Path) -> None:
    """Each pilot ends what it made itself."""
    service = Service(tmp_path, (Order(Do.GO), START))
    async with service.up():
        stubborn = Running(job_for(service, grace=0.5), tmp_path, 0, shutdown=60)
        other = Running(job_for(service, grace=0.5), tmp_path, 1, shutdown=60)
        await service.until(lambda: service.states("i-1").count("running") == 2)
        slot = next(one for one in service.channel.connected if one.endswith(".0"))
        service.channel.order(slot, Order(Do.RELEASE))
        await stubborn.ended()
        assert stubborn.machines.killed == ["i-1"] and other.machines.killed == [] and other.machines.living == {"i-1"}
        other.pilot.signalled(15)
        await other.ended()


def test_f13_one_of_a_group_dies_and_the_others_go_on_and_each_node_is_given_back_alone(world: World) -> None:
    id = asked(world, 3)
    first, second, third = started(world)
    first.gone(first.living[0], Cause.GUEST)
    world.passes(3 * SETTINGS.cycle)
    assert [one.is_alive for one in (first, second, third)] == [False, True, True]
    second.exit()
    world.passes(SETTINGS.lost + 3 * SETTINGS.cycle)
    assert states(world, id) == ["terminated", "terminated", "running"] and lease(world, id).state is L.ACTIVE
    assert causes(world, id) == [Cause.GUEST, Cause.NODE_LOST, None]


def test_f14_one_of_a_group_never_comes_and_nobody_waits_for_ever(world: World) -> None:
    id = asked(world, 2)
    (alone,) = started(world, missing=1)
    assert alone.is_alive and lease(world, id).state is L.CLAIMING
    world.passes(SETTINGS.barrier + 4 * SETTINGS.cycle)
    assert not alone.is_alive and alone.ran == {} and lease(world, id).attempt == 2
    (alone,) = started(world, missing=1)
    world.passes(SETTINGS.barrier + 4 * SETTINGS.cycle)
    assert (lease(world, id).state, lease(world, id).cause) == (L.FAILED, Cause.CAPACITY)
    assert not alone.is_alive and causes(world, id) == [Cause.CAPACITY] * 2


def test_f15_a_pilot_that_says_everything_twice_is_one_pilot(world: World) -> None:
    id = asked(world, 2)
    pilots = started(world)
    before = world.answers()
    for pilot in pilots:
        for report in list(pilot.said):
            world.deliver(pilot, report)
        world.deliver(pilot, pilot.report(Tell.HELLO, 0, facts=pilot.host))
    assert world.answers() == before
    assert len({one.slot for one in machines(world, id)}) == 2


def test_f16_one_of_a_waiting_group_is_given_up_and_the_others_keep_their_job(world: World) -> None:
    id = asked(world, 3)
    world.desk.terminate(ADA, [machines(world, id)[0].id])
    world.passes(20)
    assert states(world, id) == ["terminated", "queued", "queued"]
    assert [one.state for one in world.jobs.values()] == [JobState.WAITING]
    started(world)
    assert states(world, id) == ["terminated", "running", "running"]


@pytest.mark.parametrize("seconds, count", [(60, 1), (400, 1), (400, 3)])
def test_f17_the_batch_system_never_ends_a_pilot_that_keeps_its_time(world: World, seconds: int, count: int) -> None:
    id = asked(world, count, seconds=seconds)
    pilots = started(world)
    assert pilots[0].job.walltime >= margins(seconds, count, SETTINGS).pilot + SETTINGS.margin
    world.passes(pilots[0].job.walltime)
    assert [one.job.killed_at for one in pilots] == [0.0] * count and causes(world, id) == [Cause.EXPIRED] * count
    assert lease(world, id).state is L.EXPIRED


@pytest.mark.parametrize("hours", [-1, 1])
async def test_f18_a_pilot_whose_clock_is_an_hour_off_is_told_so_and_nothing_is_charged(
    tmp_path: Path, hours: int
) -> None:
    import time

    async with House(tmp_path, tries=1).up(lambda: time.time() + 3600 * hours) as house:
        id = house.ask()
        await house.until_state(id, L.QUEUED)
        (run,) = house.slurm.start("1")
        await run.ended()
        await house.until_state(id, L.FAILED)
        (found,) = [one.instance for one in house.desk.machines(OWNER) if one.lease.id == id]
        assert "clock" in house.lease(id).why and run.machines.started == {} and found.charged == 0


class Zombies(NoGuests):
    """Machines that nothing ends."""

    def kill(self, instance: str) -> None:
        self.killed.append(instance)


async def test_f19_a_machine_that_cannot_be_ended_ends_with_its_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pilot tries, says so, and leaves: the batch system kills what is in the job. The lease does not hang."""
    monkeypatch.setattr("belljar.lease.pilot.pilot.KILLING", 0.3)
    made: list[Zombies] = []

    def make(changed: Changed) -> NoGuests:
        made.append(Zombies(changed, shutdown=600))
        return made[0]

    async with House(tmp_path).up() as house:
        id = house.ask()
        await house.until_state(id, L.QUEUED)
        (run,) = house.slurm.start("1", make=make)
        await house.until(lambda: house.states(id) == ["running"])
        house.desk.release(OWNER, id)
        with suppress(HostError):
            await run.ended(20)
        assert made[0].killed
        house.slurm.jobs["1"][1] = "COMPLETED"
        await house.until_state(id, L.RELEASED)
        assert house.states(id) == ["terminated"]
