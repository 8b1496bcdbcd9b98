"""What the outside may ask of a machine while it lives: by signal, by the control socket, by the terminal."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from pathlib import Path

from belljar.errors import AgentLost, BelljarError, DomainDied
from belljar.hints import Any, NoReturn, TypeVar
from belljar.model import Cause
from belljar.records import dataclass

T = TypeVar("T")
LAST_WORDS = 2.0  # seconds between the end of a domain's lines and the event that explains it


@dataclass(frozen=True)
class Signal:
    """Deliver this signal to the payload. TERM also starts the grace; a second TERM ends the machine."""

    number: int
    alone: bool = False  # for the payload's first process, not for its group; TERM is always for all


@dataclass(frozen=True)
class Stop:
    """TERM the payload, end the machine after *grace* seconds (None: the request's)."""

    grace: float | None = None
    why: str = "stopped"


@dataclass(frozen=True)
class Kill:
    """End the machine now."""


@dataclass(frozen=True)
class Resize:
    """The caller's terminal has a new size."""

    rows: int
    columns: int


@dataclass(frozen=True)
class Pause:
    """Halt the vcpus; `done` is set when they stand still (or cannot be halted)."""

    done: asyncio.Event


@dataclass(frozen=True)
class Resume:
    """Let the vcpus go on and set the guest's clock right."""


@dataclass(frozen=True)
class Freeze:
    """Write the machine to *folder* as its next checkpoint; then end it with Cause.CHECKPOINTED (*stop*), or let it go on.

    `done` is settled when the checkpoint is whole: with its number, or with the BelljarError that says why there is none; the
    machine then goes on as if nothing had been. Where the machine ends before it is never settled."""

    folder: Path
    done: asyncio.Future[int]
    stop: bool = False
    within: float | None = None  # seconds; what takes longer is given up


Order = Signal | Stop | Kill | Resize | Pause | Resume | Freeze

# Before there is a payload to deliver them to, these mean: do not start one.
CANCELLING = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGXCPU})


class Orders:
    """A queue of orders. Giving never blocks."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[Order] = asyncio.Queue()

    def give(self, order: Order) -> None:
        self._queue.put_nowait(order)

    async def next(self) -> Order:
        return await self._queue.get()


class Ended(Exception):
    """The machine's work is over for a reason that is nobody's error."""

    def __init__(self, cause: Cause, number: int | None, reason: str) -> None:
        super().__init__(reason)
        self.cause, self.number, self.reason = cause, number, reason


async def unless_cancelled(
    work: Coroutine[Any, Any, T] | asyncio.Task[T], orders: Orders, *, only_kill: bool = False
) -> T:
    """The work's result. An order after which no payload is to be started, or *only_kill*, ends it, and raises Ended; the others stay
    given."""
    others = list[Order]()

    async def until_cancelled() -> NoReturn:
        while True:
            match await orders.next():
                case Signal(number=number) if number in CANCELLING and not only_kill:
                    raise Ended(Cause.CANCELLED, number, "cancelled before the machine was begun")
                case Stop() | Kill() as order if isinstance(order, Kill) or not only_kill:
                    raise Ended(Cause.CANCELLED, signal.SIGKILL, "killed on request")
                case order:
                    others.append(order)

    try:
        return await first(work, until_cancelled())
    finally:
        for order in others:
            orders.give(order)


async def first(work: Coroutine[Any, Any, T] | asyncio.Task[T], end: Coroutine[Any, Any, T]) -> T:
    """Run both until one ends; its result or exception counts, and the other is cancelled. Work wins a draw."""
    tasks = asyncio.ensure_future(work), asyncio.ensure_future(end)
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return await (tasks[0] if tasks[0].done() else tasks[1])
    finally:
        for task in tasks:
            await cancelled(task)


async def unless_ended(work: Coroutine[Any, Any, T], fate: asyncio.Future[BelljarError]) -> T:
    """The work's result, unless the domain ends before: then *fate* is raised, the reason for that."""

    async def end() -> NoReturn:
        raise await asyncio.shield(fate)

    try:
        return await first(work, end())
    except BelljarError as error:
        if isinstance(error, (AgentLost, DomainDied)):
            # A channel that breaks, or its monitor, is how QEMU's end shows first; its own event tells why.
            await asyncio.wait({fate}, timeout=LAST_WORDS)
        if fate.done():
            raise fate.result() from None
        raise


async def cancelled(task: asyncio.Future[Any]) -> None:
    """Cancel it and wait until it has cleared away what it made; what it raises then does not count."""
    task.cancel()
    if not task.done():
        await asyncio.wait({task})
    if not task.cancelled():
        task.exception()
