"""Is a bait open, and whose turn is it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.bait.plain import nothing

from belljar.bait import Order, Settings
from belljar.bait.decisions.decide import Bait, Room, as_given, bait_now, choose, impossible, size_of
from belljar.bait.decisions.note import Parts, write
from belljar.bait.decisions.step import BaitState, Entry, State
from belljar.model import GIB, MIB
from belljar.pool import JobState, JobView
from belljar.records import replace

SETTINGS = Settings(name="bait1", images=("worker", "el9"), networks=(("open", "br0"), ("closed", "br1")))
ROOM = Room(memory=8 * GIB, cpus=4, disk=50 * GIB, all_memory=16 * GIB, all_cpus=8)
OPEN = Bait(BaitState.OPEN)


def job(id: str = "1", **facts: object) -> JobView:
    return replace(JobView(id, JobState.HELD, owner="alice", memory=GIB), **facts)  # type: ignore[arg-type]


def stopped(id: str = "1", since: float = 0.0) -> Entry:
    return Entry(id, State.STOPPED, since)


@pytest.mark.parametrize(
    ("facts", "state", "why"),
    [
        ({}, BaitState.OPEN, ""),
        ({"order": Order(False, "disk swap")}, BaitState.CLOSED_ADMIN, "disk swap"),
        (
            {"room": replace(ROOM, memory=100 * MIB)},
            BaitState.CLOSED_RESOURCES,
            "100 MiB of memory free, 1024 MiB are the least",
        ),
        ({"room": replace(ROOM, disk=MIB)}, BaitState.CLOSED_RESOURCES, "1 MiB of disk free, 2048 MiB are the least"),
        ({"room": replace(ROOM, cpus=0)}, BaitState.CLOSED_RESOURCES, "no processor is free"),
        ({"room": replace(ROOM, no_image="worker: corrupt")}, BaitState.CLOSED_STORE, "worker: corrupt"),
        ({"faults": 3, "failed": 900.0}, BaitState.CLOSED_FAULTS, "3 starts failed in a row"),
        ({"faults": 3, "failed": 600.0}, BaitState.OPEN, ""),  # after five minutes one job is let in
        ({"faults": 3, "failed": 600.0, "starting": True}, BaitState.CLOSED_FAULTS, "3 starts failed in a row"),
        ({"faults": 2, "failed": 999.0}, BaitState.OPEN, ""),
    ],
)
def test_a_bait_is_open_unless_something_speaks_against_it(
    facts: dict[str, object], state: BaitState, why: str
) -> None:
    said = {"order": Order(), "room": ROOM, "faults": 0, "failed": 0.0, "settings": SETTINGS, "now": 1000.0} | facts
    assert bait_now(**said) == Bait(state, why)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        ({}, ""), ({"image": "el9", "network": "closed"}, ""), ({"nodes": 2, "cpus": 8}, ""),
        ({"image": "el7"}, "image el7: not among the images that may become nodes here (worker, el9)"),
        ({"network": "lab"}, "network class lab: there is open, closed here"),
        ({"cpus": 9}, "9 processors: this host gives 8 to machines"),
        ({"memory": 16 * GIB}, "16576 MiB of memory: this host has 16384 MiB"),
        ({"unmovable": "reservation r1: not there"}, "reservation r1: not there"),
        ({"memory": 0}, "it has no memory limit: a machine's size follows from it (--mem, or DefMemPerCPU)"),
    ],
)  # fmt: skip
def test_what_no_machine_here_can_be_has_one_clear_line(facts: dict[str, object], why: str) -> None:
    assert impossible(job(**facts), size_of(job(**facts), SETTINGS), ROOM, SETTINGS) == why
    assert choose([stopped()], {"1": job(**facts)}, OPEN, ROOM, SETTINGS, nothing).wrong == (
        (("1", why),) if why else ()
    )


def test_a_machine_has_what_its_job_was_given_on_the_bait() -> None:
    """A node of its own has more processors than the job asks for; a range of nodes has memory for each."""
    asked = job(cpus=1, memory=600 * MIB)
    given = replace(stopped(), given=(16, 1200 * MIB))
    (whole,) = as_given({"1": asked}, {}, {"1": given}, ()).values()
    assert (whole.cpus, whole.memory) == (16, 1200 * MIB)
    assert size_of(whole, SETTINGS).cpus == 16
    larger = replace(asked, memory=2 * GIB)  # altered since
    assert as_given({"1": larger}, {}, {"1": given}, ())["1"].memory == 2 * GIB
    assert as_given({"1": replace(asked, memory=0)}, {}, {"1": given}, ())["1"].memory == 0  # it is refused
    note = "belljar: " + write(Parts((("bait1", "a" * 12), ("bait2", "b" * 12)), given=(32, 2 * GIB)))
    other = as_given({"1": replace(asked, note=note)}, {}, {}, ())["1"]  # as another host's bait sees it
    assert (other.cpus, other.memory) == (32, 2 * GIB) and as_given({"1": asked}, {}, {}, ())["1"] == asked


def test_jobs_are_served_in_their_order() -> None:
    jobs = {"1": job("1", memory=9 * GIB), "2": job("2")}
    turn = choose([stopped("2", 2.0), stopped("1", 1.0)], jobs, OPEN, ROOM, SETTINGS, nothing)
    assert (turn.job, turn.why) == ("", "1 waits for 9408 MiB of memory, 8192 are free")
    assert choose([stopped("2", 2.0)], jobs, OPEN, ROOM, SETTINGS, nothing).job == "2"
    closed = Bait(BaitState.CLOSED_ADMIN, "disk swap")
    assert choose([stopped("2")], jobs, closed, ROOM, SETTINGS, nothing).why == "disk swap"


jobs = st.builds(
    lambda cpus, nodes, memory: JobView("", JobState.HELD, cpus=cpus, nodes=nodes, memory=memory * MIB),
    st.integers(1, 20), st.integers(1, 6), st.integers(1, 20_000),
)  # fmt: skip


@given(jobs, st.integers(0, 20_000), st.integers(0, 16))
def test_no_job_is_served_that_does_not_fit_whole(one: JobView, memory: int, cpus: int) -> None:
    room, size = replace(ROOM, memory=memory * MIB, cpus=cpus), size_of(one, SETTINGS)
    turn = choose([stopped()], {"1": one}, OPEN, room, SETTINGS, nothing)
    assert size.count == one.nodes and size.all_cpus >= one.cpus and size.job_memory * size.count >= one.memory
    fits = size.all_memory <= room.memory and size.all_cpus <= room.cpus
    assert (turn.job == "1") == (fits and not turn.wrong) and bool(turn.job) + bool(turn.why) + bool(turn.wrong) == 1


@given(st.lists(st.tuples(jobs, st.floats(0, 100)), max_size=8))
def test_whose_turn_it_is_does_not_depend_on_the_order_of_a_list(given: list[tuple[JobView, float]]) -> None:
    known = {str(number): one for number, (one, _) in enumerate(given)}
    entries = [stopped(str(number), since + number / 1000) for number, (_, since) in enumerate(given)]
    turn = choose(entries, known, OPEN, ROOM, SETTINGS, nothing)
    back = choose(entries[::-1], known, OPEN, ROOM, SETTINGS, nothing)
    assert (turn.job, turn.why, set(turn.wrong)) == (back.job, back.why, set(back.wrong))
    if turn.job:
        first = next(one for one in entries if one.job == turn.job)
        wrong = dict(turn.wrong)
        assert all(one.since >= first.since for one in entries if one.job not in wrong)


def test_a_full_network_closes_the_bait_only_where_somebody_said_so() -> None:
    said = replace(SETTINGS, min_bandwidth=10_000_000)
    for free, state in ((9_000_000, BaitState.CLOSED_RESOURCES), (10_000_000, BaitState.OPEN), (None, BaitState.OPEN)):
        assert bait_now(Order(), replace(ROOM, bandwidth=free), 0, 0.0, said, 0.0).state is state
    full = bait_now(Order(), replace(ROOM, bandwidth=9_000_000), 0, 0.0, said, 0.0)
    assert full.why == "9000 kB/s of bandwidth free, 10000 kB/s are the least"
    assert bait_now(Order(), replace(ROOM, bandwidth=0), 0, 0.0, SETTINGS, 0.0).is_open
