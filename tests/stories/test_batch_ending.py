"""Machines of batch jobs: found under each of their ids, ended whatever their supervisor does, nobody else's touched."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tests.stories.conftest import House

from belljar.errors import NoSuchMachine
from belljar.machine import MachineView
from belljar.machine.cleaning import reaper
from belljar.machine.life.claim import claim
from belljar.machine.life.life import Lifecycle
from belljar.machine.outside.registry import jobs_of, known_as
from belljar.model import Request


def job(house: House, id: str, number: str, *aliases: str) -> Request:
    labels = (("queue", "night"), *(("alias", alias) for alias in aliases))
    name = f"slurm:{number}"
    return replace(house.request(id=id, name=name), requester=name, labels=labels)


def test_each_start_of_a_job_has_its_record_and_the_latest_is_found(house: House) -> None:
    for number in (1, 2):
        house.run(job(house, f"{number:012x}", "10_3", "13"))
    assert house.machines.find("slurm:10_3").id == house.machines.find("slurm:13").id == f"{2:012x}"
    newest = house.machines.newest("slurm:13")
    assert newest is not None and newest.id == f"{2:012x}"
    assert len(house.machines.list(ended=True)) == 2
    with pytest.raises(NoSuchMachine):
        house.machines.find("slurm:10")
    assert house.machines.newest("slurm:1") is None


def test_a_name_somebody_gave_is_no_batch_id(house: House) -> None:
    house.run(house.request(name="slurm:7"))
    view = house.machines.find("slurm:7")
    assert jobs_of(view) == frozenset() and "slurm:7" in known_as(view)
    assert house.machines.newest("slurm:7") is None


@pytest.mark.parametrize("labels", [None, 3, "alias", [["alias"]], [["alias", 7]], [7], {"alias": "7"}])
def test_labels_that_make_no_sense_are_no_names(house: House, labels: object) -> None:
    house.run(job(house, "0123456789ab", "7"))
    view = replace(house.machines.find("slurm:7"), request={"labels": labels})
    assert known_as(view) == {"slurm:7"}


def test_the_record_tells_how_qemu_was_started_and_which_image_it_was(house: House) -> None:
    house.run(job(house, "0123456789ab", "7"))
    (spawned,) = [event for event in house.journal() if event["event"] == "spawned"]
    assert spawned["argv"][:2] == ["fake-qemu", "-name"]
    assert house.saved_outcome()["image_digest"]


# -- ending --------------------------------------------------------------------------------------------------------------


def living(house: House, life: Lifecycle) -> MachineView:
    (view,) = house.machines.list()
    assert view.id == life.request.id
    return view


def test_what_its_dead_supervisor_left_is_finished(house: House) -> None:
    life = claim(job(house, "0123456789ab", "7"), house.folders, lambda point: None)
    view = living(house, life)
    life.release()
    assert house.reaper.end(view)
    assert house.leftovers() == []
    assert house.reaper.end(view), "ending what ended is success"


def test_a_lock_that_stays_taken_by_somebody_unknown_is_told(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reaper, "ASK_PATIENCE", 0.1)
    monkeypatch.setattr("belljar.machine.cleaning.reaper.LOCK_PATIENCE", 0.1)
    life = claim(job(house, "0123456789ab", "7"), house.folders, lambda point: None)  # held by this very process
    assert not house.reaper.end(living(house, life))
    assert life.folder.exists()
    life.release()


def test_a_pid_alone_is_nobodys_name(house: House) -> None:
    """The claim's pid was given to another process meanwhile: that one is not a supervisor."""
    life = claim(job(house, "0123456789ab", "7"), house.folders, lambda point: None)
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
