"""Arrays of a system that tells all tasks which wait together where they may run: they come to one bait, and are released one by one. Pure.

Else a task that waits would start on the node that was made for another one.
"""

from __future__ import annotations

from collections.abc import Mapping

from belljar.bait.decisions.states import Entry, State
from belljar.batch import JobState, JobView

RELEASING = (State.MIGRATING, State.REQUEUE)


def newcomers(entries: Mapping[str, Entry], jobs: Mapping[str, JobView]) -> tuple[JobView, ...]:
    """Tasks that wait, of arrays that are here."""
    here = {jobs[id].array[0] for id in entries if id in jobs} - {""}
    waiting = (one for one in jobs.values() if one.state is JobState.WAITING and one.id not in entries)
    return tuple(one for one in waiting if one.array[0] in here)


def must_wait(job: JobView, entries: Mapping[str, Entry], jobs: Mapping[str, JobView]) -> bool:
    """Another task of its array was released and has not started, or is to be released first."""
    others = {
        one.id: one for one in jobs.values() if job.array[0] and one.array[0] == job.array[0] and one.id != job.id
    }
    own = entries[job.id]
    before = (
        one for one in entries.values()
        if one.job in others and one.state in RELEASING and (one.since, one.job) < (own.since, own.job)
    )  # fmt: skip
    return any(one.state is JobState.WAITING for one in others.values()) or any(
        others[one.job].state is JobState.HELD for one in before
    )
