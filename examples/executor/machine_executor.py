"""A `concurrent.futures.Executor` whose tasks each run in a fresh virtual machine.

    with MachineExecutor(max_workers=4) as executor:
        print(list(executor.map(harvest, range(10))))

The function's file goes into the machine and is run by the guest's own Python, so it must not import what the guest does not have.
Arguments and results travel as JSON, and never as pickles: what comes out of a guest is not trusted.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar, Unpack

import belljar.api as belljar

T = TypeVar("T")
INSIDE = b"""#!/usr/bin/env python3
import json, sys
task, answer, sys.stdout = json.load(sys.stdin), sys.stdout, sys.stderr
names = {"__name__": "task", "__file__": task["file"]}
exec(compile(task["source"], task["file"], "exec"), names)
json.dump(names[task["function"]](*task["args"], **task["kwargs"]), answer)
"""


class MachineExecutor(Executor):
    """At most *max_workers* machines at once, each with these options of `belljar.api.run`."""

    def __init__(self, max_workers: int = 2, **options: Unpack[belljar.Options]) -> None:
        self._options = options
        self._threads = ThreadPoolExecutor(max_workers, "machine")

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """The future's result is what *fn*, a function of a module's top level, returned in its machine. Raises
        `belljar.api.Failed` there where it raised: its stderr has the traceback."""
        file = inspect.getsourcefile(fn)
        if file is None or fn.__qualname__ != fn.__name__:
            raise TypeError(f"{fn!r}: not a function of a module's top level")
        task = {"source": Path(file).read_text(), "file": file, "function": fn.__name__, "args": args, "kwargs": kwargs}
        return self._threads.submit(self._run, json.dumps(task).encode())

    def _run(self, task: bytes) -> Any:
        options: belljar.Options = {**self._options, "script": INSIDE}
        return json.loads(belljar.run(["task"], stdin=task, **options).check().stdout)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._threads.shutdown(wait, cancel_futures=cancel_futures)
