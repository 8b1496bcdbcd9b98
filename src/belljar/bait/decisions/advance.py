"""A job of this bait's own, state by state: from what was written down, and what is seen of it now, to the next step. Below, which
handler answers in which state: the whole table. Pure.

There is no other code for recovery. Every act is one that may be done twice, and every look starts from the journal, the batch system
and the machines that live; so a bait that was killed at any point goes on where it was. `leaving.recover` only finds what no entry names.

The batch system owns the job: what it says of a job is always believed, whatever was written down. When it says nothing, nothing is
done.
"""

from __future__ import annotations

from collections.abc import Callable

from belljar.bait import Settings
from belljar.bait.decisions import cache, parts, step
from belljar.bait.decisions.decide import asked_of
from belljar.bait.decisions.leaving import LATER, but_removals, but_waits, leave
from belljar.bait.decisions.note import Parts, read, write
from belljar.bait.decisions.step import KEEPING, STARTING, Act, Do, Entry, S, Seen, State, Step, to
from belljar.pool import JobState, JobView, NodeState
from belljar.records import replace

TOLD = 5.0
UNFIT = "unfit image: "  # begins the reason of a machine that ended because its image cannot join: no other one would
UNMOVED = "it did not start on its nodes"  # nor would it on others
ALTERED = "it was altered: "
HELD_BY_USER = "its user holds it"
BEGAN = "it had begun, which the batch system has forgotten, and it is not to run twice"
ELSEWHERE = "elsewhere: "  # begins the reason of a failure on another host
IN_LINE = (JobState.WAITING, JobState.HELD)


def _is_not_to_run_twice(entry: Entry, job: JobView) -> bool:
    return not entry.reruns and 0 < entry.starts >= job.starts


def _force_end(entry: Entry) -> Step:
    return Step(replace(entry, why=BEGAN), (Act(Do.NOTE, BEGAN), Act(Do.FORCE_END)))


# -- states ------------------------------------------------------------------------------------------------------------


def arrived(entry: Entry, job: JobView, seen: Seen, settings: Settings) -> Step:
    if job.state is JobState.HELD:
        # As it is shown while it waits: of several partitions a job that runs shows only the one that it runs in.
        home = entry.home if job.queue in (settings.queue, "") else job.queue
        return to(replace(entry, home=home), S.STOPPED, seen)
    if job.state is JobState.WAITING and not _unpin(job, seen):
        return to(entry, S.REQUEUE, seen, "somebody released it")
    return Step(replace(entry, home=entry.home or job.queue), _take_back(job))


def stopped(entry: Entry, job: JobView, seen: Seen, settings: Settings) -> Step:
    """Its turn is decided elsewhere. Somebody may have released it: then it is the batch system's again. In another queue it may
    not be this bait's any more."""
    if job.state is not JobState.HELD:
        return to(entry, S.ARRIVED, seen)
    if moved := _moved(entry, job, settings):
        return to(replace(entry, home=job.queue), S.REQUEUE, seen, moved)
    return Step(entry, _unpin(job, seen))


def starting(entry: Entry, job: JobView, seen: Seen, settings: Settings) -> Step:
    if failure := _failure(entry, job, seen, settings):
        return _failed(entry, seen, failure)
    age, missing = seen.now - entry.since, [id for id in entry.here(settings.names) if id not in seen.machines]
    acts = _announce(entry, job, settings)
    if entry.leads and job.state is not JobState.HELD:
        acts += _take_back(job)
    if entry.state is not S.VM_BOOTING:
        if not missing:
            return to(entry, S.VM_BOOTING, seen)
        if age > step.ASKED_FOR:
            return _failed(entry, seen, f"no machine was claimed within {step.ASKED_FOR:.0f} s")
        return Step(entry, (*acts, *(Act(Do.START, machine) for machine in missing)))
    if all(seen.state(machine) is NodeState.IDLE for machine in entry.machines):
        return to(entry, S.VM_READY, seen)
    if age > settings.join:
        return _failed(entry, seen, _late(entry, seen, settings))
    closed = [machine for machine in entry.machines if entry.uses and seen.state(machine) is NodeState.OUT]
    return Step(entry, (*acts, *(Act(Do.ADMIT, machine) for machine in closed)))


def ready(entry: Entry, job: JobView, seen: Seen, settings: Settings) -> Step:
    age, most = seen.now - entry.since, settings.join + step.MOVED
    if failure := _failure(entry, job, seen, settings):
        return _failed(entry, seen, failure)
    if not entry.leads:
        return _failed(entry, seen, f"no job came within {most:.0f} s") if age > most else Step(entry)
    if job.state is not JobState.HELD:
        return Step(entry, _take_back(job))
    return to(entry, S.MIGRATING, seen) if age >= settings.settle else Step(entry)


def migrating(entry: Entry, job: JobView, seen: Seen, settings: Settings) -> Step:
    if job.state in (JobState.RUNNING, JobState.ENDING):
        if job.on and set(job.on) <= set(map(seen.node, entry.machines)):
            return to(replace(entry, starts=job.starts), S.RUNNING, seen)
        return to(entry, S.REPROCESS, seen, "it started elsewhere")
    if failure := _failure(entry, job, seen, settings):
        return to(entry, S.REPROCESS, seen, failure)
    if job.state is JobState.HELD and job.is_held_by_user and job.queue == settings.queue:
        return to(replace(entry, stays_held=True), S.REQUEUE, seen, HELD_BY_USER)  # moved and released, and held again
    if job.state is JobState.HELD and None in map(seen.state, entry.machines):
        # It may have run there: slurmd starts nothing of it again for a while.
        return to(entry, S.REPROCESS, seen, "its nodes were forgotten")
    age = seen.now - entry.since
    if age > step.MOVED:
        why = f"{UNMOVED} within {step.MOVED:.0f} s: {job.reason}"
        return to(entry, S.REQUEUE if job.is_limited else S.REPROCESS, seen, why)
    if job.state is JobState.HELD:
        return Step(entry, (Act(Do.MOVE),))
    return Step(replace(entry, why=f"it waits on its nodes: {job.reason}") if age > TOLD else entry)


def running(entry: Entry, job: JobView, seen: Seen, settings: Settings) -> Step:
    failure = _failure(entry, job, seen, settings)
    # One that was not requeued since is held by us: a batch system that was killed has forgotten how it was moved.
    if job.state is JobState.HELD and not failure and (job.starts > entry.starts or job.is_held_by_user):
        return to(replace(entry, stays_held=True), S.REQUEUE, seen, "it was requeued and held")
    if job.state in IN_LINE:
        return to(entry, S.REPROCESS, seen, failure or "it was requeued")
    if failure:
        return to(entry, S.LOST, seen, failure)
    return Step(entry)


def lost(entry: Entry, job: JobView, seen: Seen, settings: Settings) -> Step:
    """Until the batch system has seen it: it requeues the job, or ends it where its user wants none to run twice."""
    if job.state in IN_LINE:
        return to(entry, S.REPROCESS, seen, entry.why)
    own = entry.here(settings.names)
    # Those that live go first: a slurmctld that forgets that a node was lost believes what slurmd says of the end of the others.
    if not (acts := tuple(Act(Do.END, machine) for machine in own if machine in seen.machines)):
        gone = (machine for machine in own if seen.state(machine) not in (None, NodeState.OUT))
        acts = tuple(Act(Do.LOSE, seen.node(machine)) for machine in gone)
    return Step(entry, (*acts, Act(Do.FORCE_END)) if seen.now - entry.since > step.QUIET else acts)


# -- the way out -------------------------------------------------------------------------------------------------------


def finished(entry: Entry, job: JobView | None, seen: Seen, settings: Settings) -> Step:
    """Over, unless the batch system was killed and has forgotten that. Its machines may be worth keeping; else nothing of them stays."""
    if not entry.leads:
        return parts.finished(entry, job, seen)
    if cache.is_worth_it(entry, seen, settings):
        return Step(cache.kept_as(replace(entry, since=seen.now)))
    if job is not None:
        entry = replace(entry, missing_since=None)
        if job.state is JobState.UNKNOWN:
            return Step(entry)
        if job.state in (*IN_LINE, JobState.RUNNING):
            if _is_not_to_run_twice(entry, job):
                return _force_end(entry)
            return to(entry, S.REPROCESS, seen, "it runs again: its end was forgotten")
    acts = _way_out(entry, seen, settings)
    return Step(entry, but_waits(acts)) if acts else to(entry, S.CLOSED, seen, entry.why)


def cleaning(entry: Entry, job: JobView, seen: Seen, settings: Settings) -> Step:
    """Nothing of the job's machines and nodes stays, and it is held until then. It needs no node that stays known: what is left of those,
    `recover` removes."""
    is_held = job.state is JobState.HELD
    entry = replace(entry, stays_held=entry.stays_held and is_held)  # else it was released meanwhile
    note = (Act(Do.NOTE, entry.why or "it is taken back"),) if read(job.note).machines else ()
    acts = (*_unpin(job, seen), *note, *(act for act in _way_out(entry, seen, settings) if act is not LATER))
    if acts:
        return Step(entry, but_waits(acts) if is_held else (*_take_back(job), *but_removals(acts)))
    if entry.state is S.REQUEUE:
        return _give_back(entry, job, seen, settings)
    if not is_held:
        return Step(entry, _take_back(job))
    if entry.state is S.REPROCESS:
        return _again(replace(entry, machines=(), tries=entry.tries + 1, uses=0), job, seen, settings)
    # Nothing shows whether the reason has been written: so it is written for a while.
    return Step(entry, (Act(Do.REFUSE),)) if seen.now - entry.since < TOLD else to(entry, S.CLOSED, seen, entry.why)


def _way_out(entry: Entry, seen: Seen, settings: Settings) -> tuple[Act, ...]:
    """For all machines of a job; none: they and their nodes are gone."""
    is_late, own = seen.now - entry.since > step.QUIET, entry.here(settings.names)
    return tuple(act for id in entry.machines for act in leave(id, seen, is_late=is_late, is_here=id in own))


def _give_back(entry: Entry, job: JobView, seen: Seen, settings: Settings) -> Step:
    is_held, is_home = job.state is JobState.HELD, job.queue == entry.home or job.queue != settings.queue
    if is_home and entry.stays_held == is_held:  # a batch system that is killed now remembers it as held by us
        is_saved = seen.now - entry.since >= seen.saves
        return to(entry, S.CLOSED, seen, entry.why) if is_saved else Step(entry)
    return Step(replace(entry, since=seen.now), (Act(Do.GIVE_BACK),) if is_held else _take_back(job))


def _again(entry: Entry, job: JobView, seen: Seen, settings: Settings) -> Step:
    if entry.why.startswith((UNFIT, UNMOVED)):
        return to(entry, S.REJECTED, seen, entry.why)
    if moved := _moved(entry, job, settings):
        return to(replace(entry, home=job.queue), S.REQUEUE, seen, moved)
    if job.starts >= settings.restarts:
        return to(entry, S.REJECTED, seen, f"requeued {job.starts} times; at last: {entry.why}")
    return to(entry, S.REQUEUE if entry.tries >= settings.tries else S.STOPPED, seen, entry.why)


# -- several hosts -----------------------------------------------------------------------------------------------------


def _announce(entry: Entry, job: JobView, settings: Settings) -> tuple[Act, ...]:
    """The other hosts' baits are told what they are to make."""
    note = Parts(tuple(zip(entry.on, entry.machines, strict=False)), given=entry.given)
    if len(entry.here(settings.names)) == len(entry.machines) or read(job.note).machines == note.machines:
        return ()
    return (Act(Do.NOTE, write(note)),)


def _late(entry: Entry, seen: Seen, settings: Settings) -> str:
    late = [machine for machine in entry.machines if seen.state(machine) is not NodeState.IDLE]
    if set(late) & set(entry.here(settings.names)):
        return f"a machine did not join within {settings.join:.0f} s"
    where = ", ".join(dict(zip(entry.machines, entry.on, strict=False))[machine] for machine in late)
    return f"{ELSEWHERE}{where}: no machine joined within {settings.join:.0f} s"


# -- small helpers -------------------------------------------------------------------------------------------------------


def _unpin(job: JobView, seen: Seen) -> tuple[Act, ...]:
    return (Act(Do.UNPIN),) if any(map(seen.machine, job.wants)) else ()


def _take_back(job: JobView) -> tuple[Act, ...]:
    return () if job.state is JobState.ENDING else (Act(Do.TAKE_BACK),)


def _moved(entry: Entry, job: JobView, settings: Settings) -> str:
    """By somebody else, to another queue."""
    return f"it was moved to {job.queue}" if job.queue not in (entry.home, settings.queue, "") else ""


def _failed(entry: Entry, seen: Seen, why: str) -> Step:
    """The leader tries the job again. A part is over, and its leader is told."""
    return to(entry, S.REPROCESS if entry.leads else S.FINISHED, seen, why)


def _failure(entry: Entry, job: JobView, seen: Seen, settings: Settings) -> str:
    """Why the machines of a job are no longer of use; "" while they are."""
    note = read(job.note)
    if not entry.leads and not set(entry.machines) <= set(note.of(settings.names)):
        return "its leader took it back"
    for machine in entry.here(settings.names):
        if machine in seen.ended and machine not in seen.machines:
            return seen.ended[machine]
        if entry.state not in (S.VM_REQUESTED, S.IMAGE_WAIT) and machine not in seen.machines:
            return "its machine is gone"
    if note.failed in entry.machines:
        where = next(name for name, machine in note.machines if machine == note.failed)
        return f"{ELSEWHERE}{where}: {note.why}"
    if entry.state not in STARTING and NodeState.OUT in map(seen.state, entry.machines):
        return "its node was taken out of service"
    is_unmoved = entry.state is not S.MIGRATING or (job.state is JobState.HELD and job.queue != settings.queue)
    if entry.state is S.RUNNING or not is_unmoved or not entry.leads:
        return ""
    asks = asked_of(job)  # its machines were made for what it asked for then
    is_same = entry.asked in ("", asks) and not _moved(entry, job, settings)
    return "" if is_same else f"{ALTERED}asked for {entry.asked} in {entry.home}; now {asks} in {job.queue}"


# -- the table ----------------------------------------------------------------------------------------------------------


HANDLERS: dict[State, Callable[[Entry, JobView, Seen, Settings], Step]] = {
    S.ARRIVED: arrived,
    S.STOPPED: stopped,
    **dict.fromkeys(STARTING, starting),
    S.VM_READY: ready,
    S.MIGRATING: migrating,
    S.RUNNING: running,
    **dict.fromkeys((S.REPROCESS, S.REQUEUE, S.REJECTED), cleaning),
    S.LOST: lost,
}
# In these the job is over, or there is none.
AFTER: dict[State, Callable[[Entry, JobView | None, Seen, Settings], Step]] = {
    S.FINISHED: finished,
    **dict.fromkeys(KEEPING, cache.keeping),
}


def next_step(entry: Entry, seen: Seen, settings: Settings) -> Step:
    """One step. Called again and again, with what is seen then."""
    job = seen.jobs.get(entry.job)
    if entry.state in AFTER:
        return AFTER[entry.state](entry, job, seen, settings)
    if job is None:
        # One such answer does not say that it is gone: a system that was just restarted may not know it yet.
        since = seen.now if entry.missing_since is None else entry.missing_since
        if seen.now - since < settings.gone_after:
            return Step(replace(entry, missing_since=since))
        return to(entry, S.FINISHED, seen, "the batch system no longer knows it")
    entry = replace(entry, missing_since=None)
    if job.state is JobState.UNKNOWN:
        return Step(entry)
    if job.state is JobState.ENDED:
        return to(entry, S.FINISHED, seen, entry.why)
    if not entry.leads and (parts.is_there(job, entry) or entry.state in (S.RUNNING, S.LOST)):
        return parts.running(entry, job, seen)
    if job.state in IN_LINE and _is_not_to_run_twice(entry, job):
        return _force_end(entry)
    return HANDLERS[entry.state](entry, job, seen, settings)
