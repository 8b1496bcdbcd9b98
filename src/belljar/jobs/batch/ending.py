"""How the process of a batch job leaves: the commands and files by which its system is told, and its own end."""

from __future__ import annotations

import os
import signal
import stat
from contextlib import suppress
from functools import partial

from belljar import errors
from belljar.batch.job.terms import Ending, Verdict
from belljar.batch.job.verdict import Run
from belljar.host.processes import die_by
from belljar.jobs import complain


def finish(ending: Ending, verdict: Verdict, run: Run) -> int:
    """Carry it out, and end."""
    ignore_signals(verdict)
    ending, trouble = carry_out(ending, run)
    if trouble:
        complain(trouble)
    if ending.delay and wait_for_term(ending.delay) and not ending.opens:
        for path, _ in ending.files:  # a job that is deleted meanwhile is not given back
            with suppress(OSError):
                os.unlink(path)
    try:
        if ending.opens:
            # HTCondor's starter reads the file as another user, perhaps in the job's group, in the job's folder.
            for path, _ in ending.files:
                os.chmod(path, 0o644)
            os.chmod(ending.opens, stat.S_IMODE(os.stat(ending.opens).st_mode) | 0o011)
    except OSError as exc:
        complain(f"{exc.filename}: {exc.strerror}: the system cannot see that the job is to start again")
    return end(ending)


def carry_out(ending: Ending, run: Run) -> tuple[Ending, str]:
    """Run what the ending wants run. Returns the ending that holds then, and what went wrong on the way."""
    trouble = ""
    while True:
        try:
            for argv in ending.commands:
                run(argv)
            for path, content in ending.files:
                with open(path, "wb", buffering=0, opener=partial(os.open, mode=0o600)) as file:
                    file.write(content)
            return ending, trouble
        except (errors.BelljarError, OSError) as exc:
            trouble = f"{trouble}; {exc}" if trouble else str(exc)
            if ending.otherwise is None:
                return ending, trouble
            ending = ending.otherwise


def ignore_signals(verdict: Verdict) -> None:
    """A system that takes the job back tells it so by TERM; its own order must not stop us in carrying it out."""
    if verdict in (Verdict.REQUEUE, Verdict.HOLD):
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU):
            signal.signal(number, signal.SIG_IGN)


def wait_for_term(seconds: float) -> bool:
    """Keep the job for this long, where its system starts it again at once. TERM ends the wait: did it?"""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    for number in numbers:
        signal.signal(number, signal.SIG_DFL)
    return signal.sigtimedwait(numbers, seconds) is not None


def end(ending: Ending) -> int:
    if ending.signal is not None:
        die_by(ending.signal)
    return ending.exit_code if ending.exit_code is not None else errors.OUR_FAILURE
