"""Jobs of our own: each starts one command on each of its nodes, runs once, and is found again by its name. Their limit is the backstop
of the pilot's own clock. Each system that can do it has pilots.py, with `PILOTS`. Nothing here runs a command.
"""

from __future__ import annotations

import os
import pwd
import re
from collections.abc import Sequence
from typing import Protocol

from belljar.pool.terms import Command, JobId, JobState
from belljar.records import dataclass

NAME = re.compile(r"belljar-r-[0-9a-f]{17}-[0-9]{1,4}")


@dataclass(frozen=True)
class PilotJob:
    """What is asked for. Sizes are of each node's share, in bytes."""

    name: str
    command: tuple[str, ...]
    nodes: int
    cpus: int
    memory: int
    seconds: float  # that the system gives it
    owner: str  # for whom it is: noted at the job
    output: str  # path of a file
    queue: str = ""
    account: str = ""
    shunned: tuple[str, ...] = ()  # nodes that it is not to have
    environment: str = ""  # the parallel environment, where a system needs one for more than a processor


@dataclass(frozen=True)
class NamedJob:
    """A job of ours, found by its name."""

    name: str
    id: JobId
    state: JobState
    reason: str = ""
    expected: float = 0.0  # when the system thinks that it starts; 0: it does not say


def account() -> str:
    """Whose jobs ours are. Somebody else's may have any name."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())


def id_printed(printed: bytes, pattern: str) -> JobId:
    """The id of a job, alone. Raises ValueError."""
    job = printed.decode("ascii", "replace").strip()
    if re.fullmatch(pattern, job) is None:
        raise ValueError(f"the batch system printed {job[:60]!r} where a job's id is expected")
    return job


def longest_of(limits: Sequence[float | None]) -> float | None:
    """None: no limit is known, or one of the queues has none."""
    return None if None in limits else max((limit for limit in limits if limit is not None), default=None)


class Pilots(Protocol):
    """One system's."""

    quantum: int  # seconds: a job's limit is a multiple of it
    notice: float  # seconds between TERM, or its like, and KILL, where the site set no other time
    limits: Command  # tells what queues allow

    def submit(self, job: PilotJob, script: str) -> Command:
        """*script*: path of a file with `script(job)`. Raises ValueError for what the system cannot be asked."""

    def script(self, job: PilotJob) -> bytes: ...
    def submitted(self, printed: bytes) -> JobId:
        """Raises ValueError."""

    def cancel(self, job: JobId) -> Command: ...
    def extend(self, job: JobId, seconds: float) -> Command:
        """A running job's limit is this now. Raises ValueError where a system cannot do that."""

    def longest(self, printed: bytes, queue: str) -> float | None:
        """Seconds that a job may have in this queue ("": that of a job which names none). None: as long as it likes, or it is not told."""

    def query(self) -> Command:
        """The one command that tells of all jobs of this account, or of everybody's."""

    def jobs(self, printed: bytes) -> tuple[NamedJob, ...]:
        """Those of this account with names of ours; two of one name where there are two. Raises ValueError for any other answer."""
