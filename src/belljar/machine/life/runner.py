"""A machine from its claim to its end: the way in, the payload, the way out. commands.py has what the outside asks meanwhile."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from belljar import errors
from belljar.guest import Streams
from belljar.hints import TYPE_CHECKING, Any, TypeVar
from belljar.host.locks import Lock
from belljar.host.processes import start_time
from belljar.host.threads import in_thread
from belljar.hypervisor import Domain
from belljar.image import Image
from belljar.journal import read
from belljar.machine import DISK_NOT_WHOLE, DOUBTS
from belljar.machine.cleaning import put_away
from belljar.machine.cleaning.reaper import traces_of
from belljar.machine.extras import Extra, Shares
from belljar.machine.life.claim import force_begin, holding
from belljar.machine.life.commands import Commands
from belljar.machine.life.control import ControlServer
from belljar.machine.life.identity import new_identity, prove, take_all_into_use
from belljar.machine.life.life import Lifecycle
from belljar.machine.life.output import Console
from belljar.machine.life.work import PayloadWorkload, Running, Workload, conclude
from belljar.machine.orders import Ended, Orders, cancelled, first, unless_cancelled, unless_ended
from belljar.machine.planning.boot_plan import Plan, Planner, awaited_line
from belljar.machine.planning.refusal import checked_image
from belljar.machine.planning.template import judge
from belljar.machine.services import Keep, Services
from belljar.model import NetworkMode, Request, RunPayload, State, Usage

if TYPE_CHECKING:
    from belljar.machine.checkpoints import Checkpoint

T = TypeVar("T")
NOT_ENDED = "its hypervisor's process may live"
CLEANING_PATIENCE = 5.0  # seconds the rest of the way out may take once belljar is told to end
QUIT_TO_KEEP = 10.0  # seconds QEMU gets to write its disk out when the folder is kept


class Runner:
    """Runs one machine. `run` may end in any way; `leave` always follows."""

    def __init__(
        self, life: Lifecycle, orders: Orders, services: Services, keep: Keep, extras: Sequence[Extra]
    ) -> None:
        self.life, self.services, self._keep = life, services, keep
        self.running = Running()
        self._further = extras  # beside what the request asks for
        self._held = ExitStack()  # what is released when the domain is gone
        self._orders = orders
        if isinstance(work := life.request.work, RunPayload):
            self._workload: Workload = PayloadWorkload(work, life, self.running, services)
        else:
            from belljar.machine.life.own_work import OwnWorkload

            self._workload = OwnWorkload(work, life, self.running)
        self._commands = Commands(life, orders, self.running, self._workload, services)
        self._control = ControlServer(life.folder, self._commands.answer)
        self._fate: asyncio.Task[errors.BelljarError] | None = None  # why the domain ended by itself
        self._tasks: list[asyncio.Task[None]] = []
        self._quit_status: int | None = None  # of the last domain, as waitpid tells it

    async def publish(self) -> None:
        """Have what it may lose to others: the fork that it is cloned from, and the ports that were asked for. Raises BadOption, NoSpace,
        TemplateError."""
        if key := self.life.request.machine.fork:
            from belljar.machine.life.forking import held

            lock = self.services.hypervisor.cloning.fork_lock(key)
            self._held.enter_context(held(self.life, self.services, lock))
        for port in self.life.request.machine.ports:
            await self._commands.publish(port)

    async def run(self, streams: Streams) -> None:
        """From the claim to the payload's end; raises what ended it otherwise."""
        await self._control.open()
        self._on_disk = asyncio.ensure_future(in_thread(lambda: force_begin(self.life)))
        await first(self._work(streams), self._commands.run())

    async def _work(self, streams: Streams) -> None:
        life = self.life
        with life.phase("prepare"):
            life.enter(State.PREPARING)
            if life.request.restore:
                await self._find_checkpoint()
            image = checked_image(life.request, self.services)
            life.note(image_digest=image.digest, image_manifest=str(image.facts.get("manifest", "")))
            for extra in (*self._further, *extras_of(life.request, image, self.services, life.checkpoint)):
                self._held.enter_context(life.trying("what it had beside its disk was not released"))
                self._held.callback(extra.release)
                self.running.extras.append(extra)
                self.running.equipment = await extra.prepare(life, self.running.equipment)
        planner = Planner(self.services, self._keep, life, image, self.running.equipment)
        async with holding(self.services.images, image, life.request.id):
            try:
                await self._start(planner)
                while await self._has_rebooted(streams):
                    life.begin_again()
                    await self._drop_domain()
                    await self._boot(await planner.again())
            except errors.GuestPoweredOff:
                if not self._workload.may_power_off:
                    raise
                conclude(life)

    async def _find_checkpoint(self) -> None:
        """Where it goes on from; the folder is its own from now on. Raises MachineBusy, CheckpointUnfit, UnsafeFolder, HostError."""
        from belljar.machine.checkpoints import newest, take

        life, folder = self.life, Path(self.life.request.restore)
        self.running.checkpoints[folder] = await in_thread(lambda: take(folder), undo=Lock.release)
        checkpoint, complaints = await in_thread(lambda: newest(folder, read_all=True))
        if checkpoint is not None:
            try:
                self.services.images.resolve(checkpoint.spec.image_digest)
            except errors.ImageUnknown as exc:  # another host may have it
                raise errors.CheckpointUnfit(f"{checkpoint.folder}: {exc.message}") from exc
            life.note(restarts=checkpoint.restarts + 1)
            life.record.tell("restored", folder=str(checkpoint.folder))
            life.checkpoint = checkpoint
        elif complaints:
            complaints.append(f"no checkpoint in {folder} is whole: the command began anew")
        for complaint in complaints:
            life.tell_trouble(complaint)

    async def _has_rebooted(self, streams: Streams) -> bool:
        """Carry its work out, from a guest that was booted to the end, or to a reboot that it may make."""
        life = self.life
        with life.phase("ready"):
            await self._while_alive(self._workload.await_ready(self.services.rules.qemu.boot_timeout))
        life.enter(State.READY)
        life.enter(State.RUNNING)
        self.running.is_up.set()
        try:
            await self._while_alive(self._workload.carry_out(streams))
        except errors.GuestRebooted:
            return True
        return False

    async def _start(self, planner: Planner) -> None:
        """Bring up a domain whose guest proved its identity: a clone where one can be made, booted cold otherwise."""
        life = self.life
        with life.phase("prepare"):
            plan = await (planner.restored(life.checkpoint) if life.checkpoint else planner.plan())
        life.point("after-overlay")
        try:
            await self._boot(plan)
        except (errors.HypervisorError, errors.GuestError) as error:
            is_killed = isinstance(error, errors.DomainKilled)  # by somebody who would kill the next one too
            if plan.template is None or is_killed:
                raise
            life.record.tell("clone-failed", key=plan.template.key, reason=error.message)
            await self._drop_domain()
            judge(error, plan.template, plan.spec, self.services.hypervisor)
            if planner.must_clone:
                raise
            with life.phase("prepare"):
                life.enter(State.PREPARING)
                self.services.overlays.discard(plan.spec.disk)
                plan = await planner.cold(f"the clone failed: {error.message}")
            await self._boot(plan)

    async def _boot(self, plan: Plan) -> None:
        life = self.life
        context = plan.context.chosen.context
        life.note(
            start=plan.start, start_reason=plan.reason,
            context=context.value, context_reason=plan.context.chosen.reason,
        )  # fmt: skip
        with life.phase("start"):
            owner = plan.spec.owner[0]  # whose processes the machine's are
            life.enter(State.STARTING, start=life.outcome.start, reason=plan.reason, context=context.value, owner=owner)
            await self._start_domain(plan)
        with life.phase("boot"):
            life.enter(State.BOOTING)
            rules = self.services.rules
            timeout = rules.machine.clone_timeout if plan.template else rules.qemu.boot_timeout
            if plan.checkpoint is not None:
                timeout += plan.checkpoint.load_time
            what = f"the guest's agent to answer ({plan.start} start, context {context.value})"
            async with put_away.deadline(timeout, what):
                await self._while_alive(self._greet())
        guest = self.running.guest
        if guest is None:
            return
        with life.phase("identify"):
            identity = plan.checkpoint.identity if plan.checkpoint else new_identity(life.request.id, plan.link)
            await self._while_alive(prove(guest, identity, plan.link, life, is_clone=plan.template is not None))
        if plan.spec.frame is not None and plan.checkpoint is None:
            await self._while_alive(take_all_into_use(guest, plan.spec, life))
        if plan.template is not None:
            with suppress(OSError):
                os.unlink(plan.template.folder / DOUBTS)  # it works
        life.point("after-agent")

    async def _start_domain(self, plan: Plan) -> None:
        """QEMU runs when this returns, watched, with its console kept."""
        hypervisor, life = self.services.hypervisor, self.life
        await self._on_disk
        self.running.plan, self.running.spec = plan, plan.disc_in_drive
        if plan.checkpoint is None:
            self.running.domain = domain = await hypervisor.launch(plan.spec, plan.template)
        else:
            from belljar.machine.checkpoints.content import reading

            memory = self._held.enter_context(reading(plan.checkpoint))
            self.running.domain = domain = hypervisor.cloning.restore(plan.spec, memory)
        life.point("after-spawn")
        life.record.write("spawned", pid=domain.pid, started=start_time(domain.pid), argv=domain.argv)
        loop = asyncio.get_running_loop()
        self._fate = loop.create_task(put_away.read(domain.events(), life, self._workload.explain_off))
        self.running.console = Console(life.folder, domain.console, awaited_line(life.request.work))
        self._tasks.append(loop.create_task(self.running.console.run()))
        if plan.spec.nic is not None and plan.spec.nic.egress is not None:
            from belljar.machine.extras.network import listen

            self._tasks += [loop.create_task(listen(domain.traffic(), life, self.running.equipment.answer))]
        if life.request.work.has_agent:
            self.running.guest = self.services.make_guest(domain.channel)

    async def _greet(self) -> None:
        """The monitor's handshake runs beside the boot: neither waits for the other, nor for one that failed."""
        assert self.running.domain is not None
        both = asyncio.ensure_future(self._connect(self.running.domain)), asyncio.ensure_future(self._await_agent())
        try:
            await asyncio.gather(*both)
            self.life.point("after-qmp")
        finally:
            for task in both:
                await cancelled(task)

    async def _connect(self, domain: Domain) -> None:
        """When its monitor answers it has all its processors, a clone's further ones too."""
        life = self.life
        await domain.connect()
        if life.placement.cpus:
            life.record.tell("pinned", threads=await domain.pin(life.placement.numbers))

    async def _await_agent(self) -> None:
        if self.running.guest is not None:
            await self.running.guest.greet(as_heir=bool(self.life.request.machine.fork))
        self.life.point("after-boot")

    async def leave(self) -> None:
        """Domain, socket, files, outcome, lock, in this order. Each step is tried whatever became of the one before."""
        life = self.life
        with life.phase("stop"):
            if self.running.domain is not None:
                life.leave_towards(State.STOPPING)
                life.point("before-stop")
                await self._drop_domain()
                if self.running.equipment.outlasts and self._quit_status != 0:
                    life.tell_trouble(DISK_NOT_WHOLE)
                put_away.own_limit(life)
                life.point("after-stop")
            elif life.state in (State.STARTING, State.BOOTING):
                life.leave_towards(State.STOPPING)
                with life.trying(NOT_ENDED):
                    traces = traces_of(read(life.folder))
                    await in_thread(lambda: self.services.hypervisor.discard(life.request.id, traces))
            self._held.close()
            for lock in self.running.checkpoints.values():
                lock.release()
            with life.trying("a published port was not closed"):
                await self._commands.close_ports()
            with life.trying("its control socket was not closed"):
                await self._control.close()
        life.leave_towards(State.CLEANING)
        # Records may lie on a file server that does not answer: whoever is told to end then leaves the rest to a reaper.
        work = asyncio.ensure_future(in_thread(lambda: put_away.put_away(life, self.services.overlays)))
        try:
            await unless_cancelled(asyncio.wait({work}), self._orders)
        except Ended:
            await asyncio.wait({work}, timeout=CLEANING_PATIENCE)
        if work.done():
            work.result()

    async def _drop_domain(self) -> None:
        """End the domain, and all that listened to it."""
        life, running, domain = self.life, self.running, self.running.domain
        if domain is None:
            return
        if self._fate is not None:
            self._fate.cancel()
        if running.guest is not None:
            running.guest.close()
        with life.trying(NOT_ENDED):
            outlasts = life.request.keep or running.equipment.outlasts
            self._quit_status = await domain.quit(grace=QUIT_TO_KEEP if outlasts else 0.0)
        with life.trying("what it used is not known"):
            (user, system, memory), before = domain.usage(), life.outcome.host
            life.note(host=Usage(before.user + user, before.system + system, max(before.peak_memory, memory)))
        for task in self._tasks:
            await cancelled(task)
        with life.trying("a line to it was not closed"):
            for end in (domain.channel, domain.console, running.console):
                if end is not None:
                    end.close()
        self._fate = None
        running.clear()
        self._tasks.clear()

    async def _while_alive(self, work: Coroutine[Any, Any, T]) -> T:
        assert self._fate is not None
        return await unless_ended(work, self._fate)


def extras_of(
    request: Request, image: Image, services: Services, checkpoint: Checkpoint | None = None
) -> Iterator[Extra]:
    """What a request asks for, in the order in which it is made, and put into its place."""
    machine, work, rules = request.machine, request.work, services.rules
    payload = work.payload if isinstance(work, RunPayload) else None
    if machine.shares:
        yield Shares(machine)
    if machine.devices:
        from belljar.machine.extras.devices import Devices

        yield Devices(machine.devices, rules)
    has_transfers = payload is not None and bool(payload.inputs or payload.outputs)
    if checkpoint is not None:
        from belljar.machine.checkpoints.content import RestoredDisks

        yield RestoredDisks(machine.disk or image.virtual_size)
    elif image.is_disc or machine.scratch is not None or has_transfers:
        from belljar.machine.extras import disks

        if image.is_disc:
            yield disks.EmptyDisk(machine.disk or rules.context.empty_disk)
        if machine.scratch is not None:
            yield disks.ScratchDisk(machine.scratch)
        if has_transfers:
            yield disks.Exchange(machine.disk or image.virtual_size)
    if machine.cache is not None:
        from belljar.machine.extras.caches import CacheDisk

        yield CacheDisk(machine.cache)
    if payload is not None and payload.inputs and checkpoint is None:
        from belljar.machine.extras.inputs import Inputs

        yield Inputs(payload, rules.machine)
    if machine.network is not NetworkMode.NONE and services.networks is not None:
        from belljar.machine.extras.network import MetadataService, Network, has_metadata

        if has_metadata(request, rules.context.metadata):
            yield MetadataService(rules)
        yield Network(services.networks, machine)
