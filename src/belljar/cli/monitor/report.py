"""`belljar report`: what machines took, added up."""

from __future__ import annotations

import math
import time

from belljar.assembly import Runtime
from belljar.cli.monitor import LEDGER, complain_of, reader
from belljar.cli.parser import Args, Verb
from belljar.cli.render import duration, show
from belljar.errors import BadOption
from belljar.monitor.report import BY, Group, as_csv, plot, report, values

HEADS = ("MACHINES", "FAILED", "WALL", "PAYLOAD", "OVERHEAD", "%", "PAYLOAD CPU", "HOST CPU", "READY AFTER", "AT MOST")


def run(args: Args, runtime: Runtime) -> None:
    now = time.time()
    since, until = now - args.since if args.since else 0.0, now - args.until if args.until else math.inf
    if since >= until:
        raise BadOption(
            "--until: ends before --since begins", hint="Both tell how long ago; --since is the longer time."
        )
    outcomes = reader(args, runtime)({})
    groups = report(outcomes.between(since, until), args.by)
    if args.plot is not None:
        plot(groups, args.by, args.plot)
    if args.format == "csv":
        print(as_csv(groups, args.by), end="")
    else:
        described = [{args.by: group.name, **values(group)} for group in groups]
        show(described, (args.by.upper(), *HEADS), [_row(group) for group in groups], as_=args.format)
    complain_of(outcomes)


def _row(group: Group) -> tuple[object, ...]:
    share = f"{100 * group.overhead / group.wall:.1f}" if group.wall else ""
    seconds = group.payload_cpu, group.host_cpu, group.ready_mean, group.ready_longest
    times = (duration(group.wall), duration(group.payload), duration(group.overhead), share, *map(duration, seconds))
    return group.name or "(none)", group.machines, group.failed, *times


VERBS = {
    "report": Verb(
        "Add up the machines that ended: how many failed, how long they took, and how much of it was not the payload's own time. "
        "Read from ledgers, which keep every machine. For grid accounting see `belljar accounting`.",
        run,
        f"""
        --by {{{",".join(BY)}}} =day | one row for each (default: day)
        --since TIME | how long ago to begin, such as 30d (default: with the first machine)
        --until TIME | how long ago to end (default: now)
        {LEDGER}
        --plot FILE | draw it, too: a name that ends in .png or .svg
        --format {{table,json,csv}} =table | for people, programs or spreadsheets""",
    ),
}
