"""What is to become of a job, judged from its machine's outcome: one rule for all systems."""

from __future__ import annotations

from belljar.batch import Settings
from belljar.batch.job.terms import Job, Verdict
from belljar.model import Outcome, OutcomeClass

AGAIN = (OutcomeClass.NODE, OutcomeClass.TRANSIENT)


def judge(outcome: Outcome, job: Job, tries: int, settings: Settings) -> Verdict:
    """The verdict.

    payload, cancelled, walltime   the job's own end
    a payload that ended in a machine that did not end well     fails: what it did is done, and cannot be done again unseen
    user                           fails: the same request would fail again
    node, transient                again, until `retries` starts failed: then held. A job that may not be run again
                                   fails, and so does one whose payload had begun, unless its system would rerun it
                                   after the loss of a node
    """
    if outcome.klass not in AGAIN:
        return Verdict.FAIL if _is_ours(outcome) else Verdict.MIRROR
    if outcome.payload_ran or not job.is_rerunnable:
        return Verdict.FAIL
    return Verdict.HOLD if tries >= max(settings.retries, 1) else Verdict.REQUEUE


def _is_ours(outcome: Outcome) -> bool:
    """Did the machine's end differ from the payload's?"""
    if outcome.klass is OutcomeClass.USER:
        return True
    return outcome.klass is OutcomeClass.PAYLOAD and not outcome.payload_ran


def why(outcome: Outcome, tries: int, verdict: Verdict, settings: Settings) -> str:
    """One line for the system's own comment: plain text, at most 200 characters."""
    text = "".join(c if " " <= c <= "~" else "?" for c in outcome.reason)
    count = f"try {tries} of {max(settings.retries, 1)}: " if verdict in (Verdict.REQUEUE, Verdict.HOLD) else ""
    return f"belljar: {count}{text}"[:200]


def delay(tries: int, settings: Settings) -> float:
    """Seconds before the next start: doubled each time, a day at most."""
    return min(settings.retry_delay * float(2 ** (tries - 1)), 86400.0)
