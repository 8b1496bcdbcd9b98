"""`belljar monitor`: what those read who watch many hosts; `belljar report`: what machines took, added up."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from secrets import token_urlsafe

from belljar.assembly import Runtime
from belljar.cli.monitor import LEDGER, SEEN, complain_of, host_metrics, host_of, libraries, reader, tell
from belljar.cli.parser import Args, Verb, acts
from belljar.cli.render import as_json, duration, show
from belljar.errors import BadOption
from belljar.host.files import private_folder, read_secret, write_whole
from belljar.host.locks import locked
from belljar.monitor.report import BY, plot, report
from belljar.service import kept


def serve(args: Args, runtime: Runtime) -> None:
    with libraries():
        from belljar.monitor import server
        from belljar.monitor.metrics import Tally, collected
    from belljar.monitor.nodes import Remote
    from belljar.service.systemd import serving

    file, end = token_file(args, runtime), server.listening(args.listen)
    token = read_secret(file).decode()
    metrics = collected(Tally(reader(args, runtime)), lambda: host_metrics(runtime))

    async def work() -> None:
        hub = server.Hub(host_of(args, runtime), [Remote(place, token) for place in args.nodes])
        app = server.app(hub, server.Access(token), lambda id: tell(runtime, id), metrics)
        await serving(hub.watch(), server.serve(end, app), reload=hub.ring)

    host, port = end.getsockname()[:2]
    where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    print(f"http://{where}/ shows numbers to everybody; names and consoles take the token in {file}", flush=True)
    asyncio.run(work())


def token_file(args: Args, runtime: Runtime) -> Path:
    """Made where it is not there."""
    file: Path = args.token_file or _own(runtime, "token")
    if not args.token_file and not file.exists():
        write_whole(file, token_urlsafe(24).encode() + b"\n")
    return file


def textfile(args: Args, runtime: Runtime) -> None:
    with libraries():
        from belljar.monitor.metrics import write_textfile
    state = args.state or _own(runtime, "textfile.json")
    write_textfile(args.file, state, reader(args, runtime), lambda: host_metrics(runtime))


def spans(args: Args, runtime: Runtime) -> None:
    with libraries():
        from belljar.monitor.spans import send_new
    if not any(os.environ.get(name) for name in ENDPOINTS):
        hint = "Such as http://127.0.0.1:4318, where a collector takes OTLP."
        raise BadOption(f"spans: {ENDPOINTS[0]} is not set", hint=hint)
    state = args.state or _own(runtime, "spans.json")
    with locked(state.with_name(f"{state.name}.lock"), timeout=PATIENCE, what="send spans"):
        before = kept.read(state, dict[str, str])
        outcomes = reader(args, runtime)(before or {})
        if before is None and not args.from_start:
            outcomes.skip()
        sent = send_new(outcomes, lambda: kept.keep(state, outcomes.positions))
    show({"sent": sent}, ("MACHINES SENT",), [(sent,)], as_=args.format)
    complain_of(outcomes)


def glue2(args: Args, runtime: Runtime) -> None:
    from belljar.machine.life.claim import room_now
    from belljar.monitor.glue2 import environment, ldif

    node, spec, now = os.uname().nodename, runtime.settings.machine, time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    service = args.service or f"urn:glue2:ComputingService:{node}"
    manager = args.manager or f"urn:glue2:ComputingManager:{node}"
    room = room_now(runtime.folders, runtime.settings.host)
    living = [view.image for view in runtime.machines.living() if view.alive]
    free = max(int(min(room.memory // spec.memory, (room.cpus - room.cpus_taken) // spec.cpus)), 0)
    about = {"service": service.rpartition(":")[2], "manager": manager, "time": now}
    names = [(name, image.os) for image in runtime.images.images() for name in image.names]
    environments = [environment(name, system, spec, living.count(name), free, **about) for name, system in names]
    if args.format == "json":
        print(as_json({"ExecutionEnvironment": environments}))
    else:
        print("\n".join(ldif(environment, service) for environment in environments), end="")


def _own(runtime: Runtime, name: str) -> Path:
    """A file of the monitor's own."""
    return private_folder(runtime.folders.store / "monitor") / name


def report_(args: Args, runtime: Runtime) -> None:
    outcomes = reader(args, runtime)(since=time.time() - args.since if args.since else 0.0)
    groups = report(outcomes.new(), args.by)
    if args.plot is not None:
        plot(groups, args.by, args.plot)
    heads = [column.replace("_", " ").upper() for column in (groups[0] if groups else [args.by])]
    rows = [[duration(cell) if isinstance(cell, float) else cell for cell in group.values()] for group in groups]
    show(groups, heads, rows, as_=args.format)
    complain_of(outcomes)


PATIENCE = 10.0  # seconds for another process that sends
ENDPOINTS = "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
STATE = "--state FILE | where the next call finds what was read (default: in monitor/ below `paths.store`)"
ROWS = f"""
# serve | show a page and metrics: numbers to everybody who reaches the port, names and consoles to those with the token
--listen ADDRESS:PORT =127.0.0.1:9180 | where; beyond this host, put a server with TLS in front
--token-file FILE | with the token, mode 0600 (default: monitor/token below `paths.store`, made if missing)
--node URL * @nodes | another node's monitor, which has the same token: [NAME=]http://HOST:9180
{SEEN}
# textfile +ledger +state | write all metrics into a file for node_exporter's textfile collector: from cron, or a timer
FILE | such as /var/lib/prometheus/node-exporter/belljar.prom; replaced as a whole
# spans +ledger +state +format | send the machines that ended as OpenTelemetry traces, by OTLP over HTTP, to where OTEL_EXPORTER_OTLP_ENDPOINT says
--from-start | begin with all machines of the ledgers (default: with those that end from now on)
# glue2 | describe this host's images as GLUE 2 execution environments, for a site's information system
--service ID | of the computing service they belong to (default: made of this host's name)
--manager ID | of its computing manager (default: the same)
--format {{ldif,json}} =ldif | for LDAP (a BDII) or as JSON
"""
WHAT = "A page, metrics and traces of one or many hosts, read from ledgers, journals and folders."
VERBS = {"monitor": Verb(WHAT, acts=acts(ROWS, globals(), ledger=LEDGER, state=STATE))}
REPORT = f"""
# report | Add up the machines that ended: how many failed, how long they took, and how much of it was not the payload's own time.
| For grid accounting see `belljar accounting`.
--by {{{",".join(BY)}}} =day | one row for each (default: day)
--since TIME | how long ago to begin, such as 30d (default: with the first machine)
{LEDGER}
--plot FILE | draw it, too: a name that ends in .png or .svg
--format {{table,json,csv}} =table | for people, programs or spreadsheets"""
VERBS |= acts(REPORT, globals())
