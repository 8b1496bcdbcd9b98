"""Simulations as pictures: idle processors and the part of each type over time, one column a mode."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench.vacuum_policies.report import Report

HOUR = 3600.0


def plot(reports: Sequence[Report], stem: Path) -> tuple[Path, ...]:
    """Write STEM.png and STEM.svg."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4 * len(reports), 6.0), layout="constrained")
    axes = figure.subplots(2, len(reports), squeeze=False, sharex=True, sharey="row")
    for column, report in enumerate(reports):
        above, below = axes[0][column], axes[1][column]
        hours = [look.at / HOUR for look in report.looks]
        above.set_title(f"{report.scenario}: {report.mode.value} mode")
        above.plot(hours, [100 * look.idle for look in report.looks], color="black", linewidth=1)
        for number, kind in enumerate(report.types):
            color = f"C{number % 10}"
            parts = [100 * look.parts[number] for look in report.looks]
            below.plot(hours, parts, color=color, linewidth=1, label=kind.machinetype)
            targets = [100 * look.targets[number] for look in report.looks]
            below.plot(hours, targets, color=color, linewidth=0.7, linestyle="dashed")
        below.set_xlabel("hours")
    axes[0][0].set_ylabel("idle processors, %")
    axes[1][0].set_ylabel("processors by type, %\n(dashed: by the shares)")
    axes[1][0].legend()
    paths = tuple(stem.with_name(stem.name + suffix) for suffix in (".png", ".svg"))
    for path in paths:
        figure.savefig(path, dpi=120)
    return paths
