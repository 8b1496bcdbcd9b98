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
from tests.stories.conftest import House

from belljar.errors import DomainDied
from belljar.host.locks import is_locked, locked
from belljar.host.processes import start_time
from belljar.hypervisor import Traces
from belljar.journal import read
from belljar.machine import Settings
from belljar.machine.cleaning import put_away, reaper
from belljar.machine.cleaning.put_away import retire
from belljar.machine.cleaning.reaper import DRAFT, Undone, prune, traces_of
from belljar.machine.life.claim import CLAIMING, claim
from belljar.machine.life.life import Lifecycle


def orphan(house: House, id: str = "0123456789ab") -> Lifecycle:
    """A machine whose supervisor died: all was made, the lock is free."""
    life = claim(house.request(id=id, name="mine"), house.folders, lambda point: None)
    overlay = house.folders.overlay(id)
    life.record.intend("overlay", overlay)
    overlay.write_bytes(b"disk")
    identity = house.folders.identities / (id * 5)
    life.record.intend("identity", identity)
    identity.touch()
    life.release()
    return life


def test_one_pass_leaves_nothing_but_the_record(house: House) -> None:
    orphan(house)
    undone = house.reaper.quick()
    assert {item.what for item in undone} == {"domain", "overlay", "identity", "machine"}
    assert house.leftovers() == []
    outcome = house.saved_outcome()
    assert outcome["reason"] == "belljar was killed while the machine was requested"
    assert (outcome["cause"], outcome["name"]) == ("node-fault", "mine")
    assert house.reaper.quick() == []


def test_no_socket_of_a_killed_machine_stays_in_its_record(house: House) -> None:
    life = orphan(house)
    folder = os.open(life.folder, os.O_PATH)
    for name in ("control.sock", "virtiofs.sock"):
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(f"/proc/self/fd/{folder}/{name}")
    os.close(folder)
    house.reaper.quick()
    kept = list(house.folders.ended("0123456789ab").iterdir())
    assert kept and not [one.name for one in kept if one.is_socket()]


def test_whoever_looks_while_a_machine_is_made_neither_hinders_nor_takes_it(house: House) -> None:
    orphan(house)
    house.reaper.quick()
    over, undone = threading.Event(), list[Undone]()

    def look() -> None:
        while not over.is_set():
            undone.extend(house.reaper.quick())

    looking = [threading.Thread(target=look) for _ in range(3)]
    for thread in looking:
        thread.start()
    try:
        for number in range(300):
            life = claim(house.request(id=f"{number:012x}"), house.folders, lambda point: None)
            assert life.folder.exists() and is_locked(life.folder / "lock")
            retire(life.folder, house.folders.ended(life.request.id))
            life.release()
    finally:
        over.set()
        for thread in looking:
            thread.join(30)
    assert undone == []


def test_two_reapers_at_once_finish_a_machine_once(house: House) -> None:
    for _ in range(30):
        orphan(house)
        shutil.rmtree(house.folders.ended("0123456789ab"), ignore_errors=True)
        with ThreadPoolExecutor(2) as reapers:
            found = [item for items in reapers.map(lambda _: house.reaper.quick(), range(2)) for item in items]
        assert house.leftovers() == []
        assert [item.what for item in found].count("machine") == 1


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


def test_a_full_pass_waits_for_a_lock_that_outlives_its_holder(house: House) -> None:
    life = claim(house.request(), house.folders, lambda point: None)
    of_the_dead(life)
    child = forked(life)
    assert house.reaper.quick() == []
    assert "machine" in {item.what for item in house.reaper.full()}
    assert house.leftovers() == [] and child.wait(10) == 0


def test_the_end_of_a_machine_waits_for_a_lock_that_outlives_its_holder(house: House) -> None:
    life = claim(house.request(), house.folders, lambda point: None)
    of_the_dead(life)
    child = forked(life)
    (view,) = house.machines.list()
    assert house.reaper.end(view)
    assert child.wait(10) == 0 and house.saved_outcome()["cause"] == "node-fault"


def test_one_machines_trouble_is_told_and_keeps_no_other_from_being_finished(house: House) -> None:
    ids = [f"{number:012x}" for number in range(3)]
    for id in ids:
        orphan(house, id)
    house.hypervisor.faults.discard = [DomainDied("QEMU of machine (pid 7) does not go away")]
    undone = house.reaper.quick()
    ((stuck, error),) = [(one.machine, one.error) for one in undone if one.error]
    assert error == "QEMU of machine (pid 7) does not go away"
    assert {one.machine for one in undone if one.what == "machine"} == set(ids) - {stuck}
    assert os.listdir(house.folders.machines) == [stuck] and house.folders.overlay(stuck).exists()
    assert house.run(house.request(id="f" * 12)).exit_code == 0
    assert stuck in {one.machine for one in house.reaper.full()}
    assert house.leftovers() == []


def test_a_file_that_cannot_be_removed_is_told_and_the_rest_goes(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    house.run()
    strays = [house.folders.overlay("e" * 12), house.folders.overlay("f" * 12)]
    for path in strays:
        path.touch()
    unlink = Path.unlink

    def refuse(path: Path, missing_ok: bool = False) -> None:
        if path == strays[0]:
            raise OSError(errno.EROFS, "Read-only file system", str(path))
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", refuse)
    told = {one.path: (one.what, one.error) for one in house.reaper.full()}
    assert told == {
        str(strays[0]): ("not finished", "Read-only file system"),
        str(strays[1]): ("stray file", ""),
    }


def test_a_reaper_that_takes_its_time_keeps_nobody_from_beginning_a_machine(house: House) -> None:
    """A process in the kernel's hands takes seconds to end, a tree on a slow disk longer."""
    orphan(house)
    began, may_end = threading.Event(), threading.Event()

    def discard(id: str, traces: Traces, *, patience: float) -> None:
        began.set()
        assert may_end.wait(30)

    house.hypervisor.discard = discard  # type: ignore[method-assign, assignment]
    (house.folders.scratch / f"{'e' * 12}.qcow2").touch()
    reaping = threading.Thread(target=house.reaper.full)
    reaping.start()
    try:
        assert began.wait(30)
        claim(house.request(id="a" * 12), house.folders, lambda point: None).release()
    finally:
        may_end.set()
        reaping.join(30)


def test_a_start_does_not_wait_for_a_machine_that_somebody_else_finishes(house: House) -> None:
    life = orphan(house)
    with locked(life.folder / "lock", timeout=1, what="finish it"):
        assert house.reaper.quick(patience=0.01) == []


def test_a_folder_in_the_making_is_nobodys_machine_and_goes_when_its_maker_is_dead(house: House) -> None:
    house.run()
    began = start_time(os.getpid()) or 0
    living, left = (house.folders.run / (CLAIMING.format(os.getpid(), at) + "a" * 12) for at in (began, began - 1))
    living.mkdir(mode=0o700)
    left.mkdir(mode=0o700)
    assert [undone.path for undone in house.reaper.full()] == [str(left)] and not left.exists()
    assert house.reaper.full() == [] and house.machines.list() == [] and living.exists()


def test_of_a_journal_only_this_boots_processes_are_believed(house: House) -> None:
    life = claim(house.request(), house.folders, lambda point: None)
    life.record.write("template-wait", lock="x", owner=65534)
    life.record.write("spawned", pid=4711, started=99, argv=["qemu"])
    life.record.write("spawned", pid=1, started="noise", argv=["qemu"])
    events = read(life.folder)
    life.release()
    assert traces_of(events) == Traces(frozenset({65534}), frozenset({(4711, 99)}))
    assert traces_of([{**events[0], "boot": "another"}, *events[1:]]) == Traces() == traces_of([])


def test_a_living_machine_is_left_alone(house: House) -> None:
    life = claim(house.request(), house.folders, lambda point: None)
    assert house.reaper.full() == []
    assert house.folders.machine("0123456789ab").exists()
    life.release()


def test_a_machine_of_another_boot_is_told_from_one_that_was_killed(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    orphan(house)
    monkeypatch.setattr(reaper, "boot_id", lambda: "another boot")
    house.reaper.quick()
    assert house.saved_outcome()["reason"].startswith("the host was restarted")
    assert house.saved_outcome()["class"] == "transient"


def test_what_a_killed_machine_worked_is_told_and_not_the_time_for_which_the_host_was_off(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    life = orphan(house)
    began = time.time() - 5000
    with open(life.folder / "journal.jsonl", "a") as journal:
        journal.write(json.dumps({"time": began, "event": "state", "state": "running"}) + "\n")
    for path in (*life.folder.iterdir(), house.folders.overlay(life.request.id)):
        os.utime(path, (began + 600, began + 600))
    monkeypatch.setattr(reaper, "boot_id", lambda: "another boot")
    house.reaper.quick()
    outcome = house.saved_outcome()
    assert outcome["ended"] == pytest.approx(began + 600) and outcome["phases"]["run"] == pytest.approx(600)


@pytest.mark.parametrize("what", ["overlay", "identity", "folder"])
def test_a_path_that_belljar_would_not_have_used_is_left_alone(house: House, tmp_path: Path, what: str) -> None:
    life = orphan(house)
    precious = tmp_path / "precious"
    precious.write_text("mine")
    with open(life.folder / "journal.jsonl", "a") as journal:
        for path in (precious, life.folders.identities / "../../precious", life.folders.scratch / "ffffffffffff.qcow2"):
            journal.write(json.dumps({"event": "make", "what": what, "path": str(path)}) + "\n")
    house.reaper.quick()
    assert precious.read_text() == "mine"


def test_a_journal_full_of_noise_does_not_stop_the_reaper(house: House) -> None:
    life = orphan(house)
    with open(life.folder / "journal.jsonl", "ab") as journal:
        journal.write(b'\xff\xfe\n{"event": "make"}\n{"event": "make", "path": 7}\n[]\n{"event": "state"}\n{"torn')
    house.reaper.quick()
    assert house.leftovers() == []


def test_a_folder_that_was_being_made_is_finished_too(house: House) -> None:
    orphan(house)
    half = house.folders.machine("ba9876543210")
    half.mkdir(mode=0o700)
    house.reaper.quick()
    assert house.leftovers() == []


def test_what_no_folder_tells_about_is_found_as_well(house: House) -> None:
    orphan(house)
    house.reaper.quick()
    stray = house.folders.overlay("ffffffffffff")
    stray.write_bytes(b"disk")
    (house.folders.identities / "old").touch()
    assert {item.path for item in house.reaper.leftovers()} == {str(stray), str(house.folders.identities / "old")}
    assert {item.what for item in house.reaper.full()} == {"stray file"}
    assert house.leftovers() == []


def test_the_next_job_works_after_a_dead_one(house: House) -> None:
    orphan(house)
    house.reaper.quick()
    assert house.run(house.request(id="0123456789ac")).exit_code == 0
    assert house.leftovers() == []


def test_a_draft_of_a_template_is_dropped_when_nobody_works_on_it(house: House) -> None:
    life = orphan(house)
    draft = house.hypervisor.folder / "0badc0de.draft"
    draft.mkdir()
    with open(life.folder / "journal.jsonl", "a") as journal:
        journal.write(json.dumps({"event": "make", "what": "template", "path": str(draft)}) + "\n")
    house.reaper.quick()
    assert not draft.exists()


def test_a_template_that_was_never_finished_is_seen_before_it_is_removed(house: House) -> None:
    house.run()
    draft, busy = (house.hypervisor.folder / name for name in ("0badc0de.draft", "1badc0de.draft"))
    draft.mkdir()
    busy.mkdir()
    with locked(busy.with_suffix(".lock"), timeout=1, what="make it"):
        assert [(one.what, one.path) for one in house.reaper.leftovers()] == [(DRAFT, str(draft))]
        assert [(one.what, one.path) for one in house.reaper.full()] == [(DRAFT, str(draft))]
        assert house.reaper.leftovers() == [] and busy.exists() and not draft.exists()


def test_records_are_dropped_by_age_and_by_number_but_not_those_kept_on_purpose(house: House) -> None:
    for number in range(30):
        folder = house.folders.ended(f"{number:012x}")
        folder.mkdir(parents=True)
        if number == 0:
            (folder / "overlay.qcow2").touch()
        os.utime(folder, (1000.0 * number, 1000.0 * number))
    (house.folders.logs / "ledger-2026-01.jsonl").touch()
    assert prune(house.folders, Settings(keep_days=7, keep_count=20), 30_000.0) == 11
    left = sorted(os.listdir(house.folders.logs))
    assert f"{0:012x}" in left and f"{1:012x}" not in left and f"{29:012x}" in left and "ledger-2026-01.jsonl" in left
    for _ in range(20):
        prune(house.folders, Settings(keep_days=1, keep_count=20), 10**9)
    assert sorted(os.listdir(house.folders.logs)) == [f"{0:012x}", "ledger-2026-01.jsonl"]


def test_machines_are_found_by_id_prefix_and_name(house: House) -> None:
    from belljar.errors import NoSuchMachine, UsageError

    house.run(house.request(id="aaaa00000000", name="first"))
    house.run(house.request(id="aaab00000000", name="second"))
    assert house.machines.find("aaab").name == "second" and house.machines.find("first").id == "aaaa00000000"
    assert house.machines.find("first").outcome is not None and not house.machines.find("first").alive
    for reference in ("", "third", "b"):
        with pytest.raises(NoSuchMachine):
            house.machines.find(reference)
    with pytest.raises(UsageError, match="aaaa00000000"):
        house.machines.find("aaa")


@pytest.fixture
def on_another_disk(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """The records of ended machines lie there."""
    rename = os.rename

    def across(source: object, target: object) -> None:
        if str(house.folders.logs) in str(target) and str(house.folders.logs) not in str(source):
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        rename(source, target)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "rename", across)


@pytest.mark.usefixtures("on_another_disk")
def test_a_record_that_lies_on_another_disk_is_copied_and_the_folder_goes(house: House) -> None:
    assert house.run(house.request()).exit_code == 0
    assert house.leftovers() == [] and house.saved_outcome()["exit_code"] == 0
    assert sorted(os.listdir(house.folders.run)) == ["identities", "machines", "room"]
    assert "lock" not in os.listdir(house.folders.ended("0123456789ab"))


@pytest.mark.usefixtures("on_another_disk")
def test_a_disk_that_is_kept_is_moved_to_another_disk(house: House) -> None:
    outcome = house.run(house.request(keep=True))
    assert (outcome.exit_code, outcome.troubles) == (0, ()) and house.leftovers() == []
    assert (house.folders.ended("0123456789ab") / "overlay.qcow2").exists()


@pytest.mark.usefixtures("on_another_disk")
def test_what_nobody_would_have_kept_never_reaches_another_disk(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even for a moment: the host's power may fail in it."""
    life = orphan(house)
    (life.folder / "seed.iso").write_text("a secret")

    def fail(path: Path) -> None:
        raise OSError(errno.EIO, "Input/output error", str(path))

    monkeypatch.setattr(put_away, "remove_tree", fail)
    house.reaper.quick()
    assert {"journal.jsonl", "outcome.json"} <= set(os.listdir(house.folders.ended("0123456789ab")))
    assert "seed.iso" not in os.listdir(house.folders.ended("0123456789ab"))


def test_a_folder_that_was_on_its_way_out_is_removed(house: House) -> None:
    house.run()
    (house.folders.run / ".retired-0123456789ab").mkdir()
    assert {item.what for item in house.reaper.full()} == {"stray file"}
    assert sorted(os.listdir(house.folders.run)) == ["identities", "machines", "room"]
