"""How a factory is seen by others: a check as Nagios and Icinga want it, and metrics for Prometheus. Both are told by its status."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from enum import IntEnum
from typing import TYPE_CHECKING

from belljar.service.metrics import Metric
from belljar.vacuum import TypeStatus
from belljar.vacuum.factory.state import LOST, Status

if TYPE_CHECKING:
    from belljar.vacuum.factory.factory import Factory

LATE = 3.0  # cycles without a sign of life: a warning; after LOST, critical
ONLY_GROW = ("machines_started", "machines_ended", "packets")
LONGEST = 200  # characters of an error in a check's line


class Level(IntEnum):
    """Exit codes of a check."""

    OK = 0
    WARNING = 1
    CRITICAL = 2
    UNKNOWN = 3


def check(status: Status | None, now: float) -> tuple[Level, str]:
    """The state of a factory, and one line about it with its performance data."""
    if status is None:
        return Level.CRITICAL, "CRITICAL: no factory has written its status here; is `belljar vacuum run` started?"
    age = max(now - status.cycled, 0.0)
    silent = Level.CRITICAL if age > LOST * status.cycle else Level.WARNING
    troubles = (
        (age > LATE * status.cycle, silent, f"no sign of life for {age:.0f} s"),
        (status.settings_error, Level.WARNING, f"settings are not obeyed: {_line(status.settings_error)}"),
        (status.error, Level.WARNING, f"machines fail on this host: {_line(status.error)}"),
        *((True, Level.WARNING, _line(f"{about}: {why}")) for about, why in status.troubles.items()),
        (True, Level.OK, "draining" if status.draining else "running"),
    )
    level, text = next((level, text) for is_so, level, text in troubles if is_so)
    data = (
        f"processors={status.processors};;;0;{status.most_processors} machines={status.machines};;;0 "
        f"age={age:.0f}s;{LATE * status.cycle:.0f};{LOST * status.cycle:.0f};0 cycle={status.took:.3f}s;;;0 "
        f"silent={len(status.silent)};;;0"
    )
    counts = f"{status.machines} machines, {status.processors} of {status.most_processors} processors"
    return level, f"{level.name}: {text}; {counts} | {data}"


def _line(text: str) -> str:
    """One line without what performance data begin with."""
    return " ".join(text.replace("|", "/").split())[:LONGEST]


def metrics(factory: Factory, types: Iterable[TypeStatus], packets: Mapping[str, int]) -> Iterator[Metric]:
    """Each metric with its values, also for another thread. Counters count from the start of the factory."""
    status, verdicts = factory.status, factory.decision.verdicts if factory.decision else ()
    words = {(verdict.machinetype, verdict.reason.value): 1 for verdict in verdicts}
    for name, text, labels, values in (
        ("processors", "Processors that machines may have", "", status.most_processors),
        ("processors_used", "Processors of living machines", "", status.processors),
        ("machines", "Living machines", "", status.machines),
        ("hs06", "HS06 of living machines", "", status.hs06),
        ("last_cycle_timestamp_seconds", "When the last cycle ended", "", status.cycled),
        ("cycle_duration_seconds", "How long the last cycle took", "", status.took),
        ("draining", "1: nothing is started", "", status.draining),
        ("silent_factories", "Factories that did not answer the last time", "", len(status.silent)),
        ("start_failing", "1: a type failed on this host, and waits here", "", bool(status.error)),
        ("settings_refused", "1: the settings files are not obeyed as they are", "", bool(status.settings_error)),
        ("type_machines", "Living machines of a type on this factory", "machinetype", {kind.machinetype: kind.running_machines for kind in types}),
        ("type_hs06", "HS06 of the living machines of a type on this factory", "machinetype", {kind.machinetype: kind.running_hs06 for kind in types}),
        ("type_share", "Target share of a type", "machinetype", {kind.name: kind.share for kind in factory.space.types}),
        ("type_verdict", "1 for how a type stands", "machinetype verdict", words),
        ("machines_started", "Machines started", "machinetype", dict(factory.started)),
        ("machines_ended", "Machines ended, by their message", "machinetype message", dict(factory.ended)),
        ("trouble", "1 for what goes wrong just now; the log tells why", "about", dict.fromkeys(list(factory.troubles.now), 1)),
        ("packets", "Packets received, by what became of them", "result", dict(packets)),
    ):  # fmt: skip
        by = values if isinstance(values, Mapping) else {(): values}
        series = {(status.space, *((key,) if isinstance(key, str) else key)): float(value) for key, value in by.items()}
        yield Metric(f"belljar_vacuum_{name}", text, ("space", *labels.split()), series, name in ONLY_GROW)
