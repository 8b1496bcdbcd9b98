"""`belljar vacuum simulate`: a space under a virtual clock, in both modes."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from belljar.cli.parser import acts
from belljar.cli.render import as_json, duration, table

if TYPE_CHECKING:
    from belljar.vacuum.simulator.report import Report

HEADS = ("MODE", "IDLE %", "SHARE ERROR %", "DRIFT %", "STARTS", "WASTED", "MESSAGES/MIN", "DECISIONS", "TOOK")
OF_TYPES = ("MODE", "TYPE", "TARGET %", "PART %", "WORST %", "STARTS", "WASTED")


def simulate(args: argparse.Namespace, house: object) -> int:
    from belljar.vacuum import Mode
    from belljar.vacuum.simulator.scenario import load
    from belljar.vacuum.simulator.simulate import Simulation

    scenario = load(args.scenario)
    reports, took = list[Any](), list[float]()
    for mode in [Mode(word) for word in args.mode] or list(Mode):
        begin = time.process_time()
        reports.append(Simulation(scenario, mode).run(_progress(mode.value, scenario.course.lasts)))
        took.append(time.process_time() - begin)
    plots: tuple[Path, ...] = ()
    if args.plot is not None:
        from belljar.vacuum.simulator.plot import plot

        plots = plot(reports, args.plot)
    if args.format == "json":
        print(as_json({"reports": reports, "processor_seconds": took, "plots": plots}))
    else:
        _tell(reports, took, plots)
    return 0


def _tell(reports: list[Report], took: list[float], plots: tuple[Path, ...]) -> None:
    print(f"{reports[0].scenario}: {reports[0].factories} factories, {duration(reports[0].lasts)}\n")
    rows = [
        (
            one.mode.value, _percent(one.idle), _percent(one.worst_share), _percent(one.worst_drift), one.starts, one.wasted,
            round(one.messages_per_minute), one.decisions, duration(seconds),
        )
        for one, seconds in zip(reports, took, strict=True)
    ]  # fmt: skip
    print(table(HEADS, rows), end="\n\n")
    types = [
        (one.mode.value, kind.machinetype, _percent(kind.target), _percent(kind.part), _percent(kind.worst), kind.starts, kind.wasted)
        for one in reports
        for kind in one.types
    ]  # fmt: skip
    print(table(OF_TYPES, types))
    for path in plots:
        print(f"\n{path}", end="")
    print("\n" if plots else "", end="")


def _percent(part: float) -> float:
    return round(100 * part, 2)


def _progress(mode: str, lasts: float) -> Callable[[float], None]:
    def tell(now: float) -> None:
        text = f"{mode}: {100 * now / lasts:.0f} %" if now < lasts else ""
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)

    return tell if sys.stderr.isatty() else lambda _: None


ACTS = acts(
    """
    # simulate | run a space under a virtual clock, in compatible and in improved mode, and compare
    FILE @scenario | the scenario; examples/vacuum has some, docs/vacuum/simulator.md tells its keys
    --mode {compatible,improved} * | only this mode (repeatable)
    --plot FILE | write PATH.png and PATH.svg, too; needs matplotlib (in a checkout: `make install EXTRAS=plot`)
    --format {table,json} =table | for people or for programs""",
    {"simulate": simulate},
)
