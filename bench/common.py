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
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

Row = dict[str, float]
ROOT = Path(__file__).resolve().parent.parent
# Fills so many MiB of a guest's memory with random bytes, and as many with text.
FILL = """\
mount -o remount,size=75% /dev/shm
cd /dev/shm
head -c {0}M /dev/urandom > a
yes 'a line of text' | head -c {0}M > b
echo ready
"""


def parser(description: str) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--belljar", default=find_belljar(), help="the command to measure (default: %(default)s)")
    made.add_argument("--image", default="debian12")
    made.add_argument("--json", metavar="FILE", help="write the figures there too")
    return made


def find_belljar() -> str:
    """The installed command, else the one of the development environment."""
    return shutil.which("belljar") or str(ROOT / ".venv/bin/belljar")


def fresh_node(command: Sequence[str | Path], node: Path, store: Path, run: Path | None = None) -> dict[str, str]:
    """Settings, as variables, of a node of its own in *node*, with the images of *store* and nothing else; *run*: where the folders
    of its machines are. Two trees that shared one would throw away what the other has noted of this host's QEMU, and ask anew in
    each job."""
    node.chmod(0o755)
    (node / "store").mkdir(mode=0o755)
    subprocess.run(["cp", "-a", "--reflink=auto", store / "images", node / "store"], check=True)
    paths = {f"BELLJAR_PATHS_{one.upper()}": str(node / one) for one in ("store", "run", "scratch", "logs")}
    if run is not None:
        paths["BELLJAR_PATHS_RUN"] = str(run)
    env = {**os.environ, **paths}
    subprocess.run([*command, "image", "verify"], env=env, check=True, stdout=subprocess.DEVNULL)  # they are copies
    return paths


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


def slope(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Of the line that fits best, by least squares; 0 where all xs are one."""
    mean_x, mean_y = statistics.fmean(xs), statistics.fmean(ys)
    spread = sum((x - mean_x) ** 2 for x in xs)
    return sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / spread if spread else 0.0


class Samples:
    """The host's own figures while jobs run, and what else is asked for; the slope of each should be zero."""

    def __init__(
        self, folders: Callable[[], Iterable[Path]], qemu_of: str = "", more: Callable[[], Row] = dict
    ) -> None:
        """*folders*: where machines have their files; *qemu_of*: a word of the command lines of the QEMUs to count."""
        self._folders, self._qemu_of, self._more = folders, qemu_of, more
        self.rows: list[Row] = []

    def take(self, done: int) -> None:
        memory = {line.split(":")[0]: int(line.split()[1]) for line in Path("/proc/meminfo").read_text().splitlines()}
        self.rows.append(
            {
                "jobs": done,
                "unreclaimable_mib": (memory["MemTotal"] - memory["MemAvailable"]) / 1024,
                "open_files": int(Path("/proc/sys/fs/file-nr").read_text().split()[0]),
                "qemu": qemus(self._qemu_of),
                "files": sum(map(files_below, self._folders())),
                **self._more(),
            }
        )

    def slopes(self) -> Row:
        """Growth per 1000 jobs, by least squares, of each figure. Only samples taken while jobs ran are compared."""
        busy = self.rows[1:-1]
        jobs = [row["jobs"] for row in busy]
        names = [name for name in busy[0] if name != "jobs"] if busy else []
        return {name: slope(jobs, [row[name] for row in busy]) * 1000 for name in names}

    def left_over(self) -> Row:
        """What is there after the last job that was not there before the first."""
        return {name: self.rows[-1][name] - self.rows[0][name] for name in ("qemu", "files")}


def files_below(folder: Path) -> int:
    return sum(len(files) for _, _, files in os.walk(folder))


def qemus(word: str) -> int:
    """QEMU processes of this host with *word* in their command line."""
    found = 0
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                is_qemu = (entry / "comm").read_text().startswith("qemu")
                found += is_qemu and word.encode() in (entry / "cmdline").read_bytes()
    return found


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
