"""Where a job stands at a bait, and what may follow: one table. A state that names an act is written down before that act."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

from belljar.records import dataclass


class State(str, Enum):
    """A job's way. Cleaning-up states end when no machine and no node of the job is left."""

    ARRIVED = "arrived"  # the batch system gave it to the bait; it is taken back, and held
    STOPPED = "stopped"  # held; it waits for its turn
    VM_REQUESTED = "vm-requested"  # its machines have names; they are asked for
    IMAGE_WAIT = "image-wait"  # asked for, and not claimed yet: their image is on its way to this host
    VM_BOOTING = "vm-booting"  # claimed; they boot, and join
    VM_READY = "vm-ready"  # all have joined
    MIGRATING = "migrating"  # it is moved to them, and released
    RUNNING = "running"  # on them
    FINISHED = "finished"  # over; cleaning up
    REPROCESS = "reprocess"  # a machine failed: held and cleaned up, then again here
    REQUEUE = "requeue"  # cleaned up, then back to the batch system: it may go to another host
    REJECTED = "rejected"  # cleaned up, then held with the reason: nobody here can make what it asks for
    LOST = "lost"  # its machine died under it; its node is declared down, and the batch system says what becomes of it
    CLOSED = "closed"  # nothing of it is left here
    PROVING = "proving"  # no job has these machines: they are cleaned, and compared with what they were
    KEPT = "kept"  # clean, for the next job of the same terms


S = State
KEEPING = frozenset({S.PROVING, S.KEPT})
# In these nothing is expected to change within a moment.
STILL = frozenset({S.STOPPED, S.VM_REQUESTED, S.IMAGE_WAIT, S.RUNNING, S.KEPT})
CLEANING = frozenset({S.FINISHED, S.REPROCESS, S.REQUEUE, S.REJECTED})
STARTING = frozenset({S.VM_REQUESTED, S.IMAGE_WAIT, S.VM_BOOTING})
MOVES: dict[State, frozenset[State]] = {  # a part of another bait's job is running when that is: it sees no move
    S.ARRIVED: frozenset({S.STOPPED, S.FINISHED, S.REQUEUE}),
    S.STOPPED: frozenset({S.VM_REQUESTED, S.VM_BOOTING, S.REJECTED, S.REQUEUE, S.FINISHED, S.ARRIVED}),
    S.VM_REQUESTED: frozenset({S.IMAGE_WAIT, S.VM_BOOTING, S.RUNNING, S.REPROCESS, S.FINISHED}),
    S.IMAGE_WAIT: frozenset({S.VM_BOOTING, S.RUNNING, S.REPROCESS, S.FINISHED}),
    S.VM_BOOTING: frozenset({S.VM_READY, S.RUNNING, S.REPROCESS, S.FINISHED}),
    S.VM_READY: frozenset({S.MIGRATING, S.RUNNING, S.REPROCESS, S.FINISHED, S.LOST}),
    S.MIGRATING: frozenset({S.RUNNING, S.REPROCESS, S.REQUEUE, S.FINISHED, S.LOST}),
    S.RUNNING: frozenset({S.FINISHED, S.LOST, S.REPROCESS, S.REQUEUE}),
    S.FINISHED: frozenset({S.CLOSED, S.PROVING, S.REPROCESS}),
    S.REPROCESS: frozenset({S.STOPPED, S.REQUEUE, S.REJECTED, S.FINISHED}),
    S.REQUEUE: frozenset({S.CLOSED, S.REJECTED, S.FINISHED}),
    S.REJECTED: frozenset({S.CLOSED, S.FINISHED}),
    S.LOST: frozenset({S.REPROCESS, S.FINISHED}),
    S.CLOSED: frozenset(),
    S.PROVING: frozenset({S.KEPT, S.FINISHED}),
    S.KEPT: frozenset({S.CLOSED, S.FINISHED}),
}


@dataclass(frozen=True)
class Terms:
    """What machines were made for. They serve another job only where all of it is equal."""

    image: str  # its digest
    network: str
    queue: str
    features: tuple[str, ...]
    who: str  # the one user, or the group
    count: int
    cpus: int  # of each
    memory: int  # of each
    disk: int
    rules: str  # the bait's settings


@dataclass(frozen=True)
class Entry:
    """What is written down of a job."""

    job: str
    state: State
    since: float  # when it came into this state
    machines: tuple[str, ...] = ()  # ids of this try's machines; their nodes' names follow from them
    tries: int = 0  # machines that failed it here
    home: str = ""  # the queue it came from
    reruns: bool = True  # as its user wanted it, before it was taken back
    why: str = ""
    asked: str = ""  # what its machines were made for
    stays_held: bool = False  # somebody else held it: it goes back so
    starts: int = 0  # how often it had been requeued when it began to run
    missing_since: float | None = None  # the batch system has not named it since then; None: it does
    terms: Terms | None = None  # of its machines, where these may serve another job
    uses: int = 0  # jobs that its machines served before
    born: float = 0.0  # when its machines were asked for
    on: tuple[str, ...] = ()  # the baits it was given: each makes a machine, in this order; none: all are made here
    given: tuple[int, int] = (0, 0)  # processors and bytes of memory that it was given on them
    leads: bool = True  # False: another bait's job, which has a part here

    def here(self, names: Iterable[str]) -> tuple[str, ...]:
        """Those of its machines that these baits make."""
        if not self.on or not self.leads:
            return self.machines
        known = frozenset(names)
        return tuple(machine for name, machine in zip(self.on, self.machines, strict=False) if name in known)


def is_moving(entry: Entry, machines: frozenset[str]) -> bool:
    """Something is expected of it within a moment. For a job that is over, and its machines too, only a name stays for a while. *machines*:
    that live."""
    is_left = entry.state is S.FINISHED and machines.isdisjoint(entry.machines)
    return entry.state not in STILL and not is_left


class BaitState(str, Enum):
    """Whether the bait takes jobs, and why not."""

    OPEN = "open"
    CLOSED_ADMIN = "closed-admin"
    CLOSED_RESOURCES = "closed-resources"
    CLOSED_STORE = "closed-store"
    CLOSED_FAULTS = "closed-faults"
