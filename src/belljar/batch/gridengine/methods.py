"""Grid Engine's suspend, resume and terminate methods of a queue: `$job_pid` and the job's spool folder follow the
name.

They run as the job's owner, in its environment. For a job without a machine they do what Grid Engine does without
methods: STOP, CONT and KILL to its process group and to all that has its additional group. For a job in a machine:

    suspend     TSTP to the wrapper, which halts the vcpus and stops itself; then STOP to all
    resume      CONT to all; the wrapper lets the vcpus go on and sets the guest's clock
    terminate   CONT and TERM to the wrapper; if it is still there after the grace, KILL

Grid Engine starts the terminate method again every second until the job is gone, never twice at once; with `-notify`
only once. So each call must end the job by itself, survive the notices (its shell ignores them), and may find the job
ended.
"""

from __future__ import annotations

import itertools
import os
import select
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from belljar.batch import Call
from belljar.batch.gridengine.dialect import GRACE, spool_config
from belljar.errors import BadOption, BelljarError
from belljar.host.processes import PROC, all_pids, command_line, is_stopped

PAUSE = 10.0  # seconds the wrapper may take to halt the vcpus and stop
PAUSE_LOOK = 0.01  # seconds between two looks: only the parent of a process is told that it has stopped
LAST_WORDS = 2.0  # seconds beyond the grace for a wrapper that ends its machine at the last moment
ENTRY = (b"wrap", b"gridengine")
LAUNCHER = b"wrap-gridengine"


def run(call: Call) -> int:
    """Carry out one method, with the grace of the site's settings. Exits 0 also if the job is gone."""
    pid, spool = (*call.words, "", "")[:2]
    if len(call.words) > 2 or not pid.isdecimal() or int(pid) < 2:
        raise BadOption(f"{call.name} {' '.join(call.words)}: wants $job_pid and $SGE_JOB_SPOOL_DIR, and nothing else")
    own = 0.0
    with suppress(BelljarError):  # a job is ended also where a mistake in the settings keeps it from being begun
        own = call.settings().grace
    job, folder = int(pid), Path(spool or "/nowhere")
    with suppress(ProcessLookupError):
        match call.name:
            case "suspend":
                suspend(job, folder)
            case "resume":
                _signal_all(job, signal.SIGCONT, folder)
            case "terminate":
                terminate(job, own or GRACE - LAST_WORDS, folder)
    return 0


def suspend(pid: int, spool: Path) -> None:
    """Halt the job."""
    if is_wrapper(pid):
        os.kill(pid, signal.SIGTSTP)
        # STOP before it is done would leave the order to stop behind: it would be obeyed after the next CONT.
        deadline = time.monotonic() + PAUSE
        while not is_stopped(pid) and time.monotonic() < deadline and command_line(pid):
            time.sleep(PAUSE_LOOK)
    _signal_all(pid, signal.SIGSTOP, spool)


def terminate(pid: int, grace: float, spool: Path) -> None:
    """Bring the job's end about: with a grace where it is in a machine."""
    descriptor = os.pidfd_open(pid)
    try:
        if is_wrapper(pid):
            with suppress(ProcessLookupError):
                _signal_group(pid, signal.SIGCONT)
                signal.pidfd_send_signal(descriptor, signal.SIGTERM)
            if select.select([descriptor], [], [], max(grace + LAST_WORDS, 0.0))[0]:  # it has ended
                return
        _signal_all(pid, signal.SIGKILL, spool)
    finally:
        os.close(descriptor)


def is_wrapper(pid: int) -> bool:
    """Is the job's first process still ours? A job that wants no machine has become its own program by then."""
    words = command_line(pid)[:8]
    return ENTRY in itertools.pairwise(words) or any(word.rpartition(b"/")[2] == LAUNCHER for word in words[:3])


def _signal_group(pid: int, number: int) -> None:
    with suppress(PermissionError):
        os.killpg(pid, number)


def _signal_all(pid: int, number: int, spool: Path) -> None:
    """To the group, and to what has left it but has the job's additional group (`ENABLE_ADDGRP_KILL`); not to this process, its
    shell, and other methods', which have it too: the shepherd runs each in a group of its own, as a child beside the job."""
    with suppress(ProcessLookupError):
        _signal_group(pid, number)
    with suppress(OSError, ValueError):
        settings = spool_config((spool / "config").read_bytes())
        group = int(settings.get("add_grp_id", b"0"))
        if settings.get("enable_addgrp_kill") != b"1" or group <= 0 or group not in os.getgroups():
            return
        statuses, spared = dict(_statuses()), {os.getpgrp()}
        with suppress(OSError):
            shepherd, job = ((spool / name).read_text().strip() for name in ("pid", "job_pid"))
            spared |= {
                other for other, status in statuses.items() if status.get("PPid") == [shepherd] and str(other) != job
            }
        for other, status in statuses.items():
            with suppress(OSError):
                if str(group) in status.get("Groups", ()) and os.getpgid(other) not in spared:
                    os.kill(other, number)


def _statuses() -> Iterator[tuple[int, dict[str, list[str]]]]:
    """Of every process: what proc(5) says of it."""
    for pid in all_pids():
        with suppress(OSError):
            text = (PROC / str(pid) / "status").read_text(errors="replace")
            yield pid, {name: value.split() for name, _, value in (line.partition(":") for line in text.splitlines())}
