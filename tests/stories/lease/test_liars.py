"""Pilots that lie, over the real channel to the real service: what each lie gets, and that nobody else is worse off for it.

    who it is       another lease's key, another lease, another rank, attempt or pilot; a stream that nobody asked for
    what it sends   frames too large, empty, or with one missing before them; no JSON, no report, no object
    what it tells   of machines that are not its own, of states that cannot follow, of orders that were never given, of another node;
                    of times that cannot be
    when it comes   twice, after its lease was cancelled, never again, far too often

After each an honest pilot still gets its lease's machine.
"""

from __future__ import annotations

import asyncio
import struct
import time
from pathlib import Path

import pytest
from tests.stories.lease.test_service import OWNER, House
from tests.stories.lease.wire import Wire

from belljar.lease import Cause, Instance, InstanceState, LeaseState, Slot, jobfile
from belljar.lease.jobfile import JobFile
from belljar.lease.orders import Facts, Reach, Tell
from belljar.lease.protocol import LARGEST, LARGEST_OPENING, Opening, frame
from belljar.model import GIB
from belljar.records import replace

RUNNING, TERMINATED = InstanceState.RUNNING, InstanceState.TERMINATED


async def queued(house: House, count: int = 1) -> tuple[str, JobFile]:
    """A lease whose job waits, and the file of its pilots."""
    id = house.ask(count)
    await house.until_state(id, LeaseState.QUEUED)
    return id, jobfile.read(house.folder / "jobs" / f"belljar-{id}-1")


async def honest(house: House, id: str) -> None:
    """A pilot that does as it is told has the lease's machine, and then nothing is left of it."""
    (number,) = [one for one, job in house.slurm.jobs.items() if job[0] == f"belljar-{id}-1"]
    (run,) = house.slurm.start(number)
    await house.until(lambda: house.states(id) == ["running"])
    house.desk.release(OWNER, id)
    await house.until_state(id, LeaseState.RELEASED)
    await run.ended()


async def holding(house: House, id: str, job: JobFile) -> tuple[Wire, str]:
    """A pilot by hand that was told to make a machine; the machine's id."""
    wire = await Wire(job).open()
    wire.hello()
    return wire, (await wire.is_told("start")).instance


def slots(house: House) -> list[Slot]:
    return house.daemon.store.read(lambda book: book.find(Slot))


def machine(house: House, id: str) -> Instance:
    return next(one.instance for one in house.desk.machines(OWNER) if one.lease.id == id)


# -- who it is ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("opening", [
    {"lease": "r-" + "0" * 17}, {"lease": "x" * 200}, {"lease": ""}, {"instance": "x" * 5000}, {"slot": -1}, {"slot": 1 << 60},
    {"attempt": -1}, {"seen": -1}, {"stream": "f" * 32}, {"stream": "x" * 200},
], ids=str)  # fmt: skip
async def test_an_opening_that_says_something_else(tmp_path: Path, opening: dict[str, object]) -> None:
    async with House(tmp_path).up() as house:
        id, job = await queued(house)
        wire = Wire(job, **opening)
        with pytest.raises((EOFError, OSError)):
            await wire.open()
            wire.hello()
            while True:
                await wire.hears()
        assert slots(house) == [] and house.daemon.channel.connected == frozenset()
        wire.close()
        await honest(house, id)


async def test_the_key_of_one_lease_opens_no_other(tmp_path: Path) -> None:
    async with House(tmp_path).up() as house:
        (mine, my_job), (theirs, _) = await queued(house), await queued(house)
        with pytest.raises((EOFError, OSError)):
            await Wire(my_job, lease=theirs).open()
        wire = await Wire(my_job).open()
        wire.hello(lease=theirs)  # the opening was honest; the report is not
        assert await wire.is_closed() and slots(house) == []
        await honest(house, mine)
        await honest(house, theirs)


@pytest.mark.parametrize("lie", [{"rank": 7}, {"attempt": 2}, {"pilot": "f" * 32}, {"seq": 5}], ids=str)
async def test_a_report_in_another_ones_name(tmp_path: Path, lie: dict[str, object]) -> None:
    async with House(tmp_path).up() as house:
        id, job = await queued(house)
        wire = await Wire(job).open()
        wire.hello(**lie)
        assert await wire.is_closed() and slots(house) == []
        await honest(house, id)


@pytest.mark.parametrize("rank, attempt", [(1, 1), (999, 1), (0, 2), (0, 0)])
async def test_a_node_or_a_job_that_nobody_asked_for_is_void(tmp_path: Path, rank: int, attempt: int) -> None:
    async with House(tmp_path).up() as house:
        id, job = await queued(house)
        wire = await Wire(replace(job, attempt=attempt), rank).open()
        wire.hello()
        await wire.is_told("void")
        assert slots(house) == [] and house.daemon.channel.connected == frozenset()
        wire.close()
        await honest(house, id)


# -- what it sends -----------------------------------------------------------------------------------------------------


def length(number: int) -> bytes:
    return struct.pack(">I", number)


@pytest.mark.parametrize("data", [
    length(0), length(LARGEST_OPENING + 1), length((1 << 32) - 1), b"GET / HTTP/1.1\r\n\r\n",
    length(60) + b"\0" * 60, length(4000) + b"[" * 4000, length(2) + b"[]", length(2) + b"{}",
    Opening("r-" + "0" * 17, 0).frame(b"")
], ids=lambda data: data[:8].hex())  # fmt: skip
async def test_what_is_no_opening_is_not_answered(tmp_path: Path, data: bytes) -> None:
    async with House(tmp_path).up() as house:
        id, job = await queued(house)
        wire = Wire(job)
        wire.first = data
        with pytest.raises((EOFError, OSError)):
            await wire.open()
        wire.close()
        await honest(house, id)


async def test_who_says_nothing_or_half_a_frame_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("belljar.lease.service.channel.OPENING", 0.5)
    async with House(tmp_path).up() as house:
        id, job = await queued(house)
        for data in (b"", length(100), length(100) + b"x" * 50):
            wire = Wire(job)
            wire.first = data
            with pytest.raises((EOFError, OSError)):
                async with asyncio.timeout(10):
                    await wire.open()
        await honest(house, id)


def wrong(what: str, wire: Wire) -> bytes:
    """What it sends in place of its next frame."""
    beat = wire.frame(Tell.HEARTBEAT)
    match what:
        case "no JSON":
            return beat[:-1] + b"!"
        case "too large":
            return length(LARGEST + 1)
        case "far too large":
            return length((1 << 32) - 1) + b"x" * 1000
        case "empty":
            return length(0)
        case "no report" | "no object" | "no number":
            say = {"no report": {"tell": "reign"}, "no object": [1, 2], "no number": {}}[what]
            return beat + frame({"report": say, "seq": "one" if what == "no number" else 0})
        case "infinite":
            return beat + wire.frame(Tell.HEARTBEAT, mono=float("inf"))
        case "an order that was never given":
            return beat + wire.frame(Tell.HEARTBEAT, ack=99)
        case "one missing before it":
            return beat + wire.frame(Tell.ENDED, 3, cause=Cause.USER)
    raise AssertionError(what)


FRAMES = (
    "no JSON", "too large", "far too large", "empty", "no report", "no object", "no number", "infinite",
    "an order that was never given", "one missing before it",
)  # fmt: skip


@pytest.mark.parametrize("what", FRAMES)
async def test_a_frame_that_is_wrong_ends_the_connection_and_the_lease_goes_on(tmp_path: Path, what: str) -> None:
    """The honest pilot, by its next connection: what it had said is known."""
    async with House(tmp_path).up() as house:
        id, job = await queued(house)
        wire, one = await holding(house, id, job)
        wire.say(Tell.INSTANCE, 1, instance=one, state=RUNNING, mono=2.0)
        await house.until(lambda: house.states(id) == ["running"])
        wire.write(wrong(what, wire))
        assert await wire.is_closed()
        assert house.states(id) == ["running"] and [one.seq for one in slots(house)] == [1]
        again = await Wire(job, pilot=wire.pilot, seen=len(wire.orders)).open()
        assert again.peer.seen == 1
        again.hello()
        await again.is_told("go")
        again.say(Tell.INSTANCE, 2, instance=one, state=TERMINATED, mono=3.0, cause=Cause.GUEST)
        again.say(Tell.ENDED, 3, mono=3.0, cause=Cause.GUEST)
        await house.until_state(id, LeaseState.RELEASED)
        again.close()


# -- what it tells -----------------------------------------------------------------------------------------------------


async def test_of_another_leases_machine_it_tells_nothing(tmp_path: Path) -> None:
    async with House(tmp_path).up() as house:
        (mine, my_job), (theirs, their_job) = await queued(house), await queued(house)
        liar, own = await holding(house, mine, my_job)
        other, foreign = await holding(house, theirs, their_job)
        other.say(Tell.INSTANCE, 1, instance=foreign, state=RUNNING, mono=2.0)
        await house.until(lambda: house.states(theirs) == ["running"])
        liar.say(
            Tell.INSTANCE, 1, instance=foreign, state=TERMINATED, console=b"stolen", host_keys=("ssh-ed25519 AAAA",)
        )
        assert (await liar.is_told("stop")).instance == foreign
        found = machine(house, theirs)
        assert (found.state, found.host_keys, found.slot) == (RUNNING, (), f"{theirs}.1.0")
        assert machine(house, mine).state is InstanceState.CLAIMED and own != foreign
        liar.close()
        other.close()


@pytest.mark.parametrize("lies", [
    (TERMINATED, RUNNING), (RUNNING, InstanceState.BOOTING), (TERMINATED, TERMINATED), (InstanceState.STOPPING, RUNNING),
], ids=str)  # fmt: skip
async def test_a_machine_never_goes_back(tmp_path: Path, lies: tuple[InstanceState, InstanceState]) -> None:
    async with House(tmp_path).up() as house:
        id, job = await queued(house)
        wire, one = await holding(house, id, job)
        for seq, state in enumerate(lies, 1):
            wire.say(Tell.INSTANCE, seq, instance=one, state=state, mono=2.0)
        await house.until(lambda: [slot.seq for slot in slots(house)] == [2])
        assert machine(house, id).state is lies[0]
        wire.close()


@pytest.mark.parametrize(
    "address", ["\ud800", "10.0.0.1\n- ../../../bin/sh", "10.0.0.1 head", "1" * 300, "10.0.0.7"], ids=ascii
)
async def test_an_address_that_is_none_goes_to_no_cluster_and_neither_do_such_keys(
    tmp_path: Path, address: str
) -> None:
    async with House(tmp_path).up() as house:
        id, job = await queued(house)
        wire, one = await holding(house, id, job)
        keys = ("ssh-ed25519 A\n* ssh-ed25519 B", "ssh-ed25519 AAAA \ud800", "ssh-ed25519 AAAA")
        wire.say(Tell.INSTANCE, 1, instance=one, state=RUNNING, mono=2.0, address=address, host_keys=keys)
        await house.until(lambda: house.states(id) == ["running"])
        found = machine(house, id)
        assert (found.address, found.host_keys) == (address if address == "10.0.0.7" else "", keys[2:])
        wire.say(Tell.INSTANCE, 2, instance=one, state=RUNNING, mono=2.0, address="10.0.0.8")
        await house.until(lambda: [slot.seq for slot in slots(house)] == [2])
        assert machine(house, id).address == (found.address or "10.0.0.8")  # the first counts
        wire.close()


@pytest.mark.parametrize("facts, why", [
    (Facts("n", cpus=0, memory=64 * GIB), "processors"), (Facts("n", cpus=-5, memory=64 * GIB), "processors"),
    (Facts("n", cpus=8, memory=-1), "memory"), (Facts("n" * 100_000, cpus=8, memory=64 * GIB), "not called so"),
    (Facts("n1,n2 --uid=0\n", cpus=8, memory=64 * GIB), "not called so"), (Facts("", cpus=8, memory=64 * GIB), "not called so"),
    (Facts("n", boot="b" * 100_000, cpus=8, memory=64 * GIB), "not called so"),
    (Facts("n", cpus=8, memory=64 * GIB, reach=Reach("h" * 100_000, "f" * 64)), "not called so"),
    (Facts("n", cpus=8, memory=64 * GIB, disk=5 * GIB), "n: its scratch has 5120 MiB of 10240 free"),
    (Facts("n", cpus=8, memory=64 * GIB, disk=1), "its scratch has 0 MiB of 10240 free"),
], ids=lambda one: str(one)[:60])  # fmt: skip
async def test_a_node_that_cannot_be_is_not_used_and_what_it_calls_itself_harms_nobody(
    tmp_path: Path, facts: Facts, why: str
) -> None:
    async with House(tmp_path).up() as house:
        id, job = await queued(house)
        wire = await Wire(job).open()
        wire.hello(facts)
        await wire.is_told("void")
        await house.until(lambda: house.lease(id).attempt == 2)
        lease = house.lease(id)
        assert why in lease.why and len(lease.why) < 2000
        assert lease.shunned == (("n",) if facts.host == "n" else ())
        wire.close()


@pytest.mark.parametrize("began, ended", [(1.0, 1e12), (-1e12, 5.0), (1e12, 5.0), (5.0, -1e12), (1e12, 1e13)])
async def test_times_that_cannot_be_are_not_charged(tmp_path: Path, began: float, ended: float) -> None:
    async with House(tmp_path).up() as house:
        id, job = await queued(house)
        wire, one = await holding(house, id, job)
        wire.say(Tell.INSTANCE, 1, instance=one, state=RUNNING, mono=began)
        wire.say(Tell.INSTANCE, 2, instance=one, state=TERMINATED, mono=ended, cause=Cause.GUEST)
        await house.until(lambda: house.states(id) == ["terminated"])
        found = machine(house, id)
        assert 0 <= found.charged <= 60 + house.settings.skew
        assert abs(found.launched - time.time()) < 60 + house.settings.skew
        wire.close()


# -- when it comes -----------------------------------------------------------------------------------------------------


async def test_two_that_answer_for_the_same_node(tmp_path: Path) -> None:
    async with House(tmp_path).up() as house:
        id, job = await queued(house)
        first, one = await holding(house, id, job)
        second = await Wire(job).open()
        second.hello()
        await second.is_told("void")
        second.say(Tell.ENDED, 1, cause=Cause.USER)  # and speaks on
        second.say(Tell.INSTANCE, 2, instance=one, state=TERMINATED)
        await second.hears()
        first.say(Tell.INSTANCE, 1, instance=one, state=RUNNING, mono=2.0)
        await house.until(lambda: house.states(id) == ["running"])
        assert house.daemon.channel.connected == {f"{id}.1.0"} and [one.seq for one in slots(house)] == [1]
        for wire in (first, second):
            wire.close()


async def test_the_same_pilot_by_two_connections_is_told_everything_once(tmp_path: Path) -> None:
    """A network that broke on one side alone."""
    async with House(tmp_path).up() as house:
        id, job = await queued(house)
        old, one = await holding(house, id, job)
        new = await Wire(job, pilot=old.pilot, seen=len(old.orders)).open()
        new.hello()
        await new.is_told("go")
        for wire in (old, new):
            wire.say(Tell.INSTANCE, 1, instance=one, state=RUNNING, mono=2.0)
        await house.until(lambda: house.states(id) == ["running"])
        old.close()
        house.desk.release(OWNER, id)
        house.daemon.wake()
        assert (await new.is_told("stop")).instance == one
        await house.until(lambda: house.states(id) == ["stopping"])
        new.say(Tell.INSTANCE, 2, instance=one, state=TERMINATED, mono=3.0)
        new.say(Tell.ENDED, 3, mono=3.0, cause=Cause.USER)
        await house.until_state(id, LeaseState.RELEASED)
        events = [event for _, event in house.daemon.store.read(lambda book: book.events()) if event.of == one]
        assert [event.after for event in events] == ["queued", "claimed", "running", "stopping", "terminated"]
        new.close()


async def test_it_comes_after_its_lease_was_cancelled_and_insists(tmp_path: Path) -> None:
    async with House(tmp_path).up() as house:
        id, job = await queued(house)
        house.desk.release(OWNER, id)
        await house.until_state(id, LeaseState.CANCELLED)
        one = machine(house, id).id
        late = await Wire(job).open()
        late.hello()
        await late.is_told("void")
        late.say(Tell.INSTANCE, 1, instance=one, state=RUNNING)
        await late.hears()
        assert house.lease(id).state is LeaseState.CANCELLED and machine(house, id).charged == 0
        assert slots(house) == [] and house.daemon.channel.connected == frozenset()
        late.close()


@pytest.mark.parametrize("stage", ["opened", "said hello", "told to make a machine", "running"])
async def test_it_vanishes(tmp_path: Path, stage: str) -> None:
    """With its job, at any point: the lease has an end, or another job."""
    async with House(tmp_path, silence=0.6, lost=1.2, tries=1).up() as house:
        id, job = await queued(house)
        house.slurm.jobs["1"][1] = "RUNNING"
        wire = await Wire(job).open()
        if stage != "opened":
            wire.hello()
            await wire.is_told("wait")
        if stage in ("told to make a machine", "running"):
            one = (await wire.is_told("start")).instance
        if stage == "running":
            wire.say(Tell.INSTANCE, 1, instance=one, state=RUNNING, mono=1.0)
            await house.until(lambda: house.states(id) == ["running"])
        wire.close()
        house.slurm.killed("1")
        await house.until_state(id, LeaseState.FAILED)
        found = machine(house, id)
        assert found.cause is Cause.NODE_LOST and found.charged <= 2


async def test_one_that_never_stops_talking_keeps_nobody_waiting(tmp_path: Path) -> None:
    async with House(tmp_path).up() as house:
        (mine, my_job), (theirs, _) = await queued(house), await queued(house)
        liar, _ = await holding(house, mine, my_job)

        async def talk() -> None:
            while True:
                for _ in range(100):
                    liar.say(Tell.HEARTBEAT)
                await liar.writer.drain()
                await asyncio.sleep(0)

        async def listen() -> None:
            while True:
                await liar.hears(60)

        works = [asyncio.ensure_future(one()) for one in (talk, listen)]
        try:
            await asyncio.sleep(0.3)
            begin = time.monotonic()
            await honest(house, theirs)
            assert time.monotonic() - begin < 15
        finally:
            for one in works:
                one.cancel()
            await asyncio.gather(*works, return_exceptions=True)
        liar.close()
