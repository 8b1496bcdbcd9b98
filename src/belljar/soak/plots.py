"""The report as a picture: each start, how the starts spread, and what this host held meanwhile."""

from __future__ import annotations

from pathlib import Path

from belljar.errors import BadOption, CommandMissing
from belljar.journal import Ledger
from belljar.soak.report import NOISE, VMBATCH, by_kind


def check(path: Path) -> None:
    """Raises BadOption for a picture that cannot be drawn."""
    if path.suffix not in (".png", ".svg") or not path.absolute().parent.is_dir():
        raise BadOption(f"--plot {path}: not a .png or .svg file in a folder that exists")


def draw(folder: Path, path: Path) -> None:
    """PNG or SVG, by the name's ending. Raises CommandMissing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        hint = "Install it for belljar's Python (the extra `plots`); without it the report is a table."
        raise CommandMissing("--plot: the library matplotlib is not installed", hint=hint) from None
    rows = [row for row, _ in Ledger(folder).since()]
    jobs = [{**row, "number": number} for number, row in enumerate((row for row in rows if row["kind"] == "job"), 1)]
    samples = [row for row in rows if row["kind"] == "sample"]
    figure = Figure(figsize=(11, 8), layout="constrained")
    panels = figure.subplot_mosaic([["each"] * 5, ["spread"] * 5, list(NOISE)], height_ratios=(2, 2, 1))
    for (batch, context), mine in by_kind(jobs).items():
        started = [row for row in mine if row["start"] is not None]
        label, starts = f"{context} ({batch})", [row["start"] for row in started]
        panels["each"].plot([row["number"] for row in started], starts, ".", markersize=2, label=label)
        panels["spread"].ecdf(starts, label=label) if starts else None
    bad = [row["number"] for row in jobs if row["failure"]]
    if bad:
        panels["each"].plot(
            bad, [VMBATCH["max"]] * len(bad), "x", markersize=3, color="red", label=f"failed: {len(bad)}"
        )
    for name in ("min", "mean", "max"):
        panels["each"].axhline(VMBATCH[name], color="grey", linestyle="--" if name == "mean" else ":")
        panels["spread"].axvline(VMBATCH[name], color="grey", linestyle="--" if name == "mean" else ":")
    panels["each"].set(yscale="log", xlabel="jobs", ylabel="start, seconds (grey: VmBatch)")
    panels["spread"].set(xscale="log", xlabel="start, seconds (grey: VmBatch)", ylabel="share of the jobs")
    for name in ("each", "spread"):
        panels[name].legend(loc="upper left", markerscale=3)
    for what in NOISE:
        panels[what].plot([row["jobs"] for row in samples], [row[what] for row in samples], linewidth=0.8)
        panels[what].set(title=what.replace("_", " ").replace("mib", "MiB"), xlabel="jobs", ylim=(0, None))
    figure.savefig(path)
