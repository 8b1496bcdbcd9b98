"""A `concurrent.futures.Executor` whose tasks each run in a fresh machine. docs/jobs/executor.md tells how it is used.

One thread with an event loop starts the machines and waits for them; it is there while there are tasks. A task's file has no name
on this host. Its result's is named after the machine, so that the reaper knows whose it is when this process is killed.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import marshal
import os
import pickle
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from functools import cache, partial
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any, ParamSpec, TypeVar, Unpack

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
from belljar.host.files import private_folder
from belljar.host.room import Need, host_memory
from belljar.host.threads import in_thread
from belljar.machine import RESERVED
from belljar.machine.outside.detached import error_of
from belljar.model import Outcome, OutcomeClass, Request, Retry, RunPayload, Transfer
from belljar.records import dataclass, replace

T = TypeVar("T")
P = ParamSpec("P")
Answer = tuple[Any, BaseException | None]
TASK, RESULT = "/tmp/belljar-task", "/tmp/belljar-result"  # in the guest
NO_ROOM = (NoMemory, NoProcessors)
LOOK_AGAIN = 10.0  # seconds: room that no machine of ours gave back


class RemoteTraceback(Exception):
    """The cause of an exception that came out of a machine: where it was raised there."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f'\n"""\n{self.text}"""'


class TaskError(Exception):
    """A task raised what cannot be pickled; its text is the last line, its cause the traceback."""


@dataclass(frozen=True)
class Task:
    """What is to be done, and who waits for it."""

    call: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
    future: Future[Any]


class Executor(concurrent.futures.Executor):
    """Runs each task in a fresh machine, at most *max_workers* at once (default: as many as this host has processors), with these
    options of `belljar.api.run`. *python*: the guest's. *plain_results*: take nothing but plain data and Python's own exceptions
    out of a guest, so that a hostile one cannot run code here. *patience*: seconds a task waits for room on this host."""

    def __init__(
        self, max_workers: int | None = None, *, python: str = "python3", plain_results: bool = False,
        patience: float = 3600.0, **options: Unpack[api.Options],
    ) -> None:  # fmt: skip
        if max_workers is not None and max_workers < 1:
            raise ValueError(f"max_workers: {max_workers} is not a number of machines")
        if "script" in options:
            raise TypeError("script: a task has none")
        self._max_workers = max_workers or os.cpu_count() or 1
        self._python, self._options, self._patience = python, options, patience
        self._load: Callable[[IO[bytes]], Any] = plain if plain_results else pickle.load
        spec = self._request([]).machine
        fits = spec.memory <= host_memory()[0] and spec.cpus <= (os.cpu_count() or 1)
        self._need = Need(spec.memory, spec.cpus, spec.scratch or 0) if fits else None  # else its start says why
        _code()  # a library that is missing is told now
        self._lock = threading.Lock()  # of what follows
        self._waiting = deque[Task]()
        self._running = dict[asyncio.Task[None], Task]()
        self._thread: threading.Thread | None = None
        self._is_shut = False

    # -- concurrent.futures ------------------------------------------------------------------------------------------

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """What *fn* returns, or raises, in its machine. The future raises `Failed` where the task's process ended without an
        answer, MachineFailed where host or machine failed it, and other errors of belljar where the options must change."""
        future = Future[T]()
        with self._lock:
            if self._is_shut:
                raise RuntimeError("cannot schedule new futures after shutdown")
            self._waiting.append(Task((fn, args, kwargs), future))
            if self._thread is None:
                self._loop, self._news = asyncio.new_event_loop(), asyncio.Event()
                self._thread = threading.Thread(target=self._work, name="belljar-executor")
                self._thread.start()  # the interpreter does not end before it does
            self._loop.call_soon_threadsafe(self._news.set)
        return future

    def map(
        self, fn: Callable[..., T], *iterables: Iterable[Any], timeout: float | None = None, chunksize: int = 1, **more: Any
    ) -> Iterator[T]:  # fmt: skip
        """As the built-in `map`, *chunksize* calls to a machine."""
        if chunksize < 1:
            raise ValueError("chunksize must be >= 1")
        rows = zip(*iterables, strict=False)
        chunks = iter(lambda: list(islice(rows, chunksize)), [])
        # A function without a name is sent whole: the guest has no belljar.
        return chain.from_iterable(
            super().map(lambda rows: [fn(*row) for row in rows], chunks, timeout=timeout, **more)
        )

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more tasks. *cancel_futures*: of those that were taken, begin no more."""
        with self._lock:
            self._is_shut, thread = True, self._thread
            tasks = [*self._waiting, *self._running.values()] if cancel_futures else []
        for task in tasks:
            task.future.cancel()  # not of those that run
        if wait and thread is not None:
            thread.join()

    def terminate_workers(self) -> None:
        """Shut down, and stop the machines of tasks that run: their futures raise CancelledError."""
        self.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            for work in self._running:
                self._loop.call_soon_threadsafe(work.cancel)

    # -- the thread --------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        """Begin tasks as others end, until there are none."""
        self._turn = asyncio.Lock()  # of who looks for room
        self._begun = dict[
            asyncio.Task[None] | None, Path | None
        ]()  # who has room -> what is there once it is reserved
        while True:
            self._news.clear()
            with self._lock:
                while self._waiting and len(self._running) < self._max_workers:
                    task = self._waiting.popleft()
                    work = asyncio.create_task(self._carry_out(task))
                    self._running[work] = task
                    work.add_done_callback(self._end)
                if not self._running:
                    self._thread = None
                    return
            await self._news.wait()

    def _end(self, work: asyncio.Task[None]) -> None:
        self._begun.pop(work, None)  # one that never came to a machine
        with self._lock:
            del self._running[work]
        self._news.set()

    async def _carry_out(self, task: Task) -> None:
        work, loop, future = asyncio.current_task(), asyncio.get_running_loop(), task.future
        assert work is not None
        future.add_done_callback(lambda _: loop.call_soon_threadsafe(work.cancel) if future.cancelled() else None)
        error: BaseException | None = None
        try:
            await self._room()
        except asyncio.CancelledError:
            future.cancel()
        except Exception as exc:
            error = exc
        if not future.set_running_or_notify_cancel():
            return
        try:
            value, error = (None, error) if error is not None else await self._answer(task)
        except asyncio.CancelledError:
            error = CancelledError("the task's machine was stopped")
        except BaseException as exc:  # whatever it is, who asked gets it
            error = exc
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(value)

    async def _room(self) -> None:
        """Return when this host has room for one more machine. One looks at a time, again whenever a machine has ended. Raises
        the refusal when its patience is over."""
        refusal: Exception = NoMemory("no room for a machine")
        with suppress(TimeoutError):
            async with asyncio.timeout(self._patience), self._turn:
                while True:
                    try:
                        self._look(sum(path is None or not path.exists() for path in self._begun.values()))
                        self._begun[asyncio.current_task()] = None
                        return
                    except HostError as error:
                        refusal = error
                    await self._some_end()
        raise MachineFailed(f"waited {self._patience:g} s for room: {refusal}") from refusal

    def _look(self, starting: int) -> None:
        """Raises HostError where there is no room now, beside that for so many machines that have not reserved theirs."""
        if (need := self._need) is not None:
            count = starting + 1
            api.room().refuse(Need(need.memory * count, need.cpus * count, need.scratch * count))

    async def _some_end(self) -> None:
        """Return when a machine of this user has ended, or after a while."""
        runtime = api._runtime()
        living = [api.Machine(view.id, runtime) for view in runtime.machines.living() if view.alive]
        ends: list[asyncio.Future[Any]] = [asyncio.ensure_future(machine.await_end()) for machine in living]
        ends.append(asyncio.ensure_future(asyncio.sleep(LOOK_AGAIN)))
        ours = [work for work in self._begun if work is not None and work is not asyncio.current_task()]
        try:
            await asyncio.wait([*ends, *ours], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for end in ends:
                end.cancel()
            await asyncio.gather(*ends, return_exceptions=True)

    # -- one task ----------------------------------------------------------------------------------------------------

    async def _answer(self, task: Task) -> Answer:
        """Raises why there is none."""
        packed, error = await in_thread(partial(_tried, self._packed, task), undo=_forget)
        if error is not None:
            return None, error
        with packed:
            while True:
                request = self._request([Transfer(f"/proc/{os.getpid()}/fd/{packed.fileno()}", TASK)])
                result = self._place_of_result(request)
                self._begun[asyncio.current_task()] = api._runtime().folders.machine(request.id) / RESERVED
                try:
                    completed = await self._run(request)
                    return await in_thread(partial(_tried, self._unpacked, completed, result))
                except NO_ROOM:
                    await self._some_end()  # another machine was quicker
                except BelljarError as exc:
                    if exc.retry is Retry.NEVER:
                        raise
                    raise MachineFailed(exc.message, hint=exc.hint) from exc
                finally:
                    self._begun.pop(asyncio.current_task(), None)
                    result.unlink(missing_ok=True)
                await self._room()

    async def _run(self, request: Request) -> api.Completed:
        return await api.arun(request)

    def _packed(self, task: Task) -> IO[bytes]:
        import cloudpickle

        file = tempfile.TemporaryFile(dir=private_folder(_scratch()))  # noqa: SIM115
        try:
            pickle.dump((tuple(sys.version_info[:2]), _code()), file, inside.OLDEST)
            cloudpickle.dump(task.call, file)
            file.flush()
            return file
        except BaseException:  # re-raised
            file.close()
            raise

    def _request(self, inputs: list[Transfer]) -> Request:
        """For one task."""
        request = api.request([self._python, "-c", _source(), TASK, RESULT], **self._options)
        assert isinstance(request.work, RunPayload)
        payload = request.work.payload
        output = Transfer(str(self._place_of_result(request)), RESULT)
        payload = replace(payload, inputs=(*payload.inputs, *inputs), outputs=(*payload.outputs, output))
        return replace(request, work=replace(request.work, payload=payload))

    def _place_of_result(self, request: Request) -> Path:
        return _scratch() / f"{request.id}.result"

    def _unpacked(self, completed: api.Completed, result: Path) -> Any:
        """What the task returned; raises what it raised, or why it did neither."""
        outcome = completed.outcome
        if outcome.exit_code != 0 or outcome.error or not result.exists():
            raise why(completed, result.exists())
        with open(result, "rb") as file:
            ended, text = plain(file)
            if ended == inside.OTHER_PYTHON:
                ours = ".".join(map(str, sys.version_info[:2]))
                raise PythonUnfit(f"{outcome.image}: its {self._python} is Python {text}, and this program's {ours}")
            if ended == inside.RETURNED:
                return self._load(file)
            error = None
            with suppress(Exception):  # then its text is all there is
                error = self._load(file)
        raise _as_raised(error, text)


def why(completed: api.Completed, has_result: bool) -> BelljarError:
    """The error of a task that gave no answer."""
    outcome = completed.outcome
    if outcome.error == "not-found":
        return PythonUnfit(f"{outcome.image}: {outcome.reason}")
    if outcome.error == OutputMissing.__name__ and not has_result:
        reason = "the task ended its process, with exit code 0, before it had returned"
        return api.Failed(replace(completed, outcome=replace(outcome, reason=reason, hint="")))
    if outcome.klass in (OutcomeClass.NODE, OutcomeClass.TRANSIENT) or (outcome.exit_code == 0 and not outcome.error):
        reason = outcome.reason if outcome.error else f"{outcome.reason}, and its result is gone"
        error = MachineFailed(f"{outcome.id}: {reason}", hint=outcome.hint or f"See `belljar show {outcome.id}`.")
        error.__cause__ = _cause(outcome)
        return error
    return _cause(outcome) if outcome.klass is OutcomeClass.USER else api.Failed(completed)


def _cause(outcome: Outcome) -> BelljarError:
    return error_of({"error": outcome.error, "message": outcome.reason, "hint": outcome.hint})


def _as_raised(error: object, text: str) -> BaseException:
    if not isinstance(error, BaseException):
        error = TaskError(text.strip().rpartition("\n")[2])
    if isinstance(error, ModuleNotFoundError):
        error.add_note(f"The guest has no module {error.name!r}: see docs/jobs/executor.md, Modules.")
    error.__cause__ = RemoteTraceback(text)
    return error


class Plain(pickle.Unpickler):
    """Plain data and Python's own exceptions; nothing else is looked for."""

    def find_class(self, module: str, name: str) -> Any:
        kind = super().find_class(module, name) if module == "builtins" and name.isidentifier() else None
        if isinstance(kind, type) and issubclass(kind, (Exception, set, frozenset, complex, bytearray)):
            return kind
        raise pickle.UnpicklingError(f"{module}.{name}: not plain data, which is all that `plain_results` takes")


def plain(file: IO[bytes]) -> Any:
    return Plain(file).load()


def _tried(call: Callable[..., Any], *words: Any) -> Answer:
    """An event loop passes on no StopIteration, and ends by some others."""
    try:
        return call(*words), None
    except BaseException as error:
        return None, error


def _forget(answer: Answer) -> None:
    if answer[0] is not None:
        answer[0].close()


def _scratch() -> Path:
    return api._runtime().folders.scratch


@cache
def _source() -> str:
    return Path(inside.__file__).read_text()


@cache
def _code() -> dict[str, bytes]:
    """Of cloudpickle's modules. Raises LibraryMissing."""
    try:
        import cloudpickle
    except ImportError as exc:
        raise LibraryMissing(
            "cloudpickle is not there", hint="`pip install cloudpickle`, or `make install EXTRAS=executor`."
        ) from exc
    names = (path.stem for path in Path(cloudpickle.__file__).parent.glob("*.py"))
    modules = ("cloudpickle" if name == "__init__" else f"cloudpickle.{name}" for name in names)
    return {name: marshal.dumps(_code_of(name)) for name in modules}


def _code_of(module: str) -> Any:
    from importlib.util import find_spec

    spec = find_spec(module)
    assert spec is not None and spec.loader is not None
    return spec.loader.get_code(module)  # type: ignore[attr-defined]
