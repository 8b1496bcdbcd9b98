"""`belljar report`: what machines took, added up."""

from __future__ import annotations

import time

from belljar.assembly import Runtime
from belljar.cli.monitor import LEDGER, complain_of, reader
from belljar.cli.parser import Args, acts
from belljar.cli.render import duration, show
from belljar.monitor.report import BY, COUNTS, TIMES, plot, report


def report_(args: Args, runtime: Runtime) -> None:
    outcomes = reader(args, runtime)({})
    groups = report(outcomes.since(time.time() - args.since if args.since else 0.0), args.by)
    if args.plot is not None:
        plot(groups, args.by, args.plot)
    heads = [column.replace("_", " ").upper() for column in (args.by, *COUNTS, *TIMES)]
    rows = [[duration(value) if name in TIMES else value for name, value in group.items()] for group in groups]
    show(groups, heads, rows, as_=args.format)
    complain_of(outcomes)


ROWS = f"""
# report | Add up the machines that ended: how many failed, how long they took, and how much of it was not the payload's own time.
| For grid accounting see `belljar accounting`.
--by {{{",".join(BY)}}} =day | one row for each (default: day)
--since TIME | how long ago to begin, such as 30d (default: with the first machine)
{LEDGER}
--plot FILE | draw it, too: a name that ends in .png or .svg
--format {{table,json,csv}} =table | for people, programs or spreadsheets"""
VERBS = acts(ROWS, globals())
