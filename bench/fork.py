"""Forks of a machine with so much memory, a quarter of it random bytes in files and a quarter text.

touched     what its QEMU holds
still       the machine stands still: the journal's event `forked`
prepare     the machine itself, from `belljar run` until its memory is filled
children    so many forks of it by one `belljar fork`, from there until the last runs its command
private     memory that is a child's QEMU's alone, the median of them
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from common import FILL, parser, publish, summary, table

COLUMNS = {
    "memory": "memory MiB", "touched": "touched MiB", "still": "still s", "prepare": "prepare s", "children_per_s": "children/s",
    "private": "private MiB", "prepare / child": "prepare / child", "private / touched": "private / touched",
}  # fmt: skip
WRITES = "while :; do head -c 1M /dev/zero > c; sleep 0.1; done"


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--memory", type=int, nargs="+", default=[256, 1024], help="MiB of the machines")
    arguments.add_argument("-n", "--children", type=int, default=8)
    arguments.add_argument(
        "--writes", action="store_true", help="the machine writes a MiB of memory ten times a second"
    )
    arguments.add_argument("--cold", action="store_true", help="the machine is booted with all its memory in one piece")
    args = arguments.parse_args()
    start, then = "cold" if args.cold else "auto", WRITES if args.writes else "exec sleep 1000"
    figures = [measure(args.belljar, args.image, memory, args.children, start, then) for memory in args.memory]
    table([*COLUMNS.values()], [[figure[name] for name in COLUMNS] for figure in figures])
    how = {"children": args.children, "start": start, "writes": args.writes}
    publish(args, {"benchmark": "fork", **how, "machines": figures})


def measure(belljar: str, image: str, memory: int, count: int, start: str, then: str) -> dict[str, float]:
    """One machine, and the forks of it, all alive at once."""
    name = f"bench-{os.getpid()}-{memory}"
    command = ["--", "sh", "-ec", FILL.format(memory // 4) + then]
    machine = ["--image", image, "--user", "0:0", "--cwd", "/", "-m", f"{memory}M", "--start", start, "--name", name]
    begin = time.perf_counter()
    machines = output([belljar, "run", "-d", "-n", *machine, *command]).split()
    try:
        await_line(belljar, machines[0], "ready")
        prepare, touched = time.perf_counter() - begin, held(belljar, machines[0], "Rss")
        begin = time.perf_counter()
        forks = output([belljar, "fork", "-n", str(count), machines[0], "--", "sh", "-c", "echo up; exec sleep 1000"])
        machines += forks.split()
        for child in machines[1:]:
            await_line(belljar, child, "up")
        took = time.perf_counter() - begin
        events = map(json.loads, output([belljar, "events", "--format", "json"]).splitlines())
        still = next(row["still"] for row in events if row["event"] == "forked" and row["machine"] == machines[0])
        private = summary([held(belljar, child, "Private_Clean", "Private_Dirty") for child in machines[1:]])["median"]
    finally:
        for id in reversed(machines):
            subprocess.run([belljar, "stop", id], check=False, stdout=subprocess.DEVNULL)
    return {
        "memory": memory, "touched": touched, "still": still, "prepare": prepare, "children_per_s": count / took, "private": private,
        "prepare / child": prepare * count / took, "private / touched": private / touched,
    }  # fmt: skip


def output(command: Iterable[str]) -> str:
    return subprocess.run([*command], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=True, text=True).stdout


def await_line(belljar: str, machine: str, line: str) -> None:
    """Until its command has written this line first."""
    follow = [belljar, "logs", "--stdout", "--follow", machine]
    with subprocess.Popen(follow, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        first = process.stdout.readline().strip()
        process.terminate()
    if first != line:
        sys.exit(f"{machine}: {first!r} instead of {line!r}")


def held(belljar: str, machine: str, *kinds: str) -> float:
    """MiB of its QEMU's memory of these kinds."""
    pid = json.loads(output([belljar, "show", "--format", "json", machine]))["pid"]
    rows = (line.split() for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
    return sum(int(row[1]) for row in rows if row[0].rstrip(":") in kinds) / 1024


if __name__ == "__main__":
    main()
