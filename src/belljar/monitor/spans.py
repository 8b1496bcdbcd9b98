"""Ended machines as OpenTelemetry traces: a span for the machine, one for each of its phases. Needs opentelemetry's SDK and exporter.

Ids are made of the machine's, so a machine that is sent twice is the same trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from hashlib import sha256
from itertools import islice
from typing import Any

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanContext, Status, StatusCode, TraceFlags

from belljar.errors import HostError
from belljar.monitor import PARTS, Machine, Outcomes

BATCH = 60  # machines, each with about eight spans
# Fields that are attributes, too.
TEXTS = ("cause", "image", "path", "error", "context", "accelerator", "requester", "name", "user")


def send_new(outcomes: Outcomes, kept: Callable[[], object]) -> int:
    """Send the machines behind the positions to where the variables OTEL_EXPORTER_OTLP_... say, by HTTP; returns how many. *kept* is
    called whenever some have been taken. Where the collector does not take them, the positions stay in front of them. Raises HostError,
    PositionLost."""
    exporter, machines, taken, rows = OTLPSpanExporter(), 0, dict(outcomes.positions), outcomes.new()
    while batch := list(islice(rows, BATCH)):
        if exporter.export([span for ended in batch for span in spans_of(ended)]).value != 0:
            outcomes.positions = taken
            hint = "See the lines above, and OTEL_EXPORTER_OTLP_ENDPOINT. They are sent again."
            raise HostError(f"{len(batch)} machines were not taken by the collector", hint=hint)
        machines, taken = machines + len(batch), dict(outcomes.positions)
        kept()
    kept()
    return machines


def spans_of(ended: Machine) -> Iterator[ReadableSpan]:
    """The machine's own span first."""

    def context(name: str) -> SpanContext:
        return SpanContext(trace, _number(f"{trace}/{name}", 8), is_remote=False, trace_flags=TraceFlags(1))

    trace, resource = _number(f"{ended.node}/{ended.id}/{ended.started}", 16), _resource(ended.node)
    values = {"machine.id": ended.id, "class": ended.klass, "cpus": ended.cpus, "memory": ended.memory}
    values |= {name: getattr(ended, name) for name in TEXTS} | {f"label.{name}": text for name, text in ended.labels}
    values |= {f"seconds.{name}": ended.phases[name] for name in PARTS if name in ended.phases}
    attributes: dict[str, Any] = {f"belljar.{name}": value for name, value in values.items() if value != ""}
    status = Status(StatusCode.ERROR, ended.reason) if ended.has_failed else Status()
    yield ReadableSpan(
        "machine", context("machine"), None, resource, attributes, status=status,
        start_time=_nano(ended.started), end_time=_nano(max(ended.ended, ended.started)),
    )  # fmt: skip
    for name, begin, end in ended.timeline():
        begins, ends = _nano(begin), _nano(end)
        yield ReadableSpan(name, context(name), context("machine"), resource, start_time=begins, end_time=ends)


@lru_cache(maxsize=1000)
def _resource(node: str) -> Resource:
    """Whose spans these are; OTEL_RESOURCE_ATTRIBUTES and OTEL_SERVICE_NAME have the last word."""
    return Resource({SERVICE_NAME: "belljar", "host.name": node}).merge(OTELResourceDetector().detect())


def _number(text: str, size: int) -> int:
    return int.from_bytes(sha256(text.encode(errors="replace")).digest()[:size], "big") or 1


def _nano(moment: float) -> int:
    return int(min(moment, 1e10) * 1e9)  # a row may tell more than the 64 bits there are
