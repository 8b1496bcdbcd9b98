"""What the benchmarks share: the command under test, repeated runs, tables, JSON. Figures are ratios of one run."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def parser(description: str) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--belljar", default=find_belljar(), help="the command to measure (default: %(default)s)")
    made.add_argument("--image", default="debian12")
    made.add_argument("--json", metavar="FILE", help="write the figures there too")
    return made


def find_belljar() -> str:
    """The installed command, else the one of the development environment."""
    return shutil.which("belljar") or str(ROOT / ".venv/bin/belljar")


def seconds(command: Sequence[str], **options: Any) -> float:
    """Wall time of one command that must succeed."""
    begin = time.perf_counter()
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, check=False, **options)
    took = time.perf_counter() - begin
    if done.returncode:
        sys.exit(f"{' '.join(command)}: exit {done.returncode}")
    return took


def interleaved(cases: dict[str, Callable[[], float]], runs: int) -> dict[str, list[float]]:
    """Each case once per round, so that a noisy moment of the host hits all of them."""
    times: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(runs):
        for name, run in cases.items():
            times[name].append(run())
        progress(f"round {number + 1} of {runs}")
    progress("")
    return times


def progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def summary(times: list[float]) -> dict[str, float]:
    ordered = sorted(times)
    return {
        "median": statistics.median(ordered),
        "best": ordered[0],
        "p90": ordered[min(len(ordered) - 1, int(len(ordered) * 0.9))],
        "worst": ordered[-1],
        "runs": len(ordered),
    }


def table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    texts = [[f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in row] for row in (heads, *rows)]
    widths = [max(len(row[column]) for row in texts) for column in range(len(heads))]
    for row in texts:
        print(
            "  ".join(
                cell.ljust(width) if not i else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
        )


def publish(args: argparse.Namespace, figures: dict[str, Any]) -> None:
    figures["host"] = {"cpus": os.cpu_count(), "kernel": os.uname().release, "load": os.getloadavg()[0]}
    text = json.dumps(figures, indent=1)
    if args.json:
        Path(args.json).write_text(text + "\n")
    else:
        print(text)
