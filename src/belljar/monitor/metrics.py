"""What all machines add up to, for Prometheus: over the network, or in a file for node_exporter's textfile collector.

Counters count every row of the ledgers, so they go on where they stood after a restart. Needs prometheus_client."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from belljar.errors import PositionLost
from belljar.host.files import write_whole
from belljar.host.locks import locked
from belljar.model import Cause, OutcomeClass
from belljar.monitor import BEFORE, PATHS, Machine, Outcomes
from belljar.records import dataclass, field
from belljar.service import kept
from belljar.service.metrics import Metric, registry

BUCKETS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)  # seconds
LIMITS = [*map(str, BUCKETS), "+Inf"]
PATIENCE = 60.0  # seconds for another process that writes the same file
COUNTER, GAUGE, HISTOGRAM = CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
# A user may write anything into the own ledger, and each word would be a series for ever.
MODES = {"cli", "api", "slurm", "gridengine", "htcondor", "openpbs", "torque", "lsf", "vacuum", "bait", "node", "lease"}
KNOWN = {*(cause.value for cause in Cause), *(klass.value for klass in OutcomeClass), *PATHS}
LAST, UNREADABLE = "last_end_timestamp_seconds", "ledger_rows_unreadable"
METRICS: Mapping[str, tuple[Any, str, tuple[str, ...]]] = {
    "machines_ended": (COUNTER, "Machines that ended", ("node", "mode", "class", "cause")),
    "machine_payload_seconds": (COUNTER, "What payloads took themselves", ("node",)),
    "machine_overhead_seconds": (COUNTER, "What machines took beside their payloads' own time", ("node",)),
    UNREADABLE: (COUNTER, "Rows of ledgers that were left out", ()),
    LAST: (GAUGE, "When the latest machine of a node ended", ("node",)),
    "machine_start_seconds": (HISTOGRAM, "Each phase before the payload", ("node", "phase", "path")),
    "machine_ready_seconds": (HISTOGRAM, "From the request to the payload's first moment", ("node", "path")),
}


def numbers_of(ended: Machine) -> Iterator[tuple[tuple[str, ...], float]]:
    """What a machine tells: each a metric with the values of its labels, and a number to add or to observe."""
    node, path, mode, sums = ended.node, _known(ended.path), ended.requester.partition(":")[0], ended.sums()
    yield ("machines_ended", node, _known(mode, MODES), _known(ended.klass), _known(ended.cause)), 1
    yield ("machine_payload_seconds", node), sums["payload"]
    yield ("machine_overhead_seconds", node), sums["overhead"]
    yield (LAST, node), ended.ended
    for phase in BEFORE if ended.path else ():
        if phase in ended.phases:
            yield ("machine_start_seconds", node, phase, path), ended.phases[phase]
    if ended.path and "run" in ended.phases:
        yield ("machine_ready_seconds", node, path), ended.until_ready


def _known(word: str, words: Collection[str] = KNOWN) -> str:
    return word if word in words else "other"


@dataclass(frozen=True)
class Kept:
    """A tally, and where its ledgers were read up to."""

    positions: dict[str, str] = field(default_factory=dict)
    values: tuple[tuple[tuple[str, ...], tuple[float, ...]], ...] = ()
    buckets: tuple[float, ...] = BUCKETS


class Tally:
    """What the machines of these ledgers add up to. *outcomes*: a reader that begins at such positions. *before*: go on from there."""

    def __init__(self, outcomes: Callable[[Mapping[str, str]], Outcomes], before: Kept | None = None) -> None:
        self._reader = outcomes
        self._begin(before if before and before.buckets == BUCKETS else Kept())

    def _begin(self, before: Kept) -> None:
        self._outcomes = self._reader(before.positions)
        # By metric and labels; of a histogram those in each bucket, then their sum.
        self._values = {key: list(numbers) for key, numbers in before.values}

    def read(self) -> None:
        """Add what is new. Where a ledger was cut, all of them are read anew: Prometheus knows counters that begin again. One call at
        a time."""
        before = self._outcomes.unreadable
        try:
            for ended in self._outcomes.new():
                for key, number in numbers_of(ended):
                    self._add(key, number)
        except PositionLost:
            self._begin(Kept())
            return self.read()
        self._add((UNREADABLE,), self._outcomes.unreadable - before)

    def _add(self, key: tuple[str, ...], number: float) -> None:
        kind = METRICS[key[0]][0]
        numbers = self._values.setdefault(key, [0.0] * (len(LIMITS) + 1 if kind == HISTOGRAM else 1))
        numbers[-1] = max(numbers[-1], number) if kind == GAUGE else numbers[-1] + number
        if kind == HISTOGRAM:
            numbers[bisect_left(BUCKETS, number)] += 1

    def kept(self) -> Kept:
        """All of it, to be handed to a later one."""
        return Kept(self._outcomes.positions, tuple((key, tuple(numbers)) for key, numbers in self._values.items()))

    def collect(self) -> Iterable[Any]:
        """All metrics, as prometheus_client takes them, with what is new by now."""
        self.read()
        families = {
            name: kind(f"belljar_{name}", text, labels=labels) for name, (kind, text, labels) in METRICS.items()
        }
        for (name, *labels), (*counts, number) in self._values.items():
            buckets = [list(zip(LIMITS, accumulate(counts), strict=True))] if counts else []
            families[name].add_metric(labels, *buckets, number)
        return families.values()


def collected(tally: Tally, host: Callable[[], Iterable[Metric]]) -> CollectorRegistry:
    """For prometheus_client. *host*: what this host has now."""
    made = registry(host)
    made.register(tally)
    return made


def write_textfile(
    path: Path, state: Path, outcomes: Callable[[Mapping[str, str]], Outcomes], host: Callable[[], Iterable[Metric]]
) -> None:
    """Put all metrics into this file, for everybody to read, whole or not at all. *state*: a file with what the next call goes on
    from; without it, or where it is damaged, all is read anew. Raises NoSpace, LockTimeout."""
    with locked(state.with_name(f"{state.name}.lock"), timeout=PATIENCE, what="write metrics"):
        tally = Tally(outcomes, kept.read(state, Kept))
        write_whole(path, generate_latest(collected(tally, host)), mode=0o644)
        kept.keep(state, tally.kept())
