"""Numbers for Prometheus, read anew whenever it asks. Needs prometheus_client."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from belljar.errors import CommandMissing, HostError
from belljar.records import dataclass

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry


@dataclass(frozen=True)
class Metric:
    """One metric with its values, by those of its labels."""

    name: str
    text: str
    labels: tuple[str, ...]
    values: Mapping[tuple[str, ...], float]
    only_grows: bool = False


def registry(read: Callable[[], Iterable[Metric]]) -> CollectorRegistry:
    """Raises CommandMissing without the library."""
    try:
        from prometheus_client import CollectorRegistry
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
    except ImportError as exc:
        hint = "In a checkout: `make install EXTRAS=monitor`, or `pip install '.[monitor]'`."
        raise CommandMissing("metrics: the library prometheus_client is not installed", hint=hint) from exc

    class Collector:
        def collect(self) -> Iterator[Any]:
            for metric in read():
                family: Any = CounterMetricFamily if metric.only_grows else GaugeMetricFamily
                made = family(metric.name, metric.text, labels=metric.labels)
                for labels, value in metric.values.items():
                    made.add_metric(labels, value)
                yield made

    collected = CollectorRegistry()
    collected.register(Collector())
    return collected


def serve(address: str, port: int, read: Callable[[], Iterable[Metric]]) -> None:
    """Answer at this address, in a thread, until the process ends. Raises CommandMissing, HostError."""
    collected = registry(read)
    from prometheus_client import start_http_server

    try:
        start_http_server(port, address, collected)
    except OSError as exc:
        raise HostError(f"metrics at {address}:{port}: {exc.strerror}", hint="Give another --metrics.") from exc
