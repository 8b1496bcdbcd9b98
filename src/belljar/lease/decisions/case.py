"""The words of one step: what is written down of a lease, what is seen, what is to be done."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

from belljar.lease import Instance, Lease, Slot
from belljar.lease.orders import Order
from belljar.lease.states import Cause, InstanceState, LeaseState
from belljar.pool import JobState, NamedJob
from belljar.records import dataclass, replace

ALIVE = frozenset({JobState.WAITING, JobState.HELD, JobState.RUNNING, JobState.ENDING, JobState.UNKNOWN})


@dataclass(frozen=True)
class Seen:
    """One look."""

    now: float
    up: float  # since when pilots can reach the service
    jobs: tuple[NamedJob, ...] | None  # of this lease, of all attempts; None: the batch system did not answer
    connected: frozenset[str] = frozenset()  # slots whose pilots are


@dataclass(frozen=True)
class Case:
    """All that is written down of a lease."""

    lease: Lease
    instances: tuple[Instance, ...] = ()
    slots: tuple[Slot, ...] = ()

    @property
    def live(self) -> list[Instance]:
        return [machine for machine in self.instances if machine.is_live]

    def but(self, **changes: Any) -> Case:
        """With other facts of its lease."""
        return replace(self, lease=replace(self.lease, **changes))

    def moved(self, state: LeaseState, now: float, **changes: Any) -> Case:
        """Its lease is in this state, since now where it was not."""
        return self.but(state=state, **changes, **({} if state is self.lease.state else {"since": now}))

    def each(self, change: Callable[[Instance], Instance]) -> Case:
        """With that done to every machine that lives."""
        changed = (change(machine) if machine.is_live else machine for machine in self.instances)
        return replace(self, instances=tuple(changed))

    def with_slot(self, slot: Slot) -> Case:
        id = slot.id  # made anew each time, and there may be a thousand
        return replace(self, slots=tuple(slot if other.id == id else other for other in self.slots))


def ended(machine: Instance, cause: Cause, why: str, now: float, *, ran_until: float = 0.0) -> Instance:
    return replace(machine, state=InstanceState.TERMINATED, since=now, ended=now, cause=machine.cause or cause, why=machine.why or why,
                   ran_until=max(ran_until, machine.ran_from))  # fmt: skip


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
