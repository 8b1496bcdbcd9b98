"""What all machines add up to, for Prometheus: over the network, or in a file for node_exporter's textfile collector.

Counters count every row of the ledgers, so they go on where they stood after a restart. Needs prometheus_client."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from belljar.errors import PositionLost
from belljar.host.files import write_whole
from belljar.host.locks import locked
from belljar.model import Cause, OutcomeClass
from belljar.monitor.outcomes import BEFORE, PATHS, Outcomes
from belljar.records import dataclass
from belljar.service import kept
from belljar.service.metrics import Metric, registry

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

BUCKETS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)  # seconds
PATIENCE = 60.0  # seconds for another process that writes the same file
METRICS = {
    "machines_ended": ("Machines that ended", ("node", "mode", "class", "cause")),
    "machine_payload_seconds": ("What payloads took themselves", ("node",)),
    "machine_overhead_seconds": ("What machines took beside their payloads' own time", ("node",)),
    "ledger_rows_unreadable": ("Rows of ledgers that were left out", ()),
    "last_end_timestamp_seconds": ("When the latest machine of a node ended", ("node",)),  # a gauge
    "machine_start_seconds": ("Each phase before the payload", ("node", "phase", "path")),  # these are histograms
    "machine_ready_seconds": ("From the request to the payload's first moment", ("node", "path")),
}
LAST, HISTOGRAMS = "last_end_timestamp_seconds", ("machine_start_seconds", "machine_ready_seconds")
# A user may write anything into the own ledger, and each word would be a series for ever.
KNOWN = {*(cause.value for cause in Cause), *(klass.value for klass in OutcomeClass), *PATHS}
MODES = {"cli", "api", "slurm", "gridengine", "htcondor", "openpbs", "torque", "lsf", "vacuum", "bait", "node", "lease"}


@dataclass(frozen=True)
class Kept:
    """A tally, and where its ledgers were read up to."""

    positions: dict[str, str]
    values: dict[str, tuple[tuple[tuple[str, ...], tuple[float, ...]], ...]]
    buckets: tuple[float, ...] = BUCKETS


class Tally:
    """What the machines of these ledgers add up to. *outcomes*: a reader that begins at such positions. *before*: go on from there."""

    def __init__(self, outcomes: Callable[[Mapping[str, str]], Outcomes], before: Kept | None = None) -> None:
        self._reader, self._turn = outcomes, threading.Lock()
        self._begin(before if before and before.buckets == BUCKETS else Kept({}, {}))

    def _begin(self, before: Kept) -> None:
        self._outcomes = self._reader(before.positions)
        self.values = {name: {of: list(numbers) for of, numbers in before.values.get(name, ())} for name in METRICS}

    def read(self) -> None:
        """Add what is new. Where a ledger was cut, all of them are read anew: Prometheus knows counters that begin again."""
        with self._turn:
            try:
                self._add(self._outcomes)
            except PositionLost:
                self._begin(Kept({}, {}))
                self._add(self._outcomes)

    def kept(self) -> Kept:
        """All of it, to be handed to a later one."""
        values = {name: tuple((of, tuple(numbers)) for of, numbers in by.items()) for name, by in self.values.items()}
        return Kept(self._outcomes.positions, values)

    def collect(self) -> Iterator[Any]:
        """All metrics, as prometheus_client takes them, with what is new by now."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        self.read()
        kinds: dict[str, Any] = {LAST: GaugeMetricFamily} | dict.fromkeys(HISTOGRAMS, HistogramMetricFamily)
        for name, (text, labels) in METRICS.items():
            family = kinds.get(name, CounterMetricFamily)(f"belljar_{name}", text, labels=labels)
            for of, (*counts, number) in list(self.values[name].items()):
                buckets = zip([*map(str, BUCKETS), "+Inf"], accumulate(counts), strict=True) if counts else ()
                family.add_metric(of, *([list(buckets), number] if counts else [number]))
            yield family

    def _add(self, outcomes: Outcomes) -> None:
        before = outcomes.unreadable
        for ended in outcomes.new():
            node, path = (ended.node,), _known(ended.path)
            mode = ended.requester.partition(":")[0]
            words = mode if mode in MODES else "other", _known(ended.klass), _known(ended.cause)
            self._count("machines_ended", (*node, *words))
            self._count("machine_payload_seconds", node, ended.run)
            self._count("machine_overhead_seconds", node, ended.overhead)
            self.values[LAST][node] = [max(ended.ended, *self.values[LAST].get(node, [0.0]))]
            for phase in (phase for phase in BEFORE if ended.path and phase in ended.phases):
                self._observe("machine_start_seconds", (*node, phase, path), ended.phases[phase])
            if ended.path and "run" in ended.phases:
                self._observe("machine_ready_seconds", (*node, path), ended.until_ready)
        self._count("ledger_rows_unreadable", (), outcomes.unreadable - before)

    def _count(self, name: str, labels: tuple[str, ...], by: float = 1.0) -> None:
        self.values[name].setdefault(labels, [0.0])[0] += by

    def _observe(self, name: str, labels: tuple[str, ...], seconds: float) -> None:
        numbers = self.values[name].setdefault(labels, [0.0] * (len(BUCKETS) + 2))  # one above them all, and the sum
        numbers[bisect_left(BUCKETS, seconds)] += 1
        numbers[-1] += seconds


def _known(word: str) -> str:
    return word if word in KNOWN else "other"


def collected(tally: Tally, host: Callable[[], Iterable[Metric]]) -> CollectorRegistry:
    """For prometheus_client's own apps, such as `make_asgi_app(registry)`. *host*: what this host has now. Raises CommandMissing
    without the library."""
    made = registry(host)
    made.register(tally)
    return made


def write_textfile(
    path: Path, state: Path, outcomes: Callable[[Mapping[str, str]], Outcomes], host: Callable[[], Iterable[Metric]]
) -> None:
    """Put all metrics into this file, for everybody to read, whole or not at all. *state*: a file with what the next call goes on
    from; without it, or where it is damaged, all is read anew. Raises CommandMissing, NoSpace, LockTimeout."""
    with locked(state.with_name(f"{state.name}.lock"), timeout=PATIENCE, what="write metrics"):
        tally = Tally(outcomes, kept.read(state, Kept))
        made = collected(tally, host)
        from prometheus_client import generate_latest

        write_whole(path, generate_latest(made), mode=0o644)
        kept.keep(state, tally.kept())
