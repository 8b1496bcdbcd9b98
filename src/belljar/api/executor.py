"""A `concurrent.futures.Executor` whose tasks each run in a fresh machine. docs/jobs/executor.md tells how it is used.

Each worker is a thread that starts a machine and waits for its end. A task has no file on this host. Its result's is named after the
machine, so that the reaper knows whose it is when this process is killed.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import marshal
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from functools import cache
from itertools import chain, islice
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, Unpack

from belljar import api
from belljar.api import task as inside
from belljar.errors import (
    BelljarError,
    HostError,
    LibraryMissing,
    MachineFailed,
    NoMemory,
    NoProcessors,
    OutputMissing,
    PythonUnfit,
)
from belljar.host.room import Need, host_memory
from belljar.machine.outside.detached import error_of
from belljar.machine.outside.watching import ENDED
from belljar.model import MachineId, MachineSpec, OutcomeClass, Request, Retry
from belljar.records import replace

T = TypeVar("T")
P = ParamSpec("P")
# Of cloudpickle: by these a function is made again in the guest. A cell is made with a value there, never by default.
LOADERS = ("_builtin_type", "_function_setstate", "_make_cell", "_make_empty_cell", "_make_function", "subimport")
SOURCE = Path(inside.__file__).read_text()
RESULT = "/tmp/belljar-result"  # in the guest
LOOK_AGAIN = 10.0  # seconds: room that no machine of ours gave back


class TaskError(Exception):
    """A task raised what cannot be pickled; its text is the last line, its cause the traceback."""


class Executor(concurrent.futures.ThreadPoolExecutor):
    """Runs each task in a fresh machine, at most *max_workers* at once (default: as many as this host has processors), with these
    options of `belljar.api.run`. *python*: the guest's. *plain_results*: take nothing but plain data and Python's own exceptions
    out of a guest, so that a hostile one cannot run code here. *patience*: seconds a task waits for room on this host."""

    def __init__(
        self, max_workers: int | None = None, *, python: str = "python3", plain_results: bool = False,
        patience: float = 3600.0, **options: Unpack[api.Options],
    ) -> None:  # fmt: skip
        super().__init__((os.cpu_count() or 1) if max_workers is None else max_workers, "belljar-executor")
        if "script" in options:
            raise TypeError("script: a task has none")
        self._python, self._options, self._patience = python, options, patience
        self._unpickler = Plain if plain_results else pickle.Unpickler
        self._request(), _code()  # what cannot be meant, and a library that is missing, are told now
        self._turn = threading.Lock()  # of the task that looks for room
        self._starting = set[MachineId]()  # that may not have reserved theirs yet
        self._living = set[api.Machine]()
        self._is_terminated = False

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """What *fn* returns, or raises, in its machine. The future raises `Failed` where the task's process ended without an
        answer, MachineFailed where host or machine failed it, and other errors of belljar where the options must change."""
        return super().submit(lambda: self._carry_out(fn, args, kwargs))

    def map(
        self, fn: Callable[..., T], *iterables: Iterable[Any], timeout: float | None = None, chunksize: int = 1, **more: Any
    ) -> Iterator[T]:  # fmt: skip
        """As the built-in `map`, *chunksize* calls to a machine."""
        if chunksize < 1:
            raise ValueError("chunksize must be >= 1")
        rows = zip(*iterables, strict=False)
        chunks = iter(lambda: list(islice(rows, chunksize)), [])

        def in_turn(chunk: list[tuple[Any, ...]]) -> list[T]:  # sent whole: the guest does not have this module
            return [fn(*row) for row in chunk]

        return chain.from_iterable(super().map(in_turn, chunks, timeout=timeout, **more))

    def terminate_workers(self) -> None:
        """Shut down, and stop the machines of tasks that run: their futures raise CancelledError."""
        self._is_terminated = True
        self.shutdown(wait=False, cancel_futures=True)
        for machine in self._living.copy():
            machine.release()

    # -- one task, in its thread -------------------------------------------------------------------------------------

    def _carry_out(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What it returns, by one machine."""
        import cloudpickle

        head = (tuple(sys.version_info[:2]), *_code())
        task = pickle.dumps(head, inside.OLDEST) + cloudpickle.dumps((function, args, kwargs))
        while True:
            request = self._request()
            result = _place_of_result(request.id)
            self._await_room(request)
            try:
                completed = self._run(request, task)
            except (NoMemory, NoProcessors):
                _await_some_end()  # another machine was quicker
            except BelljarError as exc:
                if exc.retry is Retry.NEVER:
                    raise
                raise MachineFailed(exc.message, hint=exc.hint) from exc
            else:
                return self._answer(completed, result)
            finally:
                result.unlink(missing_ok=True)

    def _await_room(self, request: Request) -> None:
        """Return when this host has room for one more machine, which counts as starting from then on. One task looks at a time,
        again whenever a machine has ended. Raises MachineFailed when its patience is over."""
        deadline = time.monotonic() + self._patience
        with self._turn:
            while True:
                self._check_terminated()
                try:
                    self._look(request.machine, len(self._starting) + 1)
                    return self._starting.add(request.id)
                except HostError as refusal:
                    if (left := deadline - time.monotonic()) <= 0:
                        raise MachineFailed(f"waited {self._patience:g} s for room: {refusal}") from refusal
                _await_some_end(min(left, LOOK_AGAIN))

    def _look(self, machine: MachineSpec, count: int) -> None:
        """Raises HostError where there is no room now for so many; one that is larger than the host finds that when it starts."""
        if machine.memory <= host_memory()[0] and machine.cpus <= (os.cpu_count() or 1):
            api.room().refuse(Need(machine.memory * count, machine.cpus * count, (machine.scratch or 0) * count))

    def _run(self, request: Request, task: bytes) -> api.Completed:
        try:
            machine = api.start(request, stdin=task, tied=True)
        finally:
            self._starting.discard(request.id)
        self._living.add(machine)
        try:
            if self._is_terminated:
                machine.release()
            return api.Completed(machine.wait(), machine.stdout, machine.stderr)
        finally:
            self._living.discard(machine)
            machine.release()

    def _check_terminated(self) -> None:
        if self._is_terminated:
            raise CancelledError("the task's machine was stopped")

    def _request(self) -> Request:
        """For one task."""
        id = os.urandom(6).hex()
        outputs = {**self._options.get("outputs", {}), RESULT: str(_place_of_result(id))}
        options: api.Options = {**self._options, "outputs": outputs}
        return replace(api.request([self._python, "-c", SOURCE, RESULT], **options), id=id)

    def _answer(self, completed: api.Completed, result: Path) -> Any:
        """What the task returned; raises what it raised, or why it did neither."""
        outcome = completed.outcome
        if outcome.exit_code != 0 or outcome.error:
            self._check_terminated()
            raise why(completed, result.exists())
        with open(result, "rb") as file:
            ended, text = Plain(file).load()
            if ended == inside.OTHER_PYTHON:
                ours = ".".join(map(str, sys.version_info[:2]))
                raise PythonUnfit(f"{outcome.image}: its {self._python} is Python {text}, and this program's {ours}")
            if ended == inside.RETURNED:
                return self._unpickler(file).load()
            error = None
            with suppress(Exception):  # then its text is all there is
                error = self._unpickler(file).load()
        raise _as_raised(error, text)


def why(completed: api.Completed, has_result: bool) -> BelljarError:
    """The error of a task that gave no answer."""
    outcome = completed.outcome
    error = error_of({"error": outcome.error, "message": outcome.reason, "hint": outcome.hint})
    if outcome.error == "not-found":
        return PythonUnfit(f"{outcome.image}: {outcome.reason}")
    if outcome.error == OutputMissing.__name__ and not has_result:
        reason = "the task ended its process, with exit code 0, before it had returned"
        return api.Failed(replace(completed, outcome=replace(outcome, reason=reason, hint="")))
    if outcome.klass in (OutcomeClass.NODE, OutcomeClass.TRANSIENT):
        failed = api.Failed(completed)
        cause, error = error, MachineFailed(failed.message, hint=failed.hint)
        error.__cause__ = cause
        return error
    return error if outcome.klass is OutcomeClass.USER else api.Failed(completed)


def _as_raised(error: object, text: str) -> BaseException:
    from multiprocessing.pool import RemoteTraceback  # type: ignore[attr-defined]

    if not isinstance(error, BaseException):
        error = TaskError(text.strip().rpartition("\n")[2])
    if isinstance(error, ModuleNotFoundError):
        error.add_note(f"The guest has no module {error.name!r}: see docs/jobs/executor.md, Modules.")
    error.__cause__ = RemoteTraceback(f'\n"""\n{text}"""')
    return error


class Plain(pickle.Unpickler):
    """Plain data and Python's own exceptions; nothing else is looked for."""

    def find_class(self, module: str, name: str) -> Any:
        kind = super().find_class(module, name) if module == "builtins" and name.isidentifier() else None
        if isinstance(kind, type) and issubclass(kind, (Exception, set, frozenset, complex, bytearray)):
            return kind
        raise pickle.UnpicklingError(f"{module}.{name}: not plain data, which is all that `plain_results` takes")


def _await_some_end(longest: float = LOOK_AGAIN) -> None:
    """Return when a machine of this user has ended, or after so many seconds."""

    async def some_end() -> None:
        async for event in api.aevents():
            if event["event"] == ENDED:
                return

    with suppress(TimeoutError):
        asyncio.run(asyncio.wait_for(some_end(), longest))


def _place_of_result(id: MachineId) -> Path:
    return api._runtime().folders.scratch / f"{id}.result"


@cache
def _code() -> tuple[dict[str, bytes], dict[str, bytes]]:
    """Of cloudpickle's modules, and of its loaders. Raises LibraryMissing."""
    from importlib.util import find_spec

    try:
        from cloudpickle import cloudpickle
    except ImportError as exc:
        hint = "`pip install cloudpickle`, or `make install EXTRAS=executor`."
        raise LibraryMissing("cloudpickle is not there", hint=hint) from exc
    modules = {name: marshal.dumps(find_spec(name).loader.get_code(name)) for name in inside.MODULES}  # type: ignore[union-attr]
    known, enough = vars(cloudpickle), {*LOADERS, *inside.KNOWN}
    loaders = ((name, known[name].__code__) for name in LOADERS if name in known)
    return modules, {name: marshal.dumps(code) for name, code in loaders if known.keys() & code.co_names <= enough}
