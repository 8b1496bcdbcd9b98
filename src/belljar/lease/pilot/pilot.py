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
from typing import Any

from belljar import api
from belljar.errors import BelljarError, HostError
from belljar.host.files import private_folder
from belljar.host.streams import Works
from belljar.journal import Record
from belljar.lease import Cause, Do, Facts, InstanceState, MachineOrder, Order, Report, Tell
from belljar.lease.jobfile import JobFile
from belljar.lease.network.trunk import Trunk
from belljar.lease.pilot.link import Link
from belljar.lease.pilot.machines import Changed, Machines
from belljar.lease.protocol import Broken
from belljar.reading import from_json, strict_json
from belljar.records import replace
from belljar.service.streams import StreamSink, at_most

ENDING = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2, signal.SIGXCPU})
# Slurm tells a step's tasks of one cancel twice: from the node's daemon, and by srun that passes it on.
SAME_TELLING, NOTICE = 1.0, 5.0  # seconds; for guests to take notice of their end, at most
KILLING = 5.0  # seconds after which a machine that was killed is left to whoever finds it
Event = Order | int | None  # an order, a signal, or the moment that was waited for


class Pilot:
    """`begun`: the loop's time at its start. *make*: makes its machines; its argument is called at each of their changes."""

    def __init__(
        self, job: JobFile, rank: int, node: Facts, folder: Path, make: Callable[[Changed], Machines],
        tell: Callable[..., None],
    ) -> None:  # fmt: skip
        loop = asyncio.get_running_loop()
        self._job, self._rank, self._node, self._tell = job, rank, node, tell
        self._clock, self.begun = loop.time, loop.time()
        self._ends = self.begun + job.deadline
        self._id = os.urandom(16).hex()
        self._events: asyncio.Queue[Order | int] = asyncio.Queue()
        self._journal = Record(private_folder(folder))
        self._machines = make(self._changed)
        self._states: dict[str, InstanceState] = {}
        self._seconds: dict[str, float] = {}  # that each may run
        self._up: dict[str, float] = {}  # since when each does
        self._limits: dict[str, asyncio.TimerHandle] = {}
        self._asides = Works(OSError, EOFError, TimeoutError, Broken, BelljarError)  # ssh, and what guests are told
        self._first_signal: float | None = None
        self._trunk = Trunk(job, rank, api.live_folder, tell)
        self._link = Link(job, rank, self._id, self._journal, self._events.put_nowait, self._report, tell)

    def signalled(self, number: int) -> None:
        """TERM and its like end it; the same telling twice is one."""
        now = self._clock()
        if self._first_signal is None or now - self._first_signal > SAME_TELLING:
            self._first_signal = self._first_signal or now
            self._events.put_nowait(number)

    async def run(self) -> None:
        """Returns when nothing of it is left on this node. Raises HostError where its service never answered."""
        self._node = replace(self._node, reach=await self._trunk.open(self._journal.folder))
        self._journal.write("started", job=replace(self._job, key=""), rank=self._rank, pilot=self._id, pid=os.getpid())
        talking = asyncio.ensure_future(self._link.run())
        try:
            if await self._gate():
                cause, why, grace = await self._hold()
                await self._end(cause, why, grace)
                await self._last_words(cause, why)
            self._journal.write("ended")
        finally:
            talking.cancel()
            self._machines.expect_none()
            await asyncio.gather(talking, self._asides.end(), self._trunk.works.end(), return_exceptions=True)
            self._journal.close()

    # -- three parts of its life ---------------------------------------------------------------------------------------

    async def _gate(self) -> bool:
        """May it take machines? False: there is no such lease any more. Nothing was made yet, so it may leave at once."""
        limit, is_answered = self.begun + self._job.claim, False
        self._machines.expect()
        while True:
            match await self._next(min(limit, self._ends)):
                case None:
                    awaited = "the other nodes of its lease" if is_answered else "an answer of its service"
                    waited = f"waited {self._clock() - self.begun:.0f} s for {awaited}"
                    await self._last_words(Cause.CAPACITY, waited)
                    hint = f"Is `belljar lease serve` up, and reached from this node at {', '.join(self._job.service)}?"
                    raise HostError(f"{self._job.lease}: {waited}", hint=hint)
                case int(number):
                    await self._last_words(Cause.PREEMPTED, f"signal {number} before it was needed")
                    return False
                case Order(do=Do.GO, seconds=seconds):
                    self._move(seconds)
                    return True
                case Order(do=Do.WAIT) if not is_answered:
                    is_answered, limit = True, self._clock() + self._job.barrier
                case Order(do=(Do.VOID | Do.RELEASE) as do, why=why):
                    self._tell("not needed", do=do.value, why=why)
                    if do is not Do.VOID:
                        await self._last_words(Cause.USER, why)
                    return False

    async def _hold(self) -> tuple[Cause, str, float]:
        """Keep machines until the end: why it came, and how long guests have to shut down."""
        job = self._job
        while True:
            match await self._next(self._forsaken()):
                case None if self._clock() >= self._last_call():
                    return Cause.EXPIRED, "its time is over", job.grace
                case None if self._clock() >= self._forsaken():
                    return Cause.GUEST, "its machines have ended, and its service is away", 0.0
                case int(number):
                    end = self._clock() + max(0.0, job.notice - job.report - 1.0)
                    await self._give_notice(end)
                    grace = min(job.grace, max(0.0, end - self._clock()))
                    return Cause.PREEMPTED, f"the batch system sent signal {number}", grace
                case Order(do=Do.RELEASE | Do.VOID, why=why):
                    return Cause.USER, why or "released", job.grace
                case Order() as order:
                    self._obey(order)

    async def _end(self, cause: Cause, why: str, grace: float) -> None:
        """No machine is left when it returns; it takes no longer than the guests do."""
        for instance in self._machines.living:
            self._machines.stop(instance, cause, why, grace)
        limit = self._clock() + grace
        while self._machines.living and self._clock() < limit:
            if isinstance(await self._next(limit), int):
                break  # told again: at once
        for instance in self._machines.living:
            self._machines.kill(instance)
        limit = self._clock() + KILLING
        while self._machines.living and self._clock() < limit:
            await self._next(limit)
        if self._machines.living:
            self._tell("machines left", instances=" ".join(sorted(self._machines.living)))

    # -- orders --------------------------------------------------------------------------------------------------------

    def _obey(self, order: Order) -> None:
        """One that keeps it going. Each may come twice."""
        match order.do:
            case Do.START if order.instance not in self._states:
                self._start(order)
            case Do.STOP if order.instance not in self._states:
                self._changed(order.instance, InstanceState.TERMINATED, cause=Cause.USER, why=order.why)
            case Do.STOP:
                self._machines.stop(order.instance, Cause.USER, order.why, self._job.grace)
            case Do.CONSOLE if order.instance in self._machines.living:
                console = self._machines.console(order.instance)
                self._link.show(self._report(Tell.HEARTBEAT, instance=order.instance, console=console))
            case Do.EXTEND:
                self._limit(order.instance, order.seconds)
            case Do.GO:
                self._move(order.seconds)
            case Do.STREAM:
                self._asides.begin(self._carry(order))
            case Do.REBOOT:
                self._journal.tell("reboot", instance=order.instance)
                self._asides.begin(self._machines.tell_guest(order.instance, "reboot"))

    def _start(self, order: Order) -> None:
        self._states[order.instance] = InstanceState.CLAIMED
        try:
            request: MachineOrder = from_json(MachineOrder, strict_json(order.request.encode()))
        except ValueError as exc:
            why = f"a request that cannot be read: {exc}"
            return self._changed(order.instance, InstanceState.TERMINATED, cause=Cause.INTERNAL, why=why)
        self._journal.tell("starting", instance=order.instance)
        self._limit(order.instance, order.seconds)
        self._trunk.join(request)
        self._machines.start(order.instance, request)

    async def _give_notice(self, end: float) -> None:
        """Tell guests the moment at which they are killed. A guest that does not answer soon is not waited for."""
        moment = time.strftime("%Y-%m-%dT%H:%M:%SZ\n", time.gmtime(time.time() + end - self._clock())).encode()
        notices = [self._machines.tell_guest(instance, "notice", moment) for instance in self._machines.living]
        await at_most(min(NOTICE, (end - self._clock()) / 2), asyncio.gather(*notices, return_exceptions=True))

    async def _carry(self, order: Order) -> None:
        """An owner's ssh, or a command of the service's, on a connection of its own."""
        async with self._link.stream(order.stream) as (reader, writer):
            await self._machines.carry(order.instance, reader, StreamSink(writer), order.request)
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
            self._journal.tell("ends", seconds=seconds)

    # -- what it says --------------------------------------------------------------------------------------------------

    def _changed(self, instance: str, state: InstanceState, **details: Any) -> None:
        self._states[instance] = state
        if state is InstanceState.TERMINATED:
            self._limit(instance, 0.0)
            self._events.put_nowait(Order(Do.PING))
        if state is InstanceState.RUNNING and instance not in self._up:
            self._up[instance] = self._clock()
            self._limit(instance, self._seconds.get(instance, 0.0))
        self._tell("instance", id=instance, state=state.value, why=details.get("why"))
        self._link.say(self._report(Tell.INSTANCE, instance=instance, state=state, **details))

    async def _last_words(self, cause: Cause, why: str) -> None:
        self._link.say(self._report(Tell.ENDED, cause=cause, why=why))
        await self._link.flush(self._job.report)

    def _report(self, tell: Tell, **more: object) -> Report:
        job, mono, node = self._job, self._clock() - self.begun, self._node if tell is Tell.HELLO else None
        return Report(tell, job.lease, job.attempt, self._rank, self._id, 0, time.time(), mono, node, **more)  # type: ignore[arg-type]

    # -- time ----------------------------------------------------------------------------------------------------------

    def _last_call(self) -> float:
        """When guests are asked to shut down, so that nothing is left at the end."""
        return self._ends - self._job.grace - self._job.report

    def _forsaken(self) -> float:
        """When it gives the node back by itself, if nothing changes: its time is over, or it keeps nothing and nobody is there to ask."""
        is_kept = self._machines.living or self._link.is_up
        return self._last_call() if is_kept else min(self._link.down_since + self._job.claim, self._last_call())

    async def _next(self, limit: float) -> Event:
        """None at that moment."""
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, limit - self._clock())):
                return await self._events.get()
        return None
