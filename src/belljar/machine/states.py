"""The life of a machine: which state may follow which, and what each cause means to who asked.

A state ending in -ING is an intent, journaled before the act. Failure is a cause, not a state: every machine ends by
STOPPING, if a domain may exist, and CLEANING.
"""

from __future__ import annotations

from belljar.errors import BelljarError
from belljar.model import Cause, OutcomeClass, Retry, State

MOVES: dict[State, tuple[State, ...]] = {
    State.REQUESTED: (State.PREPARING, State.CLEANING),
    State.PREPARING: (State.STARTING, State.CLEANING),
    State.STARTING: (State.BOOTING, State.STOPPING, State.PREPARING),  # PREPARING: a clone that failed is booted cold
    State.BOOTING: (State.READY, State.STOPPING, State.PREPARING),
    State.READY: (State.RUNNING, State.STOPPING),
    State.RUNNING: (State.STOPPING, State.STARTING),  # STARTING: a guest that may reboot did
    State.STOPPING: (State.CLEANING,),
    State.CLEANING: (State.DONE,),
    State.DONE: (),
}

CLASSES: dict[Cause, OutcomeClass] = {
    Cause.FINISHED: OutcomeClass.PAYLOAD,
    Cause.CANCELLED: OutcomeClass.CANCELLED,
    Cause.WALLTIME: OutcomeClass.WALLTIME,
    Cause.GUEST_OOM: OutcomeClass.PAYLOAD,  # ends as a process does that the OOM killer chose: by SIGKILL
    Cause.BOOT_FAILED: OutcomeClass.TRANSIENT,
    Cause.GUEST_LOST: OutcomeClass.TRANSIENT,
    Cause.HOST_OOM: OutcomeClass.NODE,
    Cause.NODE_FAULT: OutcomeClass.NODE,
    Cause.IMAGE_FAULT: OutcomeClass.NODE,
    Cause.REFUSED: OutcomeClass.USER,
    Cause.CHECKPOINTED: OutcomeClass.CANCELLED,  # ended on request; what is left to do is in its checkpoint
}

_BY_RETRY = {Retry.NEVER: OutcomeClass.USER, Retry.LATER: OutcomeClass.TRANSIENT, Retry.ELSEWHERE: OutcomeClass.NODE}


def check_move(before: State, after: State) -> None:
    if after not in MOVES[before]:
        raise AssertionError(f"{before.value} -> {after.value}")


def class_of_error(error: BelljarError) -> OutcomeClass:
    """Whose fault an error is decides what the batch system is told; the advice on retrying says whose fault it is."""
    return _BY_RETRY[error.retry]
