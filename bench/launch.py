"""Belljar's own processor time per machine, QEMU's left out: so many single starts against as many by one `start_many`, in one run."""

from __future__ import annotations

import ctypes
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable

from common import parser, publish, table

import belljar.api as belljar
from belljar.journal import read

SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER: keepers, which nobody waits for, become our children
Start = Callable[[list[str], int], list[belljar.Machine]]


def one_by_one(argv: list[str], count: int) -> list[belljar.Machine]:
    return [belljar.start(argv) for _ in range(count)]


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--machines", type=int, default=8, help="of each round")
    arguments.add_argument("--rounds", type=int, default=4)
    args = arguments.parse_args()
    ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)
    belljar.run(["true"], image=args.image).check()
    ways: dict[str, Start] = {"single starts": one_by_one, "start_many": belljar.start_many}
    rows: dict[str, list[tuple[float, float, float]]] = {name: [] for name in ways}
    for _ in range(args.rounds):
        for name, start in ways.items():
            rows[name].append(measured(start, args.machines))
    middles = {name: [statistics.median(column) for column in zip(*rows[name], strict=True)] for name in ways}
    heads = ("ms of our processor time per machine", "to its claim", "to its command", "to its end")
    table(heads, [(name, *(1000 * value for value in middle)) for name, middle in middles.items()])
    ratios = [many / single for single, many in zip(*middles.values(), strict=True)]
    print("start_many / single starts: " + ", ".join(f"{ratio:.2f}" for ratio in ratios))
    publish(args, {"benchmark": "launch", "machines": args.machines, "seconds": middles, "ratios": ratios})


def measured(start: Start, count: int) -> tuple[float, float, float]:
    """Seconds per machine: of the process that launches them; with each keeper's until its command runs; and until its end."""
    before = launchers()
    machines = start(["sleep", "1000"], count)
    launching = launchers() - before
    keepers = [keeper_of(machine) for machine in machines]
    for machine in machines:
        machine.exec(["true"])  # so its command runs
    running = [clock(pid) for pid in keepers]
    for machine in machines:
        machine.ask("kill")
    ended = [at_its_end(pid) for pid in keepers]
    return launching / count, (launching + sum(running)) / count, (launching + sum(ended)) / count


def launchers() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def keeper_of(machine: belljar.Machine) -> int:
    return int(read(machine.view.folder)[0]["pid"])


def clock(pid: int) -> float:
    """Processor time of a process, all of its threads, without its children's. See clock_getcpuclockid(3)."""
    return time.clock_gettime(~pid << 3 | 2)


def at_its_end(pid: int) -> float:
    deadline = time.monotonic() + 60
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
        if time.monotonic() > deadline:
            sys.exit("a machine does not end")
        time.sleep(0.05)
    return clock(pid)  # of a zombie


if __name__ == "__main__":
    main()
