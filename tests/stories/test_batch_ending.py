"""Machines of batch jobs: found under each of their ids, ended whatever their supervisor does, nobody else's touched."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tests.stories.conftest import Runtime

from belljar.errors import NoSuchMachine
from belljar.machine import MachineView
from belljar.machine.cleaning import reaper
from belljar.machine.life.claim import claim
from belljar.machine.life.life import Lifecycle
from belljar.machine.outside.registry import jobs_of, known_as
from belljar.model import Request


def job(runtime: Runtime, id: str, number: str, *aliases: str) -> Request:
    labels = (("queue", "night"), *(("alias", alias) for alias in aliases))
    name = f"slurm:{number}"
    return replace(runtime.request(id=id, name=name), requester=name, labels=labels)


def test_each_start_of_a_job_has_its_record_and_the_latest_is_found(runtime: Runtime) -> None:
    for number in (1, 2):
        runtime.run(job(runtime, f"{number:012x}", "10_3", "13"))
    assert runtime.machines.find("slurm:10_3").id == runtime.machines.find("slurm:13").id == f"{2:012x}"
    newest = runtime.machines.newest("slurm:13")
    assert newest is not None and newest.id == f"{2:012x}"
    assert len(runtime.machines.list(ended=True)) == 2
    with pytest.raises(NoSuchMachine):
        runtime.machines.find("slurm:10")
    assert runtime.machines.newest("slurm:1") is None


def test_a_name_somebody_gave_is_no_batch_id(runtime: Runtime) -> None:
    runtime.run(runtime.request(name="slurm:7"))
    view = runtime.machines.find("slurm:7")
    assert jobs_of(view) == frozenset() and "slurm:7" in known_as(view)
    assert runtime.machines.newest("slurm:7") is None


@pytest.mark.parametrize("labels", [None, 3, "alias", [["alias"]], [["alias", 7]], [7], {"alias": "7"}])
def test_labels_that_make_no_sense_are_no_names(runtime: Runtime, labels: object) -> None:
    runtime.run(job(runtime, "0123456789ab", "7"))
    view = replace(runtime.machines.find("slurm:7"), request={"labels": labels})
    assert known_as(view) == {"slurm:7"}


def test_the_record_tells_how_qemu_was_started_and_which_image_it_was(runtime: Runtime) -> None:
    runtime.run(job(runtime, "0123456789ab", "7"))
    (spawned,) = [event for event in runtime.journal() if event["event"] == "spawned"]
    assert spawned["argv"][:2] == ["fake-qemu", "-name"]
    assert runtime.saved_outcome()["image_digest"]


# -- ending --------------------------------------------------------------------------------------------------------------


def living(runtime: Runtime, life: Lifecycle) -> MachineView:
    (view,) = runtime.machines.list()
    assert view.id == life.request.id
    return view


def test_what_its_dead_supervisor_left_is_finished(runtime: Runtime) -> None:
    life = claim(job(runtime, "0123456789ab", "7"), runtime.folders, lambda point: None)
    view = living(runtime, life)
    life.release()
    assert runtime.reaper.end(view)
    assert runtime.leftovers() == []
    assert runtime.reaper.end(view), "ending what ended is success"


def test_a_lock_that_stays_taken_by_somebody_unknown_is_told(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reaper, "ASK_PATIENCE", 0.1)
    monkeypatch.setattr("belljar.machine.cleaning.reaper.LOCK_PATIENCE", 0.1)
    life = claim(job(runtime, "0123456789ab", "7"), runtime.folders, lambda point: None)  # held by this very process
    assert not runtime.reaper.end(living(runtime, life))
    assert life.folder.exists()
    life.release()


def test_a_pid_alone_is_nobodys_name(runtime: Runtime) -> None:
    """The claim's pid was given to another process meanwhile: that one is not a supervisor."""
    life = claim(job(runtime, "0123456789ab", "7"), runtime.folders, lambda point: None)
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        journal = life.folder / "journal.jsonl"
        journal.write_text(journal.read_text().replace(f'"pid":{os.getpid()}', f'"pid":{other.pid}'))
        assert reaper.supervisor(life.folder) is None
    finally:
        other.communicate(b"\n", timeout=30)
        life.release()


@pytest.mark.parametrize("pid", ["1", "0", "-1", '"x"', "null", "1.5"])
def test_a_claim_that_names_no_process_leads_to_none(tmp_path: Path, pid: str) -> None:
    (tmp_path / "journal.jsonl").write_text(f'{{"event":"claim","pid":{pid}}}\n')
    assert reaper.supervisor(tmp_path) is None
