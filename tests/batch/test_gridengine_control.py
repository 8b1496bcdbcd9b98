# ruff: noqa: F811 - `cell` is a fixture
"""What others do to a running job: qdel, qmod, limits, killed processes, restarted daemons."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from tests.batch.lab.gridengine import until
from tests.batch.lab.gridengine_cell import IN_MACHINE, WITH_BELLJAR, WITHOUT, Cell, cell  # noqa: F401
from tests.batch.lab.load import stretched

COUNTER = "echo started; n=0; while :; do n=$((n+1)); echo $n; sleep 0.2; done"
OBEDIENT = "trap 'echo got TERM; exit 5' TERM; echo started; while :; do sleep 0.2; done"
STUBBORN = "trap 'echo got TERM' TERM; echo started; while :; do sleep 0.2; done"


def test_qdel_gives_a_grace_and_then_ends_the_machine(cell: Cell) -> None:
    obedient, stubborn = (cell.submit(text, *IN_MACHINE) for text in (OBEDIENT, STUBBORN))
    for job in (obedient, stubborn):
        cell.started(job)
    begin = time.monotonic()
    cell.lab.run("qdel", obedient, stubborn, user="bjalice")
    first = cell.ended(obedient)
    assert time.monotonic() - begin < stretched(8)
    assert first.exit == 5 and b"got TERM" in first.out
    second = cell.ended(stubborn)
    assert time.monotonic() - begin < stretched(15), "three seconds of grace"
    assert b"got TERM" in second.out and second.exit in (128 + signal.SIGTERM, 128 + signal.SIGKILL)
    cell.clean()


def test_qdel_while_the_machine_is_made_ends_it_at_once(cell: Cell) -> None:
    job = cell.submit("echo started", *IN_MACHINE, "-pe", "smp", "2", "-l", "mem_free=777M")  # no template of this size
    until(lambda: "qemu" in _pids(cell, job), "QEMU to be started", timeout=30, every=0.02)
    begin = time.monotonic()
    cell.lab.run("qdel", job, user="bjalice")
    ended = cell.ended(job)
    assert time.monotonic() - begin < stretched(6)
    assert ended.exit == 128 + signal.SIGTERM and b"started" not in ended.out
    cell.clean()


def _pids(cell: Cell, job: str) -> dict[str, int]:
    try:
        return cell.pids(job)
    except (FileNotFoundError, ValueError):
        return {}


def test_a_suspended_job_stands_still_and_goes_on(cell: Cell) -> None:
    job = cell.submit(COUNTER + " & wait", *IN_MACHINE)
    clock = cell.submit("echo started; sleep 8; date +%s", *IN_MACHINE)
    for one in (job, clock):
        cell.started(one, b"started")
    cell.lab.run("qmod", "-sj", job, clock, user="bjalice")
    for one in (job, clock):
        cell.lab.until_state(one, "s")
        pid = cell.pids(one)
        until(lambda p=pid: _state(p["wrap"]) == _state(p["qemu"]) == "T", "both processes to stop", timeout=12)
    before, used = cell.out(job), _cpu(cell.pids(job)["qemu"])
    time.sleep(3)
    assert cell.out(job) == before and _cpu(cell.pids(job)["qemu"]) == used
    cell.lab.run("qmod", "-usj", job, clock, user="bjalice")
    until(lambda: len(cell.out(job)) > len(before), "the counter to go on", timeout=10)
    ended = cell.ended(clock)
    assert abs(float(ended.out.split()[-1]) - time.time()) < 6, "the guest's clock is right again"
    cell.lab.run("qdel", job, user="bjalice")
    cell.ended(job)


@pytest.mark.slow
def test_a_suspension_taken_back_at_once_leaves_the_job_running(cell: Cell) -> None:
    job = cell.submit(COUNTER, *IN_MACHINE)
    cell.started(job)
    cell.lab.run("qmod", "-sj", job, user="bjalice")
    cell.lab.run("qmod", "-usj", job, user="bjalice")
    cell.lab.until_state(job, "r")
    time.sleep(3)  # both methods had their time
    assert _state(cell.pids(job)["wrap"]) == "S"
    size = len(cell.out(job))
    until(lambda: len(cell.out(job)) > size, "the counter to go on", timeout=10)
    cell.lab.run("qdel", job, user="bjalice")
    cell.ended(job)


def _state(pid: int) -> str:
    """Its letter in the process table; Z too when it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "Z"


def _cpu(pid: int) -> int:
    return sum(int(word) for word in Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[11:13])


def test_native_jobs_are_suspended_resumed_and_killed_as_ever(cell: Cell) -> None:
    """The methods are there for them too: no grace, and what left the process group dies as well."""
    text = "setsid sleep 1234 & echo $!; trap 'echo got TERM' TERM; echo started; n=0; while :; do n=$((n+1)); echo $n; sleep 0.2; done"
    jobs = [cell.submit(text, *queue) for queue in (WITH_BELLJAR, WITHOUT)]
    for job in jobs:
        cell.started(job)
    cell.lab.run("qmod", "-sj", *jobs, user="bjalice")
    for job in jobs:
        until(lambda j=job: _state(cell.pids(j)["wrap"]) == "T", "the job to stop", timeout=10)
        until(lambda j=job: _state(_child(cell, j)) == "T", "what left its group to stop", timeout=10)
    cell.lab.run("qmod", "-usj", *jobs, user="bjalice")
    for job in jobs:
        until(lambda j=job: _state(cell.pids(j)["wrap"]) in "SR", "the job to go on", timeout=10)
    begin = time.monotonic()
    cell.lab.run("qdel", *jobs, user="bjalice")
    rows = [cell.ended(job) for job in jobs]
    assert time.monotonic() - begin < stretched(8)
    assert [(row.failed, row.exit) for row in rows] == [(100, 137)] * 2
    assert not any(b"got TERM" in row.out for row in rows)
    for job in jobs:
        until(lambda j=job: _state(_child(cell, j)) in "Z", "what left its group to be gone", timeout=10)


def _child(cell: Cell, job: str) -> int:
    """The process the job has put into a session of its own."""
    return int(cell.out(job).split()[0])


@pytest.mark.slow
def test_notify_and_limits_warn_the_payload(cell: Cell) -> None:
    text = "for s in USR1 USR2 XCPU; do trap \"echo got $s\" $s; done; trap 'echo got TERM; exit 0' TERM; echo started; while :; do sleep 0.2; done"
    limit = int(stretched(8))  # it counts from before the machine is made: the payload has to have begun by then
    warned = cell.submit(text, "-notify", *IN_MACHINE)
    soft = cell.submit(text, "-l", f"s_rt={limit - 2}", *IN_MACHINE)
    hard = cell.submit(STUBBORN, "-l", f"h_rt={limit}", *IN_MACHINE)
    cell.started(warned)
    cell.lab.run("qdel", warned, user="bjalice")
    ended = cell.ended(warned)
    assert b"got USR2" in ended.out and b"got TERM" in ended.out
    until(lambda: b"got USR1" in cell.out(soft), "the warning of s_rt", timeout=limit + 24)
    cell.lab.run("qdel", soft, user="bjalice")
    cell.ended(soft)
    assert b"got TERM" in cell.ended(hard).out
    assert int(float(cell.ended(hard).row["ru_wallclock"].rstrip("s"))) < limit + 12
    cell.clean()


@pytest.mark.parametrize("victim", ["wrap", "qemu"])
def test_a_killed_process_takes_the_machine_along(cell: Cell, victim: str) -> None:
    job = cell.submit("setsid sleep 1000 & echo started; sleep 1000", *IN_MACHINE)
    cell.started(job)
    pids = cell.pids(job)
    os.kill(pids[victim], signal.SIGKILL)
    if victim == "qemu":  # the payload had begun and its end is not known: it is not run again unasked
        ended = cell.ended(job)
        assert ended.exit == 125 and b"belljar:" in ended.err
    else:
        assert cell.ended(job).exit == 137
    until(lambda: not Path(f"/proc/{pids['qemu']}").exists() or _state(pids["qemu"]) == "Z", "QEMU to end", timeout=5)
    cell.clean()
    assert cell.run("echo next", *IN_MACHINE).out == b"next\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    "point", ["after-claim", "after-overlay", "after-spawn", "payload-started", "payload-ended", "before-release"]
)
def test_belljar_dies_anywhere_and_the_next_job_is_fine(cell: Cell, point: str) -> None:
    job = cell.submit("echo ran", *IN_MACHINE, "-v", f"BELLJAR_TESTING_ABORT_AT={point}")
    assert cell.ended(job).exit == 137
    cell.clean()
    assert cell.run("echo next", *IN_MACHINE).out == b"next\n"
    assert cell.lab.queue_state() == ""


@pytest.mark.slow
@pytest.mark.parametrize("daemon", ["execd", "qmaster"])
def test_a_restarted_daemon_finds_the_job_running(cell: Cell, daemon: str) -> None:
    job = cell.submit("echo started; sleep 14; echo done; exit 6", *IN_MACHINE)
    cell.started(job)
    cell.lab.stop(daemon)
    cell.lab.start(daemon)
    ended = cell.ended(job, timeout=90)
    assert ended.out == b"started\ndone\n" and ended.exit == 6
    until(lambda: cell.lab.queue_state() == "", "the queue to be open again", timeout=60)


@pytest.mark.slow
def test_a_rescheduled_job_is_run_again(cell: Cell) -> None:
    """`qmod -rj` by a manager: the first run ends, the second one comes to its end."""
    job = cell.submit('echo started $RESTARTED; [ "$RESTARTED" = 0 ] && sleep 1000; exit 4', "-r", "y", *IN_MACHINE)
    cell.started(job)
    cell.lab.run("qmod", "-rj", job)
    ended = cell.ended(job, rows=2, timeout=90)
    assert b"started 1" in ended.out and ended.exit == 4
    cell.clean()
