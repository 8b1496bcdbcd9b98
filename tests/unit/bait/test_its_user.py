"""Whatever a job's user does with it, in whatever state it is: it gets its verdict, and nothing of it stays here."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from tests.unit.bait.test_worlds import World

from belljar.bait.decisions.step import Act, Do, State
from belljar.model import MIB
from belljar.pool import JobState
from belljar.records import replace

HOME, OTHER, NODES = "batch", "long", "belljar"
ACTS = ("cancel", "hold", "release", "requeue", "requeuehold", "enlarge", "rename", "move")
ENDS_AS = {"cancel": (JobState.ENDED, 0), "hold": (JobState.HELD, 0), "requeuehold": (JobState.HELD, 0)}


class Used(World):
    """`by_user` is a command of its user's, as Slurm takes it: what it refuses changes nothing."""

    did = ""  # what its user did last, where that was not refused

    def by_user(self, act: str) -> None:
        job, is_pending = self.job, self.job.state in (JobState.HELD, JobState.WAITING)
        if job.state is JobState.ENDED:
            return
        if act == "cancel":
            self.over(JobState.ENDED)
        elif act == "hold" and job.state is JobState.WAITING:
            self.job = replace(job, state=JobState.HELD, is_held_by_user=True)
        elif act == "release" and job.state is JobState.HELD:
            self.job = replace(job, state=JobState.WAITING, is_held_by_user=False)
        elif act.startswith("requeue") and job.state is JobState.RUNNING:
            is_held = act == "requeuehold"
            self.over(JobState.HELD if is_held else JobState.WAITING)
            self.job = replace(self.job, starts=job.starts + 1, is_held_by_user=is_held)
        elif act == "enlarge" and is_pending:
            self.job = replace(job, memory=900 * MIB)
        elif act == "rename":
            self.job = replace(job, reason="a\nb | c")
        elif act == "move" and is_pending:
            self.job = replace(job, queue=OTHER)

    def tick(self) -> None:
        """A job that wants nodes which its partition does not have waits."""
        if self.job.state is JobState.WAITING and self.pinned and self.job.queue != NODES:
            self.now += 1
        else:
            super().tick()

    def do(self, act: Act) -> None:
        was_held = self.journal["7"].stays_held if "7" in self.journal else False
        by_user = self.job.is_held_by_user
        super().do(act)
        if act.do is Do.GIVE_BACK and was_held:
            self.job = replace(self.job, state=JobState.HELD, is_held_by_user=by_user)
        elif act.do is Do.MOVE:
            self.job = replace(self.job, is_held_by_user=False)

    def until_closed(self, acts: dict[int, str]) -> None:
        for look in range(600):
            self.look()
            if look in acts:
                before = self.job
                self.by_user(acts[look])
                self.did = acts[look] if self.job != before else ""
            self.tick()
            if not self.journal and not self.nodes and not self.machines and look >= max(acts, default=0):
                return

    def has_its_verdict(self) -> None:
        assert (self.nodes, self.machines, self.journal) == ({}, set(), {})
        assert self.completed <= 1
        # Its user holds it, or it is the batch system's again: not on a node of ours.
        if self.job.state is not JobState.ENDED:
            assert self.job.queue in (HOME, OTHER) and not set(self.job.on) - {"elsewhere", "bait1"}


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("nodes", [1, 2])
def test_one_act_at_any_moment(act: str, nodes: int) -> None:
    met, done = set[State](), 0
    for at in range(16):
        world = Used(nodes, lasts=4)
        world.until_closed({at: act})
        world.has_its_verdict()
        met.update(world.seen_states)
        done += bool(world.did)
        if world.did in ENDS_AS:
            assert (world.job.state, world.completed) == ENDS_AS[world.did], (at, world.seen_states)
        if world.did == "move" and at:  # before it was seen held, it is a job of that partition's
            assert world.job.queue == OTHER, (at, world.seen_states)
    assert done, "it was refused at every moment"
    assert met >= {State.VM_BOOTING, State.RUNNING, State.FINISHED}


@given(acts=st.dictionaries(st.integers(0, 40), st.sampled_from(ACTS), max_size=4), nodes=st.integers(1, 3))
@hypothesis_settings(max_examples=400, deadline=None)
def test_several_acts_in_any_order(acts: dict[int, str], nodes: int) -> None:
    world = Used(nodes, lasts=4)
    world.until_closed(acts)
    world.has_its_verdict()
