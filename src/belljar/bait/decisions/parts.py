"""A part of a job over several hosts, at a bait that does not lead: what differs from its own jobs (advance.py). Pure.

The bait of the job's first node leads (advance.py): it names the machines of all in a note at the job, and every other bait finds its own
there at its next look. No bait talks to another one: the leader sees a part's node come, and takes the parts back by another note; a
bait whose part failed says so in the note. A part's machine ends when no note names it any longer, or the job is over; while the job runs
on its node, the note means nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

from belljar.bait import Settings
from belljar.bait.decisions.decide import Bait, Judge, Room, impossible, size_of
from belljar.bait.decisions.leaving import LATER, but_removals, but_waits, leave
from belljar.bait.decisions.note import read, write
from belljar.bait.decisions.step import QUIET, Act, BaitState, Do, Entry, S, Seen, Step, to
from belljar.pool import JobState, JobView, NodeState, node_of
from belljar.records import replace


def invitation(
    entries: Mapping[str, Entry], seen: Seen, bait: Bait, room: Room, settings: Settings, judge: Judge
) -> Step | None:
    """For the first job of another bait that wants machines here, and has nothing yet: its part is begun, or refused. One for which there
    is no room now waits until its leader gives up."""
    for job in seen.jobs.values():
        parts = read(job.note)
        own = parts.of(settings.names)
        is_new = job.state is JobState.HELD and job.id not in entries and not parts.failed
        if not own or not is_new or parts.machines[0][0] in settings.names or set(own) & seen.machines:
            continue
        size = replace(size_of(job, settings), count=len(own))
        why = impossible(job, size, room, settings) or judge(job)
        if bait.state in (BaitState.CLOSED_ADMIN, BaitState.CLOSED_STORE, BaitState.CLOSED_FAULTS):
            why = why or bait.why
        part = Entry(job.id, S.VM_REQUESTED, seen.now, own, leads=False)
        if why:
            return Step(replace(part, state=S.REJECTED), (refusal(job, own[0], why),))
        if bait.is_open and size.all_cpus <= room.cpus and size.all_memory <= room.memory:
            return Step(part)
    return None


def refusal(job: JobView, machine: str, why: str) -> Act:
    """Where the leader sees it."""
    return Act(Do.NOTE, write(replace(read(job.note), failed=machine, why=why)))


def running(entry: Entry, job: JobView, seen: Seen) -> Step:
    """The bait that follows a job whose machine is gone must say so: its leader sees only that the job has stopped."""
    if not is_there(job, entry):
        return to(entry, S.FINISHED, seen, entry.why or "the job left it")
    lost = [machine for machine in entry.machines if machine not in seen.machines]
    if not lost:
        return Step(entry) if entry.state is S.RUNNING else to(entry, S.RUNNING, seen)
    if entry.state is not S.LOST:
        return to(entry, S.LOST, seen, seen.ended.get(lost[0], "its machine is gone"))
    there = (machine for machine in lost if seen.state(machine) not in (None, NodeState.OUT))
    return Step(entry, tuple(Act(Do.LOSE, seen.node(machine)) for machine in there))


def finished(entry: Entry, job: JobView | None, seen: Seen) -> Step:
    """Nothing of it stays; and a leader that still counts on it reads that it failed."""
    if job is not None and is_there(job, entry) and seen.machines.issuperset(entry.machines):
        return Step(entry)  # it came at the last moment
    is_late = seen.now - entry.since > QUIET
    acts = tuple(act for machine in entry.machines for act in leave(machine, seen, is_late=is_late) if act is not LATER)
    if job is not None and job.state is JobState.HELD:
        parts = read(job.note)
        if {machine for _, machine in parts.machines} & set(entry.machines) and not parts.failed:
            acts = (refusal(job, entry.machines[0], entry.why or "it ended"), *acts)
    if not acts:
        return to(entry, S.CLOSED, seen, entry.why)
    is_free = job is not None and job.state is JobState.WAITING  # its leader holds it in a moment
    return Step(entry, but_removals(acts) if is_free else but_waits(acts))


def is_there(job: JobView, entry: Entry) -> bool:
    """It runs on these nodes. One that is over still shows where it was."""
    there = job.on if job.state in (JobState.RUNNING, JobState.ENDING) else ()
    return set(map(node_of, entry.machines)) <= set(there)
