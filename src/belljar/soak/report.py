"""What all jobs of a folder say together, beside the figures of VmBatch's stability test: starts, failures, and whether anything grows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, quantiles
from typing import Any

from belljar.journal import Ledger

Row = dict[str, Any]
# VmBatch, "Some numbers": CentOS 6 as host and guest under Torque, two jobs at a time, five in the queue.
VMBATCH: Row = {"batch": "torque", "context": "VmBatch", "jobs": 20_000, "failed": 0, "clones": 0, "min": 24.0, "mean": 38.41,
           "p50": None, "p90": None, "p99": None, "max": 66.0}  # fmt: skip
VMBATCH_HOURS = 6 * 24 + 8 + 43 / 60
# What a host at work grows by without any leak, over all jobs.
NOISE = {"memory_mib": 128.0, "open_files": 200.0, "processes": 10.0, "files": 10.0, "disk_mib": 16.0}
OWN = ("files", "disk_mib")  # of machines alone; the others are of the whole host, with whatever else works there
SURE = 4.0  # standard errors


def of(folder: Path) -> Row:
    """For JSON. Times in seconds; `starts`: from belljar's beginning to the payload's; `hours`: while jobs were run."""
    rows = [row for row, _ in Ledger(folder).since()]
    jobs, samples = ([row for row in rows if row["kind"] == kind] for kind in ("job", "sample"))
    bad = [row for row in jobs if row["failure"]]
    causes = dict[str, list[Row]]()
    for row in bad:
        is_machines = row["class"] not in ("", "payload")
        causes.setdefault(f"{row['class']}: {row['cause']}" if is_machines else "job", []).append(row)
    spans = [[row["time"] for row in rows if row["run"] == run] for run in {row["run"] for row in jobs}]
    return {
        "jobs": len(jobs), "failed": len(bad), "runs": len(spans), "hours": sum(max(times) - min(times) for times in spans) / 3600,
        "began": min((row["begin"] for row in jobs), default=0.0), "ended": max((row["time"] for row in jobs), default=0.0),
        "hosts": sorted({f"{row['host']}, {row['cpus']} cpus" for row in rows if row["kind"] == "run"}),
        "starts": [*(_starts(*kind, mine) for kind, mine in by_kind(jobs).items()), VMBATCH],
        "failures": [{"cause": cause, "jobs": len(these), "example": these[0]["reason"] or these[0]["failure"]} for cause, these in causes.items()],
        "growth": [growth(what, samples) for what in NOISE],
    }  # fmt: skip


def by_kind(jobs: Sequence[Row]) -> dict[tuple[str, str], list[Row]]:
    """By batch system and context."""
    kinds = sorted({(row["batch"], row["context"]) for row in jobs})
    return {kind: [row for row in jobs if (row["batch"], row["context"]) == kind] for kind in kinds}


def _starts(batch: str, context: str, jobs: Sequence[Row]) -> Row:
    times = [row["start"] for row in jobs if row["start"] is not None]
    cuts = quantiles(times * 2, n=100, method="inclusive") if times else [None] * 99
    least, mean, most = (min(times), fmean(times), max(times)) if times else (None, None, None)
    return {
        "batch": batch, "context": context, "jobs": len(jobs), "failed": sum(bool(row["failure"]) for row in jobs),
        "clones": sum(row["is_clone"] for row in jobs), "min": least, "mean": mean, "p50": cuts[49], "p90": cuts[89], "p99": cuts[98],
        "max": most,
    }  # fmt: skip


def growth(what: str, samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The slope of this figure by least squares, with its standard error. A run is compared with itself only: before the next
    one this host may have been restarted."""
    runs = dict[float, list[tuple[float, float]]]()
    for row in samples:
        runs.setdefault(row["run"], []).append((row["jobs"], row[what]))
    points, jobs = list[tuple[float, float]](), 0.0
    for run in runs.values():
        middle, mean = (fmean(values) for values in zip(*run, strict=True))
        points += [(x - middle, y - mean) for x, y in run]
        jobs += run[-1][0] - run[0][0]
    spread = sum(x * x for x, _ in points) or 1.0
    slope = sum(x * y for x, y in points) / spread
    rest = sum((y - slope * x) ** 2 for x, y in points)
    error = (rest / max(len(points) - len(runs) - 1, 1) / spread) ** 0.5
    grows = slope * jobs > NOISE[what] and slope > SURE * error
    return {"what": what, "per_1000_jobs": slope * 1000, "error": error * 1000, "in_all": slope * jobs, "grows": grows}
