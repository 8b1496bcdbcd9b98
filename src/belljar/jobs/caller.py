"""What this process is to the payload of a machine that it keeps: its streams; and what it does before."""

from __future__ import annotations

import os
import resource
import stat
from typing import TYPE_CHECKING

from belljar.host.descriptors import CLOSED
from belljar.model import StdinKind

if TYPE_CHECKING:
    from belljar.jobs import House

START_PATIENCE = 2.0  # seconds a start spends on the dead, at most
SMALL_STACK = 2 << 20  # bytes, for threads of QEMU where a limit counts them


def kind(number: int) -> StdinKind:
    """What the caller's descriptor is, as far as the payload can tell the difference."""
    if number in CLOSED:
        return StdinKind.CLOSED
    facts = os.fstat(number)
    if stat.S_ISCHR(facts.st_mode) and facts.st_rdev == os.makedev(1, 3):
        return StdinKind.NULL
    return StdinKind.STDOUT if number == 2 and is_stdout(facts) else StdinKind.STREAM


def is_stdout(facts: os.stat_result) -> bool:
    """Does descriptor 1 lead to the same file, pipe or terminal?"""
    if 1 in CLOSED:
        return False
    other = os.fstat(1)
    return (facts.st_dev, facts.st_ino) == (other.st_dev, other.st_ino)


def finish_the_dead(house: House) -> None:
    """What dead supervisors left is cleared away at every start; what cannot be is no reason not to start."""
    stuck = {one.machine for one in house.reaper.quick(START_PATIENCE) if one.error}
    if stuck:
        from belljar.jobs.words import complain

        complain(f"what is left of {', '.join(sorted(stuck)[:3])} cannot be cleared away; see `belljar reap`", "")


def widen_limits() -> None:
    """The caller's soft limits are the payload's, inside. We and QEMU, with its large files, take what we may have."""
    for limit in (resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE, resource.RLIMIT_DATA, resource.RLIMIT_AS):
        _, hard = resource.getrlimit(limit)
        resource.setrlimit(limit, (hard, hard))
    if resource.getrlimit(resource.RLIMIT_DATA)[1] != resource.RLIM_INFINITY:  # which counts the stack of each thread
        soft, hard = resource.getrlimit(resource.RLIMIT_STACK)
        if soft == resource.RLIM_INFINITY or soft > SMALL_STACK:
            resource.setrlimit(resource.RLIMIT_STACK, (SMALL_STACK, hard))
