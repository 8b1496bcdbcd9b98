"""From the time that was promised to the time that is asked of the batch system. Pure.

The user's time runs from when the guest is up. Before it: the pilot's start, the others of the group, the image's way, the boot. After
it: the guest's shutdown, the kill, the report. The pilot's own monotonic clock ends a lease; the batch system's limit comes later, and
is only the backstop (Slurm acts on it up to half a minute late, and warns up to a minute early).
"""

from __future__ import annotations

from math import ceil, inf

from belljar.errors import OverLimit
from belljar.lease import Settings, Wanted
from belljar.records import dataclass

KILL = 2.0  # to end a guest by force, and to say so
PILOT = 2.0  # from the job's start to the pilot's


@dataclass(frozen=True)
class Margins:
    """Of one lease, in seconds."""

    before: float  # from the pilot's start to the guest's being up, at most
    promised: float
    after: float  # to shut down, kill and tell
    walltime: int  # of the job

    @property
    def pilot(self) -> float:
        """From its start, by its own clock: then the pilot ends."""
        return self.before + self.promised + self.after


def margins(seconds: float, nodes: int, settings: Settings, *, quantum: int = 1) -> Margins:
    """*quantum*: the batch system counts in steps of so many seconds (Slurm: 60)."""
    before = settings.staging + (settings.barrier if nodes > 1 else 0.0)
    after = settings.grace + KILL
    whole = PILOT + before + seconds + after + settings.margin
    return Margins(before, seconds, after, quantum * ceil(whole / quantum))


@dataclass(frozen=True)
class Queue:
    """What the batch system lets a job have there."""

    longest: float | None = None  # seconds; None: no limit
    quantum: int = 1  # seconds, in which it counts


def fitting(terms: Wanted, settings: Settings, queue: Queue) -> Margins:
    """Raises OverLimit where the queue's limit is less than such a lease takes."""
    seconds, limit = terms.seconds, queue.longest
    times = margins(seconds, terms.nodes, settings, quantum=queue.quantum)
    if limit is None or times.walltime <= limit:
        return times
    left = longest(terms, settings, queue)
    hint = f"Ask for {left:.0f} s or less, or for another queue." if left > 0 else "Ask for another queue."
    takes = f"a lease of {seconds:.0f} s takes {times.walltime} s of the batch system"
    raise OverLimit(f"{takes}; its queue gives {limit:.0f} s", hint=hint)


def longest(terms: Wanted, settings: Settings, queue: Queue) -> float:
    """Seconds for which a lease can be promised there."""
    times = margins(0, terms.nodes, settings)
    whole = inf if queue.longest is None else queue.quantum * (queue.longest // queue.quantum)
    return whole - (PILOT + times.before + times.after + settings.margin)
