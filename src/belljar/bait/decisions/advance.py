"""From what was written down of a job, and what is seen of it now: its next state, and what is to be done. Pure.

There is no other code for recovery. Every act is one that may be done twice, and every look starts from the journal, the batch system
and the machines that live; so a bait that was killed at any point goes on where it was. `recover` only finds what no entry tells of.

The batch system owns the job: what it says of a job is always believed, whatever was written down. When it says nothing, nothing is
done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from enum import Enum

from belljar.bait import Settings
from belljar.bait.decisions.decide import asked_of
from belljar.bait.decisions.note import Parts, read, write
from belljar.bait.decisions.states import CLEANING, STARTING, Entry, State
from belljar.pool import JobState, JobView, NodeState, NodeView, machine_of, node_of
from belljar.records import dataclass, field, replace

S = State
ASKED_FOR = 900.0  # seconds in which a machine is claimed: fetching its image counts
QUIET = 120.0  # seconds in which a node whose job is over is quiet; then its machine ends all the same
TOLD = 5.0
UNFIT = "unfit image: "  # begins the reason of a machine that ended because its image cannot join: no other one would
UNMOVED = "it did not start on its nodes"  # nor would it on others
ALTERED = "it was altered: "
HELD_BY_USER = "its user holds it"
BEGAN = "it had begun, which the batch system has forgotten, and it is not to run twice"
BESIDE = "it waits for room beside native jobs"
ELSEWHERE = "elsewhere: "  # begins the reason of a failure on another host
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
    UNPIN = "unpin"  # the job: it wants nodes of ours no more
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
    reserved: frozenset[str] | None = None  # that have room beside native jobs; None: there are no such jobs here
    node: Callable[[str], str] = node_of  # the name of a machine's node
    machine: Callable[[str], str] = machine_of  # a machine that might have had this name; "" where it is none of ours
    named: frozenset[str] = frozenset()  # nodes that a job names, or named as the batch system saved it last
    saves: float = 0.0  # seconds in which the batch system saves what became of a job


@dataclass(frozen=True)
class Step:
    """The entry to write down, and what to do after that."""

    entry: Entry
    acts: tuple[Act, ...] = ()


def advance(entry: Entry, seen: Seen, settings: Settings) -> Step:
    """One step. Called again and again, with what is seen then."""
    if seen.jobs is None or seen.nodes is None:
        return Step(entry)
    job = seen.jobs.get(entry.job)
    if job is None:
        return _clean(entry, None, seen, settings) if entry.state is S.FINISHED else missed(entry, seen, settings)
    entry = replace(entry, missing=0.0)
    if job.state is JobState.UNKNOWN:
        return Step(entry)
    if job.state is JobState.ENDED and entry.state is not S.FINISHED:
        return to(entry, S.FINISHED, seen, entry.why)
    back = (JobState.WAITING, JobState.HELD, *((JobState.RUNNING,) if entry.state is S.FINISHED else ()))
    if job.state in back and not entry.reruns and 0 < entry.starts >= job.starts:
        return Step(replace(entry, why=BEGAN), (Act(Do.NOTE, BEGAN), Act(Do.FORCE_END)))
    if job.state in back and entry.state is S.FINISHED:
        return to(entry, S.REPROCESS, seen, "it runs again: its end was forgotten")
    if entry.state in CLEANING:
        return _clean(entry, job, seen, settings)
    return HANDLERS[entry.state](entry, job, seen, settings)


def recover(entries: Iterable[Entry], seen: Seen, ours: frozenset[str]) -> tuple[Act, ...]:
    """For machines and nodes of ours that no entry tells of: the journal was lost, or a machine joined under a name that is not its
    own. *ours*: nodes with this bait's own feature."""
    known = {machine for entry in entries for machine in entry.machines}
    if seen.nodes is None or seen.jobs is None:
        return ()
    ours -= {seen.node(machine) for machine in known}
    found = {seen.machine(node) for node in ours - set(map(seen.node, seen.machines))} | seen.machines
    acts = [act for one in sorted(found - known - {""}) for act in leave(one, seen, is_late=False)]
    acts = [act for act in acts if act not in (WAIT, LATER)]
    for node in sorted(one for one in ours if not seen.machine(one)):
        acts += _turn_out(node, seen)
    return tuple(acts)


def _turn_out(node: str, seen: Seen) -> tuple[Act, ...]:
    """A node of a name that we never gave takes no job. It is removed when no machine lives that could be it: when each one has
    joined under its own name."""
    state = (seen.nodes or {})[node].state
    if state is NodeState.DRAINING:
        return ()
    if state is not NodeState.OUT:
        return (Act(Do.CLOSE, node),)
    return (Act(Do.REMOVE, node),) if all(node_state(one, seen) is not None for one in seen.machines) else ()


# -- states ------------------------------------------------------------------------------------------------------------


def _arrived(entry: Entry, job: JobView, seen: Seen, settings: Settings) -> Step:
    if job.state is JobState.HELD:
        # As it is shown while it waits: of several partitions a job that runs shows only the one that it runs in.
        home = entry.home if job.queue in (settings.queue, "") else job.queue
        return to(replace(entry, home=home), S.STOPPED, seen)
    if job.state is JobState.WAITING and not _unpin(job, seen):
        return to(entry, S.REQUEUE, seen, "somebody released it")
    return Step(replace(entry, home=entry.home or job.queue), _take_back(job))


def _stopped(entry: Entry, job: JobView, seen: Seen, settings: Settings) -> Step:
    """Its turn is decided elsewhere. Somebody may have released it: then it is the batch system's again. In another queue it may
    not be this bait's any more."""
    if job.state is not JobState.HELD:
        return to(entry, S.ARRIVED, seen)
    if moved := _moved(entry, job, settings):
        return to(replace(entry, home=job.queue), S.REQUEUE, seen, moved)
    return Step(entry, _unpin(job, seen))


def _starting(entry: Entry, job: JobView, seen: Seen, settings: Settings) -> Step:
    if failure := _failure(entry, job, seen, settings) or _altered(entry, job, settings):
        return to(entry, S.REPROCESS, seen, failure)
    age, held = seen.now - entry.since, () if job.state is JobState.HELD else _take_back(job)
    missing = [one for one in entry.here(settings.names) if one not in seen.machines]
    if (step := reserving(entry, missing, seen)) is not None:
        return replace(step, acts=held)
    held += _announce(entry, job, settings)
    if entry.state is not S.VM_BOOTING:
        if not missing:
            return to(entry, S.VM_BOOTING, seen)
        if age > ASKED_FOR:
            return to(entry, S.REPROCESS, seen, f"no machine was claimed within {ASKED_FOR:.0f} s")
        return Step(entry, (*held, *(Act(Do.START, one) for one in missing)))
    if all(node_state(one, seen) is NodeState.IDLE for one in entry.machines):
        return to(entry, S.VM_READY, seen)
    if age > settings.join:
        return to(entry, S.REPROCESS, seen, _late(entry, seen, settings))
    closed = [one for one in entry.machines if entry.uses and node_state(one, seen) is NodeState.OUT]
    return Step(entry, (*held, *(Act(Do.ADMIT, one) for one in closed)))


def reserving(entry: Entry, missing: list[str], seen: Seen) -> Step | None:
    """Where native jobs run, machines are made when they have their room beside them: a wait that has no end. None: they have it."""
    if seen.reserved is None or not missing:
        return None
    if not set(missing) <= seen.reserved:
        return Step(replace(entry, why=BESIDE))
    return to(entry, S.IMAGE_WAIT, seen) if entry.state is S.VM_REQUESTED else None


def _ready(entry: Entry, job: JobView, seen: Seen, settings: Settings) -> Step:
    if failure := _failure(entry, job, seen, settings) or _altered(entry, job, settings):
        return to(entry, S.REPROCESS, seen, failure)
    if job.state is not JobState.HELD:
        return Step(entry, _take_back(job))
    return to(entry, S.MIGRATING, seen) if seen.now - entry.since >= settings.settle else Step(entry)


def _migrating(entry: Entry, job: JobView, seen: Seen, settings: Settings) -> Step:
    if job.state in (JobState.RUNNING, JobState.ENDING):
        if job.on and set(job.on) <= {seen.node(one) for one in entry.machines}:
            return to(replace(entry, starts=job.starts), S.RUNNING, seen)
        return to(entry, S.REPROCESS, seen, "it started elsewhere")
    is_unmoved = job.state is JobState.HELD and job.queue != settings.queue
    if failure := _failure(entry, job, seen, settings) or (_altered(entry, job, settings) if is_unmoved else ""):
        return to(entry, S.REPROCESS, seen, failure)
    if job.state is JobState.HELD and job.is_held_by_user and not is_unmoved:
        return to(replace(entry, stays_held=True), S.REQUEUE, seen, HELD_BY_USER)  # moved and released, and held again
    if job.state is JobState.HELD and any(node_state(one, seen) is None for one in entry.machines):
        # It may have run there: slurmd starts nothing of it again for a while.
        return to(entry, S.REPROCESS, seen, "its nodes were forgotten")
    age = seen.now - entry.since
    if age > MOVED:
        why = f"{UNMOVED} within {MOVED:.0f} s: {job.reason}"
        return to(entry, S.REQUEUE if job.is_limited else S.REPROCESS, seen, why)
    if job.state is JobState.HELD:
        return Step(entry, (Act(Do.MOVE),))
    return Step(replace(entry, why=f"it waits on its nodes: {job.reason}") if age > TOLD else entry)


def _running(entry: Entry, job: JobView, seen: Seen, settings: Settings) -> Step:
    failure = _failure(entry, job, seen, settings)
    # One that was not requeued since is held by us: a batch system that was killed has forgotten how it was moved.
    if job.state is JobState.HELD and not failure and (job.starts > entry.starts or job.is_held_by_user):
        return to(replace(entry, stays_held=True), S.REQUEUE, seen, "it was requeued and held")
    if job.state in (JobState.WAITING, JobState.HELD):
        return to(entry, S.REPROCESS, seen, failure or "it was requeued")
    if failure:
        return to(entry, S.LOST, seen, failure)
    return Step(entry)


def _lost(entry: Entry, job: JobView, seen: Seen, settings: Settings) -> Step:
    """Until the batch system has seen it: it requeues the job, or ends it where its user wants none to run twice."""
    if job.state in (JobState.WAITING, JobState.HELD):
        return to(entry, S.REPROCESS, seen, entry.why)
    own = entry.here(settings.names)
    # Those that live go first: a slurmctld that forgets that a node was lost believes what slurmd says of the end of the others.
    if not (acts := tuple(Act(Do.END, one) for one in own if one in seen.machines)):
        lost = (one for one in own if node_state(one, seen) not in (None, NodeState.OUT))
        acts = tuple(Act(Do.LOSE, seen.node(one)) for one in lost)
    return Step(entry, (*acts, Act(Do.FORCE_END)) if seen.now - entry.since > QUIET else acts)


HANDLERS = {
    S.ARRIVED: _arrived, S.STOPPED: _stopped, S.VM_REQUESTED: _starting, S.IMAGE_WAIT: _starting, S.VM_BOOTING: _starting,
    S.VM_READY: _ready, S.MIGRATING: _migrating, S.RUNNING: _running, S.LOST: _lost,
}  # fmt: skip


# -- the way out -------------------------------------------------------------------------------------------------------


def missed(entry: Entry, seen: Seen, settings: Settings) -> Step:
    """The batch system did not name this job. One such answer does not say that it is gone: just restarted, it may not know it yet."""
    since = entry.missing or seen.now
    if seen.now - since >= settings.gone_after:
        return to(entry, S.FINISHED, seen, "the batch system does not know it any more")
    return Step(replace(entry, missing=since))


def _clean(entry: Entry, job: JobView | None, seen: Seen, settings: Settings) -> Step:
    """Nothing of the job's machines and nodes stays; and unless it is over, it is held until then."""
    age, own = seen.now - entry.since, entry.here(settings.names)
    ours = [act for one in own for act in leave(one, seen, is_late=age > QUIET)]
    others = (_leave_elsewhere(one, seen, is_late=age > QUIET) for one in entry.machines if one not in own)
    acts = (*ours, *(act for one in others for act in one))
    is_over = entry.state is S.FINISHED or job is None
    if not is_over and job is not None and read(job.note).machines:
        acts = (Act(Do.NOTE, entry.why or "it is taken back"), *acts)
    if job is not None and job.state is not JobState.HELD:
        entry = replace(entry, stays_held=False)  # released meanwhile
    if not is_over and job is not None:  # it needs no node that stays known: what is left of those, `recover` removes
        acts = (*_unpin(job, seen), *(act for act in acts if act is not LATER))
    if acts:
        if is_over or job is None or job.state is JobState.HELD:
            return Step(entry, tuple(act for act in acts if act not in (WAIT, LATER)))
        return Step(entry, (*_take_back(job), *but_removals(acts)))
    if is_over or job is None:
        return to(entry, S.CLOSED, seen, entry.why)
    if entry.state is S.REQUEUE:
        is_held, is_home = job.state is JobState.HELD, job.queue == entry.home or job.queue != settings.queue
        if is_home and entry.stays_held == is_held:  # else one that is killed now remembers it as held by us
            return to(entry, S.CLOSED, seen, entry.why) if age >= seen.saves else Step(entry)
        return Step(replace(entry, since=seen.now), (Act(Do.GIVE_BACK),) if is_held else _take_back(job))
    if job.state is not JobState.HELD:
        return Step(entry, _take_back(job))
    if entry.state is S.REPROCESS:
        return _again(replace(entry, machines=(), tries=entry.tries + 1, uses=0), job, seen, settings)
    # That it was told can be seen nowhere: so it is told for a while.
    return Step(entry, (Act(Do.REFUSE),)) if seen.now - entry.since < TOLD else to(entry, S.CLOSED, seen, entry.why)


def _again(entry: Entry, job: JobView, seen: Seen, settings: Settings) -> Step:
    if entry.why.startswith((UNFIT, UNMOVED)):
        return to(entry, S.REJECTED, seen, entry.why)
    if moved := _moved(entry, job, settings):
        return to(replace(entry, home=job.queue), S.REQUEUE, seen, moved)
    if job.starts >= settings.restarts:
        return to(entry, S.REJECTED, seen, f"requeued {job.starts} times; at last: {entry.why}")
    return to(entry, S.REQUEUE if entry.tries >= settings.tries else S.STOPPED, seen, entry.why)


WAIT = Act(Do.END, "")  # stands for: not yet
LATER = Act(Do.REMOVE, "")  # stands for: it takes no job, and stays known for a while


def leave(machine: str, seen: Seen, *, is_late: bool) -> tuple[Act, ...]:
    """The next act on the way out of one machine and its node; none: both are gone.

    Its node takes no job any more; when it is quiet its machine ends; then it is removed. slurmctld 22.05.8 crashed when a node was
    removed while it still had something to say to it; and one that begins anew fails a job that names a node it does not know, or
    never ends it: one that was killed before it had saved that the job has left, and one whose job was requeued as its nodes went
    down, for it clears its list of nodes only when it starts again."""
    node, state = seen.node(machine), node_state(machine, seen)
    if machine in seen.machines:
        if state in (None, NodeState.OUT) or is_late:
            return (Act(Do.END, machine),)
        return (WAIT,) if state is NodeState.DRAINING else (Act(Do.CLOSE, node),)
    return _forgotten(node, state, seen)


def _forgotten(node: str, state: NodeState | None, seen: Seen) -> tuple[Act, ...]:
    if state is not NodeState.OUT:
        return (Act(Do.LOSE, node),) if state is not None else ()
    return (LATER,) if node in seen.named else (Act(Do.REMOVE, node),)


def but_removals(acts: Iterable[Act]) -> tuple[Act, ...]:
    """What can be done while a job that wants these nodes is not held: until then it cannot be made to want them no more."""
    return tuple(act for act in acts if act is not WAIT and act.do not in (Do.REMOVE, Do.UNPIN))


def _leave_elsewhere(machine: str, seen: Seen, *, is_late: bool) -> tuple[Act, ...]:
    """Its own bait ends it and removes its node. Where that does not come to it, the node at least goes."""
    node, state = seen.node(machine), node_state(machine, seen)
    if is_late or state is None:
        return _forgotten(node, state, seen)
    return (WAIT,) if state in (NodeState.OUT, NodeState.DRAINING) else (Act(Do.CLOSE, node),)


# -- several hosts -----------------------------------------------------------------------------------------------------


def _announce(entry: Entry, job: JobView, settings: Settings) -> tuple[Act, ...]:
    """The other hosts' baits are told what they are to make."""
    parts = Parts(tuple(zip(entry.on, entry.machines, strict=False)), given=entry.given)
    if len(entry.here(settings.names)) == len(entry.machines) or read(job.note).machines == parts.machines:
        return ()
    return (Act(Do.NOTE, write(parts)),)


def _late(entry: Entry, seen: Seen, settings: Settings) -> str:
    late = [one for one in entry.machines if node_state(one, seen) is not NodeState.IDLE]
    if set(late) & set(entry.here(settings.names)):
        return f"a machine did not join within {settings.join:.0f} s"
    where = ", ".join(dict(zip(entry.machines, entry.on, strict=False))[one] for one in late)
    return f"{ELSEWHERE}{where}: no machine joined within {settings.join:.0f} s"


# -- small helps -------------------------------------------------------------------------------------------------------


def to(entry: Entry, state: State, seen: Seen, why: str = "", *acts: Act) -> Step:
    """What failed a job serves no other."""
    terms = None if state in (S.LOST, S.REPROCESS) else entry.terms
    return Step(replace(entry, state=state, since=seen.now, why=why, terms=terms), acts)


def _unpin(job: JobView, seen: Seen) -> tuple[Act, ...]:
    return (Act(Do.UNPIN),) if any(map(seen.machine, job.wants)) else ()


def _take_back(job: JobView) -> tuple[Act, ...]:
    return () if job.state is JobState.ENDING else (Act(Do.TAKE_BACK),)


def node_state(machine: str, seen: Seen) -> NodeState | None:
    view = (seen.nodes or {}).get(seen.node(machine))
    return view.state if view is not None else None


def _moved(entry: Entry, job: JobView, settings: Settings) -> str:
    """By somebody else, to another queue."""
    return f"it was moved to {job.queue}" if job.queue not in (entry.home, settings.queue, "") else ""


def _altered(entry: Entry, job: JobView, settings: Settings) -> str:
    """Its machines were made for what it asked for then."""
    asks = asked_of(job)
    is_same = entry.asked in ("", asks) and not _moved(entry, job, settings)
    return "" if is_same else f"{ALTERED}asked for {entry.asked} in {entry.home}; now {asks} in {job.queue}"


def _failure(entry: Entry, job: JobView, seen: Seen, settings: Settings) -> str:
    """Why the machines of a job are of no use any more; "" while they are."""
    for one in entry.here(settings.names):
        if one in seen.ended and one not in seen.machines:
            return seen.ended[one]
        if entry.state not in (S.VM_REQUESTED, S.IMAGE_WAIT) and one not in seen.machines:
            return "its machine is gone"
    parts = read(job.note)
    if parts.failed in entry.machines:
        where = next(name for name, one in parts.machines if one == parts.failed)
        return f"{ELSEWHERE}{where}: {parts.why}"
    is_out = any(node_state(one, seen) is NodeState.OUT for one in entry.machines)
    return "its node was taken out of service" if is_out and entry.state not in STARTING else ""
