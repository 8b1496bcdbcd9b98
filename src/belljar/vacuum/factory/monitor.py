"""How a factory is seen by others: a check as Nagios and Icinga want it, and metrics for Prometheus. Both are told by its status."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from belljar.errors import CommandMissing
from belljar.records import dataclass, field
from belljar.vacuum import TypeStatus
from belljar.vacuum.factory.state import Status

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

LATE, LOST = 3.0, 10.0  # cycles without a sign of life: a warning, then critical
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
    found = [
        (Level.CRITICAL, f"no sign of life for {age:.0f} s") if age > LOST * status.cycle else None,
        (Level.WARNING, f"no sign of life for {age:.0f} s") if age > LATE * status.cycle else None,
        (Level.WARNING, f"settings are not obeyed: {_line(status.settings_error)}") if status.settings_error else None,
        (Level.WARNING, f"no machine could be started: {_line(status.error)}") if status.error else None,
    ]
    level, text = next(
        (one for one in found if one is not None), (Level.OK, "draining" if status.draining else "running")
    )
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


@dataclass(frozen=True)
class Snapshot:
    """What metrics tell. Counters count from the start of the factory."""

    status: Status
    types: tuple[TypeStatus, ...] = ()
    shares: Mapping[str, float] = field(default_factory=dict)  # by type
    verdicts: Mapping[str, str] = field(default_factory=dict)  # by type: why it is started, or not
    started: Mapping[str, int] = field(default_factory=dict)  # machines, by type
    ended: Mapping[tuple[str, str], int] = field(
        default_factory=dict
    )  # by type and class of the message: "200", "none"
    packets: Mapping[str, int] = field(default_factory=dict)  # by what became of them


def registry(snapshot: Callable[[], Snapshot]) -> CollectorRegistry:
    """Metrics that ask for a snapshot whenever they are read. Raises CommandMissing without the library."""
    try:
        from prometheus_client import CollectorRegistry
    except ImportError as exc:
        raise CommandMissing(
            "metrics: the library prometheus_client is not installed", hint="`pip install belljar[metrics]`"
        ) from exc

    class Collector:
        def collect(self) -> Iterator[Any]:
            return families(snapshot())

    made = CollectorRegistry()
    made.register(Collector())
    return made


def families(now: Snapshot) -> Iterator[Any]:
    """Each metric with its values."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    status, space = now.status, [now.status.space]
    plain = {
        "processors": ("Processors that machines may have", status.most_processors),
        "processors_used": ("Processors of living machines", status.processors),
        "machines": ("Living machines", status.machines),
        "hs06": ("HS06 of living machines", status.hs06),
        "last_cycle_timestamp_seconds": ("When the last cycle ended", status.cycled),
        "cycle_duration_seconds": ("How long the last cycle took", status.took),
        "draining": ("1: nothing is started", int(status.draining)),
        "silent_factories": ("Factories that did not answer the last time", len(status.silent)),
        "start_failing": ("1: the last machine could not be started", int(bool(status.error))),
        "settings_refused": ("1: the settings files are not obeyed as they are", int(bool(status.settings_error))),
    }
    for name, (text, value) in plain.items():
        gauge = GaugeMetricFamily(f"belljar_vacuum_{name}", text, labels=["space"])
        gauge.add_metric(space, value)
        yield gauge
    for name, text, fact in (
        ("type_machines", "Living machines of a type on this factory", "running_machines"),
        ("type_hs06", "HS06 of the living machines of a type on this factory", "running_hs06"),
    ):
        gauge = GaugeMetricFamily(f"belljar_vacuum_{name}", text, labels=["space", "machinetype"])
        for one in now.types:
            gauge.add_metric([*space, one.machinetype], getattr(one, fact))
        yield gauge
    share = GaugeMetricFamily("belljar_vacuum_type_share", "Target share of a type", labels=["space", "machinetype"])
    for machinetype, part in now.shares.items():
        share.add_metric([*space, machinetype], part)
    yield share
    verdict = GaugeMetricFamily(
        "belljar_vacuum_type_verdict", "1 for how a type stands", labels=["space", "machinetype", "verdict"]
    )
    for machinetype, word in now.verdicts.items():
        verdict.add_metric([*space, machinetype, word], 1)
    yield verdict
    started = CounterMetricFamily(
        "belljar_vacuum_machines_started", "Machines started", labels=["space", "machinetype"]
    )
    for machinetype, count in now.started.items():
        started.add_metric([*space, machinetype], count)
    yield started
    ended = CounterMetricFamily(
        "belljar_vacuum_machines_ended", "Machines ended, by their message", labels=["space", "machinetype", "message"]
    )
    for (machinetype, message), count in now.ended.items():
        ended.add_metric([*space, machinetype, message], count)
    yield ended
    packets = CounterMetricFamily(
        "belljar_vacuum_packets", "Packets received, by what became of them", labels=["space", "result"]
    )
    for result, count in now.packets.items():
        packets.add_metric([*space, result], count)
    yield packets
