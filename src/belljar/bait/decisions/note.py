"""What the baits of a job's hosts tell each other: the job's machines by bait, in a note at the job that only administrators can write."""

from __future__ import annotations

import re
from collections.abc import Iterable

from belljar.bait import Pairs
from belljar.records import dataclass

LONGEST = 800  # letters that name the parts: a note has an end
NAME, MACHINE = r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", r"[0-9a-f]{12}"
FORM = re.compile(rf"belljar: parts((?: {NAME}={MACHINE})+)(?: failed=({MACHINE}) (.*))?")


@dataclass(frozen=True)
class Parts:
    """Bait and machine, each; that of the leader comes first. *failed*: a machine of which nothing will come, and *why*."""

    machines: Pairs = ()
    failed: str = ""
    why: str = ""

    def of(self, names: Iterable[str]) -> tuple[str, ...]:
        """The machines that these baits are to make."""
        known = frozenset(names)
        return tuple(machine for name, machine in self.machines if name in known)


def read(note: str) -> Parts:
    """No machines in it: it is no such note."""
    match = FORM.fullmatch(note)
    if match is None:
        return Parts()
    machines = tuple((name, machine) for name, _, machine in (one.partition("=") for one in match[1].split()))
    return Parts(machines, match[2] or "", match[3] or "")


def write(parts: Parts) -> str:
    """Without the word that the batch system's side puts before every note of ours."""
    words = " ".join(f"{name}={machine}" for name, machine in parts.machines)
    return f"parts {words}" + (f" failed={parts.failed} {parts.why}" if parts.failed else "")


def is_too_long(names: Iterable[str]) -> bool:
    return sum(len(name) + 14 for name in names) > LONGEST
