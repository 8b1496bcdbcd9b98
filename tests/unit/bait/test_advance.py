"""A job's steps at a bait, one by one."""

from __future__ import annotations

import pytest
from tests.unit.bait.moves import MOVES

from belljar.bait import Settings
from belljar.bait.decisions.advance import AFTER, HANDLERS, UNFIT, next_step
from belljar.bait.decisions.decide import asked_of
from belljar.bait.decisions.leaving import recover
from belljar.bait.decisions.step import ASKED_FOR, MOVED, QUIET, Act, Do, Entry, Seen, State, Step
from belljar.model import MIB
from belljar.pool import JobState, JobView, NodeState, NodeView, node_of
from belljar.records import replace

SETTINGS = Settings(name="bait1", images=("worker",), networks=(("open", "br0"),))
JOB = JobView("7", JobState.RUNNING, owner="alice", queue="batch", memory=600 * MIB, on=("bait1",), number="7")
S = State


def entry(state: State, **facts: object) -> Entry:
    return replace(Entry("7", state, 0.0, machines=("0" * 12,), home="batch"), **facts)  # type: ignore[arg-type]


def seen(
    now: float = 1.0, job: JobView | None = JOB, node: NodeState | None = NodeState.IDLE, *, lives: bool = True
) -> Seen:
    nodes = {} if node is None else {node_of("0" * 12): NodeView(node_of("0" * 12), node)}
    return Seen(now, {} if job is None else {"7": job}, nodes, frozenset({"0" * 12} if lives else ()))


HELD, ENDED = replace(JOB, state=JobState.HELD, on=()), replace(JOB, state=JobState.ENDED, on=())
THERE = replace(JOB, on=(node_of("0" * 12),))


def test_every_state_but_the_last_has_a_handler() -> None:
    assert {*HANDLERS, *AFTER} == set(State) - {S.CLOSED}


@pytest.mark.parametrize("state", [one for one in State if one not in (S.CLOSED, S.FINISHED)])
def test_a_job_that_is_cancelled_is_finished_in_every_state(state: State) -> None:
    assert next_step(entry(state), seen(job=ENDED), SETTINGS).entry.state is S.FINISHED


@pytest.mark.parametrize("state", [S.STOPPED, S.VM_BOOTING, S.RUNNING, S.REPROCESS])
def test_one_answer_without_it_does_not_end_a_job(state: State) -> None:
    step = next_step(entry(state), seen(10.0, None), SETTINGS)
    assert step.entry == entry(state, missing_since=10.0) and step.acts == ()
    assert next_step(step.entry, seen(69.0, None), SETTINGS).entry.state is state
    assert next_step(step.entry, seen(71.0, None), SETTINGS).entry.state is S.FINISHED
    assert (
        next_step(step.entry, seen(71.0, HELD if state is S.STOPPED else THERE), SETTINGS).entry.missing_since is None
    )


def test_each_wait_has_its_end() -> None:
    asked = next_step(entry(S.IMAGE_WAIT), seen(ASKED_FOR + 1, HELD, None, lives=False), SETTINGS).entry
    joins = next_step(entry(S.VM_BOOTING), seen(SETTINGS.join + 1, HELD, None), SETTINGS).entry
    assert [one.state for one in (asked, joins)] == [S.REPROCESS] * 2 and "did not join within 300 s" in joins.why


def test_a_move_that_does_not_succeed_ends_after_one_round_with_the_job_held_and_the_reason_shown() -> None:
    waits = replace(HELD, state=JobState.WAITING, queue="belljar", reason="Reservation")
    early = next_step(entry(S.MIGRATING), seen(30.0, waits), SETTINGS)
    assert early.entry.why == "it waits on its nodes: Reservation" and early.acts == ()
    late = next_step(entry(S.MIGRATING), seen(MOVED + 1, waits), SETTINGS).entry
    why = "it did not start on its nodes within 300 s: Reservation"
    assert (late.state, late.why) == (S.REPROCESS, why)
    states, acts = settled(S.REPROCESS, waits, why=why)
    assert states == [S.REPROCESS, S.REJECTED, S.CLOSED]
    assert acts[:5] == [Do.TAKE_BACK, Do.CLOSE, Do.END, Do.REMOVE, Do.REFUSE]
    # What other jobs of its user keep it waiting for is not its fault.
    limited = replace(waits, reason="QOSMaxJobsPerUserLimit", is_limited=True)
    assert next_step(entry(S.MIGRATING), seen(MOVED + 1, limited), SETTINGS).entry.state is S.REQUEUE


@pytest.mark.parametrize("state", [S.RUNNING, S.LOST, S.FINISHED])
@pytest.mark.parametrize("believed", [JobState.WAITING, JobState.HELD])
def test_a_job_that_runs_once_at_most_does_not_run_again_whatever_was_forgotten(
    state: State, believed: JobState
) -> None:
    began, job = entry(state, reruns=False, starts=1), replace(HELD, state=believed, starts=1)
    step = next_step(began, seen(job=job), SETTINGS)
    assert step.entry.state is state and [act.do for act in step.acts] == [Do.NOTE, Do.FORCE_END]
    assert "is not to run twice" in step.acts[0].of
    assert next_step(step.entry, seen(job=replace(job, state=JobState.ENDED)), SETTINGS).entry.state is S.FINISHED
    for may in (replace(began, reruns=True), replace(began, starts=0)):
        assert Act(Do.FORCE_END) not in next_step(may, seen(job=job), SETTINGS).acts
    somebody_requeued_it = replace(job, starts=2)
    assert Act(Do.FORCE_END) not in next_step(began, seen(job=somebody_requeued_it), SETTINGS).acts


def test_a_machine_that_dies_under_its_job_costs_the_job_nothing_but_time() -> None:
    lost = next_step(entry(S.RUNNING), seen(job=THERE, node=NodeState.BUSY, lives=False), SETTINGS)
    assert lost.entry.state is S.LOST and lost.entry.why == "its machine is gone"
    assert next_step(lost.entry, seen(job=THERE, node=NodeState.BUSY, lives=False), SETTINGS).acts == (
        Act(Do.LOSE, node_of("0" * 12)),
    )
    silent = next_step(lost.entry, seen(QUIET + 2, THERE, NodeState.OUT, lives=False), SETTINGS)
    assert silent.acts == (Act(Do.FORCE_END),)  # it may not run again, and cannot end
    waits = replace(HELD, state=JobState.WAITING)
    assert next_step(lost.entry, seen(job=waits, node=NodeState.OUT, lives=False), SETTINGS).entry.state is S.REPROCESS
    cleaned = next_step(entry(S.REPROCESS, tries=1), seen(job=HELD, node=None, lives=False), SETTINGS)
    assert (cleaned.entry.state, cleaned.entry.tries, cleaned.entry.machines) == (S.STOPPED, 2, ())


def test_a_node_is_removed_only_when_it_is_quiet_and_its_machine_gone() -> None:
    over, name = entry(S.FINISHED), node_of("0" * 12)
    steps = [
        next_step(over, seen(job=ENDED, node=node, lives=lives), SETTINGS).acts
        for node, lives in (
            (NodeState.IDLE, True), (NodeState.DRAINING, True), (NodeState.OUT, True), (NodeState.OUT, False), (NodeState.BUSY, False),
        )
    ]  # fmt: skip
    assert steps == [
        (Act(Do.CLOSE, name),),
        (),
        (Act(Do.END, "0" * 12),),
        (Act(Do.REMOVE, name),),
        (Act(Do.LOSE, name),),
    ]
    late = next_step(over, seen(500.0, ENDED, NodeState.DRAINING), SETTINGS)
    assert late.acts == (Act(Do.END, "0" * 12),)


def test_a_node_is_removed_only_when_the_job_that_wants_it_is_held() -> None:
    failed, free = entry(S.REPROCESS), replace(HELD, state=JobState.WAITING)
    assert next_step(failed, seen(job=free, node=NodeState.OUT, lives=False), SETTINGS).acts == (Act(Do.TAKE_BACK),)
    assert next_step(failed, seen(job=HELD, node=NodeState.OUT, lives=False), SETTINGS).acts == (
        Act(Do.REMOVE, node_of("0" * 12)),
    )


def test_after_so_many_tries_it_goes_back_and_after_so_many_requeues_it_is_held() -> None:
    clean = seen(job=HELD, node=None, lives=False)
    back = next_step(entry(S.REPROCESS, tries=2), clean, SETTINGS).entry
    assert back.state is S.REQUEUE and next_step(back, clean, SETTINGS).acts == (Act(Do.GIVE_BACK),)
    free = seen(job=replace(HELD, state=JobState.WAITING), node=None, lives=False)
    assert next_step(back, free, SETTINGS).entry.state is S.CLOSED
    often = seen(job=replace(HELD, starts=10), node=None, lives=False)
    refused = next_step(entry(S.REPROCESS, why="it did not boot"), often, SETTINGS).entry
    assert refused.state is S.REJECTED and refused.why == "requeued 10 times; at last: it did not boot"
    assert next_step(refused, often, SETTINGS).acts == (Act(Do.REFUSE),)
    assert next_step(refused, replace(often, now=60.0), SETTINGS).entry.state is S.CLOSED


# -- what a user does with a job that is under way: one row for each state, of the job as the batch system shows it then

HELD_HERE = (S.STOPPED, S.VM_REQUESTED, S.IMAGE_WAIT, S.VM_BOOTING, S.VM_READY)
WAITING = replace(HELD, state=JobState.WAITING)
MOVED_AWAY = replace(HELD, queue="belljar")  # to the partition of the nodes
ASKED = asked_of(HELD)


def settled(state: State, job: JobView, **facts: object) -> tuple[list[State], list[Do]]:
    """The states that a job goes through, and the acts on it, while nobody does anything any more: its machine and node obey."""
    one, lives, node = entry(state, asked=ASKED, **facts), True, NodeState.IDLE
    if state in (S.ARRIVED, S.STOPPED):
        one, lives = replace(one, machines=()), False
    states, acts, now, there = [state], list[Do](), 1.0, node if lives else None
    for _ in range(12):
        step = next_step(one, seen(now, job, there, lives=lives), SETTINGS)
        if step.entry.state is not one.state:
            assert step.entry.state in MOVES[one.state]
            states.append(step.entry.state)
        if step.entry == one and not step.acts:
            break
        one, now = step.entry, now + 1
        for act in step.acts:
            acts.append(act.do)
            if act.do is Do.TAKE_BACK:
                job = replace(job, state=JobState.HELD, on=())
            elif act.do is Do.MOVE:
                job = replace(job, state=JobState.WAITING, queue="belljar", is_held_by_user=False)
            elif act.do is Do.GIVE_BACK:
                state_then = JobState.HELD if one.stays_held else JobState.WAITING
                job = replace(job, state=state_then, queue=one.home)
            elif act.do is Do.CLOSE:
                there = NodeState.OUT
            elif act.do is Do.END:
                lives = False
            elif act.do is Do.REMOVE:
                there = None
        if one.state in (S.CLOSED, S.STOPPED, S.RUNNING):
            break
    return states, acts


@pytest.mark.parametrize("state", [S.VM_REQUESTED, S.IMAGE_WAIT, S.VM_BOOTING, S.VM_READY, S.REPROCESS])
def test_a_job_that_is_released_too_early_is_held_again(state: State) -> None:
    assert settled(state, WAITING)[1][0] is Do.TAKE_BACK


def test_a_job_that_waits_for_its_turn_and_is_released_comes_again_by_itself() -> None:
    assert settled(S.STOPPED, WAITING) == ([S.STOPPED, S.ARRIVED, S.REQUEUE, S.CLOSED], [])


@pytest.mark.parametrize("state", HELD_HERE)
def test_a_hold_of_a_job_that_is_held_already_changes_nothing(state: State) -> None:
    assert settled(state, HELD)[0][:2] != [state, S.REPROCESS]
    assert settled(state, HELD) == settled(state, replace(HELD, is_held_by_user=True))


def test_a_running_job_that_slurmctld_remembers_as_held_by_us_is_tried_again() -> None:
    """One that was killed before it had saved the move: nobody requeued the job since."""
    states, acts = settled(S.RUNNING, replace(MOVED_AWAY, starts=1), starts=1)
    assert states[:3] == [S.RUNNING, S.REPROCESS, S.STOPPED] and Do.GIVE_BACK not in acts
    assert settled(S.RUNNING, replace(MOVED_AWAY, starts=2), starts=1)[0] == [S.RUNNING, S.REQUEUE, S.CLOSED]


def test_a_node_stays_known_until_the_batch_system_has_saved_that_its_job_has_left() -> None:
    """Else one that is killed then finds the job on a node that there is none of, and never ends it."""
    over = entry(S.FINISHED)
    late = seen(1.0, ENDED, NodeState.OUT, lives=False)
    early = replace(late, named=frozenset({node_of("0" * 12)}))
    assert next_step(over, early, SETTINGS).acts == () and next_step(over, early, SETTINGS).entry == over
    assert [act.do for act in next_step(over, late, SETTINGS).acts] == [Do.REMOVE]


@pytest.mark.parametrize(
    "job", [replace(JOB, state=one) for one in (JobState.RUNNING, JobState.WAITING, JobState.HELD)]
)
def test_a_job_whose_end_was_forgotten_is_tried_again(job: JobView) -> None:
    assert next_step(entry(S.FINISHED), seen(job=job), SETTINGS).entry.state is S.REPROCESS
    assert (
        next_step(entry(S.FINISHED), seen(job=replace(job, state=JobState.ENDING)), SETTINGS).entry.state is S.FINISHED
    )


@pytest.mark.parametrize("state", [S.STOPPED, S.REPROCESS, S.REQUEUE])
def test_a_job_that_is_held_wants_no_node_that_it_was_moved_to(state: State) -> None:
    """A slurmctld that was killed remembers it as it was moved."""
    node = node_of("0" * 12)
    held = replace(seen(job=replace(HELD, wants=(node,)), node=NodeState.OUT, lives=False), named=frozenset({node}))
    machines = () if state is S.STOPPED else ("0" * 12,)
    assert next_step(entry(state, machines=machines), held, SETTINGS).acts == (Act(Do.UNPIN),)
    theirs = seen(job=replace(HELD, wants=("wn01",)), node=None, lives=False)
    assert Act(Do.UNPIN) not in next_step(entry(state, machines=()), theirs, SETTINGS).acts


def test_a_job_is_tried_again_while_its_last_node_stays_known() -> None:
    """slurmctld 22.05 does not forget the nodes of a job that was requeued as they went down before it starts anew."""
    node = node_of("0" * 12)
    held = replace(seen(job=replace(HELD, on=(node,)), node=NodeState.OUT, lives=False), named=frozenset({node}))
    step = next_step(entry(S.REPROCESS), held, SETTINGS)
    assert (step.entry.state, step.entry.machines, step.acts) == (S.STOPPED, (), ())
    assert recover((step.entry,), held, frozenset({node})) == ()
    unnamed = replace(held, named=frozenset())
    assert recover((step.entry,), unnamed, frozenset({node})) == (Act(Do.REMOVE, node),)


@pytest.mark.parametrize(
    ("state", "job"),
    [(S.MIGRATING, replace(MOVED_AWAY, is_held_by_user=True)), (S.RUNNING, replace(MOVED_AWAY, starts=1))],
)
def test_a_job_that_its_user_holds_later_goes_back_held(state: State, job: JobView) -> None:
    """Not released over its user's head; once released, it comes again as any job."""
    states, acts = settled(state, job)
    assert states == [state, S.REQUEUE, S.CLOSED]
    assert acts == [Do.CLOSE, Do.END, Do.REMOVE, Do.GIVE_BACK]
    released = replace(MOVED_AWAY, state=JobState.WAITING)
    assert settled(S.REQUEUE, released, stays_held=True)[1] == [
        Do.TAKE_BACK, Do.CLOSE, Do.END, Do.REMOVE, Do.GIVE_BACK,
    ]  # fmt: skip


def test_a_release_that_failed_is_tried_again() -> None:
    assert settled(S.MIGRATING, MOVED_AWAY)[1] == [Do.MOVE]


@pytest.mark.parametrize("state", [S.VM_REQUESTED, S.IMAGE_WAIT, S.VM_BOOTING, S.VM_READY])
@pytest.mark.parametrize(
    ("what", "says"),
    [
        ({"memory": 900 * MIB}, "900 MiB"), ({"nodes": 2, "cpus": 2}, "2 nodes, 2 cpus"), ({"image": "el9"}, "image el9"),
        ({"network": "closed"}, "network class closed"), ({"features": ("gpu",)}, ", gpu"), ({"queue": "long"}, "in long"),
    ],
)  # fmt: skip
def test_a_job_that_is_altered_gets_other_machines(state: State, what: dict[str, object], says: str) -> None:
    job = replace(HELD, **what)  # type: ignore[arg-type]
    after = next_step(entry(state, asked=ASKED), seen(job=job), SETTINGS).entry
    assert after.state is S.REPROCESS and says in after.why.partition("; now ")[2], after.why
    goes_on = [S.REQUEUE, S.CLOSED] if "queue" in what else [S.STOPPED]  # it may not be this bait's any more
    assert settled(state, job)[0] == [state, S.REPROCESS, *goes_on]


def test_a_time_limit_may_be_altered_at_any_moment() -> None:
    assert asked_of(replace(HELD, reason="", starts=3, number="9")) == ASKED  # no machine follows from it


def test_a_job_that_is_moved_to_another_queue_goes_there() -> None:
    states, acts = settled(S.STOPPED, replace(HELD, queue="long"))
    assert (states, acts) == ([S.STOPPED, S.REQUEUE, S.CLOSED], [Do.GIVE_BACK])
    back = next_step(replace(entry(S.STOPPED), machines=()), seen(job=replace(HELD, queue="long")), SETTINGS).entry
    assert (back.home, back.why) == ("long", "it was moved to long")
    for queue in ("batch", "belljar", ""):  # where it was; where the nodes are; unknown
        assert next_step(entry(S.STOPPED), seen(job=replace(HELD, queue=queue)), SETTINGS).entry.state is S.STOPPED


@pytest.mark.parametrize("state", [S.RUNNING, S.LOST])
def test_a_job_that_its_user_requeues_runs_again_on_another_machine(state: State) -> None:
    states, acts = settled(state, replace(WAITING, queue="belljar"))
    assert states == [state, S.REPROCESS, S.STOPPED] and acts[0] is Do.TAKE_BACK


def test_a_job_is_moved_when_its_nodes_are_known_for_as_long_as_the_site_wants() -> None:
    settled = replace(SETTINGS, settle=6.0)
    held = replace(JOB, state=JobState.HELD, on=())
    assert next_step(entry(S.VM_READY), seen(5.0, held), settled).entry.state is S.VM_READY
    assert next_step(entry(S.VM_READY), seen(7.0, held), settled).entry.state is S.MIGRATING
    assert next_step(entry(S.VM_READY), seen(5.0, held), SETTINGS).entry.state is S.MIGRATING


def test_a_job_that_still_leaves_its_node_is_not_moved() -> None:
    leaves = seen(7.0, replace(JOB, state=JobState.ENDING))
    assert next_step(entry(S.VM_READY, asked=ASKED), leaves, SETTINGS) == Step(entry(S.VM_READY, asked=ASKED))


# -- nodes that lie


def test_an_image_that_cannot_join_is_tried_once() -> None:
    why = f"{UNFIT}worker: no slurmd is installed in it"
    failed = Seen(2.0, {"7": HELD}, {}, frozenset(), {"0" * 12: why})
    after = next_step(entry(S.VM_BOOTING), failed, SETTINGS).entry
    assert (after.state, after.why) == (S.REPROCESS, why)
    held = next_step(after, failed, SETTINGS).entry
    assert (held.state, held.why) == (S.REJECTED, why)
    assert next_step(held, failed, SETTINGS).acts == (Act(Do.REFUSE),)


def test_a_node_that_joins_under_another_name_is_turned_out() -> None:
    own, late = node_of("0" * 12), entry(S.VM_BOOTING)

    def look(state: NodeState, *, joined: bool, lives: bool = True) -> tuple[Act, ...]:
        nodes = {"wn05": NodeView("wn05", state)} | ({own: NodeView(own, NodeState.IDLE)} if joined else {})
        machines = frozenset({"0" * 12} if lives else ())
        return recover([late], Seen(1.0, {"7": HELD}, nodes, machines), frozenset(nodes))

    assert look(NodeState.IDLE, joined=False) == (Act(Do.CLOSE, "wn05"),)
    assert look(NodeState.OUT, joined=False) == ()  # its machine may be this one, which has not joined
    assert look(NodeState.DRAINING, joined=True) == ()
    assert (
        look(NodeState.OUT, joined=True) == look(NodeState.OUT, joined=False, lives=False) == (Act(Do.REMOVE, "wn05"),)
    )
    never = next_step(late, seen(SETTINGS.join + 1, HELD, None), SETTINGS).entry
    assert never.state is S.REPROCESS and "did not join within 300 s" in never.why


def test_a_job_whose_nodes_were_forgotten_with_its_move_gets_others() -> None:
    """It may have run there, and slurmd starts nothing of it again for a while: its credential was revoked."""
    assert next_step(entry(S.MIGRATING), seen(job=HELD, node=None), SETTINGS).entry.state is S.REPROCESS
    assert next_step(entry(S.MIGRATING), seen(job=HELD), SETTINGS).acts == (Act(Do.MOVE),)


def test_of_a_job_that_lost_a_node_the_other_machines_end_before_that_is_told() -> None:
    """A slurmctld that is killed, and forgets that it requeued the job, believes what they say of its end."""
    first, second = "0" * 12, "1" * 12
    nodes = {node_of(one): NodeView(node_of(one), NodeState.BUSY) for one in (first, second)}
    lost = replace(seen(job=replace(THERE, on=tuple(nodes))), nodes=nodes)
    both = entry(S.LOST, machines=(first, second))
    assert next_step(both, lost, SETTINGS).acts == (Act(Do.END, first),)
    gone = replace(lost, machines=frozenset())
    assert next_step(both, gone, SETTINGS).acts == tuple(Act(Do.LOSE, node) for node in nodes)
