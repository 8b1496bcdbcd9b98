"""Each way to contextualize: its start, cold and as a clone, and many jobs in turn of which none may fail.

The image must be able to do each way that is measured: a stock image with systemd, cloud-init and Python. A
job counts as failed unless it exits 0 and prints what was asked of it. `--jobs 20000` is what VmBatch was proved with.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from functools import partial
from typing import Any

from common import interleaved, parser, publish, summary, table

WAYS = ("ramdisk", "cloud-init", "inject")
LONGEST = 3600.0  # seconds one job may take


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--contexts", nargs="+", choices=WAYS, default=list(WAYS[:3]))
    arguments.add_argument("--jobs", type=int, default=20, help="clones for each context, in turn (20)")
    arguments.add_argument("--cold", type=int, default=1, help="cold starts, for each context (1)")
    args = arguments.parse_args()
    found = measured(args)
    heads = (
        "context", "first s", "cold s", "clone median s", "clone p90 s", "clones", "failed", "times the first context's",
    )  # fmt: skip
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


def measured(args: Any) -> dict[str, dict[str, Any]]:
    """`first`: the job that also makes the template."""
    failures: dict[str, list[str]] = {way: [] for way in args.contexts}
    first = {way: job(args, way, "clone", failures[way]) for way in args.contexts}
    cold = {way: [job(args, way, "cold", failures[way]) for _ in range(args.cold)] for way in args.contexts}
    cases = {way: partial(job, args, way, "clone", failures[way]) for way in args.contexts}
    clones = interleaved(cases, args.jobs)
    return {
        way: {"first": first[way], "cold": summary(cold[way]) if args.cold else {}, "clone": summary(clones[way]), "failures": failures[way]}
        for way in args.contexts
    }  # fmt: skip


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
