"""Blocking calls beside the event loop, and what becomes of them when nobody waits any more."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from belljar.errors import HostError
from belljar.guest.stdio import FdSink
from belljar.host.threads import in_thread, wholly_in_thread

LONGEST = 20.0


class Slow:
    """A call that ends when it may."""

    def __init__(self) -> None:
        self.begun, self.may_end, self.undone = threading.Event(), threading.Event(), threading.Event()
        self.got: list[Any] = []

    def __call__(self) -> str:
        self.begun.set()
        assert self.may_end.wait(LONGEST)
        return "made"

    def undo(self, result: str) -> None:
        self.got.append(result)
        self.undone.set()


async def test_a_limit_on_threads_is_told_as_that(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under `ulimit -u`, which root never meets."""

    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fail)
    sink = FdSink(1)
    for act in (lambda: in_thread(lambda: 7), lambda: sink.write(b"x"), lambda: sink.write(b"x")):
        with pytest.raises(HostError, match="no more threads can be started") as raised:
            await act()
        assert "`ulimit -u`" in raised.value.hint


async def test_a_result_and_an_error_arrive() -> None:
    assert await in_thread(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        await in_thread(lambda: 1 // 0)
    assert await wholly_in_thread(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        await wholly_in_thread(lambda: 1 // 0)


async def test_a_call_that_stops_an_iteration_returns_all_the_same() -> None:
    with pytest.raises(RuntimeError, match="StopIteration") as raised:
        await asyncio.wait_for(in_thread(lambda: next(iter(()))), LONGEST)
    assert isinstance(raised.value.__cause__, StopIteration)


async def test_what_comes_after_a_cancellation_is_undone() -> None:
    slow = Slow()
    task = asyncio.ensure_future(in_thread(slow, undo=slow.undo))
    await in_thread(lambda: slow.begun.wait(LONGEST))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert slow.got == []
    slow.may_end.set()
    assert await in_thread(lambda: slow.undone.wait(LONGEST)) and slow.got == ["made"]


async def test_what_came_just_before_a_cancellation_is_undone() -> None:
    """The result is there, and the task that waits for it is cancelled before it has seen it."""
    slow = Slow()
    task = asyncio.ensure_future(in_thread(slow, undo=slow.undo))
    await in_thread(lambda: slow.begun.wait(LONGEST))
    loop = asyncio.get_running_loop()
    schedule = loop.call_soon_threadsafe

    def settle_and_cancel(callback: Any, *args: Any) -> Any:
        return schedule(lambda: (callback(*args), task.cancel()))

    loop.call_soon_threadsafe = settle_and_cancel  # type: ignore[assignment,method-assign]
    slow.may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert slow.got == ["made"]


def test_what_comes_after_the_loop_is_undone() -> None:
    slow = Slow()

    async def given_up() -> None:
        task = asyncio.ensure_future(in_thread(slow, undo=slow.undo))
        await in_thread(lambda: slow.begun.wait(LONGEST))
        task.cancel()

    asyncio.run(given_up())
    slow.may_end.set()
    assert slow.undone.wait(LONGEST) and slow.got == ["made"]


async def test_a_call_that_is_to_end_first_is_waited_for_however_often_one_is_cancelled() -> None:
    slow = Slow()
    task = asyncio.ensure_future(wholly_in_thread(slow))
    await in_thread(lambda: slow.begun.wait(LONGEST))
    for _ in range(3):
        task.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not task.done()
    slow.may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_an_error_after_a_cancellation_is_nobodys() -> None:
    slow = Slow()

    def fails() -> None:
        slow()
        raise OSError

    task = asyncio.ensure_future(wholly_in_thread(fails))
    await in_thread(lambda: slow.begun.wait(LONGEST))
    task.cancel()
    await asyncio.sleep(0)
    slow.may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await task
