"""`belljar report`: what machines took, added up."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from belljar.assembly import Runtime
from belljar.cli.monitor import LEDGER, complain_of, reader
from belljar.cli.parser import Args, Verb
from belljar.cli.render import duration, show
from belljar.monitor.report import BY, plot, report

COUNTS, TIMES = ("machines", "failed"), ("payload_cpu", "host_cpu", "ready_mean", "ready_longest")
HEADS = ("MACHINES", "FAILED", "WALL", "PAYLOAD", "OVERHEAD", "%", "PAYLOAD CPU", "HOST CPU", "READY AFTER", "AT MOST")


def run(args: Args, runtime: Runtime) -> None:
    outcomes = reader(args, runtime)({})
    groups = report(outcomes.between(time.time() - args.since if args.since else 0.0), args.by)
    if args.plot is not None:
        plot(groups, args.by, args.plot)
    show(groups, (args.by.upper(), *HEADS), [_row(group, args.by) for group in groups], as_=args.format)
    complain_of(outcomes)


def _row(group: Mapping[str, Any], by: str) -> tuple[object, ...]:
    share = f"{100 * group['overhead'] / group['wall']:.1f}" if group["wall"] else ""
    times = [duration(group[column]) for column in ("wall", "payload", "overhead")]
    return (
        group[by] or "(none)",
        *(group[column] for column in COUNTS),
        *times,
        share,
        *(duration(group[column]) for column in TIMES),
    )


VERBS = {
    "report": Verb(
        "Add up the machines that ended: how many failed, how long they took, and how much of it was not the payload's own time. "
        "Read from ledgers, which keep every machine. For grid accounting see `belljar accounting`.",
        run,
        f"""
        --by {{{",".join(BY)}}} =day | one row for each (default: day)
        --since TIME | how long ago to begin, such as 30d (default: with the first machine)
        {LEDGER}
        --plot FILE | draw it, too: a name that ends in .png or .svg
        --format {{table,json,csv}} =table | for people, programs or spreadsheets""",
    ),
}
