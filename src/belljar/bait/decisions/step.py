"""Where a job stands at a bait, what a look sees, and what a step says: the words that all handlers share (advance.py has them all). A state
that names an act is written down before that act."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from enum import Enum

from belljar.pool import JobView, NodeState, NodeView, machine_of, node_of
from belljar.records import dataclass, field, replace

ASKED_FOR = 900.0  # seconds in which a machine is claimed: fetching its image counts
QUIET = 120.0  # seconds in which a node whose job is over is quiet; then its machine ends all the same
MOVED = 300.0  # seconds in which a job starts on nodes that wait for it alone


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
STARTING = frozenset({S.VM_REQUESTED, S.IMAGE_WAIT, S.VM_BOOTING})


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
    terms: str = ""  # what its machines were made for; they serve another job of the same terms only; "": none
    takes: tuple[int, int] = (0, 0)  # processors and bytes of memory of these machines
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


class Do(str, Enum):
    """An act. Each may be done twice."""

    TAKE_BACK = "take-back"  # the job: off its node, and held
    START = "start"  # this machine, for the job
    MOVE = "move"  # the job, to all of its nodes, and release it
    CLOSE = "close"  # this node: no other job comes
    LOSE = "lose"  # this node: its machine is gone
    END = "end"  # this machine
    REMOVE = "remove"  # this node
    UNPIN = "unpin"  # the job: it no longer wants nodes of ours
    GIVE_BACK = "give-back"  # the job, to the batch system
    REFUSE = "refuse"  # the job: say why it is held
    NOTE = "note"  # write this at the job
    PROVE = "prove"  # this machine: clean it, and compare it with what it was
    ADMIT = "admit"  # the job's user to this machine, which served another job; then open its node
    FORCE_END = "force-end"  # the job: its machine is gone, and the batch system lets it neither run again nor end


@dataclass(frozen=True)
class Act:
    """What, and with which machine or node, or with which words."""

    do: Do
    of: str = ""


@dataclass(frozen=True)
class Seen:
    """One look: machines first, then nodes and jobs."""

    now: float
    jobs: Mapping[str, JobView]
    nodes: Mapping[str, NodeView]
    machines: frozenset[str]  # that live
    ended: Mapping[str, str] = field(default_factory=dict)  # machine -> why, of those that ended or never come
    proved: Mapping[str, str] = field(default_factory=dict)  # machine -> "" where it is clean, or why it is not
    node: Callable[[str], str] = node_of  # the name of a machine's node
    machine: Callable[[str], str] = machine_of  # that might have had this name; "" where it is not one of ours
    named: frozenset[str] = frozenset()  # nodes that a job names, or named as the batch system saved it last
    saves: float = 0.0  # seconds in which the batch system saves what became of a job

    def state(self, machine: str) -> NodeState | None:
        """For its node; None where the batch system knows no such node."""
        view = self.nodes.get(self.node(machine))
        return view.state if view is not None else None


@dataclass(frozen=True)
class Step:
    """The entry to write down, and what to do after that."""

    entry: Entry
    acts: tuple[Act, ...] = ()


def to(entry: Entry, state: State, seen: Seen, why: str = "") -> Step:
    """Into that state, now. Machines that failed a job serve no other."""
    terms = "" if state in (S.LOST, S.REPROCESS) else entry.terms
    return Step(replace(entry, state=state, since=seen.now, why=why, terms=terms))
