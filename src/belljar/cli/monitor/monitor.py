"""`belljar monitor`: what those read who watch many hosts."""

from __future__ import annotations

import os
import time
from pathlib import Path

from belljar.assembly import Runtime
from belljar.cli.monitor import LEDGER, complain_of, host_metrics, reader
from belljar.cli.monitor.serve import SERVE, serve
from belljar.cli.parser import FORMAT, Args, Verb, acts
from belljar.cli.render import as_json, show
from belljar.errors import BadOption
from belljar.host.files import private_folder
from belljar.host.locks import locked
from belljar.model import NetworkMode
from belljar.service import kept


def textfile(args: Args, runtime: Runtime) -> None:
    from belljar.monitor.metrics import write_textfile

    state = _state(args, runtime, "textfile.json")
    write_textfile(args.file, state, reader(args, runtime), lambda: host_metrics(runtime))


def spans(args: Args, runtime: Runtime) -> None:
    from belljar.monitor.spans import Exporter

    if not any(os.environ.get(name) for name in ENDPOINTS):
        hint = "Such as http://127.0.0.1:4318, where a collector takes OTLP."
        raise BadOption(f"spans: {ENDPOINTS[0]} is not set", hint=hint)
    state = _state(args, runtime, "spans.json")
    with locked(state.with_name(f"{state.name}.lock"), timeout=PATIENCE, what="send spans"):
        before = kept.read(state, dict[str, str])
        outcomes = reader(args, runtime)(before or {})
        exporter = Exporter(lambda: kept.keep(state, outcomes.positions))
        if before is None and not args.from_start:
            outcomes.skip()
        if args.follow:
            exporter.follow(outcomes)
        sent = exporter.send_new(outcomes)
    show({"sent": sent}, ("MACHINES SENT",), [(sent,)], as_=args.format)
    complain_of(outcomes)


def glue2(args: Args, runtime: Runtime) -> None:
    from belljar.machine.life.claim import room_now
    from belljar.monitor.glue2 import Offer, environment, ldif

    host, spec, now = os.uname(), runtime.settings.machine, time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    service = args.service or f"urn:glue2:ComputingService:{host.nodename}"
    manager = args.manager or f"urn:glue2:ComputingManager:{host.nodename}"
    room = room_now(runtime.folders, runtime.settings.host)
    living = [view.image for view in runtime.machines.living() if view.alive]
    free = max(int(min(room.memory // spec.memory, (room.cpus - room.cpus_taken) // spec.cpus)), 0)
    machine = host.machine, spec.cpus, spec.memory, spec.network is not NetworkMode.NONE
    names = [(name, image.os) for image in runtime.images.images() for name in image.names]
    offers = [Offer(name, system, *machine, living.count(name), free) for name, system in names]
    environments = [environment(offer, service.rpartition(":")[2], manager, now) for offer in offers]
    if args.format == "json":
        print(as_json({"ExecutionEnvironment": environments}))
    else:
        print("\n".join(ldif(environment, service) for environment in environments), end="")


def _state(args: Args, runtime: Runtime, name: str) -> Path:
    """The file with what was read before."""
    return args.state or private_folder(runtime.folders.store / "monitor") / name


PATIENCE = 10.0  # seconds for another process that sends
ENDPOINTS = "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
STATE = "--state FILE | where the next call finds what was read before; default: in monitor/ below `paths.store`"
ROWS = f"""
{SERVE}
# textfile +ledger +state | write all metrics into a file for node_exporter's textfile collector: from cron, or a timer
FILE | such as /var/lib/prometheus/node-exporter/belljar.prom; replaced as a whole
# spans +ledger +state +format | send the machines that ended as OpenTelemetry traces, by OTLP over HTTP, to where OTEL_EXPORTER_OTLP_ENDPOINT says
-f --follow | go on with each machine that ends, until interrupted
--from-start | the first time: with all machines of the ledgers (else with those that end from then on)
# glue2 | describe this host's images as GLUE 2 execution environments, for a site's information system
--service ID | of the computing service they belong to (default: made of this host's name)
--manager ID | of its computing manager (default: the same)
--format {{ldif,json}} =ldif | for LDAP (a BDII) or as JSON
"""
VERBS = {
    "monitor": Verb(
        "For those who watch many hosts. Everything is read from ledgers, journals and folders: no machine and no daemon is asked.",
        acts=acts(
            ROWS,
            {"serve": serve, "textfile": textfile, "spans": spans, "glue2": glue2},
            ledger=LEDGER,
            state=STATE,
            format=FORMAT,
        ),
    )
}
