"""From a lease as written down, and what is seen now: the next state, and what is to be done. Pure.

There is no other code for recovery. Every act may be done twice, and every look starts from what is written down, the batch system's
jobs and the pilots that are connected; so a service that was killed at any point goes on where it was.

What a pilot says of its machines is believed; what the batch system says of its job is believed. When the batch system says nothing,
nothing is concluded from that. An order is given again at each look until what it asks for is so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from belljar.lease import OLD_PILOT, Instance, Lease, Settings, Slot
from belljar.lease.decisions.case import ALIVE, Act, Case, Kind, Seen, Step, ended
from belljar.lease.decisions.margins import KILL, margins
from belljar.lease.orders import Do, Order
from belljar.lease.states import Cause, InstanceState, LeaseState, SlotState, end_of
from belljar.pool import JobState
from belljar.pool import NamedJob as Job
from belljar.records import replace

L, I, S = LeaseState, InstanceState, SlotState  # noqa: E741


def advance(case: Case, seen: Seen, settings: Settings) -> Step:
    """One step, of one move of the lease at most. Called again and again, with what is seen then; at once where it has moved."""
    if not case.lease.is_live:
        return Step(case, _cancelled(seen.jobs or ()))
    case = _without_the_lost(_missed(case, seen), seen, settings)
    step = HANDLERS[case.lease.state](case, seen, settings)
    # Jobs of earlier attempts, second ones of the same name, and pilots of jobs that were given up.
    job, attempt = _job(step.case.lease, seen), step.case.lease.attempt
    others = _cancelled(other for other in seen.jobs or () if other is not job)
    earlier = (slot.id for slot in step.case.slots if slot.is_live and slot.attempt < attempt)
    old = (Act(Kind.ORDER, id, Order(Do.RELEASE)) for id in earlier)
    return Step(step.case, (*step.acts, *others, *old))


def strays(jobs: Iterable[Job], known: Callable[[str], bool]) -> tuple[Act, ...]:
    """Jobs with names of ours whose lease is not written down, by its id: they are cancelled."""
    return _cancelled(job for job in jobs if not known(lease_of(job.name)))


def lease_of(job_name: str) -> str:
    """The id in the name of a job; "" in one that is not ours."""
    begin, _, rest = job_name.partition("-")
    return rest.rpartition("-")[0] if begin == "belljar" else ""


def drained(case: Case, cause: Cause, why: str, now: float) -> Case:
    """It ends from now on. What has no node has ended already."""

    def stopped(machine: Instance) -> Instance:
        if machine.state is I.QUEUED:
            return ended(machine, cause, why, now)
        return replace(machine, stop=True, cause=machine.cause or cause, why=machine.why or why)

    return case.moved(L.DRAINING, now, cause=cause, why=why).each(stopped)


# -- states ------------------------------------------------------------------------------------------------------------


def _requested(case: Case, seen: Seen, settings: Settings) -> Step:
    lease = case.lease
    if late := _late(case, seen):
        return late
    if seen.jobs is None:
        return Step(case)
    if job := _job(lease, seen):
        return Step(case.moved(L.QUEUED, seen.now, job=job.id, missing=None))
    return Step(case, (Act(Kind.SUBMIT),))


def _queued(case: Case, seen: Seen, settings: Settings) -> Step:
    """Its first pilot's hello ends this state."""
    lease, job = case.lease, _job(case.lease, seen)
    if any(slot.is_live for slot in _slots(case)):
        return Step(case.moved(L.CLAIMING, seen.now))
    if late := _late(case, seen):
        return late
    if _is_gone(lease, seen, settings):
        return again(case, Cause.NODE_LOST, "its job ended before a pilot was heard of", seen, settings)
    return Step(case if job is None else case.but(why=job.reason, expected=job.expected or None))


def _claiming(case: Case, seen: Seen, settings: Settings) -> Step:
    """All nodes are there: go. At the barrier's deadline with as many as the owner said are enough."""
    lease, terms, slots = case.lease, case.lease.wanted, _waiting_or_in_use(case)
    if len(slots) >= terms.nodes:
        return _go(case, seen, settings)
    began = min((slot.begun for slot in slots), default=lease.since)
    is_gone = _is_gone(lease, seen, settings)
    if not is_gone and seen.now - max(began, seen.up) <= settings.barrier:
        return Step(case)
    if not is_gone and len(slots) * terms.per_node >= (terms.least or terms.count):
        return _go(case, seen, settings)
    why = f"{len(slots)} of {terms.nodes} nodes came within {settings.barrier:.0f} s"
    return again(case, Cause.CAPACITY, why, seen, settings)


def _active(case: Case, seen: Seen, settings: Settings) -> Step:
    now = seen.now
    deadlines = [machine.deadline for machine in case.live if machine.deadline is not None]
    if deadlines and len(deadlines) == len(case.live):
        case = case.but(ends=max(deadlines))  # the time for staging is over: they run
    if case.lease.ends is not None and now >= case.lease.ends:
        return Step(drained(case, Cause.EXPIRED, "its time is over", now))
    if not case.live:
        last = max(case.instances, key=lambda machine: machine.ended or 0.0)
        return Step(drained(case, last.cause or Cause.INTERNAL, last.why, now))
    return _released(case, _orders(case, seen), seen)


def _draining(case: Case, seen: Seen, settings: Settings) -> Step:
    """It has ended when nothing of it is left: no machine, no pilot, no job."""
    lease, now, cause = case.lease, seen.now, case.lease.cause or Cause.INTERNAL
    case = case.each(lambda machine: ended(machine, cause, lease.why, now) if machine.state is I.QUEUED else machine)
    live = case.live
    acts = (*_go_ahead(case, seen), *(act for machine in live for act in _stopped(machine, case, seen)))
    step = _released(case, acts, seen)
    slots = [slot for slot in step.case.slots if slot.is_live]
    is_overdue = now - lease.since > settings.grace + 2 * KILL
    goes_by_itself = any(slot.pilot.startswith(OLD_PILOT) for slot in case.slots)  # it has said that it begins to
    jobs = _cancelled(seen.jobs or ()) if is_overdue or not (slots or live or goes_by_itself) else ()
    if live or slots or seen.jobs is None or any(job.state in ALIVE for job in seen.jobs):
        return Step(step.case, (*step.acts, *jobs))
    # A batch system that was just restarted may not know its jobs yet; and a submission may be under way.
    if not seen.jobs and not _is_gone(lease, seen, settings):
        return step
    return Step(_over(step.case, seen))


HANDLERS: Mapping[LeaseState, Callable[[Case, Seen, Settings], Step]] = {
    L.REQUESTED: _requested, L.QUEUED: _queued, L.CLAIMING: _claiming, L.ACTIVE: _active, L.DRAINING: _draining,
}  # fmt: skip


# -- machines ----------------------------------------------------------------------------------------------------------


def _go(case: Case, seen: Seen, settings: Settings) -> Step:
    """Active: each machine has a node, or has ended. Ranks need not be without gaps: nodes are taken in their order."""
    terms, now = case.lease.wanted, seen.now
    times, places = margins(terms.seconds, 1, settings), list[str]()
    for slot in _waiting_or_in_use(case):
        places += [slot.id] * terms.per_node
        if slot.state is not S.GO:
            case = case.with_slot(replace(slot, state=S.GO, since=now, ends=now + times.pilot))

    def placed(machine: Instance) -> Instance:
        if machine.state is not I.QUEUED:
            return machine
        if not machine.slot and not places:
            return ended(machine, Cause.CAPACITY, "there were fewer nodes than asked for", now)
        return replace(machine, state=I.CLAIMED, slot=machine.slot or places.pop(0), since=now)

    case = case.moved(L.ACTIVE, now, begun=now, ends=now + times.before + terms.seconds, expected=None).each(placed)
    return Step(case, _orders(case, seen))


def _orders(case: Case, seen: Seen) -> tuple[Act, ...]:
    """To the pilots of an active lease."""
    return (*_go_ahead(case, seen), *(act for machine in case.live for act in _order(machine, case, seen)))


def _go_ahead(case: Case, seen: Seen) -> tuple[Act, ...]:
    """Pilots take machines from now on. One that has said nothing of its own may still be at the gate."""
    waiting = {machine.slot for machine in case.live if machine.state is I.CLAIMED}
    slots = [slot for slot in case.slots if slot.state is S.GO and slot.id in waiting] if waiting else []
    by_rank = sorted(slots, key=lambda slot: slot.rank)
    return tuple(act for slot in by_rank for act in _told(slot.id, Order(Do.GO, seconds=slot.left(seen.now)), seen))


def _told(slot: str, order: Order, seen: Seen) -> tuple[Act, ...]:
    return (Act(Kind.ORDER, slot, order),) if slot in seen.connected else ()


def _order(machine: Instance, case: Case, seen: Seen) -> tuple[Act, ...]:
    """By which a machine becomes what it should be."""
    if machine.stop or machine.state is I.STOPPING:
        return _stopped(machine, case, seen)
    start = Order(Do.START, machine.id, seconds=machine.seconds)
    return _told(machine.slot, start, seen) if machine.state is I.CLAIMED else ()


def _stopped(machine: Instance, case: Case, seen: Seen) -> tuple[Act, ...]:
    why = (machine.cause or case.lease.cause or Cause.USER).value
    return _told(machine.slot, Order(Do.STOP, machine.id, why=why), seen)


def _released(case: Case, acts: tuple[Act, ...], seen: Seen) -> Step:
    """Nodes without machines are given back, each by itself."""
    busy = {machine.slot for machine in case.live}
    for slot in case.slots:
        if slot.is_live and slot.state is not S.RELEASING and slot.id not in busy:
            slot = replace(slot, state=S.RELEASING, since=seen.now)
            case = case.with_slot(slot)
        if slot.state is S.RELEASING:
            acts = (*acts, *_told(slot.id, Order(Do.RELEASE), seen))
    return Step(case, acts)


# -- what is gone ------------------------------------------------------------------------------------------------------


def _without_the_lost(case: Case, seen: Seen, settings: Settings) -> Case:
    """Slots whose pilots are gone have ended, and with them their machines."""
    for slot in case.slots:
        if slot.is_live and _is_lost(slot, case, seen, settings):
            case = case.with_slot(replace(slot, state=S.ENDED, since=seen.now))
    gone = {slot.id: slot for slot in case.slots if not slot.is_live}

    def left(machine: Instance) -> Instance:
        slot = gone.get(machine.slot)
        return without_its_node(machine, slot, Cause.NODE_LOST, "its pilot is gone", seen.now) if slot else machine

    return case.each(left)


def without_its_node(machine: Instance, slot: Slot, cause: Cause, why: str, now: float) -> Instance:
    """A machine whose pilot has ended: it is charged until its pilot was last heard."""
    last = max(machine.ran_from, slot.heard - slot.zero) if machine.launched is not None else 0.0
    return ended(machine, machine.cause or cause, why, now, ran_until=last)


def _is_lost(slot: Slot, case: Case, seen: Seen, settings: Settings) -> bool:
    if slot.id in seen.connected:
        return False
    quiet = seen.now - max(slot.heard, seen.up)
    is_over = slot.ends is not None and seen.now > slot.ends + settings.margin + settings.lost
    if is_over or (quiet > settings.lost and not slot.pilot.startswith(OLD_PILOT)):
        return True
    if seen.jobs is None:
        return False
    own = replace(case.lease, attempt=slot.attempt).job_name
    states = {job.state for job in seen.jobs if job.name == own}
    is_missed = slot.attempt == case.lease.attempt and _is_gone(case.lease, seen, settings)
    return not states & ALIVE and (bool(states) or is_missed or quiet > settings.silence)


def _missed(case: Case, seen: Seen) -> Case:
    """Write down the job's id, which a pilot may be quicker than, and since when the batch system has not known it."""
    if seen.jobs is None or case.lease.state is L.REQUESTED:
        return case
    job = _job(case.lease, seen)
    if job is not None:
        return case.but(missing=None, job=job.id)
    return case if case.lease.missing is not None else case.but(missing=seen.now)


def _is_gone(lease: Lease, seen: Seen, settings: Settings) -> bool:
    """One answer is not enough to say that a job is gone."""
    if seen.jobs is None:
        return False
    if (job := _job(lease, seen)) is not None:
        return job.state is JobState.ENDED
    return lease.missing is not None and seen.now - lease.missing >= settings.unseen


def again(case: Case, cause: Cause, why: str, seen: Seen, settings: Settings) -> Step:
    """Nothing of it ran: a job of another name. The nodes it has are given back."""
    tried = case.lease.attempt
    if tried >= settings.tries:
        return Step(drained(case, cause, f"{why}; {tried} jobs were tried", seen.now))
    return Step(case.moved(L.REQUESTED, seen.now, attempt=tried + 1, job="", missing=None, expected=None, why=why))


# -- small helps -------------------------------------------------------------------------------------------------------


def _over(case: Case, seen: Seen) -> Case:
    cause = case.lease.cause or Cause.INTERNAL
    return case.moved(end_of(cause, was_active=case.lease.begun is not None), seen.now, cause=cause, missing=None)


def _slots(case: Case) -> list[Slot]:
    """Those of this attempt, by rank."""
    return sorted((slot for slot in case.slots if slot.attempt == case.lease.attempt), key=lambda slot: slot.rank)


def _waiting_or_in_use(case: Case) -> list[Slot]:
    return [slot for slot in _slots(case) if slot.state in (S.CLAIMED, S.GO)]


def _job(lease: Lease, seen: Seen) -> Job | None:
    """For this attempt: the one that is written down, else the first that is there."""
    ours = sorted((job for job in seen.jobs or () if job.name == lease.job_name), key=lambda job: (len(job.id), job.id))
    return next((job for job in ours if job.id == lease.job), ours[0] if ours else None)


def _cancelled(jobs: Iterable[Job]) -> tuple[Act, ...]:
    return tuple(Act(Kind.CANCEL, job.id) for job in jobs if job.state in ALIVE and job.state is not JobState.ENDING)


def _late(case: Case, seen: Seen) -> Step | None:
    if case.lease.deadline is None or seen.now <= case.lease.deadline:
        return None
    why = "the batch system did not start it in time"
    return Step(drained(case, Cause.CAPACITY, f"{why}: {case.lease.why}" if case.lease.why else why, seen.now))
