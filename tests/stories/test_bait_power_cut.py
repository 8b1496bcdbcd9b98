"""The host of a bait was restarted: no process of before is there, and the run folder is empty."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from tests.stories.conftest import Runtime
from tests.stories.test_power_cuts import power_cut, rows
from tests.unit.bait.plain import nothing
from tests.unit.bait.test_daemon import HELD, ROOM, RUNNING, SETTINGS, Side

from belljar import api
from belljar.bait.daemon import Daemon
from belljar.bait.decisions.decide import Room
from belljar.bait.decisions.step import Entry, State
from belljar.bait.machines.keeper import BAIT, Machines, feature_of
from belljar.journal import Record
from belljar.machine.life.claim import claim
from belljar.pool import JobState, NodeState, NodeView, node_of
from belljar.records import replace

RUNS, BOOTS = "0" * 12, "1" * 12  # the machine of job 7, which runs there, and that of job 8, which has not joined yet
CUT = "the host was restarted while the machine was running"


class Kept(Machines):
    """The real ones, but for what this host has left."""

    def room(self, taken: int) -> Room:
        return replace(ROOM, cpus=0)


def lives(runtime: Runtime, id: str) -> None:
    """As if its keeper had just been killed."""
    life = claim(runtime.request(id=id, name=node_of(id), labels={BAIT: "bait1"}), runtime.folders, lambda point: None)
    overlay = runtime.folders.overlay(id)
    life.record.intend("overlay", overlay)
    overlay.write_bytes(b"disk")
    record = Record(life.folder, runtime.folders.begun / id)
    record.state(State.RUNNING)
    record.close()
    life.release()


def bait(side: Side, folder: Path, told: list[dict[str, Any]]) -> Daemon:
    pool: Any = side
    keeper = Kept(SETTINGS, pool, ())
    tell = lambda event, **facts: told.append(facts) if event == "job" else None  # noqa: E731
    return Daemon(SETTINGS, folder, pool, keeper, tell, nothing, run_command=side.run)


def sees(side: Side, *jobs: Any, **nodes: NodeState) -> None:
    side.seen["jobs"] = {job.id: job for job in jobs}
    features = (SETTINGS.feature, feature_of("bait1"))
    side.seen["nodes"] = {"bait1": NodeView("bait1", NodeState.IDLE)} | {
        name: NodeView(name, state, features) for name, state in nodes.items()
    }


async def test_after_a_power_cut_each_machine_has_its_end_and_each_job_is_tried_again(
    runtime: Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "_runtime", lambda: runtime)
    (tmp_path / "bait").mkdir(mode=0o700)
    side, told = Side(), list[dict[str, Any]]()
    before = bait(side, tmp_path / "bait", told)
    for id, job, state in ((RUNS, "7", State.RUNNING), (BOOTS, "8", State.VM_BOOTING)):
        lives(runtime, id)
        before.journal.write(Entry(job, state, 1e12, (id,), home="batch", starts=1 if state is State.RUNNING else 0))
    power_cut(runtime, monkeypatch)

    after = bait(side, tmp_path / "bait", told)
    runs, waits = replace(RUNNING, on=(node_of(RUNS),), queue="belljar", starts=1), replace(HELD, id="8", number="8")
    sees(side, runs, waits, **{node_of(RUNS): NodeState.BUSY})
    await after.look()
    entries = after.journal.entries
    assert (entries["7"].state, entries["7"].why) == (State.LOST, CUT)
    assert ("lose", node_of(RUNS), CUT) in side.asked  # Slurm then requeues the job
    assert [(facts["job"], facts["state"], facts["why"]) for facts in told if facts["state"] == "reprocess"] == [
        ("8", "reprocess", CUT)
    ]
    sees(
        side,
        replace(runs, state=JobState.WAITING, on=(), wants=(node_of(RUNS),)),
        waits,
        **{node_of(RUNS): NodeState.OUT},
    )
    await after.look()
    assert ("take_back", "7") in [argv[:2] for argv in side.asked]
    sees(side, replace(runs, state=JobState.HELD, on=()), waits, **{node_of(RUNS): NodeState.OUT})
    await after.look()
    assert ("remove", node_of(RUNS)) in side.asked
    sees(side, replace(runs, state=JobState.HELD, on=(), queue="batch"), waits)
    await after.look()
    assert {job: (entry.state, entry.tries) for job, entry in after.journal.entries.items()} == {
        "7": (State.STOPPED, 1), "8": (State.STOPPED, 1),
    }  # fmt: skip
    assert sorted(rows(runtime)) == [(RUNS, "node-fault"), (BOOTS, "node-fault")]
    assert runtime.leftovers() == [] and os.listdir(runtime.folders.begun) == []
    assert not [file for file in runtime.folders.scratch.rglob("*") if file.is_file()]
