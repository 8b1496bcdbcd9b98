"""Ended machines as traces, taken by a receiver that speaks OTLP over HTTP."""

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from tests.unit.monitor.test_outcomes import END, row, write

from belljar.cli import main
from belljar.monitor import ended_of
from belljar.monitor.spans import _resource


class Collector(http.server.ThreadingHTTPServer):
    """Takes traces as a collector does, so many requests; refuses others."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.most, self.requests = 9, list[tuple[str, ExportTraceServiceRequest]]()

    @property
    def spans(self) -> list[Span]:
        scopes = [
            scope for _, request in self.requests for whole in request.resource_spans for scope in whole.scope_spans
        ]
        return [span for scope in scopes for span in scope.spans]


class Handler(http.server.BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        is_taken = len(self.server.requests) < self.server.most
        if is_taken:
            self.server.requests.append((self.path, ExportTraceServiceRequest.FromString(body)))
        self.send_response(200 if is_taken else 400)
        self.end_headers()

    def log_message(self, *words: Any) -> None:
        pass


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    with Collector() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        yield server
        server.shutdown()
        thread.join()


def send(folder: Path, *words: str) -> int:
    return main(
        [
            "monitor",
            "spans",
            "--ledger",
            f"wn01={folder / 'logs'}",
            "--state",
            str(folder / "state.json"),
            "--format",
            "json",
            *words,
        ]
    )


def attributes(items: Any) -> dict[str, Any]:
    return {item.key: getattr(item.value, str(item.value.WhichOneof("value"))) for item in items}


def test_a_machine_is_a_trace_with_a_span_for_each_phase(tmp_path: Path, collector: Collector) -> None:
    write(tmp_path / "logs", row(), row("b" * 12, cause="boot-failed", reason="the guest never answered"))
    assert send(tmp_path, "--from-start") == 0
    ((path, request),) = collector.requests
    (whole,) = request.resource_spans
    assert path == "/v1/traces"
    assert attributes(whole.resource.attributes).items() >= {"service.name": "belljar", "host.name": "wn01"}.items()
    machine, *phases = [span for span in collector.spans if span.trace_id == collector.spans[0].trace_id]
    assert [span.name for span in phases] == ["prepare", "start", "boot", "identify", "run", "stop"]
    assert {span.parent_span_id for span in phases} == {machine.span_id} and not machine.parent_span_id
    assert (machine.start_time_unix_nano, machine.end_time_unix_nano) == ((END - 10) * 1e9, END * 1e9)
    assert (
        attributes(machine.attributes)["belljar.label.queue"] == "night"
        and machine.status.code == Status.STATUS_CODE_UNSET
    )
    failed = collector.spans[7]
    assert (failed.status.code, failed.status.message) == (Status.STATUS_CODE_ERROR, "the guest never answered")


def test_the_time_that_a_template_took_is_told(tmp_path: Path, collector: Collector) -> None:
    write(tmp_path / "logs", row(phases={"prepare": 9.0, "template": 8.5}))
    assert send(tmp_path, "--from-start") == 0
    assert [span.name for span in collector.spans] == ["machine", "prepare"]
    told = attributes(collector.spans[0].attributes)
    assert (told["belljar.path"], told["belljar.seconds.template"]) == ("template", 8.5)


def test_each_machine_is_sent_once_unless_the_collector_refused_it(
    tmp_path: Path, collector: Collector, capsys: Any
) -> None:
    write(tmp_path / "logs", row("a" * 12))
    assert send(tmp_path) == 0
    assert json.loads(capsys.readouterr().out) == {"sent": 0}
    write(tmp_path / "logs", row("b" * 12))
    collector.most = 0
    assert send(tmp_path) == 125
    assert "1 machines were not taken by the collector" in capsys.readouterr().err
    collector.most = 9
    assert send(tmp_path) == 0
    assert json.loads(capsys.readouterr().out) == {"sent": 1}
    assert send(tmp_path) == 0
    assert json.loads(capsys.readouterr().out) == {"sent": 0}
    assert len(collector.spans) == 7


def test_of_many_machines_those_that_were_taken_are_not_sent_again(
    tmp_path: Path, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "logs", *[row(f"{number:012x}") for number in range(100)])
    collector.most = 1
    assert send(tmp_path, "--from-start") == 125
    assert len(collector.spans) == 60 * 7
    collector.most = 9
    assert send(tmp_path) == 0
    assert len(collector.spans) == 100 * 7 and len({span.trace_id for span in collector.spans}) == 100


def test_a_ledger_that_was_cut_is_an_error(tmp_path: Path, collector: Collector, capsys: Any) -> None:
    write(tmp_path / "logs", row())
    assert send(tmp_path, "--from-start") == 0
    (tmp_path / "logs/ledger-2026-01.jsonl").write_bytes(b"")
    assert send(tmp_path) == 125
    assert "had been read up to byte" in capsys.readouterr().err


def test_no_row_keeps_those_behind_it_from_being_sent(tmp_path: Path, collector: Collector) -> None:
    odd = {
        "reason": "\ud800",
        "image": "\udcff",
        "labels": [["\ud800", "\ud800"]],
        "phases": {"run": 1e14},
        "ended": 1e14,
    }
    write(tmp_path / "logs", row("a" * 12, **odd, started=1e13), row("b" * 12))
    assert send(tmp_path, "--from-start") == 0
    assert len({span.trace_id for span in collector.spans}) == 2


def test_a_machine_that_is_sent_again_is_the_same_trace(tmp_path: Path, collector: Collector) -> None:
    write(tmp_path / "logs", row())

    def again(state: str) -> int:
        return main(
            [
                "monitor",
                "spans",
                "--ledger",
                f"wn01={tmp_path / 'logs'}",
                "--state",
                str(tmp_path / state),
                "--from-start",
            ]
        )

    assert (again("one"), again("two")) == (0, 0)
    first, second = collector.requests
    assert first == second


def test_nothing_is_sent_unless_the_standard_variables_ask_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    write(tmp_path / "logs", row())
    assert send(tmp_path) == 125
    assert "OTEL_EXPORTER_OTLP_ENDPOINT is not set" in capsys.readouterr().err


def test_service_and_resource_are_named_by_the_standard_variables(
    tmp_path: Path, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "farm")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "site=EXAMPLE")
    _resource.cache_clear()
    write(tmp_path / "logs", row())
    assert send(tmp_path, "--from-start") == 0
    resource = attributes(collector.requests[0][1].resource_spans[0].resource.attributes)
    assert resource.items() >= {"service.name": "farm", "site": "EXAMPLE", "host.name": "wn01"}.items()
    _resource.cache_clear()


def test_phases_are_laid_out_between_begin_and_end() -> None:
    phases = {"prepare": 3.0, "template": 2.0, "start": 1.0, "run": 4.0, "stop": 0.5, "clean": 0.5}
    ended = ended_of(row(phases=phases), "wn01")
    assert ended is not None
    laid = {name: (begin - ended.started, end - ended.started) for name, begin, end in ended.timeline()}
    assert laid == {
        "prepare": (0, 3),
        "start": (3, 4),
        "run": (4, 8),
        "stop": (8, 8.5),
        "clean": (8.5, 9),
    }
    forged = ended_of(json.loads(json.dumps(row(phases={"prepare": 1e9, "run": 1e9, "stop": 1e9}, ended=0))), "wn01")
    assert forged is not None and all(begin <= end for _, begin, end in forged.timeline())
