"""A pilot from its first word to its last. Everything that happens to it comes by one queue; its own clock decides on the end."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from belljar.errors import BelljarError, HostError
from belljar.lease import Cause, Do, Facts, InstanceState, MachineOrder, Order, Report, Tell
from belljar.lease.jobfile import JobFile
from belljar.lease.pilot.journal import Journal
from belljar.lease.pilot.link import Link
from belljar.lease.pilot.machines import Change, Machines
from belljar.lease.protocol import Broken
from belljar.reading import from_json, strict_json
from belljar.records import replace

ENDING = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2, signal.SIGXCPU})
# Slurm tells a step's tasks of one cancel twice: from the node's daemon, and by srun that passes it on.
SAME_TELLING = 1.0  # seconds
KILLING = 5.0  # seconds after which a machine that was killed is left to whoever finds it
Event = Order | int | None  # an order, a signal, or the moment that was waited for


class Pilot:
    """`begun`: the loop's time at its start. *make*: its machines, given who is to hear of their changes."""

    def __init__(
        self, job: JobFile, rank: int, facts: Facts, folder: Path, make: Callable[[Callable[[Change], None]], Machines],
        tell: Callable[..., None],
    ) -> None:  # fmt: skip
        loop = asyncio.get_running_loop()
        self._job, self._rank, self._facts, self._tell = job, rank, facts, tell
        self._clock, self.begun = loop.time, loop.time()
        self._ends = self.begun + job.deadline
        self._id = os.urandom(16).hex()
        self._events: asyncio.Queue[Order | int] = asyncio.Queue()
        self._journal = Journal(folder)
        self._machines = make(self._changed)
        self._states: dict[str, InstanceState] = {}
        self._seconds: dict[str, float] = {}  # that each may run
        self._up: dict[str, float] = {}  # since when each does
        self._limits: dict[str, asyncio.TimerHandle] = {}
        self._streams = set[asyncio.Task[None]]()
        self._first_signal: float | None = None
        self._link = Link(job, rank, self._id, self._journal, self._events.put_nowait, self._moment, tell)

    def signalled(self, number: int) -> None:
        """TERM and its like end it; the same telling twice is one."""
        now = self._clock()
        if self._first_signal is None or now - self._first_signal > SAME_TELLING:
            self._first_signal = self._first_signal or now
            self._events.put_nowait(number)

    async def run(self) -> None:
        """Returns when nothing of it is left on this node. Raises HostError where its service never answered."""
        self._journal.write("started", job=replace(self._job, key=""), rank=self._rank, pilot=self._id, pid=os.getpid())
        talking = asyncio.ensure_future(self._link.run())
        try:
            if await self._gate():
                cause, why, grace = await self._hold()
                await self._end(cause, why, grace)
                self._say(Tell.ENDED, cause=cause, why=why)
                await self._link.flushed(self._job.report)
            self._journal.write("ended")
        finally:
            for task in (talking, *self._streams):
                task.cancel()
            await asyncio.gather(talking, *self._streams, return_exceptions=True)
            self._journal.close()

    # -- three parts of its life ---------------------------------------------------------------------------------------

    async def _gate(self) -> bool:
        """May it take machines? False: there is no such lease any more. Nothing was made yet, so it may leave at once."""
        limit, is_answered = self.begun + self._job.claim, False
        while True:
            match await self._next(min(limit, self._ends)):
                case None:
                    awaited = "the other nodes of its lease" if is_answered else "an answer of its service"
                    seconds = self._clock() - self.begun
                    self._say(Tell.ENDED, cause=Cause.CAPACITY, why=f"waited {seconds:.0f} s for {awaited}")
                    await self._link.flushed(self._job.report)
                    raise HostError(
                        f"{self._job.lease}: waited {seconds:.0f} s for {awaited}",
                        hint=f"Is `belljar lease serve` up, and reached from this node at {', '.join(self._job.service)}?",
                    )
                case int(number):
                    self._say(Tell.ENDED, cause=Cause.PREEMPTED, why=f"signal {number} before it was needed")
                    await self._link.flushed(self._job.report)
                    return False
                case Order(do=Do.GO, seconds=seconds):
                    self._move(seconds)
                    return True
                case Order(do=Do.WAIT) if not is_answered:
                    is_answered, limit = True, self._clock() + self._job.barrier
                case Order(do=(Do.VOID | Do.RELEASE | Do.DRAIN) as do, why=why):
                    self._tell("not needed", do=do.value, why=why)
                    if do is not Do.VOID:
                        self._say(Tell.ENDED, cause=Cause.USER, why=why)
                        await self._link.flushed(self._job.report)
                    return False
                case Order():
                    pass

    async def _hold(self) -> tuple[Cause, str, float]:
        """Keep machines until the end: why it came, and how long guests have to shut down."""
        job = self._job
        while True:
            match await self._next(self._forsaken() or self._last_call()):
                case None if self._clock() >= self._last_call():
                    return Cause.EXPIRED, "its time is over", job.grace
                case None if self._is_forsaken():
                    return Cause.GUEST, "its machines have ended, and its service is away", 0.0
                case int(number):
                    grace = max(0.0, min(job.grace, job.notice - job.report - 1.0))
                    return Cause.PREEMPTED, f"the batch system sent signal {number}", grace
                case Order(do=Do.RELEASE | Do.DRAIN | Do.VOID, why=why):
                    return Cause.USER, why or "released", job.grace
                case Order() as order:
                    self._obey(order)
                case _:
                    pass

    async def _end(self, cause: Cause, why: str, grace: float) -> None:
        """No machine is left when it returns; it takes no longer than the guests do."""
        for instance in self._machines.living:
            self._machines.stop(instance, cause, why, grace)
        gone = asyncio.ensure_future(self._machines.gone())
        limit = self._clock() + grace
        while not gone.done() and self._clock() < limit:
            coming = asyncio.ensure_future(self._next(limit))
            await asyncio.wait({gone, coming}, return_when=asyncio.FIRST_COMPLETED)
            if coming.done() and isinstance(coming.result(), int):
                break  # told again: at once
            coming.cancel()
            await asyncio.gather(coming, return_exceptions=True)
        for instance in self._machines.living:
            self._machines.kill(instance)
        await asyncio.wait({gone}, timeout=KILLING)
        if not gone.done():
            self._tell("machines left", instances=" ".join(sorted(self._machines.living)))
            gone.cancel()

    # -- orders --------------------------------------------------------------------------------------------------------

    def _obey(self, order: Order) -> None:
        """One that keeps it going. Each may come twice."""
        match order.do:
            case Do.START if order.instance not in self._states:
                self._start(order)
            case Do.STOP if order.instance not in self._states:
                self._changed(Change(order.instance, InstanceState.TERMINATED, Cause.USER, order.why))
            case Do.STOP:
                self._machines.stop(order.instance, Cause.USER, order.why, self._job.grace)
            case Do.CONSOLE:
                state = self._states.get(order.instance)
                if state is not None and state is not InstanceState.TERMINATED:
                    console = self._machines.console(order.instance)
                    self._say(Tell.INSTANCE, instance=order.instance, state=state, console=console)
            case Do.EXTEND:
                self._limit(order.instance, order.seconds)
            case Do.GO:
                self._move(order.seconds)
            case Do.STREAM:
                task = asyncio.ensure_future(self._carry(order))
                self._streams.add(task)
                task.add_done_callback(self._streams.discard)
            case _:
                pass

    def _start(self, order: Order) -> None:
        self._states[order.instance] = InstanceState.CLAIMED
        try:
            wanted: MachineOrder = from_json(MachineOrder, strict_json(order.request.encode()))
        except ValueError as exc:
            change = Change(order.instance, InstanceState.TERMINATED, Cause.INTERNAL, f"a request that is none: {exc}")
            return self._changed(change)
        self._journal_or_go_on("starting", instance=order.instance)
        self._limit(order.instance, order.seconds)
        self._machines.start(order.instance, wanted)

    async def _carry(self, order: Order) -> None:
        """An owner's ssh, on a connection of its own."""
        with suppress(OSError, EOFError, TimeoutError, Broken, BelljarError):
            async with self._link.stream(order.stream) as (reader, writer, early):
                await self._machines.carry(order.instance, FromOwner(reader, early), ToOwner(writer))
                with suppress(OSError):
                    await writer.drain()
                    writer.close()
                    await writer.wait_closed()

    def _limit(self, instance: str, seconds: float) -> None:
        """It may run so long from when it is up: then its guest is asked to shut down."""
        self._seconds[instance] = seconds
        if instance in self._limits:
            self._limits.pop(instance).cancel()
        if seconds > 0 and instance in self._up:
            stop = partial(self._machines.stop, instance, Cause.EXPIRED, "its time is over", self._job.grace)
            self._limits[instance] = asyncio.get_running_loop().call_at(self._up[instance] + seconds, stop)

    def _move(self, seconds: float) -> None:
        """This pilot has ended after so many seconds from now; 0: as its job file says."""
        if seconds > 0:
            self._ends = self._clock() + seconds
            self._journal_or_go_on("ends", seconds=seconds)

    # -- what it says --------------------------------------------------------------------------------------------------

    def _changed(self, change: Change) -> None:
        self._states[change.instance] = change.state
        if change.state is InstanceState.TERMINATED:
            self._limit(change.instance, 0.0)
            self._events.put_nowait(Order(Do.PING))
        if change.state is InstanceState.RUNNING and change.instance not in self._up:
            self._up[change.instance] = self._clock()
            self._limit(change.instance, self._seconds.get(change.instance, 0.0))
        self._tell("instance", id=change.instance, state=change.state.value, why=change.why)
        self._say(
            Tell.INSTANCE, instance=change.instance, state=change.state, cause=change.cause, why=change.why,
            host_keys=change.host_keys, console=change.console,
        )  # fmt: skip

    def _say(self, tell: Tell, **facts: object) -> None:
        self._link.say(self._report(tell, self._link.next_number, **facts))

    def _moment(self, tell: Tell) -> Report:
        """A hello, or a heartbeat."""
        return self._report(tell, 0, facts=self._facts if tell is Tell.HELLO else None)

    def _report(self, tell: Tell, seq: int, **facts: object) -> Report:
        mono = self._clock() - self.begun
        job = self._job
        return Report(tell, job.lease, job.attempt, self._rank, self._id, seq, time.time(), mono, **facts)  # type: ignore[arg-type]

    def _journal_or_go_on(self, event: str, **facts: object) -> None:
        """A full disk keeps nobody from ending machines in time."""
        with suppress(HostError):
            self._journal.write(event, **facts)

    # -- time ----------------------------------------------------------------------------------------------------------

    def _last_call(self) -> float:
        """When guests are asked to shut down, so that nothing is left at the end."""
        return self._ends - self._job.grace - self._job.report

    def _forsaken(self) -> float | None:
        """When it gives the node back by itself, if nothing changes: it keeps nothing, and nobody is there to ask."""
        if self._machines.living or self._link.is_up:
            return None
        return min(self._link.down_since + self._job.claim, self._last_call())

    def _is_forsaken(self) -> bool:
        limit = self._forsaken()
        return limit is not None and self._clock() >= limit

    async def _next(self, limit: float) -> Event:
        """None at that moment."""
        try:
            async with asyncio.timeout(max(0.0, limit - self._clock())):
                return await self._events.get()
        except TimeoutError:
            return None


class FromOwner:
    """A `Source`: what an owner's ssh client sends."""

    def __init__(self, reader: asyncio.StreamReader, early: bytes) -> None:
        self._reader, self._early = reader, early

    async def read(self, limit: int) -> bytes:
        if self._early:
            data, self._early = self._early[:limit], self._early[limit:]
            return data
        return await self._reader.read(limit)


class ToOwner:
    """A `Sink`: what it is sent."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer

    async def write(self, data: bytes) -> None:
        try:
            self._writer.write(data)
            await self._writer.drain()
        except OSError as exc:
            raise BrokenPipeError from exc

    async def close(self) -> None:
        with suppress(OSError, RuntimeError):
            if self._writer.can_write_eof():
                self._writer.write_eof()
