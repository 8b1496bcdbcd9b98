"""The Executor, with machines that are calls of this process: what comes back, what goes wrong, and what a cancel does when."""

from __future__ import annotations

import concurrent.futures
import io
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.pool import RemoteTraceback  # type: ignore[attr-defined]
from pathlib import Path
from typing import Any

import pytest

from belljar import api
from belljar.api import Completed, Failed, TaskError, executor, task
from belljar.api.executor import Executor
from belljar.errors import AgentLost, ImageUnknown, MachineFailed, NoMemory, NoSpace, OverLimit, PythonUnfit
from belljar.model import Cause, MachineSpec, Outcome, OutcomeClass, Request
from belljar.records import replace

LONGEST = 30.0


@pytest.fixture(autouse=True)
def _a_host_that_has_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("STORE", "RUN", "SCRATCH", "LOGS"):
        monkeypatch.setenv(f"BELLJAR_PATHS_{name}", str(tmp_path / name))
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    api._runtime.cache_clear()
    scratch = tmp_path / "SCRATCH"
    scratch.mkdir(mode=0o700)
    yield
    assert not os.listdir(scratch)
    api._runtime.cache_clear()


Ends = Callable[[Request], Completed | None]


class Fakes(Executor):
    """Executor of machines that are no machines. *ends*: what becomes of the first ones, where they run no task; *room*: is there
    some now?"""

    def __init__(
        self, *words: Any, ends: Sequence[Ends] = (), room: Callable[[], bool] = lambda: True, **options: Any
    ) -> None:
        super().__init__(*words, **options)
        self.ends, self.room, self.requests = [*ends], room, list[Request]()
        self.starting = list[int]()
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.go_on.set()

    def _run(self, request: Request, packed: bytes) -> Completed:
        self.requests.append(request)
        self.begun.set()
        assert self.go_on.wait(LONGEST)
        self._check_terminated()
        if self.ends and (completed := self.ends.pop(0)(request)):
            return completed
        task.main(io.BytesIO(packed), request.work.payload.outputs[-1].outside)  # type: ignore[union-attr]
        return ended(request, exit_code=0)

    def _look(self, machine: MachineSpec, count: int) -> None:
        self.starting.append(count)
        if not self.room():
            raise NoMemory("none is left")


def ended(
    request: Request, cause: Cause = Cause.FINISHED, klass: OutcomeClass = OutcomeClass.PAYLOAD, **facts: Any
) -> Completed:
    return Completed(Outcome.of(request, cause, klass, **facts), b"", b"")


def result_of(executor: Executor, *call: Any) -> Any:
    with executor:
        return executor.submit(*call).result(LONGEST)


def error_of(executor: Executor, *call: Any) -> BaseException:
    with executor:
        error = executor.submit(*call).exception(LONGEST)
    assert error is not None
    return error


# -- what comes back ---------------------------------------------------------------------------------------------------


def test_a_result_is_what_the_function_returned_also_of_one_without_a_name() -> None:
    ten = 10
    with Fakes(2) as executor:
        futures = [executor.submit(pow, 2, 5), executor.submit(lambda a, *, b: (a, b, ten), 1, b="x")]
        assert [future.result(LONGEST) for future in futures] == [32, (1, "x", 10)]


def test_map_keeps_the_order_and_gives_each_machine_a_chunk() -> None:
    with Fakes(3) as executor:
        assert list(executor.map(pow, range(7), [2] * 9, chunksize=3, timeout=LONGEST)) == [n * n for n in range(7)]
    assert len(executor.requests) == 3
    with pytest.raises(ValueError, match="chunksize must be >= 1"):
        executor.map(pow, [1], chunksize=0)


def test_the_options_are_those_of_a_run() -> None:
    executor = Fakes(1, image="other", memory="1G", inputs={"/etc/hostname": "/name"}, python="/opt/python3")
    assert result_of(executor, abs, -1) == 1
    (request,) = executor.requests
    payload = request.work.payload  # type: ignore[union-attr]
    assert (request.machine.image, request.machine.memory, payload.argv[0]) == ("other", 1 << 30, b"/opt/python3")
    assert payload.inputs[0].inside == "/name" and sum(map(len, payload.argv)) < 10_000
    assert payload.outputs[-1].outside.endswith(f"{request.id}.result")  # by which the reaper knows it


def test_a_large_argument_is_no_word_of_the_command() -> None:
    executor = Fakes(1)
    assert result_of(executor, len, bytes(5 << 20)) == 5 << 20
    assert sum(map(len, executor.requests[0].work.payload.argv)) < 10_000  # type: ignore[union-attr]


@pytest.mark.parametrize("words", [{"max_workers": 0}, {"script": b"#!/bin/sh"}, {"memory": "much"}, {"unknown": 1}])
def test_what_cannot_be_meant_is_refused_where_it_is_given(words: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError)):
        Executor(**words)


class Processes(Fakes):
    """By processes of this Python, which find cloudpickle nowhere but in their task."""

    def _run(self, request: Request, packed: bytes) -> Completed:
        payload = request.work.payload  # type: ignore[union-attr]
        command = [sys.executable, "-I", "-S", *payload.argv[1:-1], payload.outputs[-1].outside]
        subprocess.run(command, input=packed, check=True, timeout=LONGEST)
        return ended(request, exit_code=0)


def test_a_function_is_made_again_without_the_whole_of_cloudpickle() -> None:
    """Which takes the guest longer to import than its Python takes to start."""
    ten, nothing = 10, None

    def closed(n: int) -> tuple[int, None, bool]:
        return (n if n > ten else closed(n + 1)[0]), nothing, "dataclasses" in sys.modules

    assert result_of(Processes(1), closed, 1) == (11, None, False)


def test_all_of_cloudpickle_is_there_for_what_needs_it() -> None:
    class Pair:
        def __init__(self, *two: int) -> None:
            self.two = two

    def swapped(pair: Pair, sign: int = -1) -> Any:
        import cloudpickle

        return Pair(*(sign * n for n in reversed(pair.two))), lambda n: n + 1, len(cloudpickle.dumps(pair)) > 0

    pair, successor, is_there = result_of(Processes(1), swapped, Pair(1, 2))
    assert (pair.two, successor(1), is_there) == ((-2, -1), 2, True)
    assert isinstance(error_of(Processes(1), lambda: swapped(None)), AttributeError)  # type: ignore[arg-type]


# -- what tasks do -----------------------------------------------------------------------------------------------------


def broken(kind: type[BaseException], *words: Any) -> None:
    raise kind(*words)


class Odd(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")  # pickle makes it again with one argument, which is too few


class Held(Exception):
    def __init__(self) -> None:
        super().__init__("held")
        self.lock = threading.Lock()


@pytest.mark.parametrize("kind", [ZeroDivisionError, SystemExit, KeyboardInterrupt, StopIteration, GeneratorExit])
def test_an_exception_arrives_as_it_was_raised_with_its_traceback(kind: type[BaseException]) -> None:
    error = error_of(Fakes(1), broken, kind, "seven")
    assert type(error) is kind and error.args == ("seven",)
    assert isinstance(error.__cause__, RemoteTraceback)
    assert "in broken" in str(error.__cause__) and "task.py" not in str(error.__cause__)


@pytest.mark.parametrize(("kind", "words", "text"), [(Odd, (1, 2), "Odd: 1 and 2"), (Held, (), "Held: held")])
def test_an_exception_that_cannot_be_pickled_is_told_in_words(kind: Any, words: Any, text: str) -> None:
    error = error_of(Fakes(1), broken, kind, *words)
    assert type(error) is TaskError and str(error).endswith(text)
    assert "in broken" in str(error.__cause__)


def test_a_function_that_cannot_be_pickled_is_no_machine() -> None:
    executor = Fakes(1)
    assert isinstance(error_of(executor, lambda lock: None, threading.Lock()), TypeError)
    assert executor.requests == []


class Hostile:
    """Says StopIteration, which an event loop does not pass on, when it is to be pickled."""

    def __reduce__(self) -> str:
        raise StopIteration("no")


def test_an_argument_that_raises_what_it_likes_when_it_is_pickled() -> None:
    assert isinstance(error_of(Fakes(1), id, Hostile()), StopIteration)


def test_a_result_that_cannot_be_pickled_raises_in_its_place() -> None:
    error = error_of(Fakes(1), lambda: [bytes(9000), threading.Lock()])
    assert isinstance(error, TypeError) and "cannot pickle" in str(error)


def test_a_module_that_the_guest_lacks_is_named() -> None:
    error = error_of(Fakes(1), broken, ModuleNotFoundError, "No module named 'mine'")
    assert error.__notes__ == ["The guest has no module None: see docs/jobs/executor.md, Modules."]


# -- what guests and hosts do ------------------------------------------------------------------------------------------

MISSING: dict[str, Any] = {"exit_code": 0, "error": "OutputMissing", "reason": "/tmp/belljar-result: no such file"}


@pytest.mark.parametrize(
    ("facts", "kind", "words"),
    [
        ({"exit_code": 3, "reason": "the payload ended with exit code 3"}, Failed, "exit code 3"),
        ({"signal": 9, "reason": "the payload was ended by signal 9"}, Failed, "signal 9"),
        ({"cause": Cause.GUEST_OOM, "signal": 9, "reason": "the guest ran out of memory"}, Failed, "out of memory"),
        ({"cause": Cause.REFUSED, "klass": OutcomeClass.USER, **MISSING}, Failed, "before it had returned"),
        ({"cause": Cause.WALLTIME, "klass": OutcomeClass.WALLTIME, "reason": "time is over"}, Failed, "time is over"),
        ({"cause": Cause.CANCELLED, "klass": OutcomeClass.CANCELLED, "reason": "was stopped"}, Failed, "was stopped"),
        ({"exit_code": 127, "error": "not-found", "reason": "python3: not found in the guest"}, PythonUnfit, "debian12: python3: not"),
        ({"cause": Cause.REFUSED, "klass": OutcomeClass.USER, "error": "OverLimit", "reason": "too much"}, OverLimit, "too much"),
    ],
)  # fmt: skip
def test_a_task_without_an_answer_says_why(facts: dict[str, Any], kind: type[Exception], words: str) -> None:
    error = error_of(Fakes(1, image="debian12", ends=[lambda request: ended(request, **facts)]), abs, 1)
    assert type(error) is kind and words in str(error)


@pytest.mark.parametrize(("klass", "name"), [(OutcomeClass.TRANSIENT, "AgentLost"), (OutcomeClass.NODE, "NoSpace")])
def test_a_failure_of_the_machine_is_not_the_tasks(klass: OutcomeClass, name: str) -> None:
    executor = Fakes(1, ends=[lambda request: ended(request, Cause.GUEST_LOST, klass, error=name, reason="lost it")])
    error = error_of(executor, abs, 1)
    assert type(error) is MachineFailed and "lost it" in str(error)
    assert type(error.__cause__) is {"AgentLost": AgentLost, "NoSpace": NoSpace}[name]


def test_an_image_that_is_not_there_is_told_as_by_run() -> None:
    """By a keeper of a host that has nothing."""
    assert isinstance(error_of(Executor(1, image="none"), abs, 1), ImageUnknown)


def test_another_python_in_the_guest_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def later(request: Request) -> None:
        monkeypatch.setattr(task.sys, "version_info", (3, 99, 1))

    executor = Fakes(1, image="newer", ends=[later])  # type: ignore[list-item]
    with executor:
        future = executor.submit(abs, 1)
        error = future.exception(LONGEST)
    monkeypatch.undo()
    assert isinstance(error, PythonUnfit) and "newer: its python3 is Python 3.99" in str(error)


def test_plain_results_take_nothing_that_runs_code(tmp_path: Path) -> None:
    mark = tmp_path / "mark"

    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(mark),)

    def evil(request: Request) -> Completed:
        result = Path(request.work.payload.outputs[-1].outside)  # type: ignore[union-attr]
        result.write_bytes(pickle.dumps((task.RETURNED, "")) + pickle.dumps(Evil()))
        return ended(request, exit_code=0)

    error = error_of(Fakes(1, plain_results=True, ends=[evil]), abs, 1)
    assert isinstance(error, pickle.UnpicklingError) and not mark.exists()
    value = {"a": [1, 2.5, None, {3}, b"x", (True, 1j)]}
    assert result_of(Fakes(1, plain_results=True), lambda: value) == value
    assert isinstance(error_of(Fakes(1, plain_results=True), broken, KeyError, 1), KeyError)
    assert isinstance(error_of(Fakes(1, plain_results=True), broken, SystemExit, 1), TaskError)


# -- room --------------------------------------------------------------------------------------------------------------


def test_a_task_waits_for_room_and_another_machine_that_is_quicker_costs_it_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(executor, "_await_some_end", lambda longest=0: None)
    looks = iter([False, False, True, False, True])

    def late(request: Request) -> Completed:
        raise NoMemory("none is left")

    tasks = Fakes(1, room=lambda: next(looks), ends=[late])
    assert result_of(tasks, abs, -3) == 3
    assert len({request.id for request in tasks.requests}) == 2 and list(looks) == []


def test_machines_that_have_not_reserved_their_room_yet_are_counted() -> None:
    with Fakes(3) as executor:
        executor.go_on.clear()
        futures = [executor.submit(abs, -n) for n in range(3)]
        assert executor.begun.wait(LONGEST)
        executor.go_on.set()
        concurrent.futures.wait(futures, LONGEST)
    assert executor.starting == [1, 2, 3]


def test_what_keeps_a_machine_from_starting_is_not_the_tasks() -> None:
    def full(request: Request) -> Completed:
        raise NoSpace("the disk is full")

    error = error_of(Fakes(1, ends=[full]), abs, 1)
    assert type(error) is MachineFailed and type(error.__cause__) is NoSpace


def test_a_task_that_waited_too_long_for_room_says_so() -> None:
    error = error_of(Fakes(1, room=lambda: False, patience=0.01), abs, 1)
    assert isinstance(error, MachineFailed) and "waited 0.01 s for room: none is left" in str(error)


def test_a_machine_larger_than_the_host_is_not_waited_for() -> None:
    with Executor(1, memory=1 << 60) as executor:
        executor._look(executor._request().machine, 1)
        with pytest.raises(NoMemory):
            executor._look(replace(executor._request().machine, memory=1 << 20), 1 << 40)


# -- cancel and shutdown -----------------------------------------------------------------------------------------------


def test_a_task_that_waits_for_a_worker_can_be_cancelled_and_one_that_runs_cannot() -> None:
    with Fakes(1) as executor:
        executor.go_on.clear()
        first, second = executor.submit(abs, -1), executor.submit(abs, -2)
        assert executor.begun.wait(LONGEST)
        assert second.cancel() and not first.cancel() and first.running()
        executor.go_on.set()
        assert first.result(LONGEST) == 1
        concurrent.futures.wait([second], LONGEST)
    assert second.cancelled() and len(executor.requests) == 1


def test_a_task_that_waits_for_room_is_terminated(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = threading.Event()
    monkeypatch.setattr(executor, "_await_some_end", lambda longest: looked.set())
    tasks = Fakes(1, room=lambda: False)
    future = tasks.submit(abs, 1)
    assert looked.wait(LONGEST)
    tasks.terminate_workers()
    assert isinstance(future.exception(LONGEST), concurrent.futures.CancelledError) and tasks.requests == []


def test_shutdown_with_cancel_ends_what_runs_and_begins_no_more() -> None:
    executor = Fakes(1)
    executor.go_on.clear()
    futures = [executor.submit(abs, -n) for n in range(5)]
    assert executor.begun.wait(LONGEST)
    executor.shutdown(wait=False, cancel_futures=True)
    executor.go_on.set()
    executor.shutdown()
    assert futures[0].result(0) == 0 and all(future.cancelled() for future in futures[1:])
    with pytest.raises(RuntimeError, match="after shutdown"):
        executor.submit(abs, 1)


def test_workers_that_are_terminated_leave_their_tasks_cancelled() -> None:
    executor = Fakes(2)
    executor.go_on.clear()
    futures = [executor.submit(abs, n) for n in range(3)]
    assert executor.begun.wait(LONGEST)
    executor.terminate_workers()
    executor.go_on.set()
    executor.shutdown()
    for future in futures:
        assert isinstance(future.exception(LONGEST) if not future.cancelled() else concurrent.futures.CancelledError(), concurrent.futures.CancelledError)  # fmt: skip


def test_the_door_imports_it_when_it_is_asked_for() -> None:
    assert api.Executor is Executor
    with pytest.raises(AttributeError, match="no attribute 'Executors'"):
        _ = api.Executors  # type: ignore[attr-defined]
