"""A space of factories under a virtual clock, in compatible and in improved mode: for whoever tunes the policies of the vacuum.

.venv/bin/python -m bench.vacuum_policies bench/vacuum_policies/scenarios/mixed.toml --plot /tmp/mixed
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from bench.vacuum_policies.plot import plot
from bench.vacuum_policies.report import Report
from bench.vacuum_policies.scenario import load
from bench.vacuum_policies.simulate import Simulation

from belljar.cli.render import as_json, duration, table
from belljar.errors import BelljarError
from belljar.vacuum import Mode

HEADS = ("MODE", "IDLE %", "SHARE ERROR %", "DRIFT %", "STARTS", "WASTED", "MESSAGES/MIN", "DECISIONS", "TOOK")
TYPE_HEADS = ("MODE", "TYPE", "TARGET %", "PART %", "WORST %", "STARTS", "WASTED")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.vacuum_policies", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("scenario", type=Path, help="a TOML file; docs/develop/simulator.md lists its keys")
    parser.add_argument("--mode", choices=[mode.value for mode in Mode], help="only this mode")
    parser.add_argument("--plot", type=Path, metavar="PATH", help="write PATH.png and PATH.svg, too")
    parser.add_argument("--format", choices=["table", "json"], default="table")
    args = parser.parse_args(argv)
    try:
        scenario = load(args.scenario)
    except (BelljarError, OSError) as exc:
        print(exc, file=sys.stderr)
        return 1
    reports, took = list[Report](), list[float]()
    for mode in [Mode(args.mode)] if args.mode else list(Mode):
        begin = time.process_time()
        reports.append(Simulation(scenario, mode).run())
        took.append(time.process_time() - begin)
    if args.format == "json":
        print(as_json({"reports": reports, "processor_seconds": took}))
    else:
        _print(reports, took)
    if args.plot is not None:
        plot(reports, args.plot)
    return 0


def _print(reports: list[Report], took: list[float]) -> None:
    print(f"{reports[0].scenario}: {reports[0].factories} factories, {duration(reports[0].lasts)}\n")
    rows = [
        (
            report.mode.value, _percent(report.idle), _percent(report.worst_share), _percent(report.worst_drift),
            report.starts, report.wasted, round(report.messages_per_minute), report.decisions, duration(seconds),
        )
        for report, seconds in zip(reports, took, strict=True)
    ]  # fmt: skip
    print(table(HEADS, rows), end="\n\n")
    types = [
        (
            report.mode.value, kind.machinetype, _percent(kind.target), _percent(kind.part), _percent(kind.worst),
            kind.starts, kind.wasted,
        )
        for report in reports
        for kind in report.types
    ]  # fmt: skip
    print(table(TYPE_HEADS, types))


def _percent(part: float) -> float:
    return round(100 * part, 2)


if __name__ == "__main__":
    sys.exit(main())
