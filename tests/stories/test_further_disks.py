"""A machine with a scratch disk or a packed folder: the disks are there when it needs them and gone when it does not."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.guest import Script
from tests.stories.conftest import Runtime

from belljar.errors import CommandFailed, GuestRefused, NoPackedFolders, NoSpace
from belljar.guest import Streams
from belljar.hypervisor import ExtraDisk
from belljar.machine import DISK_NOT_WHOLE
from belljar.machine.extras import Equipment, Extra, disks, inputs
from belljar.machine.life.claim import claim
from belljar.machine.life.life import Lifecycle
from belljar.machine.orders import Orders
from belljar.model import MIB, Cause, Outcome, Transfer

ID = "0123456789ab"


@pytest.fixture
def many_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Transfer:
    """A large folder; the program that packs it is played."""
    folder = tmp_path / "many"
    folder.mkdir()
    for number in range(5):
        (folder / str(number)).touch()

    async def pack_folder(item: Transfer, target: Path, *rest: Any) -> None:
        os.close(os.open(target, os.O_CREAT | os.O_EXCL))

    monkeypatch.setattr(inputs, "pack_folder", pack_folder)
    monkeypatch.setattr(inputs, "which", lambda program: program)
    return Transfer(str(folder), "many")


def test_a_scratch_disk_is_journaled_used_and_removed(runtime: Runtime) -> None:
    made = []
    runtime.at["after-attachments"] = lambda: made.append((runtime.folders.scratch / f"{ID}.scratch").stat().st_size)
    outcome = runtime.run(runtime.request(machine={"scratch": 2 * MIB}))
    assert outcome.cause is Cause.FINISHED and made == [2 * MIB]
    done = runtime.guests[-1].done
    assert done.index("find_disks") < done.index("mount_scratch") < done.index("start")
    events = [event for event in runtime.journal() if event["event"] == "make"]
    assert [event["path"] for event in events if event["what"] == "scratch"] == [
        str(runtime.folders.scratch / f"{ID}.scratch")
    ]
    assert runtime.leftovers() == []


def test_a_machine_without_further_disks_asks_for_none(runtime: Runtime) -> None:
    runtime.run()
    assert "find_disks" not in runtime.guests[-1].done
    assert "after-attachments" not in runtime.passed


def test_a_large_folder_is_laid_there_and_not_copied(runtime: Runtime, many_files: Transfer) -> None:
    runtime.settings = replace(runtime.settings, pack_files=3)
    runtime.run(runtime.request(payload={"inputs": (many_files,)}))
    done = runtime.guests[-1].done
    assert "mount_packed" in done and "put" not in done
    assert runtime.leftovers() == []


def test_a_small_folder_is_copied(runtime: Runtime, many_files: Transfer) -> None:
    runtime.run(runtime.request(payload={"inputs": (many_files,)}))
    done = runtime.guests[-1].done
    assert "put" in done and "find_disks" not in done


def test_a_guest_that_cannot_use_a_packed_folder_gets_a_copy(runtime: Runtime, many_files: Transfer) -> None:
    runtime.settings = replace(runtime.settings, pack_files=3)
    runtime.plan(Script(refuses={"mount_packed": NoPackedFolders("no overlay")}))
    outcome = runtime.run(runtime.request(payload={"inputs": (many_files,)}))
    assert outcome.cause is Cause.FINISHED
    assert runtime.guests[-1].done.count("put") == 1
    assert [event["reason"] for event in runtime.journal() if event["event"] == "not-packed"]


def test_a_folder_that_cannot_be_packed_is_copied(
    runtime: Runtime, many_files: Transfer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def pack_folder(item: Transfer, target: Path, *rest: Any) -> None:
        os.close(os.open(target, os.O_CREAT | os.O_EXCL))
        raise CommandFailed("mksquashfs: exit 1: out of memory")

    monkeypatch.setattr(inputs, "pack_folder", pack_folder)
    runtime.settings = replace(runtime.settings, pack_files=3)
    outcome = runtime.run(runtime.request(payload={"inputs": (many_files,)}))
    assert outcome.cause is Cause.FINISHED and runtime.guests[-1].done.count("put") == 1
    assert [event["reason"] for event in runtime.journal() if event["event"] == "not-packed"]
    assert runtime.leftovers() == []


@pytest.mark.parametrize("call", ["find_disks", "mount_scratch"])
def test_a_guest_that_cannot_use_a_scratch_disk_starts_no_payload(runtime: Runtime, call: str) -> None:
    runtime.plan(Script(refuses={call: GuestRefused(f"it refuses to {call}")}))
    outcome = runtime.run(runtime.request(machine={"scratch": 2 * MIB}))
    assert not outcome.payload_ran and call in outcome.reason
    assert runtime.leftovers() == []


def test_a_size_that_cannot_be_is_the_askers_mistake(runtime: Runtime) -> None:
    outcome = runtime.run(runtime.request(machine={"scratch": 1000}))
    assert (outcome.cause, outcome.error) == (Cause.REFUSED, "OverLimit")
    assert runtime.leftovers() == [] and "after-attachments" not in runtime.passed


def test_a_host_without_room_for_it_is_left_for_another(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disks, "free_bytes", lambda folder: MIB)
    outcome = runtime.run(runtime.request(machine={"scratch": 2 * MIB}))
    assert outcome.error == "NoSpace" and runtime.leftovers() == []


def test_whoever_comes_after_a_dead_supervisor_removes_them(runtime: Runtime) -> None:
    life = claim(runtime.request(), runtime.folders, lambda point: None)
    for name in ("scratch", "packed0"):
        life.attach(name, name).write_bytes(b"disk")
    life.release()
    runtime.reaper.quick()
    assert runtime.leftovers() == []


def test_disks_whose_machine_left_no_folder_are_removed_and_others_files_are_not(runtime: Runtime) -> None:
    runtime.run()
    for name in (f"{ID}.scratch", f"{ID}.packed3", f"{ID}.qcow2"):
        (runtime.folders.scratch / name).touch()
    for name in ("notes", "abc.scratch", f"{ID}.scratch.mine"):
        (runtime.folders.scratch / name).touch()
    runtime.reaper.full()
    assert sorted(path.name for path in runtime.folders.scratch.iterdir()) == sorted(
        ["notes", "abc.scratch", f"{ID}.scratch.mine"]
    )


def test_a_journal_that_names_somebody_elses_file_is_not_followed(runtime: Runtime, tmp_path: Path) -> None:
    other = tmp_path / f"{ID}.scratch"
    other.touch()
    life = claim(runtime.request(), runtime.folders, lambda point: None)
    life.record.intend("scratch", other)
    life.record.intend("scratch", runtime.folders.scratch / "0123456789ab.scratch/../../x")
    life.release()
    runtime.reaper.quick()
    assert other.exists()


# -- extras --------------------------------------------------------------------------------------------------------------


class Lasting(Extra):
    """A disk that outlives its machine."""

    async def prepare(self, life: Lifecycle, there: Equipment) -> Equipment:
        disk = ExtraDisk("foreign", life.folder / "foreign", "qcow2", readonly=False)
        return there.with_disk(disk, outlasts=True)


class Noted(Extra):
    """Writes down that it was released."""

    def __init__(self, name: str, released: list[str], *, fails: str = "") -> None:
        self.name, self.released, self.fails = name, released, fails

    async def prepare(self, life: Lifecycle, there: Equipment) -> Equipment:
        if self.fails == "prepare":
            raise NoSpace("no room for it")
        return there

    def release(self) -> None:
        self.released.append(self.name)
        if self.fails == "release":
            raise OSError(5, "it is stuck", "/it")


def kept_with(runtime: Runtime, *extras: Extra) -> Outcome:
    return runtime.leap(
        runtime.supervisor().keep(runtime.request(), Streams(None, None, None), Orders(), extras=extras)
    )


@pytest.mark.parametrize("is_deaf", [False, True])
def test_a_disk_that_outlives_its_machine_is_written_whole_or_that_is_told(runtime: Runtime, is_deaf: bool) -> None:
    runtime.at["before-stop"] = lambda: setattr(runtime.domain(), "is_deaf", is_deaf)
    outcome = kept_with(runtime, Lasting())
    assert outcome.exit_code == 0 and outcome.troubles == ((DISK_NOT_WHOLE,) if is_deaf else ())


def test_what_was_prepared_is_released_once_the_last_first_whatever_goes_wrong(runtime: Runtime) -> None:
    released: list[str] = []
    kinds = [("one", ""), ("two", "release"), ("three", "prepare"), ("four", "")]
    outcome = kept_with(runtime, *(Noted(name, released, fails=fails) for name, fails in kinds))
    assert outcome.error == "NoSpace" and released == ["three", "two", "one"]
    assert len(outcome.troubles) == 1 and "it is stuck" in outcome.troubles[0]
    assert runtime.leftovers() == []
