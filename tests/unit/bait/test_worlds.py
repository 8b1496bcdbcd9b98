"""A job's way at a bait through a world of values that lives by itself: whatever dies, whenever, and whatever is forgotten."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from tests.unit.bait.moves import MOVES

from belljar.bait import Settings
from belljar.bait.decisions.advance import next_step
from belljar.bait.decisions.decide import asked_of
from belljar.bait.decisions.leaving import recover
from belljar.bait.decisions.step import Act, Do, Entry, Seen, State
from belljar.model import MIB
from belljar.pool import JobState, JobView, NodeState, NodeView, machine_of, node_of
from belljar.records import replace

SETTINGS = Settings(name="bait1", images=("worker",), networks=(("open", "br0"),))
JOB = JobView("7", JobState.RUNNING, owner="alice", queue="batch", memory=600 * MIB, on=("bait1",), number="7")
S = State
SAVES = 6


class Killed(Exception):
    """The bait, between two lines."""


class World:
    """A batch system with one job, and the machines of a host. Acts show at once, what follows from them at a tick."""

    settings = SETTINGS

    def __init__(self, nodes: int = 1, lasts: int = 2) -> None:
        self.job, self.lasts = replace(JOB, nodes=nodes), lasts
        self.pinned: tuple[str, ...] = ()
        self.nodes: dict[str, NodeState] = {}
        self.machines: set[str] = set()
        self.ended: dict[str, str] = {}
        self.journal: dict[str, Entry] = {"7": Entry("7", S.ARRIVED, 0.0)}
        self.now, self.ran, self.completed, self.fresh = 0.0, 0, 0, itertools.count()
        self.points, self.kill_at = 0, -1
        self.past: list[tuple[JobView, tuple[str, ...]]] = []  # the job, a tick each
        self.unnamed: dict[str, float] = {}
        self.seen_states: list[State] = []

    # -- what happens by itself

    def tick(self) -> None:
        self.now += 1
        self.past.append((self.job, self.pinned))
        for id in self.machines:
            self.nodes.setdefault(node_of(id), NodeState.IDLE)
        if self.job.state is JobState.RUNNING and self.job.on != ("bait1",):
            self.ran += self.machines.issuperset(map(machine_of, self.job.on)) or self.job.on == ("elsewhere",)
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

    def forget(self, ticks: int) -> None:
        """The batch system is killed, and remembers the job as it was so many ticks ago. It must know the nodes that that names. What it
        has forgotten it can never remember again: from now on those ticks were as it believes."""
        ticks = min(ticks, len(self.past))
        if ticks:
            self.job, self.pinned = self.past[-ticks]
            self.past[-ticks:] = [self.past[-ticks]] * ticks
        names = {*self.job.on, *self.pinned} if self.job.state is not JobState.ENDED else set()
        assert self.nodes.keys() >= set(filter(machine_of, names)), self.job
        for node, state in self.nodes.items():
            is_open, is_busy = state in (NodeState.IDLE, NodeState.BUSY), node in self.job.on
            quiet = NodeState.IDLE if is_open else NodeState.OUT
            self.nodes[node] = (NodeState.BUSY if is_open else NodeState.DRAINING) if is_busy else quiet

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
        elif act.do is Do.UNPIN and job.state is JobState.HELD:
            home = self.journal["7"].home if job.queue == "belljar" else job.queue
            self.pinned, self.job = (), replace(job, queue=home)
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
        job = replace(self.job, wants=self.pinned)
        names = {*job.on, *job.wants} if job.state is not JobState.ENDED else set()
        self.unnamed = {one: self.unnamed.get(one, self.now) for one in nodes if one not in names}
        named = frozenset(names | {one for one, since in self.unnamed.items() if self.now - since < SAVES})
        seen = Seen(self.now, {"7": job}, nodes, frozenset(self.machines), dict(self.ended), named=named, saves=SAVES)
        for entry in list(self.journal.values()):
            step = next_step(entry, seen, self.settings)
            after = step.entry
            if after.state is S.STOPPED and entry.state is S.STOPPED:
                ids = tuple(f"{next(self.fresh):012x}" for _ in range(self.job.nodes))
                after = replace(after, state=S.VM_REQUESTED, since=self.now, machines=ids, asked=asked_of(self.job))
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


@given(
    deaths=st.sets(st.integers(0, 25), max_size=2), nodes=st.integers(1, 2),
    forgets=st.dictionaries(st.integers(1, 60), st.integers(1, SAVES - 1), max_size=4), tries=st.integers(1, 3),
)  # fmt: skip
@hypothesis_settings(max_examples=300, deadline=None)
def test_what_a_batch_system_forgets_that_is_killed_costs_no_job(
    deaths: set[int], forgets: dict[int, int], nodes: int, tries: int
) -> None:
    """It has forgotten the last seconds: of a job that ended, that was moved, or that was taken back."""
    world = World(nodes, lasts=4)
    world.settings = replace(SETTINGS, tries=tries)
    for tick in range(300):
        if tick in deaths:
            world.lose_machine()
        if tick in forgets:
            world.forget(forgets[tick])
        world.look()
        world.tick()
        if tick >= max(forgets, default=0) and not (world.journal or world.nodes or world.machines):
            break
    assert (world.nodes, world.machines, world.journal) == ({}, set(), {})
    assert world.completed or world.job.on == ("elsewhere",), world.job


def test_a_lost_journal_leaves_no_machine_and_no_node() -> None:
    world = World()
    while world.journal["7"].state is not S.VM_READY:
        world.look()
        world.tick()
    world.journal.clear()
    world.run(20)
    assert (world.nodes, world.machines) == ({}, set()) and world.job.state is JobState.HELD
