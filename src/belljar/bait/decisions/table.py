"""Which handler answers in which state: the whole table. A handler says the next state and what is to be done. Pure.

There is no other code for recovery. Every act is one that may be done twice, and every look starts from the journal, the batch system
and the machines that live; so a bait that was killed at any point goes on where it was. `leaving.recover` only finds what no entry names.

The batch system owns the job: what it says of a job is always believed, whatever was written down. When it says nothing, nothing is
done.
"""

from __future__ import annotations

from belljar.bait import Settings
from belljar.bait.decisions import advance, cache, parts
from belljar.bait.decisions.step import Entry, Handler, Seen, State, Step, of_job

S = State
HANDLERS: dict[State, Handler] = {
    S.ARRIVED: advance.of_own(advance.arrived),
    S.STOPPED: advance.of_own(advance.stopped),
    S.VM_REQUESTED: advance.of_own(advance.starting),
    S.IMAGE_WAIT: advance.of_own(advance.starting),
    S.VM_BOOTING: advance.of_own(advance.starting),
    S.VM_READY: advance.of_own(advance.ready),
    S.MIGRATING: advance.of_own(advance.migrating),
    S.RUNNING: advance.of_own(advance.running),
    S.FINISHED: advance.finished,
    S.REPROCESS: advance.of_own(advance.cleaning),
    S.REQUEUE: advance.of_own(advance.cleaning),
    S.REJECTED: advance.of_own(advance.cleaning),
    S.LOST: advance.of_own(advance.lost),
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
