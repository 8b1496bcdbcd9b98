"""From a lease as written down, and what is seen now: the next state, and what is to be done. Pure.

There is no other code for recovery. Every act may be done twice, and every look starts from what is written down, the batch system's
jobs and the pilots that are connected; so a service that was killed at any point goes on where it was.

What a pilot says of its machines is believed; what the batch system says of its job is believed. When the batch system says nothing,
nothing is concluded from that. An order is given again at each look until what it asks for is so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from belljar.batch import JobState
from belljar.lease import Do, Instance, Lease, Order, Settings, Slot
from belljar.lease.case import ALIVE, Act, Case, Job, Kind, Seen, Step
from belljar.lease.margins import KILL, margins
from belljar.lease.states import Cause, InstanceState, LeaseState, SlotState, end_of
from belljar.records import replace

L, I, S = LeaseState, InstanceState, SlotState  # noqa: E741


def advance(case: Case, seen: Seen, settings: Settings) -> Step:
    """One step, of one move of the lease at most. Called again and again, with what is seen then; at once where it has moved."""
    if not case.lease.is_live:
        return Step(case, _cancelled(seen.jobs or ()))
    case = _without_the_lost(case, seen, settings)
    step = HANDLERS[case.lease.state](case, seen, settings)
    return Step(step.case, (*step.acts, *_superfluous(step.case.lease, seen), *_old_slots(step.case)))


def strays(jobs: Iterable[Job], known: Callable[[str], bool]) -> tuple[Act, ...]:
    """Jobs with names of ours whose lease is not written down, by its id: they are cancelled."""
    return _cancelled(job for job in jobs if not known(lease_of(job.name)))


def lease_of(job_name: str) -> str:
    """The id in the name of a job; "" in one that is not ours."""
    begin, _, rest = job_name.partition("-")
    return rest.rpartition("-")[0] if begin == "belljar" else ""


def rejected(case: Case, why: str, now: float) -> Case:
    """The batch system will never take this job."""
    return drained(case, Cause.REJECTED, why, now)


def drained(case: Case, cause: Cause, why: str, now: float) -> Case:
    """It ends from now on. What has no node has ended already."""
    lease = _lease(case.lease, L.DRAINING, now, cause=cause, why=why)
    instances = tuple(
        ended(one, cause, why, now)
        if one.state is I.QUEUED
        else replace(one, stop=True, cause=one.cause or cause, why=one.why or why)
        if one.is_live
        else one
        for one in case.instances
    )
    return replace(case, lease=lease, instances=instances)


# -- states ------------------------------------------------------------------------------------------------------------


def _requested(case: Case, seen: Seen, settings: Settings) -> Step:
    lease = case.lease
    if lease.carrier:
        return Step(replace(case, lease=_lease(lease, L.CLAIMING, seen.now)))
    if _is_late(lease, seen):
        return _late(case, seen)
    if seen.jobs is None:
        return Step(case)
    if job := _job(lease, seen):
        return Step(replace(case, lease=_lease(lease, L.QUEUED, seen.now, job=job.id, missing=0.0)))
    return Step(case, (Act(Kind.SUBMIT),))


def _queued(case: Case, seen: Seen, settings: Settings) -> Step:
    """Its first pilot's hello ends this state."""
    lease, job = case.lease, _job(case.lease, seen)
    if any(one.is_live for one in _own(case)):
        return Step(replace(case, lease=_lease(lease, L.CLAIMING, seen.now)))
    if _is_late(lease, seen):
        return _late(case, seen)
    case = _missed(case, job, seen)
    if _is_gone(case.lease, job, seen, settings):
        return again(case, Cause.NODE_LOST, "its job ended before a pilot was heard of", seen, settings)
    if job is not None:
        case = replace(case, lease=replace(case.lease, job=job.id, why=job.reason, expected=job.expected))
    return Step(case)


def _claiming(case: Case, seen: Seen, settings: Settings) -> Step:
    """All nodes are there: go. At the barrier's deadline with as many as the owner said are enough."""
    lease, live = case.lease, [one for one in _own(case) if one.state in (S.CLAIMED, S.GO)]
    case = _missed(case, _job(lease, seen), seen)
    if lease.carrier:
        is_there = any(one.state is S.GO for one in live)
        return (
            _go(case, seen, settings)
            if is_there
            else Step(drained(case, Cause.NODE_LOST, "its node is gone", seen.now))
        )
    if len(live) >= lease.wanted.nodes:
        return _go(case, seen, settings)
    began = min((one.begun for one in live), default=lease.since)
    is_gone = _is_gone(case.lease, _job(lease, seen), seen, settings)
    if not is_gone and seen.now - max(began, seen.up) <= settings.barrier:
        return Step(case)
    if not is_gone and len(live) * lease.wanted.per_node >= (lease.wanted.least or lease.wanted.count):
        return _go(case, seen, settings)
    why = f"{len(live)} of {lease.wanted.nodes} nodes came within {settings.barrier:.0f} s"
    return again(case, Cause.CAPACITY, why, seen, settings)


def _active(case: Case, seen: Seen, settings: Settings) -> Step:
    lease, now = case.lease, seen.now
    case = _missed(case, _job(lease, seen), seen)
    if now >= lease.ends:
        return Step(drained(case, Cause.EXPIRED, "its time is over", now))
    live = [one for one in case.instances if one.is_live]
    if not live and not case.guests and not _lingers(case, seen, settings):
        last = max(case.instances, key=lambda one: one.ended)
        return Step(drained(case, last.cause or Cause.INTERNAL, last.why, now))
    acts = tuple(act for one in live for act in _wanted_of(one, case, seen))
    if lease.carrier:
        return Step(case, acts)
    return _released(case, acts, seen, settings)


def _draining(case: Case, seen: Seen, settings: Settings) -> Step:
    """It has ended when nothing of it is left: no machine, no pilot, no job."""
    lease, now = case.lease, seen.now
    cause = lease.cause or Cause.INTERNAL
    case = _missed(case, _job(lease, seen), seen)
    case = replace(case, instances=tuple(
        ended(one, cause, lease.why, now) if one.state is I.QUEUED else one for one in case.instances
    ))  # fmt: skip
    live = [one for one in case.instances if one.is_live]
    acts = tuple(act for one in live for act in _stopped(one, case, seen))
    if lease.carrier:
        step = Step(case, acts)
        return step if live else Step(_over(case, seen))
    step = _released(case, acts, seen, settings, at_once=True)
    slots = [one for one in _all_own(step.case) if one.is_live]
    is_overdue = now - lease.since > settings.grace + 2 * KILL and not case.guests
    jobs = _cancelled(seen.jobs or ()) if (not slots and not live) or is_overdue else ()
    if live or slots or seen.jobs is None or any(job.state in ALIVE for job in seen.jobs):
        return Step(step.case, (*step.acts, *jobs))
    # A batch system that was just restarted may not know its jobs yet; and a submission may be under way.
    if not seen.jobs and not _is_gone(step.case.lease, None, seen, settings):
        return step
    return Step(_over(step.case, seen))


HANDLERS: Mapping[LeaseState, Callable[[Case, Seen, Settings], Step]] = {
    L.REQUESTED: _requested, L.QUEUED: _queued, L.CLAIMING: _claiming, L.ACTIVE: _active, L.DRAINING: _draining,
}  # fmt: skip


# -- machines ----------------------------------------------------------------------------------------------------------


def _go(case: Case, seen: Seen, settings: Settings) -> Step:
    """Active: each machine has a node, or has ended. Ranks need not be without gaps: nodes are taken in their order."""
    lease, now = case.lease, seen.now
    found = margins(lease.wanted.seconds, 1, settings)
    slots = [
        replace(one, state=S.GO, since=now, ends=now + found.pilot) if one.state is S.CLAIMED else one
        for one in _own(case)
        if one.state in (S.CLAIMED, S.GO)
    ]
    changed = {one.id: one for one in slots}
    places = [one.id for one in slots for _ in range(lease.wanted.per_node)]
    instances = []
    for one in case.instances:
        if one.state is I.QUEUED and not one.slot:
            one = (
                replace(one, state=I.CLAIMED, slot=places.pop(0), since=now)
                if places
                else ended(one, Cause.CAPACITY, "there were fewer nodes than asked for", now)
            )
        elif one.state is I.QUEUED:
            one = replace(one, state=I.CLAIMED, since=now)
        instances.append(one)
    ends = now + found.before + lease.wanted.seconds
    lease = _lease(lease, L.ACTIVE, now, begun=now, ends=ends, expected=0.0)
    done = tuple(changed.get(one.id, one) for one in case.slots)
    case = replace(case, lease=lease, instances=tuple(instances), slots=done)
    gone = tuple(
        Act(Kind.ORDER, one.id, Order(Do.GO, seconds=one.ends - now)) for one in slots if one.id in seen.connected
    )
    return Step(case, (*gone, *(act for one in case.instances if one.is_live for act in _wanted_of(one, case, seen))))


def _wanted_of(one: Instance, case: Case, seen: Seen) -> tuple[Act, ...]:
    """The order by which a machine becomes what it should be."""
    if one.stop or one.state is I.STOPPING:
        return _stopped(one, case, seen)
    if one.state is I.CLAIMED and one.slot in seen.connected:
        return (Act(Kind.ORDER, one.slot, Order(Do.START, one.id, seconds=one.seconds)),)
    return ()


def _stopped(one: Instance, case: Case, seen: Seen) -> tuple[Act, ...]:
    why = (one.cause or case.lease.cause or Cause.USER).value
    return (Act(Kind.ORDER, one.slot, Order(Do.STOP, one.id, why=why)),) if one.slot in seen.connected else ()


def _released(case: Case, acts: tuple[Act, ...], seen: Seen, settings: Settings, *, at_once: bool = False) -> Step:
    """Nodes without machines are given back, each by itself, after a while in which their owner may want them again."""
    busy = {one.slot for one in (*case.instances, *case.guests) if one.is_live}
    slots = []
    for one in case.slots:
        is_ours = one.lease == case.lease.id and one.is_live
        if is_ours and one.state is not S.RELEASING and one.id not in busy and (
            at_once or seen.now - _idle_since(one, case) >= settings.linger
        ):  # fmt: skip
            one = replace(one, state=S.RELEASING, since=seen.now)
        if is_ours and one.state is S.RELEASING and one.id in seen.connected:
            acts = (*acts, Act(Kind.ORDER, one.id, Order(Do.RELEASE)))
        slots.append(one)
    return Step(replace(case, slots=tuple(slots)), acts)


def _idle_since(slot: Slot, case: Case) -> float:
    return max([slot.since, *(one.ended for one in case.instances if one.slot == slot.id)])


def _lingers(case: Case, seen: Seen, settings: Settings) -> bool:
    if case.lease.carrier or not settings.linger:
        return False
    return any(one.state is S.GO and seen.now - _idle_since(one, case) < settings.linger for one in _own(case))


# -- what is gone ------------------------------------------------------------------------------------------------------


def _without_the_lost(case: Case, seen: Seen, settings: Settings) -> Case:
    """Slots whose pilots are gone have ended, and with them their machines."""
    slots = tuple(
        replace(one, state=S.ENDED, since=seen.now) if one.is_live and _is_lost(one, case, seen, settings) else one
        for one in case.slots
    )
    ended = {one.id: one for one in slots if not one.is_live}
    instances = tuple(
        without_its_node(one, ended[one.slot], Cause.NODE_LOST, "its pilot is gone", seen.now)
        if one.is_live and one.slot in ended
        else one
        for one in case.instances
    )
    return replace(case, slots=slots, instances=instances)


def without_its_node(one: Instance, slot: Slot, cause: Cause, why: str, now: float) -> Instance:
    """A machine whose pilot has ended: it is charged for as long as that was heard of."""
    last = max(one.began_at, slot.heard - slot.zero) if one.launched else 0.0
    return ended(one, one.cause or cause, why, now, ended_at=last)


def _is_lost(slot: Slot, case: Case, seen: Seen, settings: Settings) -> bool:
    if slot.id in seen.connected:
        return False
    quiet = seen.now - max(slot.heard, seen.up)
    if quiet > settings.lost or (slot.ends and seen.now > slot.ends + settings.margin + settings.lost):
        return True
    if case.lease.carrier or seen.jobs is None:  # its carrier's own look decides
        return False
    is_running = any(job.state in ALIVE for job in seen.jobs)
    return not is_running and quiet > settings.silence


def _missed(case: Case, job: Job | None, seen: Seen) -> Case:
    """Write down the job's id, which a pilot may be quicker than, and since when the batch system has not known it."""
    if seen.jobs is None:
        return case
    since = 0.0 if job is not None else case.lease.missing or seen.now
    return replace(case, lease=replace(case.lease, missing=since, job=job.id if job else case.lease.job))


def _is_gone(lease: Lease, job: Job | None, seen: Seen, settings: Settings) -> bool:
    """One answer is not enough to say that a job is gone."""
    if seen.jobs is None:
        return False
    if job is not None:
        return job.state is JobState.ENDED
    return bool(lease.missing) and seen.now - lease.missing >= settings.unseen


def again(case: Case, cause: Cause, why: str, seen: Seen, settings: Settings) -> Step:
    """Nothing of it ran: a job of another name. The nodes it has are given back."""
    lease = case.lease
    if lease.attempt >= settings.tries:
        return Step(drained(case, cause, f"{why}; {lease.attempt} jobs were tried", seen.now))
    lease = _lease(lease, L.REQUESTED, seen.now, attempt=lease.attempt + 1, job="", missing=0.0, why=why, expected=0.0)
    return Step(replace(case, lease=lease))


# -- small helps -------------------------------------------------------------------------------------------------------


def _lease(lease: Lease, state: LeaseState, now: float, **facts: Any) -> Lease:
    return replace(lease, state=state, since=now, **facts) if state is not lease.state else replace(lease, **facts)


def _over(case: Case, seen: Seen) -> Case:
    cause = case.lease.cause or Cause.INTERNAL
    end = end_of(cause, was_active=bool(case.lease.begun))
    return replace(case, lease=_lease(case.lease, end, seen.now, cause=cause, missing=0.0))


def ended(one: Instance, cause: Cause, why: str, now: float, *, ended_at: float = 0.0) -> Instance:
    return replace(
        one, state=I.TERMINATED, since=now, ended=now, cause=one.cause or cause, why=one.why or why,
        ended_at=max(ended_at, one.began_at),
    )  # fmt: skip


def _own(case: Case) -> list[Slot]:
    """The slots that its machines are on, by rank: of this attempt, or those of its carrier that it was given."""
    if case.lease.carrier:
        used = {one.slot for one in case.instances}
        return [one for one in case.slots if one.id in used]
    return sorted((one for one in case.slots if one.attempt == case.lease.attempt), key=lambda one: one.rank)


def _all_own(case: Case) -> list[Slot]:
    return [one for one in case.slots if one.lease == case.lease.id]


def _old_slots(case: Case) -> tuple[Act, ...]:
    """Of jobs that were given up: their pilots end."""
    return tuple(
        Act(Kind.ORDER, one.id, Order(Do.RELEASE))
        for one in _all_own(case)
        if one.attempt < case.lease.attempt and one.is_live
    )


def _job(lease: Lease, seen: Seen) -> Job | None:
    """Of this attempt: the one that is written down, else the first that is there."""
    ours = sorted((job for job in seen.jobs or () if job.name == lease.job_name), key=lambda one: (len(one.id), one.id))
    return next((job for job in ours if job.id == lease.job), ours[0] if ours else None)


def _superfluous(lease: Lease, seen: Seen) -> tuple[Act, ...]:
    """Jobs of earlier attempts, and second ones of the same name."""
    job = _job(lease, seen)
    return _cancelled(one for one in seen.jobs or () if one is not job)


def _cancelled(jobs: Iterable[Job]) -> tuple[Act, ...]:
    return tuple(Act(Kind.CANCEL, job.id) for job in jobs if job.state in ALIVE and job.state is not JobState.ENDING)


def _is_late(lease: Lease, seen: Seen) -> bool:
    return bool(lease.deadline) and seen.now > lease.deadline


def _late(case: Case, seen: Seen) -> Step:
    why = "the batch system did not start it in time"
    return Step(drained(case, Cause.CAPACITY, f"{why}: {case.lease.why}" if case.lease.why else why, seen.now))
