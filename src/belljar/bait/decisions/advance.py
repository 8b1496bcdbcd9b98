"""A job of this bait's own, state by state: from what was written down, and what is seen of it now, to the next step. Below, which
handler answers in which state: the whole table. Pure.

There is no other code for recovery. Every act is one that may be done twice, and every look starts from the journal, the batch system
and the machines that live; so a bait that was killed at any point goes on where it was. `leaving.recover` only finds what no entry names.

The batch system owns the job: what it says of a job is always believed, whatever was written down. When it says nothing, nothing is
done.
"""

from __future__ import annotations

from belljar.bait import Settings
from belljar.bait.decisions import cache, parts, step
from belljar.bait.decisions.decide import asked_of
from belljar.bait.decisions.leaving import LATER, but_removals, but_waits, leave, leave_elsewhere
from belljar.bait.decisions.note import Parts, read, write
from belljar.bait.decisions.step import Act, Do, Entry, Handler, OfJob, Seen, State, Step, of_job, to
from belljar.pool import JobState, JobView, NodeState
from belljar.records import replace

S = State
TOLD = 5.0
UNFIT = "unfit image: "  # begins the reason of a machine that ended because its image cannot join: no other one would
UNMOVED = "it did not start on its nodes"  # nor would it on others
ALTERED = "it was altered: "
HELD_BY_USER = "its user holds it"
BEGAN = "it had begun, which the batch system has forgotten, and it is not to run twice"
ELSEWHERE = "elsewhere: "  # begins the reason of a failure on another host
IN_LINE = (JobState.WAITING, JobState.HELD)


def of_own(handler: OfJob) -> Handler:
    """This handler, for a job that may be started again."""

    def unless_over(entry: Entry, job: JobView, seen: Seen, settings: Settings) -> Step:
        if job.state in IN_LINE and _is_not_to_run_twice(entry, job):
            return _force_end(entry)
        return handler(entry, job, seen, settings)

    return of_job(unless_over)


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
    if failure := _failure(entry, job, seen, settings) or _altered(entry, job, settings):
        return to(entry, S.REPROCESS, seen, failure)
    age, held = seen.now - entry.since, () if job.state is JobState.HELD else _take_back(job)
    missing = [machine for machine in entry.here(settings.names) if machine not in seen.machines]
    held += _announce(entry, job, settings)
    if entry.state is not S.VM_BOOTING:
        if not missing:
            return to(entry, S.VM_BOOTING, seen)
        if age > step.ASKED_FOR:
            return to(entry, S.REPROCESS, seen, f"no machine was claimed within {step.ASKED_FOR:.0f} s")
        return Step(entry, (*held, *(Act(Do.START, machine) for machine in missing)))
    if all(seen.state(machine) is NodeState.IDLE for machine in entry.machines):
        return to(entry, S.VM_READY, seen)
    if age > settings.join:
        return to(entry, S.REPROCESS, seen, _late(entry, seen, settings))
    closed = [machine for machine in entry.machines if entry.uses and seen.state(machine) is NodeState.OUT]
    return Step(entry, (*held, *(Act(Do.ADMIT, machine) for machine in closed)))


def ready(entry: Entry, job: JobView, seen: Seen, settings: Settings) -> Step:
    if failure := _failure(entry, job, seen, settings) or _altered(entry, job, settings):
        return to(entry, S.REPROCESS, seen, failure)
    if job.state is not JobState.HELD:
        return Step(entry, _take_back(job))
    return to(entry, S.MIGRATING, seen) if seen.now - entry.since >= settings.settle else Step(entry)


def migrating(entry: Entry, job: JobView, seen: Seen, settings: Settings) -> Step:
    if job.state in (JobState.RUNNING, JobState.ENDING):
        if job.on and set(job.on) <= set(map(seen.node, entry.machines)):
            return to(replace(entry, starts=job.starts), S.RUNNING, seen)
        return to(entry, S.REPROCESS, seen, "it started elsewhere")
    is_unmoved = job.state is JobState.HELD and job.queue != settings.queue
    if failure := _failure(entry, job, seen, settings) or (_altered(entry, job, settings) if is_unmoved else ""):
        return to(entry, S.REPROCESS, seen, failure)
    if job.state is JobState.HELD and job.is_held_by_user and not is_unmoved:
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
    others = [machine for machine in entry.machines if machine not in own]
    steps = [leave(machine, seen, is_late=is_late) for machine in own]
    steps += [leave_elsewhere(machine, seen, is_late=is_late) for machine in others]
    return tuple(act for step in steps for act in step)


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


def _altered(entry: Entry, job: JobView, settings: Settings) -> str:
    """Its machines were made for what it asked for then."""
    asks = asked_of(job)
    is_same = entry.asked in ("", asks) and not _moved(entry, job, settings)
    return "" if is_same else f"{ALTERED}asked for {entry.asked} in {entry.home}; now {asks} in {job.queue}"


def _failure(entry: Entry, job: JobView, seen: Seen, settings: Settings) -> str:
    """Why the machines of a job are no longer of use; "" while they are."""
    for machine in entry.here(settings.names):
        if machine in seen.ended and machine not in seen.machines:
            return seen.ended[machine]
        if entry.state not in (S.VM_REQUESTED, S.IMAGE_WAIT) and machine not in seen.machines:
            return "its machine is gone"
    note = read(job.note)
    if note.failed in entry.machines:
        where = next(name for name, machine in note.machines if machine == note.failed)
        return f"{ELSEWHERE}{where}: {note.why}"
    is_out = NodeState.OUT in map(seen.state, entry.machines)
    return "its node was taken out of service" if is_out and entry.state not in step.STARTING else ""


# -- the table ----------------------------------------------------------------------------------------------------------


HANDLERS: dict[State, Handler] = {
    S.ARRIVED: of_own(arrived),
    S.STOPPED: of_own(stopped),
    S.VM_REQUESTED: of_own(starting),
    S.IMAGE_WAIT: of_own(starting),
    S.VM_BOOTING: of_own(starting),
    S.VM_READY: of_own(ready),
    S.MIGRATING: of_own(migrating),
    S.RUNNING: of_own(running),
    S.FINISHED: finished,
    S.REPROCESS: of_own(cleaning),
    S.REQUEUE: of_own(cleaning),
    S.REJECTED: of_own(cleaning),
    S.LOST: of_own(lost),
    S.PROVING: cache.keeping,
    S.KEPT: cache.keeping,
}
# For a part of another bait's job. It is never stopped or moved here.
PART_HANDLERS: dict[State, Handler] = {
    S.VM_REQUESTED: of_job(parts.coming),
    S.IMAGE_WAIT: of_job(parts.coming),
    S.VM_BOOTING: of_job(parts.coming),
    S.VM_READY: of_job(parts.coming),
    S.RUNNING: of_job(parts.running),
    S.LOST: of_job(parts.running),
    S.FINISHED: parts.finished,
}


def next_step(entry: Entry, seen: Seen, settings: Settings) -> Step:
    """One step. Called again and again, with what is seen then."""
    if seen.jobs is None or seen.nodes is None:
        return Step(entry)
    handler = (HANDLERS if entry.leads else PART_HANDLERS)[entry.state]
    return handler(entry, seen.jobs.get(entry.job), seen, settings)
