"""The host was restarted: `run` was on a tmpfs, and every machine that lived still has its end."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest
from tests.stories.conftest import House
from tests.stories.test_reaping import orphan

from belljar.journal import Ledger, Record
from belljar.machine import Settings
from belljar.machine.cleaning import put_away, reaper
from belljar.machine.cleaning.reaper import prune
from belljar.machine.life import claim as claiming
from belljar.model import State


def power_cut(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is left of what runs, and `run` was on a tmpfs."""
    shutil.rmtree(house.folders.run)
    for module in (reaper, claiming):
        monkeypatch.setattr(module, "boot_id", lambda: "another boot")


def rows(house: House) -> list[tuple[str, str]]:
    return [(row["id"], row["cause"]) for row in Ledger(house.folders.logs).rows()]


def test_a_machine_that_a_power_cut_ended_has_its_end_its_row_once_and_no_disk(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    life = orphan(house)
    began = time.time() - 5000
    life.record = Record(life.folder, house.folders.begun / life.request.id)
    monkeypatch.setattr(time, "time", lambda: began)
    life.record.state(State.RUNNING)
    monkeypatch.undo()
    for path in (*(house.folders.begun / life.request.id).iterdir(), house.folders.overlay(life.request.id)):
        os.utime(path, (began + 600, began + 600))
    power_cut(house, monkeypatch)
    assert [item.what for item in house.reaper.leftovers()] == ["machine without a supervisor", "stray file"]
    house.reaper.quick()
    outcome = house.saved_outcome()
    assert (outcome["cause"], outcome["name"]) == ("node-fault", "mine")
    assert outcome["reason"] == "the host was restarted while the machine was running"
    assert outcome["phases"]["run"] == pytest.approx(600) and outcome["ended"] == pytest.approx(began + 600)
    assert house.leftovers() == [] == house.reaper.quick() and not os.listdir(house.folders.begun)
    assert rows(house) == [("0123456789ab", "node-fault")]


@pytest.mark.parametrize("step", ["keep_outcome", "retire", "remove_tree"])
@pytest.mark.parametrize("is_done", [False, True])
def test_a_reaper_that_is_killed_after_a_power_cut_leaves_the_rest_to_the_next(
    house: House, monkeypatch: pytest.MonkeyPatch, step: str, is_done: bool
) -> None:
    class Killed(BaseException):
        pass

    def die(*words: object) -> None:
        if is_done:
            rest(*words)
        raise Killed

    orphan(house)
    power_cut(house, monkeypatch)
    rest = getattr(reaper, step)
    with monkeypatch.context() as once:
        once.setattr(reaper, step, die)
        with pytest.raises(Killed):
            house.reaper.quick()
    house.reaper.quick()
    assert rows(house) == [("0123456789ab", "node-fault")] and house.saved_outcome()["name"] == "mine"
    assert house.leftovers() == [] and not os.listdir(house.folders.begun)


def test_a_supervisor_that_is_killed_after_its_last_act_but_one_has_its_row_once(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(put_away, "remove_tree", lambda path: None)
    assert house.run().exit_code == 0
    assert os.listdir(house.folders.begun) and house.reaper.quick() == []  # its process lives
    monkeypatch.undo()
    power_cut(house, monkeypatch)
    assert [view.cause for view in house.machines.list(ended=True)] == ["finished"]
    assert rows(house) == [("0123456789ab", "finished")] and not os.listdir(house.folders.begun)


def test_a_machine_whose_supervisor_ends_it_while_a_reaper_looks_is_left_to_it(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(put_away, "remove_tree", lambda path: None)
    house.run()
    begun = house.folders.begun / "0123456789ab"

    def claimed_by(folder: Path) -> int:
        shutil.rmtree(begun)  # as its supervisor's last act, between two looks of ours
        return os.getpid()

    monkeypatch.setattr(reaper, "claimed_by", claimed_by)
    assert begun.exists() and house.reaper.quick() == []
    assert len(rows(house)) == 1 and not begun.exists()


def test_whoever_asks_for_a_machine_after_a_power_cut_learns_of_its_end(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    orphan(house)
    power_cut(house, monkeypatch)
    assert house.machines.list() == []
    assert house.machines.find("mine").cause == "node-fault"


def test_machines_of_another_host_with_the_same_records_are_left_alone(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    orphan(house)
    os.rename(house.folders.begun, house.folders.logs / ".begun-elsewhere")
    power_cut(house, monkeypatch)
    house.reaper.quick()
    assert rows(house) == [] and os.listdir(house.folders.logs / ".begun-elsewhere") == ["0123456789ab"]
    assert prune(house.folders, Settings(keep_days=0, keep_count=0), time.time() + 1e6) == 0


def test_a_machine_runs_where_its_beginning_cannot_be_written(house: House) -> None:
    house.folders.logs.mkdir(mode=0o700)
    house.folders.begun.write_text("in the way")
    assert house.run().exit_code == 0
