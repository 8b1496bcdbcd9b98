"""What this host holds while jobs run, and by how much that grows: memory, open files, processes, machines' files, disk."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import Any

from belljar.host.processes import all_pids

# What a host at work grows by without any leak, over all jobs.
NOISE = {"memory_mib": 128.0, "open_files": 200.0, "processes": 10.0, "files": 10.0, "disk_mib": 16.0}
OWN = ("files", "disk_mib")  # of machines alone; the others are of the whole host, with whatever else works there
SURE = 4.0  # standard errors


def sample(folders: Iterable[Path]) -> dict[str, float]:
    memory = {line.split(":")[0]: int(line.split()[1]) for line in Path("/proc/meminfo").read_text().splitlines()}
    sizes = [size for folder in folders for size in _sizes(folder)]
    open_files = int(Path("/proc/sys/fs/file-nr").read_text().split()[0])
    held = (memory["MemTotal"] - memory["MemAvailable"]) / 1024
    return dict(zip(NOISE, (held, open_files, sum(1 for _ in all_pids()), len(sizes), sum(sizes) / 2**20), strict=True))


def _sizes(folder: Path) -> Iterator[int]:
    """Bytes on disk of each file below it."""
    for where, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                yield os.lstat(os.path.join(where, name)).st_blocks * 512


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
