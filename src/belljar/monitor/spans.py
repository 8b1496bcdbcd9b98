"""Ended machines as OpenTelemetry traces: a span for the machine, one for each of its phases. Needs opentelemetry's SDK and exporter.

Ids are made of the machine's, so a machine that is sent twice is the same trace. The ledger has how long each phase took: those up
to the payload's end are laid end to end from the machine's start, the last two up to its end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from functools import lru_cache
from hashlib import sha256
from typing import TYPE_CHECKING

from belljar.errors import CommandMissing, HostError
from belljar.monitor.outcomes import PHASES, WITHIN, Ended, Outcomes

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan

BATCH = 500  # spans
AT_THE_END = ("stop", "clean")


class Exporter:
    """Sends spans to where the variables OTEL_EXPORTER_OTLP_... say, by HTTP."""

    def __init__(self, kept: Callable[[], object]) -> None:
        """*kept* is called after what was read so far has been taken. Raises CommandMissing."""
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        except ImportError as exc:
            hint = "In a checkout: `make install EXTRAS=monitor`, or `pip install '.[monitor]'`."
            raise CommandMissing("spans: the libraries of opentelemetry are not installed", hint=hint) from exc
        self._exporter, self._kept = OTLPSpanExporter(), kept

    def send_new(self, outcomes: Outcomes) -> int:
        """Send the machines behind the positions; returns how many. Raises HostError, PositionLost."""
        machines, batch = 0, list["ReadableSpan"]()
        for ended in outcomes.new():
            machines += 1
            batch += spans_of(ended)
            if len(batch) >= BATCH:
                self._send(batch)
                batch = []
        self._send(batch)
        return machines

    def follow(self, outcomes: Outcomes) -> None:
        """Send each machine as it ends, for ever. Raises HostError, PositionLost."""

        async def run() -> None:
            async for ended in outcomes.follow():
                self._send(list(spans_of(ended)))

        asyncio.run(run())

    def _send(self, spans: list[ReadableSpan]) -> None:
        if spans and self._exporter.export(spans).value != 0:
            hint = "See the lines above, and OTEL_EXPORTER_OTLP_ENDPOINT. The next call sends these machines again."
            raise HostError(f"{len(spans)} spans were not taken by the collector", hint=hint)
        self._kept()


def spans_of(ended: Ended) -> Iterator[ReadableSpan]:
    """The machine's own span first."""
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.trace import SpanContext, Status, StatusCode, TraceFlags

    def context(name: str) -> SpanContext:
        return SpanContext(trace, _number(f"{trace}/{name}", 8), is_remote=False, trace_flags=TraceFlags(1))

    trace = _number(f"{ended.node}/{ended.id}/{ended.started}", 16)
    texts = {
        "machine.id": ended.id, "cause": ended.cause, "class": ended.klass, "image": ended.image, "path": ended.path, "error": ended.error,
        "context": ended.context, "accelerator": ended.accelerator, "requester": ended.requester, "name": ended.name, "user": ended.user,
        **{f"label.{name}": text for name, text in ended.labels.items()},
    }  # fmt: skip
    attributes: dict[str, str | int] = {f"belljar.{name}": text for name, text in texts.items() if text}
    attributes |= {"belljar.cpus": ended.cpus, "belljar.memory": ended.memory}
    yield ReadableSpan(
        "machine", context("machine"), resource=_resource(ended.node), attributes=attributes, start_time=_nano(ended.started),
        end_time=_nano(max(ended.ended, ended.started)), status=Status(StatusCode.ERROR, ended.reason) if ended.has_failed else Status(),
    )  # fmt: skip
    for name, begin, end in laid_out(ended):
        parent = context(WITHIN.get(name, "machine"))
        resource, begins, ends = _resource(ended.node), _nano(begin), _nano(end)
        yield ReadableSpan(name, context(name), parent, resource, start_time=begins, end_time=ends)


def laid_out(ended: Ended) -> Iterator[tuple[str, float, float]]:
    """Each phase with the moments of its begin and its end."""
    moment = ended.started
    for name in PHASES:
        seconds = ended.phases.get(name)
        if seconds is None or name in AT_THE_END:
            continue
        begin, moment = moment, min(moment + seconds, max(ended.ended, ended.started))
        yield name, begin, moment
        for part in (part for part, whole in WITHIN.items() if whole == name and part in ended.phases):
            yield part, max(moment - ended.phases[part], begin), moment
    last = max(ended.ended, moment)
    for name in reversed([name for name in AT_THE_END if name in ended.phases]):
        begin = max(last - ended.phases[name], moment)
        yield name, begin, last
        last = begin


@lru_cache(maxsize=1000)
def _resource(node: str) -> Resource:
    """Whose spans these are; OTEL_RESOURCE_ATTRIBUTES and OTEL_SERVICE_NAME add to it."""
    from opentelemetry.sdk.resources import SERVICE_NAME, Resource

    made = Resource.create({"host.name": node})
    is_named = not str(made.attributes.get(SERVICE_NAME, "unknown_service")).startswith("unknown_service")
    return made if is_named else made.merge(Resource({SERVICE_NAME: "belljar"}))


def _number(text: str, size: int) -> int:
    return int.from_bytes(sha256(text.encode(errors="replace")).digest()[:size], "big") or 1


def _nano(moment: float) -> int:
    return int(min(moment, 1e10) * 1e9)  # a row may tell more than the 64 bits there are
