"""Whoever comes after a dead supervisor finishes its work, and touches nothing else."""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.stories.conftest import Runtime

from belljar.errors import DomainDied
from belljar.host.locks import is_locked, locked
from belljar.host.processes import start_time
from belljar.hypervisor import Traces
from belljar.journal import read
from belljar.machine import Settings
from belljar.machine.checkpoints import draft_in, take
from belljar.machine.cleaning import put_away, reaper
from belljar.machine.cleaning.put_away import retire
from belljar.machine.cleaning.reaper import DRAFT, Undone, prune, traces_of
from belljar.machine.extras.disks import EXCHANGE
from belljar.machine.life.claim import CLAIMING, claim
from belljar.machine.life.life import Lifecycle


def orphan(runtime: Runtime, id: str = "0123456789ab") -> Lifecycle:
    """A machine whose supervisor died: all was made, the lock is free."""
    life = claim(runtime.request(id=id, name="mine"), runtime.folders, lambda point: None)
    overlay = runtime.folders.overlay(id)
    life.record.intend("overlay", overlay)
    overlay.write_bytes(b"disk")
    identity = runtime.folders.identities / (id * 5)
    life.record.intend("identity", identity)
    identity.touch()
    life.release()
    return life


def test_one_pass_leaves_nothing_but_the_record(runtime: Runtime) -> None:
    orphan(runtime)
    undone = runtime.reaper.quick()
    assert {item.what for item in undone} == {"domain", "disk", "identity", "machine"}
    assert runtime.leftovers() == []
    outcome = runtime.saved_outcome()
    assert outcome["reason"] == "belljar was killed while the machine was requested"
    assert (outcome["cause"], outcome["name"]) == ("node-fault", "mine")
    assert runtime.reaper.quick() == []


def test_no_socket_of_a_killed_machine_stays_in_its_record(runtime: Runtime) -> None:
    life = orphan(runtime)
    folder = os.open(life.folder, os.O_PATH)
    for name in ("control.sock", "virtiofs.sock"):
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(f"/proc/self/fd/{folder}/{name}")
    os.close(folder)
    runtime.reaper.quick()
    kept = list(runtime.folders.ended("0123456789ab").iterdir())
    assert kept and not [one.name for one in kept if one.is_socket()]


def test_whoever_looks_while_a_machine_is_made_neither_hinders_nor_takes_it(runtime: Runtime) -> None:
    orphan(runtime)
    runtime.reaper.quick()
    over, undone = threading.Event(), list[Undone]()

    def look() -> None:
        while not over.is_set():
            undone.extend(runtime.reaper.quick())

    looking = [threading.Thread(target=look) for _ in range(3)]
    for thread in looking:
        thread.start()
    try:
        for number in range(300):
            life = claim(runtime.request(id=f"{number:012x}"), runtime.folders, lambda point: None)
            assert life.folder.exists() and is_locked(life.folder / "lock")
            retire(life.folder, runtime.folders.ended(life.request.id))
            life.release()
    finally:
        over.set()
        for thread in looking:
            thread.join(30)
    assert undone == []


def test_two_reapers_at_once_finish_a_machine_once(runtime: Runtime) -> None:
    for _ in range(30):
        orphan(runtime)
        shutil.rmtree(runtime.folders.ended("0123456789ab"), ignore_errors=True)
        with ThreadPoolExecutor(2) as reapers:
            found = [item for items in reapers.map(lambda _: runtime.reaper.quick(), range(2)) for item in items]
        assert runtime.leftovers() == []
        assert [item.what for item in found].count("machine") == 1


def test_a_second_reaper_that_looks_as_the_folder_is_moved_takes_the_machine_for_no_lost_one(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    orphan(runtime)
    monkeypatch.setattr(reaper, "claimed_by", lambda folder: None)  # a process that is gone, as ours is not
    theirs = list[Undone]()

    def move_and_look(source: Path, target: Path) -> None:
        retire(source, target)
        theirs.extend(runtime.reaper.quick())

    monkeypatch.setattr(reaper, "retire", move_and_look)
    assert "machine" in {item.what for item in runtime.reaper.quick()} and theirs == []


def forked(life: Lifecycle) -> subprocess.Popen[bytes]:
    """Who has a dead supervisor's lock still, as a child of its has until it runs a program of its own."""
    child = subprocess.Popen(["sleep", "0.4"], pass_fds=[life._lock.descriptor])
    life.release()
    return child


def of_the_dead(life: Lifecycle) -> None:
    """Its claim is of a process that is gone."""
    gone = subprocess.Popen(["true"])
    gone.wait()
    journal = life.folder / "journal.jsonl"
    journal.write_bytes(journal.read_bytes().replace(b'"pid":%d' % os.getpid(), b'"pid":%d' % gone.pid, 1))


def test_a_full_pass_waits_for_a_lock_that_outlives_its_holder(runtime: Runtime) -> None:
    life = claim(runtime.request(), runtime.folders, lambda point: None)
    of_the_dead(life)
    child = forked(life)
    assert runtime.reaper.quick() == []
    assert "machine" in {item.what for item in runtime.reaper.full()}
    assert runtime.leftovers() == [] and child.wait(10) == 0


def test_the_end_of_a_machine_waits_for_a_lock_that_outlives_its_holder(runtime: Runtime) -> None:
    life = claim(runtime.request(), runtime.folders, lambda point: None)
    of_the_dead(life)
    child = forked(life)
    (view,) = runtime.machines.list()
    assert runtime.reaper.end(view)
    assert child.wait(10) == 0 and runtime.saved_outcome()["cause"] == "node-fault"


def test_one_machines_trouble_is_told_and_keeps_no_other_from_being_finished(runtime: Runtime) -> None:
    ids = [f"{number:012x}" for number in range(3)]
    for id in ids:
        orphan(runtime, id)
    runtime.hypervisor.faults.discard = [DomainDied("QEMU of machine (pid 7) does not go away")]
    undone = runtime.reaper.quick()
    ((stuck, error),) = [(one.machine, one.error) for one in undone if one.error]
    assert error == "QEMU of machine (pid 7) does not go away"
    assert {one.machine for one in undone if one.what == "machine"} == set(ids) - {stuck}
    assert os.listdir(runtime.folders.machines) == [stuck] and runtime.folders.overlay(stuck).exists()
    assert runtime.run(runtime.request(id="f" * 12)).exit_code == 0
    assert stuck in {one.machine for one in runtime.reaper.full()}
    assert runtime.leftovers() == []


def test_a_file_that_cannot_be_removed_is_told_and_the_rest_goes(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime.run()
    strays = [runtime.folders.overlay("e" * 12), runtime.folders.overlay("f" * 12)]
    for path in strays:
        path.touch()
    unlink = Path.unlink

    def refuse(path: Path, missing_ok: bool = False) -> None:
        if path == strays[0]:
            raise OSError(errno.EROFS, "Read-only file system", str(path))
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", refuse)
    told = {one.path: (one.what, one.error) for one in runtime.reaper.full()}
    assert told == {
        str(strays[0]): ("not finished", "Read-only file system"),
        str(strays[1]): ("stray file", ""),
    }


def test_a_reaper_that_takes_its_time_keeps_nobody_from_beginning_a_machine(runtime: Runtime) -> None:
    """A process in the kernel's hands takes seconds to end, a tree on a slow disk longer."""
    orphan(runtime)
    began, may_end = threading.Event(), threading.Event()

    def discard(id: str, traces: Traces, *, patience: float) -> None:
        began.set()
        assert may_end.wait(30)

    runtime.hypervisor.discard = discard  # type: ignore[method-assign, assignment]
    (runtime.folders.scratch / f"{'e' * 12}.qcow2").touch()
    reaping = threading.Thread(target=runtime.reaper.full)
    reaping.start()
    try:
        assert began.wait(30)
        claim(runtime.request(id="a" * 12), runtime.folders, lambda point: None).release()
    finally:
        may_end.set()
        reaping.join(30)


def test_a_start_does_not_wait_for_a_machine_that_somebody_else_finishes(runtime: Runtime) -> None:
    life = orphan(runtime)
    with locked(life.folder / "lock", timeout=1, what="finish it"):
        assert runtime.reaper.quick(patience=0.01) == []


def test_a_folder_in_the_making_is_nobodys_machine_and_goes_when_its_maker_is_dead(runtime: Runtime) -> None:
    runtime.run()
    began = start_time(os.getpid()) or 0
    living, left = (runtime.folders.run / (CLAIMING.format(os.getpid(), at) + "a" * 12) for at in (began, began - 1))
    living.mkdir(mode=0o700)
    left.mkdir(mode=0o700)
    assert [undone.path for undone in runtime.reaper.full()] == [str(left)] and not left.exists()
    assert runtime.reaper.full() == [] and runtime.machines.list() == [] and living.exists()


def test_of_a_journal_only_this_boots_processes_are_believed(runtime: Runtime) -> None:
    life = claim(runtime.request(), runtime.folders, lambda point: None)
    life.record.write("template-wait", lock="x", owner=65534)
    life.record.write("spawned", pid=4711, started=99, argv=["qemu"])
    life.record.write("spawned", pid=1, started="noise", argv=["qemu"])
    events = read(life.folder)
    life.release()
    assert traces_of(events) == Traces(frozenset({65534}), frozenset({(4711, 99)}))
    assert traces_of([{**events[0], "boot": "another"}, *events[1:]]) == Traces() == traces_of([])


def test_a_living_machine_is_left_alone(runtime: Runtime) -> None:
    life = claim(runtime.request(), runtime.folders, lambda point: None)
    assert runtime.reaper.full() == []
    assert runtime.folders.machine("0123456789ab").exists()
    life.release()


def test_a_machine_of_another_boot_is_told_from_one_that_was_killed(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    orphan(runtime)
    monkeypatch.setattr(reaper, "boot_id", lambda: "another boot")
    runtime.reaper.quick()
    assert runtime.saved_outcome()["reason"].startswith("the host was restarted")
    assert runtime.saved_outcome()["class"] == "transient"


def test_what_a_killed_machine_worked_is_told_and_not_the_time_for_which_the_host_was_off(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    life = orphan(runtime)
    began = time.time() - 5000
    with open(life.folder / "journal.jsonl", "a") as journal:
        journal.write(json.dumps({"time": began, "event": "state", "state": "running"}) + "\n")
    for path in (*life.folder.iterdir(), runtime.folders.overlay(life.request.id)):
        os.utime(path, (began + 600, began + 600))
    monkeypatch.setattr(reaper, "boot_id", lambda: "another boot")
    runtime.reaper.quick()
    outcome = runtime.saved_outcome()
    assert outcome["ended"] == pytest.approx(began + 600) and outcome["phases"]["run"] == pytest.approx(600)


@pytest.mark.parametrize("what", ["overlay", "identity", "folder"])
def test_a_path_that_belljar_would_not_have_used_is_left_alone(runtime: Runtime, tmp_path: Path, what: str) -> None:
    life = orphan(runtime)
    precious = tmp_path / "precious"
    precious.write_text("mine")
    with open(life.folder / "journal.jsonl", "a") as journal:
        for path in (precious, life.folders.identities / "../../precious", life.folders.scratch / "ffffffffffff.qcow2"):
            journal.write(json.dumps({"event": "make", "what": what, "path": str(path)}) + "\n")
    runtime.reaper.quick()
    assert precious.read_text() == "mine"


def test_a_journal_full_of_noise_does_not_stop_the_reaper(runtime: Runtime) -> None:
    life = orphan(runtime)
    with open(life.folder / "journal.jsonl", "ab") as journal:
        journal.write(b'\xff\xfe\n{"event": "make"}\n{"event": "make", "path": 7}\n[]\n{"event": "state"}\n{"torn')
    runtime.reaper.quick()
    assert runtime.leftovers() == []


def test_a_folder_that_was_being_made_is_finished_too(runtime: Runtime) -> None:
    orphan(runtime)
    half = runtime.folders.machine("ba9876543210")
    half.mkdir(mode=0o700)
    runtime.reaper.quick()
    assert runtime.leftovers() == []


def test_what_no_folder_tells_about_is_found_as_well(runtime: Runtime) -> None:
    orphan(runtime)
    runtime.reaper.quick()
    strays = [runtime.folders.overlay("f" * 12), runtime.folders.attachment("f" * 12, EXCHANGE)]
    for stray in strays:
        stray.write_bytes(b"disk")
    (runtime.folders.identities / "old").touch()
    assert {item.path for item in runtime.reaper.leftovers()} == {
        *map(str, strays),
        str(runtime.folders.identities / "old"),
    }
    assert {item.what for item in runtime.reaper.full()} == {"stray file"}
    assert runtime.leftovers() == []


def test_the_next_job_works_after_a_dead_one(runtime: Runtime) -> None:
    orphan(runtime)
    runtime.reaper.quick()
    assert runtime.run(runtime.request(id="0123456789ac")).exit_code == 0
    assert runtime.leftovers() == []


def test_a_draft_of_a_template_is_dropped_when_nobody_works_on_it(runtime: Runtime) -> None:
    life = orphan(runtime)
    draft = runtime.hypervisor.folder / "0badc0de.draft"
    draft.mkdir()
    with open(life.folder / "journal.jsonl", "a") as journal:
        journal.write(json.dumps({"event": "make", "what": "template", "path": str(draft)}) + "\n")
    runtime.reaper.quick()
    assert not draft.exists()


def test_a_checkpoint_that_was_never_finished_is_removed_unless_another_machine_has_its_folder(
    runtime: Runtime, tmp_path: Path
) -> None:
    for id, has_other in (("0123456789ab", False), ("0123456789ac", True)):
        life, folder = orphan(runtime, id), tmp_path / f"kept-{id}"
        checkpoints = take(folder)
        (folder / "1").mkdir()
        draft = draft_in(folder, lambda what, path: None)
        with open(life.folder / "journal.jsonl", "a") as journal:
            journal.write(json.dumps({"event": "make", "what": "checkpoint", "path": str(draft)}) + "\n")
        if not has_other:
            checkpoints.release()
        assert ("checkpoint" in {item.what for item in runtime.reaper.quick()}) is not has_other
        assert draft.exists() is has_other and (folder / "1").exists()
        if has_other:
            checkpoints.release()
    assert runtime.leftovers() == []


def test_a_template_that_was_never_finished_is_seen_before_it_is_removed(runtime: Runtime) -> None:
    runtime.run()
    draft, busy = (runtime.hypervisor.folder / name for name in ("0badc0de.draft", "1badc0de.draft"))
    draft.mkdir()
    busy.mkdir()
    with locked(busy.with_suffix(".lock"), timeout=1, what="make it"):
        assert [(one.what, one.path) for one in runtime.reaper.leftovers()] == [(DRAFT, str(draft))]
        assert [(one.what, one.path) for one in runtime.reaper.full()] == [(DRAFT, str(draft))]
        assert runtime.reaper.leftovers() == [] and busy.exists() and not draft.exists()


def test_records_are_dropped_by_age_and_by_number_but_not_those_kept_on_purpose(runtime: Runtime) -> None:
    for number in range(30):
        folder = runtime.folders.ended(f"{number:012x}")
        folder.mkdir(parents=True)
        if number == 0:
            (folder / "overlay.qcow2").touch()
        os.utime(folder, (1000.0 * number, 1000.0 * number))
    (runtime.folders.logs / "ledger-2026-01.jsonl").touch()
    assert prune(runtime.folders, Settings(keep_days=7, keep_count=20), 30_000.0) == 11
    left = sorted(os.listdir(runtime.folders.logs))
    assert f"{0:012x}" in left and f"{1:012x}" not in left and f"{29:012x}" in left and "ledger-2026-01.jsonl" in left
    for _ in range(20):
        prune(runtime.folders, Settings(keep_days=1, keep_count=20), 10**9)
    assert sorted(os.listdir(runtime.folders.logs)) == [f"{0:012x}", "ledger-2026-01.jsonl"]


def test_machines_are_found_by_id_prefix_and_name(runtime: Runtime) -> None:
    from belljar.errors import NoSuchMachine, UsageError

    runtime.run(runtime.request(id="aaaa00000000", name="first"))
    runtime.run(runtime.request(id="aaab00000000", name="second"))
    assert runtime.machines.find("aaab").name == "second" and runtime.machines.find("first").id == "aaaa00000000"
    assert runtime.machines.find("first").outcome is not None and not runtime.machines.find("first").alive
    for reference in ("", "third", "b"):
        with pytest.raises(NoSuchMachine):
            runtime.machines.find(reference)
    with pytest.raises(UsageError, match="aaaa00000000"):
        runtime.machines.find("aaa")


@pytest.fixture
def on_another_disk(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """The records of ended machines lie there."""
    rename = os.rename

    def across(source: object, target: object) -> None:
        if str(runtime.folders.logs) in str(target) and str(runtime.folders.logs) not in str(source):
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        rename(source, target)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "rename", across)


@pytest.mark.usefixtures("on_another_disk")
def test_a_record_that_lies_on_another_disk_is_copied_and_the_folder_goes(runtime: Runtime) -> None:
    assert runtime.run(runtime.request()).exit_code == 0
    assert runtime.leftovers() == [] and runtime.saved_outcome()["exit_code"] == 0
    assert sorted(os.listdir(runtime.folders.run)) == ["identities", "machines", "room"]
    assert "lock" not in os.listdir(runtime.folders.ended("0123456789ab"))


@pytest.mark.usefixtures("on_another_disk")
def test_a_disk_that_is_kept_is_moved_to_another_disk(runtime: Runtime) -> None:
    outcome = runtime.run(runtime.request(keep=True))
    assert (outcome.exit_code, outcome.troubles) == (0, ()) and runtime.leftovers() == []
    assert (runtime.folders.ended("0123456789ab") / "overlay.qcow2").exists()


@pytest.mark.usefixtures("on_another_disk")
def test_what_nobody_would_have_kept_never_reaches_another_disk(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even for a moment: the host's power may fail in it."""
    life = orphan(runtime)
    (life.folder / "seed.iso").write_text("a secret")

    def fail(path: Path) -> None:
        raise OSError(errno.EIO, "Input/output error", str(path))

    monkeypatch.setattr(put_away, "remove_tree", fail)
    runtime.reaper.quick()
    assert {"journal.jsonl", "outcome.json"} <= set(os.listdir(runtime.folders.ended("0123456789ab")))
    assert "seed.iso" not in os.listdir(runtime.folders.ended("0123456789ab"))


def test_a_folder_that_was_on_its_way_out_is_removed(runtime: Runtime) -> None:
    runtime.run()
    (runtime.folders.run / ".retired-0123456789ab").mkdir()
    assert {item.what for item in runtime.reaper.full()} == {"stray file"}
    assert sorted(os.listdir(runtime.folders.run)) == ["identities", "machines", "room"]
