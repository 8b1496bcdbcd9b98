"""One blocking call beside the event loop, in a daemon thread: a stuck call never keeps the process from ending."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress

from belljar.errors import HostError
from belljar.hints import TypeVar

MORE_THREADS = "Raise the limit on processes and threads (`ulimit -u`, pids.max of the cgroup)."
T = TypeVar("T")


def begin_thread(work: Callable[..., object], *args: object, name: str | None = None) -> threading.Thread:
    """Do this in a daemon thread. Raises HostError where the user may have no more threads."""
    thread = threading.Thread(target=work, args=args, name=name, daemon=True)
    try:
        thread.start()
        return thread
    except RuntimeError as exc:
        raise HostError("no more threads can be started", hint=MORE_THREADS) from exc


async def in_thread(call: Callable[[], T], *, undo: Callable[[T], object] | None = None) -> T:
    """The call's result; RuntimeError for StopIteration. Cancelling stops the waiting, not the call; *undo* then gets what nobody
    takes any more."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if not future.cancelled():
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)  # type: ignore[arg-type]
        elif error is None and undo is not None:
            undo(result)  # type: ignore[arg-type]

    def work() -> None:
        result: T | None = None
        error: BaseException | None = None
        try:
            result = call()
        except StopIteration as exc:  # which neither a future nor a coroutine can raise
            error = RuntimeError(f"{call}: StopIteration")
            error.__cause__ = exc
        except BaseException as exc:
            error = exc
        try:
            loop.call_soon_threadsafe(settle, result, error)
        except RuntimeError:  # the loop is closed: nobody waits any more
            if error is None and undo is not None:
                undo(result)  # type: ignore[arg-type]

    begin_thread(work)
    try:
        return await future
    except asyncio.CancelledError:
        if undo is not None and not future.cancelled() and future.exception() is None:
            undo(future.result())
        raise


async def wholly_in_thread(call: Callable[[], T]) -> T:
    """The call's result. Cancelled, it waits for the end of the call all the same, which is to have a deadline of its own:
    whoever undoes what it makes comes after it."""
    work = asyncio.ensure_future(in_thread(call))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        with suppress(Exception, asyncio.CancelledError):
            await to_its_end(work)
        raise


async def to_its_end(task: asyncio.Future[T]) -> None:
    """Finish this task however often its caller is cancelled meanwhile; that cancel is heard when it is done."""
    cancelled = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    task.result()
    if cancelled is not None:
        raise cancelled
