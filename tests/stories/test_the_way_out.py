"""What is known of a payload's end is delivered and written, whatever goes wrong on the machine's way out."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.guest import Script
from tests.stories.conftest import Runtime

from belljar.errors import DomainDied
from belljar.guest import Streams
from belljar.hypervisor import EventKind
from belljar.journal import Ledger
from belljar.machine.cleaning import reaper
from belljar.machine.life.claim import claim
from belljar.machine.orders import Orders, Pause, Resume, Signal
from belljar.model import MIB, Cause, Outcome, OutcomeClass, Start, Transfer

ID = "0123456789ab"
COLD = {"machine": {"start": Start.COLD}}


def rows(runtime: Runtime) -> list[dict[str, Any]]:
    return [row for row, _ in Ledger(runtime.folders.logs).since() if row["id"] == ID]


def facts(outcome: Outcome) -> tuple[object, ...]:
    return outcome.cause, outcome.klass, outcome.exit_code, outcome.signal


def in_the_way(path: Path) -> Callable[[], None]:
    """A folder that is not empty in the place of a file, which nobody can unlink, open, or put a file over. Returns how
    it is taken away again."""
    with suppress(FileNotFoundError):
        path.unlink()
    (path / "in the way").mkdir(parents=True)

    def take_away() -> None:
        with suppress(FileNotFoundError):  # it went with its folder
            (path / "in the way").rmdir()
            path.rmdir()

    return take_away


def fill(path: Path) -> Callable[[], None]:
    """The disk is full for whoever has this file open."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}") == str(path):
                full = os.open("/dev/full", os.O_WRONLY | os.O_APPEND)
                os.dup2(full, int(name), inheritable=False)
                os.close(full)
    return lambda: None


def break_(runtime: Runtime, step: str) -> Callable[[], None]:
    """Let this step of the way out fail; returns how it is mended."""
    folder = runtime.folders.machine(ID)
    match step:
        case "domain":
            runtime.hypervisor.faults.quit.append(DomainDied("it hangs in the kernel"))
            return lambda: runtime.hypervisor.discard(ID)
        case "disk":
            runtime.overlays.stuck = OSError(errno.EROFS, "Read-only file system", str(runtime.folders.overlay(ID)))
            return lambda: setattr(runtime.overlays, "stuck", None)
        case "further disk":
            return in_the_way(runtime.folders.attachment(ID, "scratch"))
        case "identity":
            return in_the_way(next(runtime.folders.identities.iterdir()))
        case "control socket":
            return in_the_way(folder / "control.sock")
        case "outcome":
            return in_the_way(folder / "outcome.json")
        case "ledger":
            return in_the_way(runtime.folders.logs / time.strftime("ledger-%Y-%m.jsonl", time.gmtime()))
        case "record":
            runtime.folders.ended(ID).write_text("in the way")
            return lambda: runtime.folders.ended(ID).unlink()
        case "journal":
            return fill(folder / "journal.jsonl")
    raise AssertionError(step)


STEPS = (
    "domain", "disk", "further disk", "identity", "control socket", "outcome", "ledger", "record", "journal"
)  # fmt: skip
KNOWN: dict[str, tuple[Script, dict[str, Any], tuple[Any, ...], tuple[object, ...]]] = {
    "exit 0": (Script(), {}, (), (Cause.FINISHED, OutcomeClass.PAYLOAD, 0, None)),
    "exit 3": (Script(exit_code=3), {}, (), (Cause.FINISHED, OutcomeClass.PAYLOAD, 3, None)),
    "signal": (Script(signal=11), {}, (), (Cause.FINISHED, OutcomeClass.PAYLOAD, None, 11)),
    "cancelled": (
        Script(runs_for=None), {}, ((5.0, Signal(signal.SIGTERM)),), (Cause.CANCELLED, OutcomeClass.CANCELLED, None, 15)
    ),
    "time limit": (
        Script(runs_for=None), {"timeout": 60.0}, (), (Cause.WALLTIME, OutcomeClass.WALLTIME, None, 15)
    ),
    "no identity": (
        Script(proof={"nonce": "x"}), {}, (), (Cause.BOOT_FAILED, OutcomeClass.TRANSIENT, None, None)
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("step", "known"), [pair for pair in product(STEPS, KNOWN) if pair != ("identity", "no identity")]
)
def test_what_is_known_is_delivered_and_written_though_a_step_of_the_way_out_fails(
    runtime: Runtime, step: str, known: str
) -> None:
    script, changes, orders, wanted = KNOWN[known]
    mend: list[Callable[[], None]] = []
    runtime.plan(script)
    runtime.at["before-stop"] = lambda: mend.append(break_(runtime, step))
    machine = {**COLD["machine"], "scratch": 64 * MIB} if step == "further disk" else COLD["machine"]
    outcome = runtime.run(runtime.request(machine=machine, **changes), *orders)
    assert facts(outcome) == wanted
    assert len(outcome.troubles) == (step != "journal"), outcome.troubles
    mend[0]()
    runtime.overlays.stuck = None
    runtime.reaper.full()
    assert runtime.leftovers() == []
    assert [(row["cause"], row["class"], row["exit_code"], row["signal"]) for row in rows(runtime)] == [
        (wanted[0].value, wanted[1].value, *wanted[2:])  # type: ignore[attr-defined]
    ]
    assert runtime.saved_outcome()["reason"] == outcome.reason


def test_everything_that_fails_is_told_and_nothing_hides_the_end(runtime: Runtime) -> None:
    mend: list[Callable[[], None]] = []
    runtime.plan(Script(exit_code=3))
    runtime.at["before-stop"] = lambda: mend.extend(break_(runtime, step) for step in STEPS if step != "further disk")
    outcome = runtime.run(runtime.request(**COLD))
    assert facts(outcome) == (Cause.FINISHED, OutcomeClass.PAYLOAD, 3, None)
    told = "\n".join(outcome.troubles)
    assert "it hangs in the kernel" in told and "0123456789ab.qcow2: Read-only file system" in told
    assert "control.sock" in told and "ledger-" in told


def test_a_reaper_that_comes_between_finds_the_outcome_and_records_no_fault(runtime: Runtime) -> None:
    """The ledger cannot be written: the record waits for it where a reaper finds it."""
    mend: list[Callable[[], None]] = []
    runtime.at["before-stop"] = lambda: mend.append(break_(runtime, "ledger"))
    runtime.run(runtime.request(**COLD))
    runtime.reaper.quick()
    assert runtime.folders.machine(ID).exists() and not runtime.folders.ended(ID).exists()
    mend[0]()
    assert rows(runtime) == []
    runtime.reaper.quick()
    assert [row["cause"] for row in rows(runtime)] == ["finished"] and runtime.leftovers() == []


# -- a journal whose disk is full ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [0, 3])
def test_a_full_disk_of_the_journal_ends_no_machine_whose_payload_runs(runtime: Runtime, code: int) -> None:
    """It fills up while the payload runs; then the job is suspended, resumed, and its files are fetched."""
    runtime.plan(Script(runs_for=100.0, exit_code=code))
    runtime.at["payload-started"] = lambda: fill(runtime.folders.machine(ID) / "journal.jsonl") and None
    outputs = (Transfer("/tmp/result", "result"),)
    outcome = runtime.run(
        runtime.request(payload={"outputs": outputs}, **COLD), (10.0, Pause(asyncio.Event())), (20.0, Resume())
    )
    assert facts(outcome) == (Cause.FINISHED, OutcomeClass.PAYLOAD, code, None) and outcome.error == ""
    assert {"pause", "resume"} <= set(runtime.domain().done) and "get" in runtime.guests[-1].done
    assert runtime.leftovers() == [] and len(rows(runtime)) == 1


def test_why_a_domain_ended_is_told_though_the_journals_disk_is_full(runtime: Runtime) -> None:
    runtime.plan(Script(runs_for=None))

    def end() -> None:
        fill(runtime.folders.machine(ID) / "journal.jsonl")
        runtime.domain().happen(EventKind.PANICKED)

    runtime.at["payload-started"] = end
    outcome = runtime.run(runtime.request(**COLD))
    assert outcome.error == "GuestError" and outcome.klass is OutcomeClass.TRANSIENT


def test_a_clone_that_failed_is_booted_cold_or_told_though_its_failure_cannot_be_journaled(runtime: Runtime) -> None:
    runtime.run()
    runtime.hypervisor.faults.start_clone.append(DomainDied("it broke"))
    runtime.at["after-overlay"] = lambda: fill(runtime.folders.machine("0123456789ac") / "journal.jsonl") and None
    outcome = runtime.run(runtime.request(id="0123456789ac"))
    assert outcome.error == "NoSpace" and outcome.klass is OutcomeClass.NODE and runtime.leftovers() == []


# -- a cancel of the program that keeps the machine --------------------------------------------------------------------------


def cancelled(runtime: Runtime, *points: str, **changes: Any) -> Outcome:
    """The outcome that is written when the supervisor is cancelled at each of these points."""

    async def keep() -> None:
        task = asyncio.ensure_future(
            runtime.supervisor().keep(runtime.request(**changes), Streams(None, None, None), Orders())
        )
        for point in points:
            runtime.at[point] = task.cancel
        with pytest.raises(asyncio.CancelledError):
            await task

    runtime.leap(keep())
    assert runtime.leftovers() == []
    (row,) = rows(runtime)
    return Outcome(
        ID, Cause(row["cause"]), OutcomeClass(row["class"]), row["exit_code"], row["signal"], reason=row["reason"]
    )


@pytest.mark.parametrize("at", ["after-overlay", "after-spawn", "after-boot", "payload-sent", "payload-started"])
def test_a_cancelled_machine_is_cancelled_and_no_nodes_fault(runtime: Runtime, at: str) -> None:
    runtime.plan(Script(runs_for=None))
    outcome = cancelled(runtime, at, **COLD)
    assert facts(outcome) == (Cause.CANCELLED, OutcomeClass.CANCELLED, None, signal.SIGKILL)


@pytest.mark.parametrize("code", [0, 3])
def test_a_cancel_while_files_are_fetched_tells_how_the_payload_had_ended(runtime: Runtime, code: int) -> None:
    runtime.plan(Script(exit_code=code, gets_for=60.0))
    outcome = cancelled(runtime, "payload-ended", payload={"outputs": (Transfer("/tmp/result", "result"),)}, **COLD)
    assert outcome.cause is Cause.CANCELLED and f"the payload had ended with exit code {code}" in outcome.reason


@pytest.mark.parametrize("at", ["status-written", "before-stop", "after-stop", "before-release"])
def test_a_cancel_when_all_is_done_changes_nothing_of_the_outcome(runtime: Runtime, at: str) -> None:
    runtime.plan(Script(exit_code=3))
    outcome = cancelled(runtime, at, collect=("/var/log",), **COLD)
    assert facts(outcome) == (Cause.FINISHED, OutcomeClass.PAYLOAD, 3, None)


def test_a_second_cancel_does_not_abandon_the_way_out(runtime: Runtime) -> None:
    runtime.plan(Script(runs_for=None))
    outcome = cancelled(runtime, "payload-started", "before-stop", "after-stop", **COLD)
    assert outcome.cause is Cause.CANCELLED


# -- a kill between the outcome and its row in the ledger -----------------------------------------------------------------------


class Killed(BaseException):
    """In the place of SIGKILL: nothing of the supervisor runs any more."""


def killed_before_the_row(runtime: Runtime, code: int = 3) -> None:
    """A machine whose supervisor was killed when its outcome was written, and its row in the ledger not."""

    def die() -> None:
        raise Killed

    runtime.plan(Script(exit_code=code))
    runtime.at["outcome-written"] = die
    with pytest.raises(Killed):
        runtime.run(runtime.request(**COLD))
    runtime.at.clear()
    gc.collect()
    free(runtime.folders.machine(ID) / "lock")
    assert rows(runtime) == [] and (runtime.folders.machine(ID) / "outcome.json").exists()


def free(lock: Path) -> None:
    """As the kernel does at a process's end."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}") == str(lock):
                os.close(int(name))


def test_the_reaper_adds_the_row_that_is_missing(runtime: Runtime) -> None:
    killed_before_the_row(runtime)
    runtime.reaper.quick()
    assert [(row["cause"], row["exit_code"]) for row in rows(runtime)] == [("finished", 3)]
    assert runtime.leftovers() == [] and runtime.saved_outcome()["exit_code"] == 3


def test_two_reapers_at_once_add_it_once(runtime: Runtime) -> None:
    for number in range(8):
        killed_before_the_row(runtime)
        with ThreadPoolExecutor(2) as reapers:
            list(reapers.map(lambda _: runtime.reaper.quick(), range(2)))
        assert len(rows(runtime)) == 1 and runtime.leftovers() == [], number
        for path in (*runtime.folders.logs.glob("ledger-*"), *runtime.folders.ended(ID).iterdir()):
            path.unlink()
        runtime.folders.ended(ID).rmdir()


def test_a_reaper_that_dies_when_the_row_is_written_adds_no_second_one(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed_before_the_row(runtime)

    def die(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(reaper, "retire", die)
        with pytest.raises(Killed):
            runtime.reaper.quick()
    assert len(rows(runtime)) == 1 and runtime.folders.machine(ID).exists()
    runtime.reaper.quick()
    assert len(rows(runtime)) == 1 and runtime.leftovers() == []


def test_half_a_row_is_none(runtime: Runtime) -> None:
    """The host's power failed while the row was written."""
    killed_before_the_row(runtime)
    runtime.reaper.quick()
    (path,) = runtime.folders.logs.glob("ledger-*")
    path.write_bytes(path.read_bytes()[:-20])
    os.rename(runtime.folders.ended(ID), runtime.folders.machine(ID))
    (runtime.folders.machine(ID) / "lock").touch()
    runtime.reaper.quick()
    assert [(row["cause"], row["exit_code"]) for row in rows(runtime)] == [("finished", 3)]


def test_who_was_killed_after_the_payloads_end_is_told_so(runtime: Runtime) -> None:
    life = claim(runtime.request(), runtime.folders, lambda point: None)
    life.record.tell("payload-ended", exit_code=3, signal=None)
    life.release()
    runtime.reaper.quick()
    assert runtime.saved_outcome()["cause"] == "node-fault"
    assert runtime.saved_outcome()["reason"].endswith("; the payload had ended with exit code 3")


def test_a_dead_machine_is_put_on_record_though_its_disk_cannot_be_removed(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    life = claim(runtime.request(), runtime.folders, lambda point: None)
    life.record.intend("overlay", runtime.folders.overlay(ID))
    life.release()
    runtime.folders.overlay(ID).touch()
    unlink = Path.unlink

    def refuse(path: Path, missing_ok: bool = False) -> None:
        if path == runtime.folders.overlay(ID):
            raise OSError(errno.EROFS, "Read-only file system", str(path))
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", refuse)
    undone = runtime.reaper.quick()
    assert [row["cause"] for row in rows(runtime)] == ["node-fault"] and not runtime.folders.machine(ID).exists()
    assert [one.path for one in undone if one.error] == [str(runtime.folders.overlay(ID))]
