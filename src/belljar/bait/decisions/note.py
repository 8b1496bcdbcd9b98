"""What the baits of a job's hosts tell each other: the job's machines by bait, in a note at the job that only administrators can write."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from belljar.bait import Pairs
from belljar.records import dataclass

LONGEST = 800  # letters that name the parts: a note has an end
NAME, MACHINE = r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", r"[0-9a-f]{12}"
FORM = re.compile(rf"belljar: parts((?: {NAME}={MACHINE})+)(?: given=(\d+)/(\d+))?(?: failed=({MACHINE}) (.*))?")


@dataclass(frozen=True)
class Parts:
    """Bait and machine, each, the leader's first. *failed*: a machine that will not come, and *why*. *given*: see `Entry`."""

    machines: Pairs = ()
    failed: str = ""
    why: str = ""
    given: tuple[int, int] = (0, 0)

    def of(self, names: Iterable[str]) -> tuple[str, ...]:
        """The machines that these baits are to make."""
        known = frozenset(names)
        return tuple(machine for name, machine in self.machines if name in known)


def read(note: str) -> Parts:
    """Without machines where it is another note."""
    match = FORM.fullmatch(note)
    if match is None:
        return Parts()
    machines = tuple((name, machine) for name, _, machine in (part.partition("=") for part in match[1].split()))
    return Parts(machines, match[4] or "", match[5] or "", (int(match[2] or 0), int(match[3] or 0)))


def write(parts: Parts) -> str:
    """Without the word that the batch system's side puts before every note of ours."""
    words = " ".join(f"{name}={machine}" for name, machine in parts.machines)
    words += " given={}/{}".format(*parts.given) if any(parts.given) else ""
    return f"parts {words}" + (f" failed={parts.failed} {parts.why}" if parts.failed else "")


def too_long(names: Collection[str]) -> str:
    """Why no note can name machines of all these baits; "" where one can."""
    is_fine = sum(len(name) + 14 for name in names) <= LONGEST
    return "" if is_fine else f"{len(names)} nodes: more than its note can name"
