"""The words of one step: what is written down of a lease, what is seen, what is to be done."""

from __future__ import annotations

from enum import Enum

from belljar.batch import JobState
from belljar.lease import Instance, Lease, Order, Slot
from belljar.records import dataclass

ALIVE = frozenset({JobState.WAITING, JobState.HELD, JobState.RUNNING, JobState.ENDING, JobState.UNKNOWN})


@dataclass(frozen=True)
class Job:
    """A job of ours as the batch system tells of it."""

    name: str
    id: str
    state: JobState
    reason: str = ""
    expected: float = 0.0  # when the batch system thinks that it starts; 0: it does not say


@dataclass(frozen=True)
class Seen:
    """One look."""

    now: float
    up: float  # since when pilots can reach the service
    jobs: tuple[Job, ...] | None  # whose names are this lease's, of all attempts; None: the batch system did not answer
    connected: frozenset[str] = frozenset()  # slots whose pilots are


@dataclass(frozen=True)
class Case:
    """All that is written down of a lease. Slots are those of its carrier where it has one."""

    lease: Lease
    instances: tuple[Instance, ...] = ()
    slots: tuple[Slot, ...] = ()
    guests: tuple[Instance, ...] = ()  # live machines of other leases of this owner on its slots


class Kind(str, Enum):
    SUBMIT = "submit"  # a job of the lease's name, unless there is one
    CANCEL = "cancel"  # this job
    ORDER = "order"  # to this slot's pilot


@dataclass(frozen=True)
class Act:
    """Each may be done twice."""

    kind: Kind
    of: str = ""  # id of the job, or of the slot
    order: Order | None = None


@dataclass(frozen=True)
class Step:
    """What to write down, and what to do after that."""

    case: Case
    acts: tuple[Act, ...] = ()
