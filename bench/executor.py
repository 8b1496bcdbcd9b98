"""Tasks per second of `belljar.api.Executor`, each in a fresh clone, beside a `ProcessPoolExecutor` whose processes serve many
tasks and one whose processes serve one task each: the same function, the same number at a time."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Executor, ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context

from common import interleaved, parser, publish, summary, table

from belljar.api import Executor as Machines


def work(number: int) -> int:
    return sum(range(number))


def seconds_of(make: Callable[[], Executor], tasks: int, chunk: int) -> float:
    """For each task, with the pool's own start and end."""
    begin = time.perf_counter()
    with make() as executor:
        results = list(executor.map(work, range(tasks), chunksize=chunk))
    assert results == [sum(range(number)) for number in range(tasks)]
    return (time.perf_counter() - begin) / tasks


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--tasks", type=int, default=40)
    arguments.add_argument("--at-a-time", type=int, default=2)
    arguments.add_argument("--runs", type=int, default=3)
    args = arguments.parse_args()
    count, tasks = args.at_a_time, args.tasks
    machines = partial(Machines, count, image=args.image)
    fresh = partial(ProcessPoolExecutor, count, get_context("spawn"), max_tasks_per_child=1)
    seconds_of(machines, 1, 1)  # makes the template where it is missing
    times = interleaved(
        {
            "machines": lambda: seconds_of(machines, tasks, 1),
            "machines, ten tasks each": lambda: seconds_of(machines, tasks, 10),
            "a process per task": lambda: seconds_of(fresh, tasks, 1),
            "processes": lambda: seconds_of(partial(ProcessPoolExecutor, count), tasks, 1),
        },
        args.runs,
    )
    medians = {name: summary(values)["median"] for name, values in times.items()}
    rows = [(name, 1 / each, each, each / medians["processes"]) for name, each in medians.items()]
    table(("executor", "tasks/s", "s per task", "times processes"), rows)
    ratios = {name: medians["machines"] / each for name, each in medians.items()}
    publish(args, {"benchmark": "executor", "tasks": tasks, "at_a_time": count, "seconds": medians, "ratios": ratios})


if __name__ == "__main__":
    main()
