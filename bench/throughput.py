"""Complete jobs per second, some at a time; and whether anything grows: leftovers, memory, descriptors, files.

VmBatch (2016) ran 20 000 jobs, two at a time, in 152.7 hours: 0.036 per second.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

from common import parser, progress, publish, seconds, summary, table

VMBATCH = 20_000 / (152.7 * 3600)


class Samples:
    """The host's own figures while the jobs run; the slope over the run should be zero."""

    def __init__(self, belljar: str) -> None:
        settings = json.loads(
            subprocess.run([belljar, "config", "show", "--format", "json"], capture_output=True, check=True).stdout
        )
        paths = settings.get("paths", {})
        self._folders = [Path(str(paths[name])) for name in ("run", "scratch") if name in paths]
        self.rows: list[dict[str, float]] = []

    def take(self, done: int) -> None:
        memory = {line.split(":")[0]: int(line.split()[1]) for line in Path("/proc/meminfo").read_text().splitlines()}
        self.rows.append(
            {
                "jobs": done,
                "unreclaimable_mib": (memory["MemTotal"] - memory["MemAvailable"]) / 1024,
                "open_files": int(Path("/proc/sys/fs/file-nr").read_text().split()[0]),
                "qemu": sum(comm.startswith("qemu") for comm in _commands()),
                "files": sum(len(files) for folder in self._folders for _, _, files in os.walk(folder)),
            }
        )

    def slopes(self) -> dict[str, float]:
        """Growth per 1000 jobs, by least squares, of each figure. Only samples taken while jobs ran are compared."""
        busy = self.rows[1:-1]
        jobs = [row["jobs"] for row in busy]
        return (
            {name: _slope(jobs, [row[name] for row in busy]) * 1000 for name in busy[0] if name != "jobs"}
            if busy
            else {}
        )

    def left_over(self) -> dict[str, float]:
        """What is there after the last job that was not there before the first."""
        return {name: self.rows[-1][name] - self.rows[0][name] for name in ("qemu", "files")}


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--jobs", type=int, default=200)
    arguments.add_argument("--at-a-time", type=int, default=2)
    arguments.add_argument("--sample-every", type=int, default=20)
    args = arguments.parse_args()
    command = [args.belljar, "run", "--image", args.image, "--", "true"]
    seconds(command)
    samples, times, failures = Samples(args.belljar), [], []
    samples.take(0)
    left, lock = iter(range(args.jobs)), threading.Lock()

    def work() -> None:
        while True:
            with lock:
                if next(left, None) is None:
                    return
            begin = time.perf_counter()
            done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
            with lock:
                times.append(time.perf_counter() - begin)
                if done.returncode:
                    failures.append(done.stderr.decode(errors="replace").strip())
                if len(times) % args.sample_every == 0:
                    samples.take(len(times))
                    progress(f"{len(times)} of {args.jobs} jobs, {len(failures)} failed")

    begin = time.perf_counter()
    workers = [threading.Thread(target=work) for _ in range(args.at_a_time)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    took = time.perf_counter() - begin
    progress("")
    samples.take(args.jobs)
    rate = args.jobs / took
    table(
        ("figure", "value"),
        [
            ("jobs", args.jobs), ("at a time", args.at_a_time), ("failed", len(failures)), ("seconds", took),
            ("jobs per second", rate), ("times VmBatch's rate", rate / VMBATCH),
            *((f"growth per 1000 jobs: {name}", value) for name, value in samples.slopes().items()),
            *((f"left over: {name}", value) for name, value in samples.left_over().items()),
        ],
    )  # fmt: skip
    publish(
        args,
        {
            "benchmark": "throughput",
            "jobs_per_second": rate,
            "failed": failures[:5],
            "seconds": summary(times),
            "samples": samples.rows,
        },
    )
    if failures:
        sys.exit(1)


def _commands() -> list[str]:
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                found.append(Path(f"/proc/{entry}/comm").read_text())
            except (FileNotFoundError, ProcessLookupError):
                continue
    return found


def _slope(xs: list[float], ys: list[float]) -> float:
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    spread = sum((x - mean_x) ** 2 for x in xs)
    return sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / spread if spread else 0.0


if __name__ == "__main__":
    main()
