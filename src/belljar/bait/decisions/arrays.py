"""Arrays of a system that tells all tasks which wait together where they may run: they come to one bait, and are released one by one. Pure.

Else a task that waits would start on the node that was made for another one.
"""

from __future__ import annotations

from collections.abc import Container, Mapping

from belljar.bait.decisions.states import Entry
from belljar.pool import JobState, JobView


def newcomers(entries: Mapping[str, Entry], jobs: Mapping[str, JobView]) -> tuple[JobView, ...]:
    """Tasks that wait, of arrays that are here."""
    here = {jobs[id].array[0] for id in entries if id in jobs} - {""}
    waiting = (one for one in jobs.values() if one.state is JobState.WAITING and one.id not in entries)
    return tuple(one for one in waiting if one.array[0] in here)


def must_wait(job: JobView, jobs: Mapping[str, JobView], released: Container[str]) -> bool:
    """Another task of its array was released and has not started. *released*: arrays of which one was since these jobs were seen."""
    array = job.array[0]
    others = (one for one in jobs.values() if one.array[0] == array and one.id != job.id)
    return bool(array) and (array in released or any(one.state is JobState.WAITING for one in others))
