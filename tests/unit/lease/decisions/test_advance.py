"""A lease's way, look by look: what is seen, and what is then to be done."""

from typing import NamedTuple

import pytest

from belljar.lease import (
    Cause,
    Do,
    Facts,
    Instance,
    InstanceState,
    Lease,
    LeaseState,
    Order,
    Report,
    Settings,
    SlotState,
    Tell,
    Wanted,
)
from belljar.lease.decisions.advance import advance, drained, strays
from belljar.lease.decisions.case import Case, Kind, Seen, Step
from belljar.lease.decisions.reports import heard
from belljar.lease.states import LEASE_MOVES
from belljar.model import GIB
from belljar.pool import JobState
from belljar.pool import NamedJob as Job
from belljar.records import replace

SETTINGS = Settings(staging=300, barrier=120, grace=30, margin=30, silence=90, unseen=60, tries=2)
L, I, S = LeaseState, InstanceState, SlotState  # noqa: E741
NODE = Facts("wn1", cpus=4, memory=64 * GIB)


def lease(count: int = 1, **wanted: object) -> Case:
    found = Lease("r-1", "ada", Wanted("alma", count=count, seconds=3600, **wanted), deadline=10_000)  # type: ignore[arg-type]
    machines = (Instance(f"i-{one}", "r-1", one, "ada", seconds=3600) for one in range(count))
    return Case(found, tuple(machines))


class Heard(NamedTuple):
    orders: tuple[Order, ...]
    acked: int  # the last report that is written down


class Story:
    """One lease, with what is seen of it."""

    def __init__(self, case: Case, settings: Settings = SETTINGS) -> None:
        self.case, self.settings, self.now = case, settings, 0.0
        self.jobs: tuple[Job, ...] | None = ()
        self.connected: set[str] = set()

    def look(self, after: float = 5.0) -> Step:
        self.now += after
        while True:
            before = self.case.lease.state
            step = advance(self.case, Seen(self.now, 0.0, self.jobs, frozenset(self.connected)), self.settings)
            assert step.case.lease.state in {before, *LEASE_MOVES[before]}
            self.case = step.case
            if self.case.lease.state is before:
                return step

    def hears(self, tell: Tell, rank: int = 0, seq: int = 0, pilot: str = "p", **facts: object) -> Heard:
        report = Report(tell, "r-1", self.case.lease.attempt, rank, pilot + str(rank), seq, mono=self.now, **facts)  # type: ignore[arg-type]
        answer = heard(self.case, report, self.now, self.settings)
        self.case, orders = answer
        self.connected.add(report.slot)
        return Heard(orders, next((one.seq for one in self.case.slots if one.id == report.slot), 0))

    def job(self, state: JobState, attempt: int = 1) -> None:
        self.jobs = (Job(f"belljar-r-1-{attempt}", "77", state),)

    def active(self) -> "Story":
        self.job(JobState.RUNNING)
        self.look()
        for rank in range(self.case.lease.wanted.nodes):
            assert self.hears(Tell.HELLO, rank, facts=NODE).orders[0].do is Do.WAIT
        self.look()
        return self

    def running(self) -> "Story":
        self.active()
        for rank in range(self.case.lease.wanted.nodes):
            self.hears(Tell.INSTANCE, rank, 1, instance=f"i-{rank}", state=I.RUNNING)
        return self


def orders(step: Step) -> list[tuple[Do, str]]:
    return [(act.order.do, act.order.instance or act.of) for act in step.acts if act.order is not None]


def test_a_lease_from_its_request_to_its_end() -> None:
    story = Story(lease())
    assert [act.kind for act in story.look().acts] == [Kind.SUBMIT]
    story.job(JobState.WAITING)
    story.look()
    assert story.case.lease.state is L.QUEUED and story.case.lease.job == "77"
    story.active()
    assert story.case.lease.state is L.ACTIVE
    assert orders(story.look()) == [(Do.GO, "r-1.1.0"), (Do.START, "i-0")]
    story.hears(Tell.INSTANCE, 0, 1, instance="i-0", state=I.RUNNING, address="10.0.2.15")
    assert orders(story.look()) == []
    story.case = drained(story.case, Cause.USER, "", story.now)
    assert orders(story.look()) == [(Do.STOP, "i-0")]
    story.hears(Tell.INSTANCE, 0, 2, instance="i-0", state=I.TERMINATED)
    assert orders(story.look()) == [(Do.RELEASE, "r-1.1.0")]
    story.hears(Tell.ENDED, 0, 3)
    story.job(JobState.ENDED)
    story.look()
    assert story.case.lease.state is L.RELEASED
    assert story.case.instances[0].charged == 10


@pytest.mark.parametrize("is_given_up", [False, True])
def test_a_pilot_that_is_connected_only_after_its_lease_became_active_is_told_to_go(is_given_up: bool) -> None:
    """Its hello is written down before the channel knows it, and a look may come between."""
    story = Story(lease())
    story.job(JobState.RUNNING)
    story.look()
    story.hears(Tell.HELLO, facts=NODE)
    story.connected.clear()
    story.look()
    assert orders(story.look()) == [] and story.case.lease.state is L.ACTIVE
    if is_given_up:
        story.case = drained(story.case, Cause.USER, "", story.now)
    story.connected.add("r-1.1.0")
    assert orders(story.look())[:2] == [(Do.GO, "r-1.1.0"), (Do.STOP if is_given_up else Do.START, "i-0")]


def test_a_queued_lease_that_is_given_up_has_no_pending_machine_and_no_job() -> None:
    story = Story(lease(2))
    story.job(JobState.WAITING)
    story.look()
    story.case = drained(story.case, Cause.USER, "", story.now)
    assert {one.state for one in story.case.instances} == {I.TERMINATED}
    assert [(act.kind, act.of) for act in story.look().acts] == [(Kind.CANCEL, "77")]
    story.job(JobState.ENDED)
    story.look()
    assert story.case.lease.state is L.CANCELLED


def test_a_lease_whose_machines_run_ends_with_the_last_of_them() -> None:
    """The time for staging and boot counts only until then."""
    story = Story(lease(2)).active()
    at_most = story.case.lease.ends
    story.hears(Tell.INSTANCE, 0, 1, instance="i-0", state=I.RUNNING)
    story.look()
    assert story.case.lease.ends == at_most == story.now - 5 + 300 + 3600
    story.hears(Tell.INSTANCE, 1, 1, instance="i-1", state=I.RUNNING)
    story.look()
    assert story.case.lease.ends == max(one.deadline for one in story.case.instances) < at_most


def test_a_silent_batch_system_proves_nothing() -> None:
    story = Story(lease()).running()
    story.jobs, story.connected = None, set()
    story.look(500)
    assert story.case.lease.state is L.ACTIVE and story.case.instances[0].state is I.RUNNING


def test_a_lost_pilot_is_charged_until_it_was_heard_of_last() -> None:
    story = Story(lease()).running()
    began = story.now
    story.now += 100
    story.hears(Tell.HEARTBEAT)
    story.connected.clear()
    story.jobs = ()
    story.look(91)
    lost = story.case.instances[0]
    assert (lost.state, lost.cause, lost.charged) == (I.TERMINATED, Cause.NODE_LOST, 100)
    assert lost.launched == began and story.case.lease.state is L.DRAINING
    story.look(60)
    assert story.case.lease.state is L.FAILED


@pytest.mark.parametrize(("jobs", "after", "is_lost"), [
    ((JobState.ENDED,), 5, True), ((JobState.ENDING,), 5, False), ((JobState.RUNNING,), 5, False), ((), 5, False), ((), 61, True),
])  # fmt: skip
def test_a_pilot_whose_job_has_ended_is_lost_at_once(jobs: tuple[JobState, ...], after: float, is_lost: bool) -> None:
    """As far as the batch system knows its job: one that it does not name may only be forgotten for a while."""
    story = Story(lease()).running()
    story.connected.clear()
    story.jobs = tuple(Job("belljar-r-1-1", "77", state) for state in jobs)
    story.look()
    story.look(after)
    assert story.case.instances[0].cause is (Cause.NODE_LOST if is_lost else None)
    assert (story.case.lease.state is L.ACTIVE) != is_lost


@pytest.mark.parametrize(("first", "is_lost"), [(JobState.ENDED, True), (JobState.RUNNING, False)])
def test_a_pilot_of_an_earlier_job_is_lost_with_that_and_not_with_the_next_one(first: JobState, is_lost: bool) -> None:
    story = Story(lease(2))
    story.job(JobState.RUNNING)
    story.look()
    story.hears(Tell.HELLO, 0, facts=NODE)
    story.look(121)
    assert story.case.lease.attempt == 2
    story.connected.clear()
    story.jobs = (Job("belljar-r-1-1", "77", first), Job("belljar-r-1-2", "78", JobState.RUNNING))
    story.look()
    assert [one.is_live for one in story.case.slots] == [not is_lost]


def test_a_pilot_that_is_connected_is_not_lost_whatever_its_job_is() -> None:
    story = Story(lease()).running()
    story.job(JobState.ENDED)
    story.look()
    assert story.case.lease.state is L.ACTIVE


def test_a_group_starts_when_all_are_there() -> None:
    story = Story(lease(2))
    story.job(JobState.RUNNING)
    story.look()
    story.hears(Tell.HELLO, 1, facts=NODE)
    assert orders(story.look()) == [] and story.case.lease.state is L.CLAIMING
    story.hears(Tell.HELLO, 0, facts=NODE)
    story.now += 5
    step = advance(story.case, Seen(story.now, 0.0, story.jobs, frozenset(story.connected)), SETTINGS)
    assert orders(step) == [(Do.GO, "r-1.1.0"), (Do.GO, "r-1.1.1"), (Do.START, "i-0"), (Do.START, "i-1")]


def test_a_group_that_is_not_complete_in_time_is_tried_anew_and_then_fails() -> None:
    story = Story(lease(2))
    story.job(JobState.RUNNING)
    story.look()
    story.hears(Tell.HELLO, 0, facts=NODE)
    step = story.look(121)
    assert story.case.lease.state is L.REQUESTED and story.case.lease.attempt == 2
    assert orders(step) == [(Do.RELEASE, "r-1.1.0")]
    assert (Kind.CANCEL, "77") in [(act.kind, act.of) for act in step.acts]
    story.job(JobState.RUNNING, 2)
    story.look()
    story.hears(Tell.HELLO, 0, facts=NODE)
    story.look(121)
    assert story.case.lease.cause is Cause.CAPACITY
    assert story.case.lease.why == "1 of 2 nodes came within 120 s; 2 jobs were tried"


def test_who_is_content_with_fewer_gets_them() -> None:
    story = Story(lease(3, least=1))
    story.job(JobState.RUNNING)
    story.look()
    story.hears(Tell.HELLO, 2, facts=NODE)
    story.look(121)
    assert story.case.lease.state is L.ACTIVE
    assert [(one.state, one.cause) for one in story.case.instances] == [
        (I.CLAIMED, None), (I.TERMINATED, Cause.CAPACITY), (I.TERMINATED, Cause.CAPACITY),
    ]  # fmt: skip
    assert story.hears(Tell.HELLO, 0, facts=NODE).orders[0].do is Do.VOID


def test_a_lease_that_does_not_start_in_time_fails_and_its_job_goes() -> None:
    story = Story(lease())
    story.jobs = (Job("belljar-r-1-1", "77", JobState.WAITING, "Priority"),)
    story.look()
    story.look()
    story.look(10_000)
    assert story.case.lease.cause is Cause.CAPACITY
    assert story.case.lease.why == "the batch system did not start it in time: Priority"
    assert [(act.kind, act.of) for act in story.look().acts] == [(Kind.CANCEL, "77")]


def test_a_job_that_is_there_twice_is_cancelled_once() -> None:
    story = Story(lease())
    story.jobs = tuple(Job("belljar-r-1-1", number, JobState.WAITING) for number in ("78", "77"))
    assert [(act.kind, act.of) for act in story.look().acts] == [(Kind.CANCEL, "78")]
    assert story.case.lease.job == "77"


def test_a_job_that_nobody_asked_for_is_cancelled() -> None:
    jobs = [Job("belljar-r-9-1", "5", JobState.WAITING), Job("belljar-r-1-1", "6", JobState.WAITING)]
    assert [act.of for act in strays(jobs, {"r-1"}.__contains__)] == ["5"]


def test_a_second_pilot_of_the_same_rank_is_void() -> None:
    story = Story(lease()).running()
    assert story.hears(Tell.HELLO, 0, pilot="other", facts=NODE).orders[0].do is Do.VOID
    assert story.hears(Tell.INSTANCE, 0, 2, pilot="other", instance="i-0", state=I.TERMINATED).orders[0].do is Do.VOID
    assert story.case.instances[0].state is I.RUNNING


def test_a_report_counts_once_and_in_order() -> None:
    story = Story(lease()).active()
    assert story.hears(Tell.INSTANCE, 0, 2, instance="i-0", state=I.RUNNING).acked == 0
    assert story.case.instances[0].state is I.CLAIMED
    assert story.hears(Tell.INSTANCE, 0, 1, instance="i-0", state=I.BOOTING).acked == 1
    story.hears(Tell.INSTANCE, 0, 2, instance="i-0", state=I.RUNNING)
    ran = story.case.instances[0]
    story.now += 50
    assert story.hears(Tell.INSTANCE, 0, 2, instance="i-0", state=I.RUNNING).acked == 2
    assert story.case.instances[0] == ran


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        (replace(NODE, cpus=0), "was granted 0 processors of 1"),
        (replace(NODE, memory=GIB), "was granted 1024 MiB of memory of 2304"),
        (replace(NODE, offset=-400.0), "its clock is -400 s off"),
    ],
)
def test_a_node_that_cannot_be_used_is_shunned_and_another_one_is_asked_for(facts: Facts, why: str) -> None:
    story = Story(lease())
    story.job(JobState.RUNNING)
    story.look()
    answer = story.hears(Tell.HELLO, 0, facts=facts)
    assert answer.orders[0].do is Do.VOID and why in answer.orders[0].why
    assert (story.case.lease.state, story.case.lease.attempt, story.case.lease.shunned) == (L.REQUESTED, 2, ("wn1",))


def test_a_pilot_that_comes_back_is_told_again_what_holds() -> None:
    story = Story(lease()).running()
    go, run = story.hears(Tell.HELLO, 0, facts=NODE).orders
    assert (go.do, go.seconds) == (Do.GO, story.case.slots[0].ends - story.now)
    assert (run.do, run.instance, run.seconds) == (Do.EXTEND, "i-0", 3600)


def test_a_pilot_that_comes_after_its_lease_is_void() -> None:
    story = Story(lease())
    story.job(JobState.WAITING)
    story.look()
    story.case = drained(story.case, Cause.USER, "", 0.0)
    assert story.hears(Tell.HELLO, 0, facts=NODE).orders[0].do is Do.VOID


def test_nodes_are_given_back_one_by_one_as_their_machines_end() -> None:
    story = Story(lease(2)).running()
    story.hears(Tell.INSTANCE, 0, 2, instance="i-0", state=I.TERMINATED, cause=Cause.GUEST)
    assert orders(story.look()) == [(Do.RELEASE, "r-1.1.0")]
    assert story.case.lease.state is L.ACTIVE
    assert [one.state for one in story.case.slots] == [S.RELEASING, S.GO]


def test_a_lease_whose_machines_powered_off_is_released() -> None:
    story = Story(lease()).running()
    story.hears(Tell.INSTANCE, 0, 2, instance="i-0", state=I.TERMINATED, cause=Cause.GUEST)
    story.look()
    story.hears(Tell.ENDED, 0, 3)
    story.job(JobState.ENDED)
    story.look()
    assert (story.case.lease.state, story.case.lease.cause) == (L.RELEASED, Cause.GUEST)


def test_what_the_batch_system_never_takes_has_failed() -> None:
    story = Story(lease())
    story.look()
    story.case = drained(story.case, Cause.REJECTED, "no such partition: night", story.now)
    story.look()
    story.look(60)
    assert (story.case.lease.state, story.case.lease.why) == (L.FAILED, "no such partition: night")


def test_its_time_is_over() -> None:
    story = Story(lease()).running()
    assert orders(story.look(3600 + 301)) == [(Do.STOP, "i-0")]
    assert story.case.lease.cause is Cause.EXPIRED
