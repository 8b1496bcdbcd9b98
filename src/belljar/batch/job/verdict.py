"""What is to become of a job, by its machine's outcome. `jobs.batch.ending` carries it out."""

from __future__ import annotations

from collections.abc import Callable

from belljar.batch import Settings
from belljar.batch.job.terms import Job, Verdict, one_line
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
