"""What is to become of a job, by its machine's outcome, and how that is carried out. The process's own end is the
caller's."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from belljar.batch import Settings
from belljar.batch.job.terms import Ending, Job, Verdict, one_line
from belljar.errors import BelljarError
from belljar.model import Cause, Outcome, OutcomeClass

Run = Callable[[tuple[str, ...]], bytes]  # a command of the system; raises CommandFailed, CommandMissing

AGAIN = (OutcomeClass.NODE, OutcomeClass.TRANSIENT)


def judge(outcome: Outcome, job: Job, tries: int, settings: Settings) -> Verdict:
    """The verdict.

    payload, cancelled, walltime   the job's own end; but a payload whose machine did not end well fails
    user                           fails: the same request would fail again
    node, transient                again, until `retries` starts failed: then held. A job that may not be run again fails, and
                                   so does one whose payload had begun, unless its system would rerun it
    checkpointed                   again
    """
    if outcome.cause is Cause.CHECKPOINTED:
        return Verdict.REQUEUE
    if outcome.klass not in AGAIN:
        is_lost = outcome.klass is OutcomeClass.PAYLOAD and not outcome.payload_ran
        return Verdict.FAIL if is_lost or outcome.klass is OutcomeClass.USER else Verdict.MIRROR
    if outcome.payload_ran or (has_begun(outcome) and not job.reruns):
        return Verdict.FAIL
    return Verdict.HOLD if tries >= max(settings.retries, 1) else Verdict.REQUEUE


def why(outcome: Outcome, tries: int, verdict: Verdict, settings: Settings) -> str:
    """One line for the system's own comment: plain text, at most 200 characters."""
    count = f"try {tries} of {max(settings.retries, 1)}: " if verdict in (Verdict.REQUEUE, Verdict.HOLD) else ""
    return one_line(f"belljar: {count}{outcome.reason}")


def delay(tries: int, settings: Settings) -> float:
    """Seconds before the next start: doubled each time, a day at most."""
    return min(settings.retry_delay * float(2 ** (tries - 1)), 86400.0)


def has_begun(outcome: Outcome) -> bool:
    """Was the payload started? What it did is done."""
    return "run" in outcome.phases


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
        except (BelljarError, OSError) as exc:
            trouble = f"{trouble}; {exc}" if trouble else str(exc)
            if ending.otherwise is None:
                return ending, trouble
            ending = ending.otherwise


def take_back(ending: Ending) -> None:
    """Remove what it wrote."""
    for path, _ in ending.files:
        with suppress(OSError):
            os.unlink(path)


def let_in(ending: Ending) -> None:
    """HTCondor's starter reads the file as another user, perhaps in the job's group, in the job's folder: let it in."""
    if ending.opens:
        for path, _ in ending.files:
            os.chmod(path, 0o644)
        os.chmod(ending.opens, stat.S_IMODE(os.stat(ending.opens).st_mode) | 0o011)
