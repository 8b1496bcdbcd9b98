"""Each way to contextualize: its start, cold and as a clone, and many jobs in a row of which none may fail.

The image must be able to do each way that is measured: a stock image with systemd, cloud-init, an ssh server and Python. A
job counts as failed unless it exits 0 and prints what was asked of it. `--jobs 20000` is what VmBatch was proved with.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import Any

from common import parser, progress, publish, summary, table

WAYS = ("ramdisk", "cloud-init", "inject", "ssh")
LONGEST = 3600.0  # seconds one job may take


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--contexts", nargs="+", choices=WAYS, default=list(WAYS[:3]))
    arguments.add_argument("--jobs", type=int, default=20, help="clones in a row, for each context (20)")
    arguments.add_argument("--cold", type=int, default=1, help="cold starts, for each context (1)")
    args = arguments.parse_args()
    found = {way: measured(args, way) for way in args.contexts}
    heads = (
        "context",
        "first s",
        "cold s",
        "clone median s",
        "clone p90 s",
        "clones",
        "failed",
        "times the first context's",
    )
    base = found[args.contexts[0]]["clone"]["median"]
    rows = []
    for way, one in found.items():
        cold = one["cold"]["median"] if args.cold else float("nan")
        median = one["clone"]["median"]
        rows.append(
            (way, one["first"], cold, median, one["clone"]["p90"], args.jobs, len(one["failures"]), median / base)
        )
    table(heads, rows)
    publish(args, {"benchmark": "contexts", "contexts": found})
    for way, one in found.items():
        for failure in one["failures"][:5]:
            print(f"{way}: {failure}", file=sys.stderr)
    if any(one["failures"] for one in found.values()):
        sys.exit(1)


def measured(args: Any, way: str) -> dict[str, Any]:
    """`first`: the job that also makes the template."""
    failures: list[str] = []
    first = job(args, way, "clone", failures)
    cold = [job(args, way, "cold", failures) for _ in range(args.cold)]
    clones = []
    for number in range(args.jobs):
        clones.append(job(args, way, "clone", failures))
        progress(f"{way}: {number + 1} of {args.jobs}, {len(failures)} failed")
    progress("")
    return {"first": first, "cold": summary(cold) if cold else {}, "clone": summary(clones), "failures": failures}


def job(args: Any, way: str, start: str, failures: list[str]) -> float:
    """One job; its seconds."""
    word = os.urandom(8).hex()
    argv = [args.belljar, "run", "--image", args.image, "--context", way, "--start", start, "--", "echo", word]
    begin = time.perf_counter()
    try:
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, check=False, timeout=LONGEST)
        if done.returncode or done.stdout.decode(errors="replace") != f"{word}\n":
            failures.append(json.dumps([done.returncode, done.stderr.decode(errors="replace")[-300:]]))
    except subprocess.TimeoutExpired:
        failures.append(f"not finished after {LONGEST:g} s")
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
