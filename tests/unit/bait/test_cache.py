"""Which machine may serve another job, and which go to make room."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from belljar.bait import Settings
from belljar.bait.decisions.advance import next_step
from belljar.bait.decisions.cache import (
    MARK,
    PROVED,
    kept_as,
    making_room,
    terms_of,
    too_old,
    with_kept,
    with_machines,
)
from belljar.bait.decisions.decide import Room, Turn, size_of
from belljar.bait.decisions.step import Act, Do, Entry, Seen, State
from belljar.bait.machines import scrub
from belljar.model import GIB, MIB
from belljar.pool import JobState, JobView, NodeState, NodeView, node_of
from belljar.records import replace

SETTINGS = Settings(
    name="bait1", images=("worker",), networks=(("open", "br0"), ("closed", "br1")), cache="same-user", overhead=0
)
JOB = JobView("7", JobState.HELD, owner="alice", uid=1000, group="physics", queue="batch", memory=GIB, cpus=2)
ROOM = Room(8 * GIB, 4, 50 * GIB, 16 * GIB, 8)
ID = "0123456789ab"


def kept(job: JobView = JOB, *, since: float = 0.0, id: str = ID, state: State = State.KEPT) -> Entry:
    size = size_of(job, SETTINGS)
    takes = (size.all_cpus, size.all_memory)
    return Entry(f"{MARK}{id}", state, since, (id,), terms=terms_of(job, "digest", SETTINGS), takes=takes)


def turn(job: JobView, *idle: Entry, room: Room = ROOM, image: str = "digest", settings: Settings = SETTINGS) -> Turn:
    size = size_of(job, settings)
    fits = size.all_cpus <= room.cpus and size.all_memory <= room.memory
    asked = Turn(job.id if fits else "", why="" if fits else "it waits", first=job.id)
    return with_machines(asked, idle, terms_of(job, image, settings), size, room)


def test_the_next_job_of_the_same_terms_gets_the_machine_that_was_kept_last() -> None:
    assert turn(replace(JOB, id="8"), kept(), kept(since=1.0, id="f" * 12)).kept == f"{MARK}{'f' * 12}"
    full = turn(replace(JOB, id="8"), kept(), room=replace(ROOM, cpus=0))
    assert (full.job, full.kept, full.why, full.ending) == ("8", f"{MARK}{ID}", "", ())
    assert turn(JOB, kept(state=State.PROVING)).kept == "" == turn(JOB, kept(state=State.FINISHED)).kept
    waits = turn(JOB, kept(state=State.PROVING), room=replace(ROOM, cpus=0))
    assert (waits.job, waits.ending) == ("", ())  # it is clean in a moment


@pytest.mark.parametrize(
    "other",
    [
        {"uid": 1001}, {"owner": "bob"}, {"queue": "night"}, {"network": "closed"}, {"cpus": 1}, {"memory": 2 * GIB}, {"disk": GIB},
        {"features": ("el9",)}, {"nodes": 2},
    ],
)  # fmt: skip
def test_a_job_that_differs_in_anything_gets_a_machine_of_its_own(other: dict[str, object]) -> None:
    job: JobView = replace(JOB, id="8", **other)  # type: ignore[arg-type]
    assert (turn(job, kept()).kept, turn(job, kept()).job) == ("", "8")


def test_so_does_one_of_another_image_or_under_other_settings() -> None:
    assert (
        turn(JOB, kept(), image="newer").kept
        == turn(JOB, kept(), settings=replace(SETTINGS, shares=("/home",))).kept
        == ""
    )


def test_a_group_shares_machines_only_where_that_is_said() -> None:
    said = replace(SETTINGS, cache="same-group")
    alice, bob = terms_of(JOB, "digest", said), terms_of(replace(JOB, uid=1001, owner="bob"), "digest", said)
    assert alice == bob != "" and alice != terms_of(replace(JOB, group="it"), "digest", said)


@pytest.mark.parametrize(
    ("job", "image", "cache"),
    [
        (JOB, "digest", "never"), (JOB, "", "same-user"), (replace(JOB, uid=0, owner="root"), "digest", "same-user"),
        (replace(JOB, uid=-1), "digest", "same-user"), (replace(JOB, group=""), "digest", "same-group"),
    ],
)  # fmt: skip
def test_some_machines_serve_no_second_job_at_all(job: JobView, image: str, cache: str) -> None:
    assert terms_of(job, image, replace(SETTINGS, cache=cache)) == ""


def test_a_kept_machine_has_an_age_and_a_number_of_uses() -> None:
    one = replace(kept(), born=1000.0, uses=3)
    assert too_old(one, SETTINGS, 1000.0 + SETTINGS.cache_age - 1) == ""
    assert "older than 3600 s" in too_old(one, SETTINGS, 1000.0 + SETTINGS.cache_age)
    assert too_old(replace(one, uses=9), SETTINGS, 1001.0) == "it has served 10 jobs"
    assert too_old(one, replace(SETTINGS, cache_age=7200.0), 1001.0) == "the bait's settings are others"


sizes = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 6), st.booleans()), max_size=6)


@given(sizes, st.integers(0, 6), st.integers(0, 9), st.integers(1, 8), st.integers(1, 12))
def test_kept_machines_end_only_when_that_makes_the_room_and_no_more_than_needed(
    idle: list[tuple[int, int, bool]], cpus: int, memory: int, need: int, bytes_: int
) -> None:
    states = {True: State.KEPT, False: State.FINISHED}
    entries = [
        kept(replace(JOB, cpus=one, memory=size * MIB), since=float(number), id=f"{number:012x}", state=states[is_kept])
        for number, (one, size, is_kept) in enumerate(idle)
    ]
    room = replace(ROOM, cpus=cpus, memory=memory * MIB)
    ending = making_room(entries, room, need, bytes_ * MIB)
    by_name = {one.job: one for one in entries}
    assert all(by_name[one].state is State.KEPT for one in ending)
    leaving = [one for one in entries if one.state is State.FINISHED]
    enough = lambda ended: (  # noqa: E731
        (free := with_kept(room, [*leaving, *(by_name[one] for one in ended)])).cpus >= need
        and free.memory >= bytes_ * MIB
    )
    everything = [one.job for one in entries if one.state is State.KEPT]
    if ending:
        assert enough(ending) and not enough(ending[:-1]) and list(ending) == everything[: len(ending)]
    else:
        assert enough(()) or not enough(everything)


# -- between two jobs --------------------------------------------------------------------------------------------------

OUT = NodeView(node_of(ID), NodeState.OUT, reason="belljar: its job has ended")
FINISHED = Entry("7", State.FINISHED, 0.0, (ID,), terms=terms_of(JOB, "digest", SETTINGS))


def seen(
    node: NodeView | None = OUT, *, now: float = 1.0, lives: bool = True, proved: dict[str, str] | None = None
) -> Seen:
    nodes = {node.name: node} if node is not None else {}
    return Seen(now, {}, nodes, frozenset({ID} if lives else ()), proved=proved or {})


def test_a_quiet_machine_is_cleaned_and_proved_before_it_is_kept() -> None:
    proving = next_step(FINISHED, seen(), SETTINGS).entry
    assert (proving.job, proving.state, proving.machines) == (f"{MARK}{ID}", State.PROVING, (ID,))
    assert next_step(proving, seen(), SETTINGS).acts == (Act(Do.PROVE, ID),)
    assert next_step(proving, seen(proved={ID: ""}), SETTINGS).entry.state is State.KEPT
    dirty = next_step(proving, seen(proved={ID: "/etc/cron.d/x"}), SETTINGS).entry
    assert (dirty.state, dirty.why) == (State.FINISHED, "not clean: /etc/cron.d/x")
    assert next_step(dirty, seen(), SETTINGS).acts == (Act(Do.END, ID),)  # and is never proved again
    assert next_step(proving, seen(now=PROVED + 2), SETTINGS).entry.state is State.FINISHED


@pytest.mark.parametrize(
    ("entry", "seen_"),
    [
        (replace(FINISHED, terms=""), seen()), (FINISHED, seen(lives=False)), (FINISHED, seen(replace(OUT, reason="Kill task failed"))),
        (FINISHED, seen(replace(OUT, state=NodeState.DRAINING))), (FINISHED, seen(None)), (replace(FINISHED, uses=9), seen()),
        (replace(FINISHED, born=-SETTINGS.cache_age), seen()), (replace(FINISHED, machines=()), seen()),
    ],
)  # fmt: skip
def test_a_machine_in_doubt_is_not_kept(entry: Entry, seen_: Seen) -> None:
    assert next_step(entry, seen_, SETTINGS).entry.state is not State.PROVING


@pytest.mark.parametrize("state", [State.RUNNING, State.VM_READY])
def test_a_machine_that_failed_its_job_serves_no_other(state: State) -> None:
    running = replace(JOB, state=JobState.RUNNING, on=(node_of(ID),))
    looked = replace(seen(replace(OUT, state=NodeState.BUSY), lives=False), jobs={"7": running})
    failed = next_step(replace(FINISHED, state=state), looked, SETTINGS).entry
    assert failed.state in (State.LOST, State.REPROCESS) and failed.terms == ""


@pytest.mark.parametrize(
    "seen_", [seen(lives=False), seen(replace(OUT, state=NodeState.IDLE)), seen(None), seen(now=SETTINGS.cache_age + 1)]
)
def test_a_kept_machine_that_is_not_as_it_should_be_ends(seen_: Seen) -> None:
    assert next_step(kept_as(FINISHED), seen(), SETTINGS).entry.state is State.PROVING
    assert next_step(kept(), seen(), SETTINGS).entry.state is State.KEPT
    assert next_step(kept(), seen_, SETTINGS).entry.state is State.FINISHED


def test_only_a_machine_that_says_so_is_clean() -> None:
    assert scrub.why_not(0, b"clean\n", b"") == ""
    for code, out, err in (
        (1, b"clean\n", b""),
        (0, b"", b""),
        (0, b"clean\nclean\n", b""),
        (0, b"clean\n", b"find: x"),
    ):
        assert scrub.why_not(code, out, err)


def test_terms_are_read_back_as_they_were_written() -> None:
    from belljar.model import to_json
    from belljar.reading import from_json

    assert from_json(Entry, to_json(kept())) == kept()
