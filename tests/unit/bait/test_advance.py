"""A job's way at a bait, in a world of values: to its end, whatever dies and whenever."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from belljar.bait import Settings
from belljar.bait.decisions.advance import ASKED_FOR, BESIDE, MOVED, QUIET, UNFIT, Act, Do, Seen, advance, recover
from belljar.bait.decisions.decide import asked_of
from belljar.bait.decisions.states import MOVES, Entry, State
from belljar.batch import JobState, JobView, NodeState, NodeView, machine_of, node_of
from belljar.model import MIB
from belljar.records import replace

SETTINGS = Settings(name="bait1", images=("worker",), networks=(("open", "br0"),))
JOB = JobView("7", JobState.RUNNING, owner="alice", queue="batch", memory=600 * MIB, on=("bait1",), number="7")
S = State


class Killed(Exception):
    """The bait, between two lines."""


class World:
    """A batch system with one job, and the machines of a host. Acts show at once, what follows from them at a tick."""

    def __init__(self, nodes: int = 1, lasts: int = 2) -> None:
        self.job, self.lasts = replace(JOB, nodes=nodes), lasts
        self.pinned: tuple[str, ...] = ()
        self.nodes: dict[str, NodeState] = {}
        self.machines: set[str] = set()
        self.ended: dict[str, str] = {}
        self.journal: dict[str, Entry] = {"7": Entry("7", S.ARRIVED, 0.0)}
        self.now, self.ran, self.completed, self.fresh = 0.0, 0, 0, itertools.count()
        self.points, self.kill_at = 0, -1
        self.seen_states: list[State] = []

    # -- what happens by itself

    def tick(self) -> None:
        self.now += 1
        for id in self.machines:
            self.nodes.setdefault(node_of(id), NodeState.IDLE)
        if self.job.state is JobState.RUNNING and self.job.on != ("bait1",):
            self.ran += 1
            if self.ran >= self.lasts:
                self.completed += 1
                self.over(JobState.ENDED)
        elif (
            self.job.state is JobState.WAITING
            and self.pinned
            and all(self.nodes.get(one) is NodeState.IDLE and machine_of(one) in self.machines for one in self.pinned)
        ):
            self.job, self.ran = replace(self.job, state=JobState.RUNNING, on=self.pinned), 0
            self.nodes.update(dict.fromkeys(self.pinned, NodeState.BUSY))
        elif self.job.state is JobState.WAITING and not self.pinned:
            self.job = replace(self.job, state=JobState.RUNNING, on=("elsewhere",))

    def over(self, state: JobState) -> None:
        for one in self.job.on:
            if one in self.nodes:
                is_open = self.nodes[one] in (NodeState.BUSY, NodeState.IDLE)
                self.nodes[one] = NodeState.IDLE if is_open else NodeState.OUT
        self.job = replace(self.job, state=state, on=())

    def lose_machine(self) -> None:
        for id in sorted(self.machines)[:1]:
            self.machines.discard(id)
            self.ended[id] = "QEMU was killed"

    # -- what the bait does

    def point(self) -> None:
        self.points += 1
        if self.points == self.kill_at:
            raise Killed

    def do(self, act: Act) -> None:
        job, of = self.job, act.of
        if act.do is Do.TAKE_BACK and job.state is JobState.RUNNING:
            self.over(JobState.HELD)
            self.job = replace(self.job, starts=job.starts + 1)
        elif act.do is Do.TAKE_BACK and job.state is JobState.WAITING:
            self.job = replace(job, state=JobState.HELD)
        elif act.do is Do.START and of not in self.ended:
            self.machines.add(of)
        elif act.do is Do.MOVE and job.state is JobState.HELD:
            self.pinned = tuple(map(node_of, self.journal["7"].machines))
            self.job = replace(job, state=JobState.WAITING, queue="belljar")
        elif act.do is Do.GIVE_BACK and job.state is JobState.HELD:
            self.pinned, self.job = (), replace(job, state=JobState.WAITING, queue=self.journal["7"].home)
        elif act.do is Do.END and of in self.machines:
            self.machines.discard(of)
            self.ended[of] = "cancelled"
        elif act.do is Do.CLOSE and of in self.nodes:
            self.nodes[of] = NodeState.DRAINING if self.nodes[of] is NodeState.BUSY else NodeState.OUT
        elif act.do is Do.LOSE and of in self.nodes:
            if of in job.on:
                self.over(JobState.WAITING)
            self.nodes[of] = NodeState.OUT
        elif act.do is Do.REMOVE:
            assert self.nodes.get(of, NodeState.OUT) is NodeState.OUT and machine_of(of) not in self.machines
            self.nodes.pop(of, None)

    def look(self) -> None:
        nodes = {name: NodeView(name, state) for name, state in self.nodes.items()}
        seen = Seen(self.now, {"7": self.job}, nodes, frozenset(self.machines), dict(self.ended))
        for entry in list(self.journal.values()):
            step = advance(entry, seen, SETTINGS)
            after = step.entry
            if after.state is S.STOPPED and entry.state is S.STOPPED:
                ids = tuple(f"{next(self.fresh):012x}" for _ in range(self.job.nodes))
                after = replace(after, state=S.VM_REQUESTED, since=self.now, machines=ids)
            self.point()
            if after.state is not entry.state:
                assert after.state in MOVES[entry.state], (entry.state, after.state)
                self.seen_states.append(after.state)
            if after.state is S.CLOSED:
                del self.journal["7"]
            else:
                self.journal["7"] = after
            for act in step.acts:
                self.point()
                self.do(act)
        for act in recover(self.journal.values(), seen, frozenset(self.nodes)):
            self.do(act)

    def run(self, looks: int = 120) -> World:
        for _ in range(looks):
            try:
                self.look()
            except Killed:
                continue
            self.tick()
            if not self.journal and not self.nodes and not self.machines:
                break
        return self


def test_a_jobs_way_is_the_table_of_states() -> None:
    world = World().run()
    assert world.seen_states == [
        S.STOPPED, S.VM_REQUESTED, S.VM_BOOTING, S.VM_READY, S.MIGRATING, S.RUNNING, S.FINISHED, S.CLOSED,
    ]  # fmt: skip
    assert (world.completed, world.nodes, world.machines, world.journal) == (1, {}, set(), {})


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_bait_that_is_killed_at_any_point_goes_on(nodes: int) -> None:
    whole = World(nodes).run().points
    assert whole > 20
    for at in range(1, whole + 1):
        world = World(nodes)
        world.kill_at = at
        world.run()
        assert (world.completed, world.job.starts, world.nodes, world.machines, world.journal) == (
            1,
            1,
            {},
            set(),
            {},
        ), at


@given(deaths=st.lists(st.integers(0, 25), max_size=3), kills=st.integers(0, 60), nodes=st.integers(1, 3))
@hypothesis_settings(max_examples=300, deadline=None)
def test_whatever_dies_no_job_is_lost_or_done_twice_and_nothing_stays(
    deaths: list[int], kills: int, nodes: int
) -> None:
    world = World(nodes)
    world.kill_at = kills
    for look in range(200):
        try:
            world.look()
        except Killed:
            continue
        world.tick()
        if look in deaths:
            world.lose_machine()
        if not world.journal and not world.nodes and not world.machines:
            break
    assert (world.nodes, world.machines, world.journal) == ({}, set(), {})
    gone_elsewhere = world.job.on == ("elsewhere",) or (world.job.state is JobState.WAITING and not world.pinned)
    assert world.completed == (0 if gone_elsewhere else 1)
    if gone_elsewhere:  # after so many tries
        assert len(world.ended) >= SETTINGS.tries * nodes or S.REQUEUE in world.seen_states


def test_a_lost_journal_leaves_no_machine_and_no_node() -> None:
    world = World()
    while world.journal["7"].state is not S.VM_READY:
        world.look()
        world.tick()
    world.journal.clear()
    world.run(20)
    assert (world.nodes, world.machines) == ({}, set()) and world.job.state is JobState.HELD


def entry(state: State, **facts: object) -> Entry:
    return replace(Entry("7", state, 0.0, machines=("0" * 12,), home="batch"), **facts)  # type: ignore[arg-type]


def seen(
    now: float = 1.0, job: JobView | None = JOB, node: NodeState | None = NodeState.IDLE, *, lives: bool = True
) -> Seen:
    nodes = {} if node is None else {node_of("0" * 12): NodeView(node_of("0" * 12), node)}
    return Seen(now, {} if job is None else {"7": job}, nodes, frozenset({"0" * 12} if lives else ()))


HELD, ENDED = replace(JOB, state=JobState.HELD, on=()), replace(JOB, state=JobState.ENDED, on=())
THERE = replace(JOB, on=(node_of("0" * 12),))


@pytest.mark.parametrize("state", [one for one in State if one is not S.CLOSED])
def test_a_batch_system_that_does_not_answer_means_nothing(state: State) -> None:
    for silent in (replace(seen(), jobs=None), replace(seen(), nodes=None)):
        assert advance(entry(state), silent, SETTINGS) == advance(entry(state), silent, SETTINGS)
        assert advance(entry(state), silent, SETTINGS).acts == ()
        assert advance(entry(state), silent, SETTINGS).entry == entry(state)


@pytest.mark.parametrize("state", [one for one in State if one not in (S.CLOSED, S.FINISHED)])
def test_a_job_that_is_cancelled_is_finished_in_every_state(state: State) -> None:
    assert advance(entry(state), seen(job=ENDED), SETTINGS).entry.state is S.FINISHED


@pytest.mark.parametrize("state", [S.STOPPED, S.VM_BOOTING, S.RUNNING, S.REPROCESS])
def test_one_answer_without_it_does_not_end_a_job(state: State) -> None:
    step = advance(entry(state), seen(10.0, None), SETTINGS)
    assert step.entry == entry(state, missing=10.0) and step.acts == ()
    assert advance(step.entry, seen(69.0, None), SETTINGS).entry.state is state
    assert advance(step.entry, seen(71.0, None), SETTINGS).entry.state is S.FINISHED
    assert advance(step.entry, seen(71.0, HELD if state is S.STOPPED else THERE), SETTINGS).entry.missing == 0.0


def test_each_wait_has_its_end() -> None:
    asked = advance(entry(S.IMAGE_WAIT), seen(ASKED_FOR + 1, HELD, None, lives=False), SETTINGS).entry
    joins = advance(entry(S.VM_BOOTING), seen(SETTINGS.join + 1, HELD, None), SETTINGS).entry
    moves = advance(entry(S.MIGRATING), seen(MOVED + 1, replace(HELD, state=JobState.WAITING)), SETTINGS).entry
    assert [one.state for one in (asked, joins, moves)] == [S.REPROCESS] * 3
    assert "did not join within 300 s" in joins.why and "did not start on its nodes" in moves.why


def test_a_machine_that_dies_under_its_job_costs_the_job_nothing_but_time() -> None:
    lost = advance(entry(S.RUNNING), seen(job=THERE, node=NodeState.BUSY, lives=False), SETTINGS)
    assert lost.entry.state is S.LOST and lost.entry.why == "its machine is gone"
    assert advance(lost.entry, seen(job=THERE, node=NodeState.BUSY, lives=False), SETTINGS).acts == (
        Act(Do.LOSE, node_of("0" * 12)),
    )
    silent = advance(lost.entry, seen(QUIET + 2, THERE, NodeState.OUT, lives=False), SETTINGS)
    assert silent.acts == (Act(Do.FORCE_END),)  # it may not run again, and cannot end
    waits = replace(HELD, state=JobState.WAITING)
    assert advance(lost.entry, seen(job=waits, node=NodeState.OUT, lives=False), SETTINGS).entry.state is S.REPROCESS
    cleaned = advance(entry(S.REPROCESS, tries=1), seen(job=HELD, node=None, lives=False), SETTINGS)
    assert (cleaned.entry.state, cleaned.entry.tries, cleaned.entry.machines) == (S.STOPPED, 2, ())


def test_a_node_is_removed_only_when_it_is_quiet_and_its_machine_gone() -> None:
    over, name = entry(S.FINISHED), node_of("0" * 12)
    steps = [
        advance(over, seen(job=ENDED, node=node, lives=lives), SETTINGS).acts
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
    late = advance(over, seen(500.0, ENDED, NodeState.DRAINING), SETTINGS)
    assert late.acts == (Act(Do.END, "0" * 12),)


def test_a_node_is_removed_only_when_the_job_that_wants_it_is_held() -> None:
    failed, free = entry(S.REPROCESS), replace(HELD, state=JobState.WAITING)
    assert advance(failed, seen(job=free, node=NodeState.OUT, lives=False), SETTINGS).acts == (Act(Do.TAKE_BACK),)
    assert advance(failed, seen(job=HELD, node=NodeState.OUT, lives=False), SETTINGS).acts == (
        Act(Do.REMOVE, node_of("0" * 12)),
    )


def test_after_so_many_tries_it_goes_back_and_after_so_many_requeues_it_is_held() -> None:
    clean = seen(job=HELD, node=None, lives=False)
    back = advance(entry(S.REPROCESS, tries=2), clean, SETTINGS).entry
    assert back.state is S.REQUEUE and advance(back, clean, SETTINGS).acts == (Act(Do.GIVE_BACK),)
    free = seen(job=replace(HELD, state=JobState.WAITING), node=None, lives=False)
    assert advance(back, free, SETTINGS).entry.state is S.CLOSED
    often = seen(job=replace(HELD, starts=10), node=None, lives=False)
    refused = advance(entry(S.REPROCESS, why="it did not boot"), often, SETTINGS).entry
    assert refused.state is S.REJECTED and refused.why == "requeued 10 times; at last: it did not boot"
    assert advance(refused, often, SETTINGS).acts == (Act(Do.REFUSE),)
    assert advance(refused, replace(often, now=60.0), SETTINGS).entry.state is S.CLOSED


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
        step = advance(one, seen(now, job, there, lives=lives), SETTINGS)
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
    assert settled(S.STOPPED, WAITING) == ([S.STOPPED, S.ARRIVED, S.CLOSED], [])


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
    early, late = (
        replace(seen(over.since + age, ENDED, NodeState.OUT, lives=False), saves=10.0) for age in (9.0, 10.0)
    )
    assert advance(over, early, SETTINGS).acts == () and advance(over, early, SETTINGS).entry == over
    assert [act.do for act in advance(over, late, SETTINGS).acts] == [Do.REMOVE]


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
    after = advance(entry(state, asked=ASKED), seen(job=job), SETTINGS).entry
    assert after.state is S.REPROCESS and says in after.why.partition("; now ")[2], after.why
    goes_on = [S.REQUEUE, S.CLOSED] if "queue" in what else [S.STOPPED]  # it may not be this bait's any more
    assert settled(state, job)[0] == [state, S.REPROCESS, *goes_on]


def test_a_time_limit_may_be_altered_at_any_moment() -> None:
    assert asked_of(replace(HELD, reason="", starts=3, number="9")) == ASKED  # no machine follows from it


def test_a_job_that_is_moved_to_another_queue_goes_there() -> None:
    states, acts = settled(S.STOPPED, replace(HELD, queue="long"))
    assert (states, acts) == ([S.STOPPED, S.REQUEUE, S.CLOSED], [Do.GIVE_BACK])
    back = advance(replace(entry(S.STOPPED), machines=()), seen(job=replace(HELD, queue="long")), SETTINGS).entry
    assert (back.home, back.why) == ("long", "it was moved to long")
    for queue in ("batch", "belljar", ""):  # where it was; where the nodes are; unknown
        assert advance(entry(S.STOPPED), seen(job=replace(HELD, queue=queue)), SETTINGS).entry.state is S.STOPPED


@pytest.mark.parametrize("state", [S.RUNNING, S.LOST])
def test_a_job_that_its_user_requeues_runs_again_on_another_machine(state: State) -> None:
    states, acts = settled(state, replace(WAITING, queue="belljar"))
    assert states == [state, S.REPROCESS, S.STOPPED] and acts[0] is Do.TAKE_BACK


# -- nodes that lie


def test_an_image_that_cannot_join_is_tried_once() -> None:
    why = f"{UNFIT}worker: no slurmd is installed in it"
    failed = Seen(2.0, {"7": HELD}, {}, frozenset(), {"0" * 12: why})
    after = advance(entry(S.VM_BOOTING), failed, SETTINGS).entry
    assert (after.state, after.why) == (S.REPROCESS, why)
    held = advance(after, failed, SETTINGS).entry
    assert (held.state, held.why) == (S.REJECTED, why)
    assert advance(held, failed, SETTINGS).acts == (Act(Do.REFUSE),)


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
    never = advance(late, seen(SETTINGS.join + 1, HELD, None), SETTINGS).entry
    assert never.state is S.REPROCESS and "did not join within 300 s" in never.why


def test_beside_native_jobs_a_machine_is_made_when_it_has_its_room() -> None:
    id, held = "0" * 12, replace(JOB, state=JobState.HELD, on=())
    waits = replace(seen(5000.0, held, None, lives=False), reserved=frozenset())
    step = advance(entry(S.VM_REQUESTED), waits, SETTINGS)
    assert step.acts == () and (step.entry.state, step.entry.why) == (S.VM_REQUESTED, BESIDE)
    has_room = replace(waits, reserved=frozenset({id}))
    asks = advance(step.entry, has_room, SETTINGS)
    assert (asks.entry.state, asks.entry.since, asks.acts) == (S.IMAGE_WAIT, 5000.0, ())
    assert advance(asks.entry, has_room, SETTINGS).acts == (Act(Do.START, id),)
    assert advance(asks.entry, waits, SETTINGS).acts == ()  # somebody took it away again
    alive = replace(waits, machines=frozenset({id}))
    assert advance(asks.entry, alive, SETTINGS).entry.state is S.VM_BOOTING
