"""`belljar monitor`: what those read who watch many hosts."""

from __future__ import annotations

import os
from pathlib import Path

from belljar.assembly import Runtime
from belljar.cli.monitor import LEDGER, complain_of, host_metrics, reader
from belljar.cli.parser import Args, Verb, acts
from belljar.errors import BadOption
from belljar.host.files import private_folder
from belljar.host.locks import locked
from belljar.records import dataclass
from belljar.service import kept


def state_of(args: Args, runtime: Runtime, name: str) -> Path:
    """The file with what was read before."""
    return args.state or private_folder(runtime.folders.store / "monitor") / name


def textfile(args: Args, runtime: Runtime) -> None:
    from belljar.monitor.metrics import write_textfile

    state = state_of(args, runtime, "textfile.json")
    write_textfile(args.file, state, reader(args, runtime), lambda: host_metrics(runtime))


def spans(args: Args, runtime: Runtime) -> None:
    from belljar.monitor.spans import Exporter

    if not any(os.environ.get(name) for name in ENDPOINTS):
        raise BadOption(
            f"spans: {ENDPOINTS[0]} is not set", hint="Such as http://127.0.0.1:4318, where a collector takes OTLP."
        )
    state, make = state_of(args, runtime, "spans.json"), reader(args, runtime)
    with locked(state.with_name(f"{state.name}.lock"), timeout=PATIENCE, what="send spans"):
        before = kept.read(state, Sent)
        outcomes = make(before.positions if before else {})
        exporter = Exporter(lambda: kept.keep(state, Sent(outcomes.positions)))
        if before is None and not args.from_start:
            outcomes.skip()
        print(f"{exporter.send_new(outcomes)} machines were sent.", flush=True)
        if args.follow:
            exporter.follow(outcomes)
    complain_of(outcomes)


@dataclass(frozen=True)
class Sent:
    """Where each ledger was read up to."""

    positions: dict[str, str]


PATIENCE = 10.0  # seconds for another process that sends
ENDPOINTS = "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
STATE = "--state FILE | where the next call finds what was read before; default: in monitor/ below `paths.store`"
ROWS = f"""
# textfile | write all metrics into a file for node_exporter's textfile collector: from cron, or a timer
FILE | such as /var/lib/prometheus/node-exporter/belljar.prom; replaced as a whole
{LEDGER}
{STATE}
# spans | send the machines that ended as OpenTelemetry traces, by OTLP over HTTP, to where OTEL_EXPORTER_OTLP_ENDPOINT says
-f --follow | go on with each machine that ends, until interrupted
--from-start | the first time: with all machines of the ledgers (else with those that end from then on)
{LEDGER}
{STATE}
"""
VERBS = {
    "monitor": Verb(
        "For those who watch many hosts. Everything is read from ledgers, journals and folders: no machine and no daemon is asked.",
        acts=acts(ROWS, {"textfile": textfile, "spans": spans}),
    )
}
