"""Carries one Request to one Outcome. `keep` is the table of contents; the life it follows is in states.py.

The supervisor runs inside the job, as its user; the domain is its child. Nothing of a machine outlives `keep`, and when
the supervisor itself is killed the domain dies with it and recover.py undoes the rest from the journal.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from belljar.errors import (
    AgentLost,
    BelljarError,
    DomainKilled,
    GuestError,
    GuestRefused,
    HostError,
    HypervisorError,
    OutputMissing,
    UsageError,
)
from belljar.guest import ExitStatus, Guest, Process, Streams
from belljar.host.processes import start_time
from belljar.hypervisor import Domain, Hypervisor, Template
from belljar.image import Image, ImageStore, Overlays
from belljar.machine import Folders, Settings, fates
from belljar.machine.console import Console
from belljar.machine.control import Answer, ControlServer
from belljar.machine.identity import prove
from belljar.machine.life import Life, claim
from belljar.machine.orders import CANCELLING, Ended, GraceOver, Kill, Orders, Pause, Resize, Resume, Signal, Stop
from belljar.machine.plan import Plan, Planner
from belljar.machine.recover import prune
from belljar.model import Cause, Outcome, Payload, Request, Start, State

T = TypeVar("T")
MakeGuest = Callable[[socket.socket], Guest]
Relay = Callable[[Guest, socket.socket], Awaitable[None]]  # lets a second client talk to the guest, until it closes
LAST_WORDS = 2.0  # seconds between the channel's end and the event that explains it
QUIT_TO_KEEP = 5.0  # seconds QEMU gets to write its disk out when the folder is kept


class Supervisor:
    """One supervisor keeps one machine at a time; `keep` may be called again for the next."""

    def __init__(
        self, *, hypervisor: Hypervisor, images: ImageStore, overlays: Overlays, make_guest: MakeGuest, relay: Relay,
        folders: Folders, settings: Settings, boot_timeout: float, planner: Planner, point: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._hypervisor, self._images, self._overlays = hypervisor, images, overlays
        self._make_guest, self._relay = make_guest, relay
        self._folders, self._settings, self._boot_timeout = folders, settings, boot_timeout
        self._planner, self._point = planner, point

    async def keep(self, request: Request, streams: Streams, orders: Orders) -> Outcome:
        """Make the machine, run the payload, leave nothing behind. What goes wrong is in the outcome; only a machine
        that could not even be claimed (no folder, no space) raises."""
        life = claim(request, self._folders, self._point)
        machine = _Machine(life, orders, self)
        try:
            await machine.live(streams)
        except Ended as ended:
            life.end(ended)
        except BelljarError as error:
            life.fail(error)
        finally:
            await asyncio.shield(machine.leave())
        with suppress(OSError):  # old records may wait
            prune(self._folders, days=self._settings.keep_days, count=self._settings.keep_count, now=time.time())
        return life.outcome

    async def cast(self, request: Request) -> Template:
        """The template a request would be cloned from, made now where there is none. Raises why it cannot be had."""
        life = claim(request, self._folders, self._point)
        try:
            life.enter(State.PREPARING)
            image = self._planner.image(request)
            with self._images.hold(image, request.id):
                template = await self._planner.template(life, image)
            life.expect(Cause.FINISHED, f"template {template.key[:12]} is there")
            return template
        except BelljarError as error:
            life.fail(error)
            raise
        finally:
            life.leave_towards(State.CLEANING)
            fates.put_away(life, self._overlays, (0.0, 0.0, 0))


class _Machine:
    """The machine while it lives: what the tasks around it share."""

    def __init__(self, life: Life, orders: Orders, keeper: Supervisor) -> None:
        self.life, self.orders, self.keeper = life, orders, keeper
        self.domain: Domain | None = None
        self.guest: Guest | None = None
        self.process: Process | None = None
        self._fate: asyncio.Task[BelljarError] | None = None  # why the domain ended by itself
        self._console: Console | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._early: list[int] = []  # signals that came before the payload did
        self._control = ControlServer(life.folder, self._answer)
        self._usage = (0.0, 0.0, 0)
        self._grace: asyncio.TimerHandle | None = None

    # -- the way in ------------------------------------------------------------------------------------------------

    async def live(self, streams: Streams) -> None:
        """From the claim to the payload's end; raises what ended it otherwise."""
        self._control.open()
        await _first(self._work(streams), self._obey())

    async def _work(self, streams: Streams) -> None:
        life = self.life
        with life.phase("prepare"):
            life.enter(State.PREPARING)
            image = self.keeper._planner.image(life.request)
            life.note(image_digest=image.digest)
        with self.keeper._images.hold(image, life.request.id):
            await self._start(image)
            if life.request.payload is None:
                await self._while_alive(asyncio.get_running_loop().create_future())
            else:
                life.enter(State.RUNNING)
                await self._while_alive(self._serve(life.request.payload, streams))

    async def _start(self, image: Image) -> None:
        """Bring up a domain whose guest proved its identity: a clone where one can be had, booted cold otherwise."""
        life = self.life
        with life.phase("prepare"):
            plan = await self.keeper._planner.plan(life, image)
        life.point("after-overlay")
        try:
            await self._boot(plan)
        except (HypervisorError, GuestError) as error:
            is_killed = isinstance(error, DomainKilled)  # by somebody who would kill the next one too
            if plan.template is None or is_killed or life.request.machine.start is Start.CLONE:
                raise
            life.record.write("clone-failed", key=plan.template.key, reason=error.message)
            await self._drop_domain()
            self.keeper._hypervisor.remove_template(plan.template.key)
            with life.phase("prepare"):
                life.enter(State.PREPARING)
                self.keeper._overlays.discard(plan.spec.disk)
                plan = await self.keeper._planner.cold(life, image, f"the clone failed: {error.message}")
            await self._boot(plan)

    async def _boot(self, plan: Plan) -> None:
        life = self.life
        life.note(
            start=(Start.CLONE if plan.template else Start.COLD).value, start_reason=plan.reason,
            accelerator=plan.spec.accelerator.value,
        )  # fmt: skip
        with life.phase("start"):
            life.enter(State.STARTING, start=life.outcome.start, reason=plan.reason)
            self._start_domain(plan)
        with life.phase("boot"):
            life.enter(State.BOOTING)
            timeout = self.keeper._settings.clone_timeout if plan.template else self.keeper._boot_timeout
            await self._while_alive(self._greet(timeout, bool(plan.template)))
        with life.phase("identify"):
            await self._while_alive(prove(self._living_guest(), plan.link, life))
        life.point("after-agent")
        life.enter(State.READY)

    def _start_domain(self, plan: Plan) -> None:
        """QEMU runs when this returns, watched, with its console kept."""
        hypervisor, life = self.keeper._hypervisor, self.life
        self.domain = hypervisor.start_clone(plan.spec, plan.template) if plan.template else hypervisor.start(plan.spec)
        life.point("after-spawn")
        life.record.write("spawned", pid=self.domain.pid, started=start_time(self.domain.pid))
        loop = asyncio.get_running_loop()
        self._fate = loop.create_task(fates.read(self.domain.events(), life))
        self._console = Console(life.folder, self.domain.console)
        self._tasks.append(loop.create_task(self._console.run()))
        self.guest = self.keeper._make_guest(self.domain.channel)

    async def _greet(self, longest: float, clone: bool) -> None:
        assert self.domain is not None
        async with fates.deadline(longest, f"the {'clone' if clone else 'guest'}'s agent to answer"):
            # The monitor's handshake runs beside the boot; the guest does not wait for it.
            connecting = asyncio.ensure_future(self.domain.connect())
            try:
                await self._living_guest().greet()
                self.life.point("after-boot")
                await connecting
                self.life.point("after-qmp")
            finally:
                connecting.cancel()

    # -- the payload -----------------------------------------------------------------------------------------------

    async def _serve(self, payload: Payload, streams: Streams) -> None:
        """Everything that happens inside: folders, account, files in, the payload itself, files out."""
        life, guest = self.life, self._living_guest()
        with life.phase("setup"):
            await self._furnish(guest, payload)
        with life.phase("run"):
            life.point("payload-sent")
            life.record.write("payload", argv=[word[:200] for word in payload.argv[:20]])
            life.payload_started = True
            self.process = await guest.start(payload, streams)
            life.point("payload-started")
            await self._deliver_early()
            status = await self._until_ended(self.process)
            life.point("payload-ended")
        life.conclude(status)
        life.record.write("payload-ended", exit_code=status.exit_code, signal=status.signal)
        with life.phase("fetch"):
            await self._fetch(guest, payload)
        life.point("status-written")

    async def _furnish(self, guest: Guest, payload: Payload) -> None:
        shares = enumerate(self.life.request.machine.shares)
        for number, share in sorted(shares, key=lambda item: item[1].target):  # one may lie in another
            await guest.mount(f"share{number}", share.target, readonly=share.readonly)
        for item in payload.inputs:
            await guest.put(item.outside, item.inside, payload.account, payload.cwd)

    async def _until_ended(self, process: Process) -> ExitStatus:
        """The payload's status; TERM at the time limit, and after the grace the machine's end."""
        limit, grace = self.life.request.timeout, self.life.request.grace
        waiting = asyncio.ensure_future(process.wait())
        try:
            done, _ = await asyncio.wait({waiting}, timeout=limit)
            if not done:
                self.life.expect(Cause.WALLTIME, f"the time limit of {limit:g} s was reached")
                await process.signal(signal.SIGTERM)
                done, _ = await asyncio.wait({waiting}, timeout=grace)
            if not done:
                raise Ended(
                    Cause.WALLTIME,
                    signal.SIGKILL,
                    f"the time limit of {limit:g} s was reached; killed after {grace:g} s of grace",
                )
            return await waiting
        finally:
            waiting.cancel()

    async def _fetch(self, guest: Guest, payload: Payload) -> None:
        """Copy every output that can be had, then complain about the first that cannot."""
        trouble: BelljarError | None = None
        for item in payload.outputs:
            try:
                await guest.get(item.inside, item.outside, payload.account, payload.cwd)
            except (UsageError, GuestRefused, HostError) as error:
                trouble = trouble or error
        if self.life.request.machine.shares or self.life.request.keep:
            await guest.end_payload()
        has_failed = self.life.outcome.exit_code != 0
        if trouble is not None and not (has_failed and isinstance(trouble, OutputMissing)):
            raise trouble  # what a failing payload did not write is its own affair

    # -- what the outside asks ---------------------------------------------------------------------------------------

    async def _obey(self) -> None:
        """Follow orders for as long as the machine lives. Ends by raising Ended, or by being cancelled."""
        while True:
            match await self.orders.next():
                case Signal(number=signal.SIGTERM) if self.process is not None:
                    await self._begin_grace(self.life.request.grace, "cancelled by TERM")
                case Stop(grace=grace) if self.process is not None:
                    await self._begin_grace(self.life.request.grace if grace is None else grace, "stopped")
                case Signal(number=number) if self.process is not None:
                    await self.process.signal(number)
                case Signal(number=number) if number in CANCELLING:
                    raise Ended(Cause.CANCELLED, number, "cancelled before the payload was started")
                case Signal(number=number):
                    self._early.append(number)
                case Stop() | Kill():
                    raise Ended(Cause.CANCELLED, signal.SIGKILL, "killed on request")
                case Resize(rows=rows, columns=columns) if self.process is not None:
                    await self.process.resize(rows, columns)
                case Pause(done=done):
                    await self._pause(done)
                case Resume():
                    await self._resume()
                case GraceOver(reason=reason):
                    raise Ended(Cause.CANCELLED, signal.SIGTERM, reason)

    async def _begin_grace(self, grace: float, why: str) -> None:
        """First time: TERM to the payload, and its end after the grace. Second time: its end now."""
        if self.life.outcome.cause is Cause.CANCELLED:
            raise Ended(Cause.CANCELLED, signal.SIGTERM, f"{why} twice")
        self.life.expect(Cause.CANCELLED, why)
        assert self.process is not None
        await self.process.signal(signal.SIGTERM)
        over = GraceOver(f"{why}; the payload did not end within {grace:g} s")
        self._grace = asyncio.get_running_loop().call_later(grace, self.orders.give, over)

    async def _deliver_early(self) -> None:
        early, self._early = self._early, []
        for number in early:
            assert self.process is not None
            await self.process.signal(number)

    async def _pause(self, done: asyncio.Event) -> None:
        try:
            if self.domain is not None:
                with suppress(HypervisorError):  # SIGSTOP of the process group halts the vcpus too
                    await self.domain.pause()
                    self.life.record.write("paused")
        finally:
            done.set()

    async def _resume(self) -> None:
        if self.domain is not None:
            with suppress(HypervisorError):
                await self.domain.resume()
                self.life.record.write("resumed")
        if self.guest is not None and self.process is not None:
            with suppress(GuestError):
                await self.guest.set_clock()

    async def _answer(self, question: Answer, connection: socket.socket) -> Answer | None:
        """One question from the control socket."""
        match question.get("do"):
            case "status":
                pid = self.domain.pid if self.domain is not None else None
                return {"id": self.life.request.id, "state": self.life.state.value, "pid": pid}
            case "stop":
                grace = question.get("grace")
                self.orders.give(Stop(float(grace) if isinstance(grace, (int, float)) else None))
                return {"ok": True}
            case "kill":
                self.orders.give(Kill())
                return {"ok": True}
            case "relay":
                return await self._relay(connection)
            case "console":
                return await self._attach_console(connection)
            case other:
                return {"error": f"unknown request {str(other)[:40]!r}"}

    async def _relay(self, connection: socket.socket) -> Answer | None:
        if self.guest is None or self.life.state is not State.RUNNING:
            return {"error": f"the machine is {self.life.state.value}, not running"}
        await asyncio.get_running_loop().sock_sendall(connection, b'{"ok": true}\n')
        await self.keeper._relay(self.guest, connection)
        return None

    async def _attach_console(self, connection: socket.socket) -> Answer | None:
        if self._console is None:
            return {"error": f"the machine is {self.life.state.value}: it has no console yet"}
        await asyncio.get_running_loop().sock_sendall(connection, b'{"ok": true}\n')
        await self._console.attach(connection)
        return None

    # -- the way out -------------------------------------------------------------------------------------------------

    async def leave(self) -> None:
        """Domain, socket, files, outcome, lock, in this order. Each step is tried whatever became of the one before."""
        life = self.life
        if self._grace is not None:
            self._grace.cancel()
        with life.phase("stop"):
            if self.domain is not None:
                life.leave_towards(State.STOPPING)
                life.point("before-stop")
                await self._drop_domain()
                life.point("after-stop")
            elif life.state in (State.STARTING, State.BOOTING):
                life.leave_towards(State.STOPPING)
                self.keeper._hypervisor.discard(life.request.id)
            await self._control.close()
        life.leave_towards(State.CLEANING)
        fates.put_away(life, self.keeper._overlays, self._usage)

    async def _drop_domain(self) -> None:
        """End the domain, and all that listened to it."""
        if self.guest is not None:
            self.guest.close()
        if self._fate is not None:
            self._fate.cancel()
        if self.domain is not None:
            grace = QUIT_TO_KEEP if self.life.request.keep else 0.0
            with suppress(HypervisorError):
                await self.domain.quit(grace=grace)
            self._usage = self.domain.usage()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.domain is not None:
            self.domain.channel.close()
            self.domain.console.close()
        if self._console is not None:
            self._console.close()
        self.domain = self.guest = self._fate = self._console = None
        self._tasks.clear()

    # -- small helps ---------------------------------------------------------------------------------------------------

    def _living_guest(self) -> Guest:
        assert self.guest is not None
        return self.guest

    async def _while_alive(self, work: Coroutine[Any, Any, T] | asyncio.Future[T]) -> T:
        """The work's result, unless the domain ends before: then the reason for that."""
        assert self._fate is not None
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait({task, self._fate}, return_when=asyncio.FIRST_COMPLETED)
            if task.done() and isinstance(task.exception(), AgentLost):
                # A channel that breaks is how QEMU's end shows first; its own event tells why.
                await asyncio.wait({self._fate}, timeout=LAST_WORDS)
            if self._fate.done() and not (task.done() and task.exception() is None):
                raise self._fate.result()
            return await task
        finally:
            await _cancelled(task)


async def _first(work: Coroutine[Any, Any, None], other: Coroutine[Any, Any, None]) -> None:
    """Run both until one ends; its result or exception counts, and the other is cancelled. Work wins a draw."""
    first, second = asyncio.ensure_future(work), asyncio.ensure_future(other)
    try:
        await asyncio.wait({first, second}, return_when=asyncio.FIRST_COMPLETED)
        await (first if first.done() else second)
    finally:
        await _cancelled(first)
        await _cancelled(second)


async def _cancelled(task: asyncio.Future[Any]) -> None:
    """Cancel and wait; what it says in leaving does not count any more."""
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        task.exception()
