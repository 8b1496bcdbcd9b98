"""Complete jobs per second, some at a time; and whether anything grows: leftovers, memory, descriptors, files.

VmBatch (2016) ran 20 000 jobs, two at a time, in 152.7 hours: 0.036 per second.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path

from common import Samples, parser, progress, publish, seconds, summary, table

VMBATCH = 20_000 / (152.7 * 3600)


def folders_of_machines(belljar: str) -> list[Path]:
    """As the settings have them."""
    done = subprocess.run([belljar, "config", "show", "--format", "json"], capture_output=True, check=True)
    paths = json.loads(done.stdout).get("paths", {})
    return [Path(str(paths[name])) for name in ("run", "scratch") if name in paths]


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--jobs", type=int, default=200)
    arguments.add_argument("--at-a-time", type=int, default=2)
    arguments.add_argument("--sample-every", type=int, default=20)
    args = arguments.parse_args()
    command = [args.belljar, "run", "--image", args.image, "--", "true"]
    seconds(command)
    folders = folders_of_machines(args.belljar)
    samples, times, failures = Samples(lambda: folders), [], []
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


if __name__ == "__main__":
    main()
