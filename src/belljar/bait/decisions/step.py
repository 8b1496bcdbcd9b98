"""What a look sees of a bait's jobs, and what a step says: the words that all handlers share (table.py has them all)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum

from belljar.bait import Settings
from belljar.bait.decisions.states import Entry, State
from belljar.pool import JobState, JobView, NodeState, NodeView, machine_of, node_of
from belljar.records import dataclass, field, replace

S = State
ASKED_FOR = 900.0  # seconds in which a machine is claimed: fetching its image counts
QUIET = 120.0  # seconds in which a node whose job is over is quiet; then its machine ends all the same
MOVED = 300.0  # seconds in which a job starts on nodes that wait for it alone


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
    """One look: machines first, then nodes and jobs. None: the batch system did not answer."""

    now: float
    jobs: Mapping[str, JobView] | None
    nodes: Mapping[str, NodeView] | None
    machines: frozenset[str]  # that live
    ended: Mapping[str, str] = field(default_factory=dict)  # machine -> why, of those that ended or never come
    proved: Mapping[str, str] = field(default_factory=dict)  # machine -> "" where it is clean, or why it is not
    node: Callable[[str], str] = node_of  # the name of a machine's node
    machine: Callable[[str], str] = machine_of  # that might have had this name; "" where it is not one of ours
    named: frozenset[str] = frozenset()  # nodes that a job names, or named as the batch system saved it last
    saves: float = 0.0  # seconds in which the batch system saves what became of a job

    def state(self, machine: str) -> NodeState | None:
        """For its node; None where the batch system knows no such node."""
        view = (self.nodes or {}).get(self.node(machine))
        return view.state if view is not None else None


@dataclass(frozen=True)
class Step:
    """The entry to write down, and what to do after that."""

    entry: Entry
    acts: tuple[Act, ...] = ()


Handler = Callable[[Entry, JobView | None, Seen, Settings], Step]
OfJob = Callable[[Entry, JobView, Seen, Settings], Step]


def to(entry: Entry, state: State, seen: Seen, why: str = "") -> Step:
    """Into that state, now. Machines that failed a job serve no other."""
    terms = None if state in (S.LOST, S.REPROCESS) else entry.terms
    return Step(replace(entry, state=state, since=seen.now, why=why, terms=terms))


def of_job(handler: OfJob) -> Handler:
    """This handler while the batch system says what the job does; else the answer is the same in all states."""

    def step(entry: Entry, job: JobView | None, seen: Seen, settings: Settings) -> Step:
        if job is None:
            return _missed(entry, seen, settings)
        entry = replace(entry, missing_since=None)
        if job.state is JobState.UNKNOWN:
            return Step(entry)
        if job.state is JobState.ENDED:
            return to(entry, S.FINISHED, seen, entry.why)
        return handler(entry, job, seen, settings)

    return step


def _missed(entry: Entry, seen: Seen, settings: Settings) -> Step:
    """The batch system did not name this job. One such answer does not say that it is gone: just restarted, it may not know it yet."""
    since = seen.now if entry.missing_since is None else entry.missing_since
    if seen.now - since >= settings.gone_after:
        return to(entry, S.FINISHED, seen, "the batch system no longer knows it")
    return Step(replace(entry, missing_since=since))
