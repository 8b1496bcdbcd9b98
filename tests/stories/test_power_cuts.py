"""The host was restarted: `run` was on a tmpfs, and every machine that lived still has its end."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest
from tests.stories.conftest import Runtime
from tests.stories.test_reaping import orphan

from belljar.journal import Ledger, Record
from belljar.machine import Settings
from belljar.machine.cleaning import put_away, reaper
from belljar.machine.cleaning.reaper import prune
from belljar.machine.life import claim as claiming
from belljar.model import State


def power_cut(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is left of what runs, and `run` was on a tmpfs."""
    shutil.rmtree(runtime.folders.run)
    for module in (reaper, claiming):
        monkeypatch.setattr(module, "boot_id", lambda: "another boot")


def rows(runtime: Runtime) -> list[tuple[str, str]]:
    return [(row["id"], row["cause"]) for row, _ in Ledger(runtime.folders.logs).since()]


def test_a_machine_that_a_power_cut_ended_has_its_end_its_row_once_and_no_disk(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    life = orphan(runtime)
    began = time.time() - 5000
    life.record = Record(life.folder, runtime.folders.begun / life.request.id)
    monkeypatch.setattr(time, "time", lambda: began)
    life.record.state(State.RUNNING)
    monkeypatch.undo()
    for path in (*(runtime.folders.begun / life.request.id).iterdir(), runtime.folders.overlay(life.request.id)):
        os.utime(path, (began + 600, began + 600))
    power_cut(runtime, monkeypatch)
    assert [item.what for item in runtime.reaper.leftovers()] == ["machine without a supervisor", "stray file"]
    runtime.reaper.quick()
    outcome = runtime.saved_outcome()
    assert (outcome["cause"], outcome["name"]) == ("node-fault", "mine")
    assert outcome["reason"] == "the host was restarted while the machine was running"
    assert outcome["phases"]["run"] == pytest.approx(600) and outcome["ended"] == pytest.approx(began + 600)
    assert runtime.leftovers() == [] == runtime.reaper.quick() and not os.listdir(runtime.folders.begun)
    assert rows(runtime) == [("0123456789ab", "node-fault")]


@pytest.mark.parametrize("step", ["keep_outcome", "retire"])
@pytest.mark.parametrize("is_done", [False, True])
def test_a_reaper_that_is_killed_after_a_power_cut_leaves_the_rest_to_the_next(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, step: str, is_done: bool
) -> None:
    class Killed(BaseException):
        pass

    def die(*words: object) -> None:
        if is_done:
            rest(*words)
        raise Killed

    orphan(runtime)
    power_cut(runtime, monkeypatch)
    rest = getattr(reaper, step)
    with monkeypatch.context() as once:
        once.setattr(reaper, step, die)
        with pytest.raises(Killed):
            runtime.reaper.quick()
    runtime.reaper.quick()
    assert rows(runtime) == [("0123456789ab", "node-fault")] and runtime.saved_outcome()["name"] == "mine"
    assert runtime.leftovers() == [] and not os.listdir(runtime.folders.begun)


def test_a_supervisor_that_is_killed_after_its_last_act_but_one_has_its_row_once(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(put_away, "remove_tree", lambda path: None)
    assert runtime.run().exit_code == 0
    assert os.listdir(runtime.folders.begun) and runtime.reaper.quick() == []  # its process lives
    monkeypatch.undo()
    power_cut(runtime, monkeypatch)
    assert [view.cause for view in runtime.machines.list(ended=True)] == ["finished"]
    assert rows(runtime) == [("0123456789ab", "finished")] and not os.listdir(runtime.folders.begun)


def test_a_machine_whose_supervisor_ends_it_while_a_reaper_looks_is_left_to_it(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(put_away, "remove_tree", lambda path: None)
    runtime.run()
    begun = runtime.folders.begun / "0123456789ab"

    def claimed_by(folder: Path) -> int:
        shutil.rmtree(begun)  # as its supervisor's last act, between two looks of ours
        return os.getpid()

    monkeypatch.setattr(reaper, "claimed_by", claimed_by)
    assert begun.exists() and runtime.reaper.quick() == []
    assert len(rows(runtime)) == 1 and not begun.exists()


def test_whoever_asks_for_a_machine_after_a_power_cut_learns_of_its_end(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    orphan(runtime)
    power_cut(runtime, monkeypatch)
    assert runtime.machines.list() == []
    assert runtime.machines.find("mine").cause == "node-fault"


def test_machines_of_another_host_with_the_same_records_are_left_alone(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    orphan(runtime)
    os.rename(runtime.folders.begun, runtime.folders.logs / ".begun-elsewhere")
    power_cut(runtime, monkeypatch)
    runtime.reaper.quick()
    assert rows(runtime) == [] and os.listdir(runtime.folders.logs / ".begun-elsewhere") == ["0123456789ab"]
    assert prune(runtime.folders, Settings(keep_days=0, keep_count=0), time.time() + 1e6) == 0


def test_a_machine_runs_where_its_beginning_cannot_be_written(runtime: Runtime) -> None:
    runtime.folders.logs.mkdir(mode=0o700)
    runtime.folders.begun.write_text("in the way")
    assert runtime.run().exit_code == 0
