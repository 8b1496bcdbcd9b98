"""What a factory writes down of itself: its status, for checks and for people; what it must know after a restart; its decisions.

Status and memory are files that are written whole or not at all. All of it may be removed: machines are found by their folders."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from belljar.errors import BelljarError
from belljar.model import to_json
from belljar.records import dataclass, field
from belljar.service.kept import Lines
from belljar.vacuum.decisions.backoff import TypePast
from belljar.vacuum.factory.keeper import Living

STATUS, MEMORY, DECISIONS = "status.json", "memory.json", "decisions"
LOST = 10.0  # cycles without a sign of life, after which no factory runs
LARGEST_DECISIONS = 1 << 26  # bytes of a file of decisions; the one before it is kept
# What makes another decision: numbers that change by themselves do not.
ESSENCE = ("machinetype", "reason", "detail", "started", "failures")


@dataclass(frozen=True)
class Status:
    """A factory at the end of its last cycle. Moments are seconds since the epoch."""

    space: str
    factory: str
    pid: int
    started: float
    cycle: float  # seconds between two cycles
    cycled: float  # the end of the last one
    took: float = 0.0  # seconds it took
    machines: int = 0
    processors: int = 0  # of its machines
    most_processors: int = 0
    hs06: float = 0.0
    draining: bool = False
    silent: tuple[str, ...] = ()  # factories that did not answer
    error: str = ""  # why types wait on this host: a machine could not be started, or the host ended it
    troubles: dict[str, str] = field(default_factory=dict)  # what goes wrong just now, and why, by what it is about
    settings_error: str = ""  # why the settings files are not obeyed as they are


@dataclass(frozen=True)
class Finished:
    """The machine of a type that ended last. Moments are whole seconds since the epoch."""

    machine: str = ""  # name of its slot
    at: int = 0
    message: str = ""
    proved: int = 0  # when the latest machine began that found work
    aborted: int = 0  # when the latest one ended that was aborted


@dataclass(frozen=True)
class Memory:
    """What a factory must not forget."""

    position: str = ""  # in the ledger: what is behind it was not seen
    finished: dict[str, Finished] = field(default_factory=dict)  # by type
    past: dict[str, TypePast] = field(default_factory=dict)  # by type
    pending: tuple[Living, ...] = ()  # were asked for, and may not show yet


class Decisions:
    """The journal of decisions: a line for each that differs from the one before. `explain` reads it."""

    def __init__(self, folder: Path) -> None:
        self._lines = Lines(folder, DECISIONS, LARGEST_DECISIONS)
        self._last: Any = None

    def tell(self, now: float, decision: dict[str, Any]) -> None:
        """One that is as the last one is not written again. A disk that is full costs a line, and nothing else."""
        plain = to_json(decision)
        essence = [tuple(verdict.get(key) for key in ESSENCE) for verdict in plain.get("verdicts", [])]
        if essence != self._last:
            with suppress(OSError, BelljarError):
                self._lines.add({"time": now, **plain})
                self._last = essence


def decision_at(folder: Path, moment: float) -> dict[str, Any] | None:
    """The last decision that was written before this moment."""
    last = None
    for line in Lines(folder, DECISIONS, LARGEST_DECISIONS):
        with suppress(ValueError):
            decision = json.loads(line)
            if isinstance(decision, dict) and isinstance(decision.get("time"), (int, float)):
                if decision["time"] > moment:
                    break
                last = decision
    return last
