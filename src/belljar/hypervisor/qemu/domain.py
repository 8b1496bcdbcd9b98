"""One QEMU while it lives: process, monitor, channel, console, and what happens to it."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path

from belljar.errors import BelljarError, DomainDied, HypervisorError, PlugRefused, QmpError, QmpTimeout
from belljar.hints import TYPE_CHECKING, Any
from belljar.host.processes import cpu_times
from belljar.host.threads import to_its_end
from belljar.hypervisor import LAST_RESORT, DomainEvent, EventKind
from belljar.hypervisor.devices import stop_serving
from belljar.hypervisor.qemu.process.launch import Child, Launch, Spawn, ended, spawn
from belljar.hypervisor.qemu.process.qmp import Monitor, settle
from belljar.model import QEMU_LOG

if TYPE_CHECKING:
    from belljar.host.guard.traffic import Call, Refusal, Traffic
    from belljar.hypervisor.devices import Server

Command = tuple[str, dict[str, Any]]
Switch = Callable[[], Awaitable[None]]
Grow = Callable[[Any], Sequence[Command]]  # from QEMU's answer to CPU_SLOTS, where it was asked
CPU_SLOTS = "query-hotpluggable-cpus"
RESIZE = "block_resize"
PLUGGING = ("object-add", "device_add", RESIZE)
PAUSED = "pre-switchover"  # of a migration: the guest stands still, and the rest of its state is not written yet
FINAL = ("completed", "failed", "cancelled")  # states of a migration that do not change any more
# For a migration with memory: as fast as can be; the guest stands still when the rest takes so many milliseconds. One that writes
# more than is moved gets so many percent less of its processors, until it does not.
QUICKLY = {"max-bandwidth": 1 << 40, "downtime-limit": 50, "cpu-throttle-initial": 50, "cpu-throttle-increment": 20}
UNFINISHED = "not finalized yet"
LAST_WORDS = 1.0  # seconds in which QEMU's own end explains the end of what served it


class Lines:
    """Connections to a process: our ends, and its ends until it has them, at the end of a `with`, which closes ours where it fails."""

    def __init__(self, *names: str) -> None:
        self.ours: dict[str, socket.socket] = {}
        self.theirs: dict[str, socket.socket] = {}
        for name in names:
            self.ours[name], self.theirs[name] = socket.socketpair()
            self.ours[name].setblocking(False)

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, failed: object, *_: object) -> None:
        for end in (*self.theirs.values(), *(self.ours.values() if failed else ())):
            end.close()


class Migration:
    """One of a domain's, as far as QEMU has told. Its end counts as each stage before it, too."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.paused: asyncio.Future[str] = loop.create_future()
        self.ended: asyncio.Future[str] = loop.create_future()

    def hear(self, status: str) -> None:
        stages = (self.paused, self.ended) if status in FINAL else (self.paused,) if status == PAUSED else ()
        for stage in stages:
            if not stage.done():
                stage.set_result(status)


def capabilities(*, with_memory: bool, pauses: bool = False) -> dict[str, Any]:
    """For a migration: does its stream have memory that is in a file, too? It tells where it is, and may pause before its last part."""
    states = {
        "events": True,
        "x-ignore-shared": not with_memory,
        "pause-before-switchover": pauses,
        "auto-converge": pauses,
    }
    return {"capabilities": [{"capability": name, "state": state} for name, state in states.items()]}


class QemuDomain:
    """Implements `Domain`. `doing` says what it was last asked to do, for the message when it dies of it."""

    def __init__(
        self, launch: Launch, argv: Sequence[str], fds: Sequence[int], lines: Lines, servers: Sequence[Server],
        *, timeout: float,
    ) -> None:  # fmt: skip
        """*servers*, of its shared folders, end with it; until it is made they are the caller's."""
        self._servers = servers
        self.channel, self.console = lines.ours["channel"], lines.ours["console"]
        # The channel stays up when its user closes it, so a template is saved with its port open: a clone's agent
        # then need not see the port close and open again.
        self._held = self.channel.dup()
        self._timeout, self._doing, self.has_uplink = timeout, launch.doing, launch.has_uplink
        self._history = History()
        self._loop = asyncio.get_running_loop()
        self._migration = Migration()  # the latest one
        self._grows = self.is_paused = False
        self.disk = "disk0"  # the block node that its guest writes to
        self._preliminaries: list[tuple[str, asyncio.Future[Any]]] = []
        self._over: asyncio.Future[int] = self._loop.create_future()
        self._traffic: Traffic | None = None
        start: Spawn = spawn
        try:
            if launch.egress is not None:  # imported by machines that have a network alone
                from belljar.host.guard.traffic import Traffic
                from belljar.hypervisor.qemu.guard import QemuGuard

                self._traffic = Traffic()
                start = QemuGuard(launch.egress, self._traffic.tell).spawn
            self._child = Child(argv, fds, launch.spec.folder / QEMU_LOG, self._ended, start)
        except BaseException:
            self._held.close()
            raise
        self.pid, self.argv = self._child.pid, tuple(argv)
        self._monitor = Monitor(lines.ours["monitor"], self._event)
        for server in servers:
            server.over.add_done_callback(partial(self._share_ended, server))

    # -- the Domain protocol -----------------------------------------------------------------------------------------

    async def connect(self) -> None:
        await self.answer(self._monitor.handshake, "qmp_capabilities")
        if self._grows:
            await self._until(self._migration.ended, None)
        for command, future in self._preliminaries:
            try:
                await self.answer(future, command)
            except QmpError as exc:
                if command not in PLUGGING:
                    raise
                raise PlugRefused(f"{command}: {exc.message}") from exc
        self._preliminaries.clear()

    async def pause(self) -> None:
        self.is_paused = True
        await self.call("stop")

    async def resume(self) -> None:
        """QEMU announces a migration's end before it leaves the state `finish-migrate`, in which it refuses `cont`, and no event says
        when it does: as long as it refuses for that, it is asked again with each answer."""
        self.is_paused, deadline = False, self._loop.time() + self._timeout
        while True:
            try:
                await self.call("cont")
                return
            except QmpError as exc:
                if UNFINISHED not in exc.message:
                    raise
                if self._loop.time() > deadline:
                    raise QmpTimeout(f"QEMU has not finished its migration within {self._timeout:g} s") from exc

    async def pin(self, cpus: Sequence[int]) -> dict[str, int]:
        from belljar.host.devices.topology import pin

        vcpus = sorted(await self.call("query-cpus-fast"), key=lambda cpu: int(cpu["cpu-index"]))
        return pin([vcpu["thread-id"] for vcpu in vcpus], cpus)

    async def press_power(self) -> None:
        await self.call("system_powerdown")

    async def quit(self, *, grace: float) -> int:
        """Asks QEMU itself first: it then closes its disk in good order. SIGKILL after *grace* seconds."""
        self._doing = "stopping"
        if not self._over.done() and grace > 0:
            self._monitor.send("quit")
            await asyncio.wait({self._over}, timeout=grace)
        if not self._over.done():
            self.kill()
            await asyncio.wait({self._over}, timeout=LAST_RESORT)
        if not self._over.done():
            raise DomainDied(f"QEMU (pid {self.pid}) outlives SIGKILL: it hangs in the host's kernel")
        await stop_serving(self._servers, grace=LAST_WORDS)
        return self._over.result()

    def kill(self) -> None:
        self._child.send(signal.SIGKILL)

    def events(self) -> AsyncIterator[DomainEvent]:
        return self._history.events()

    def traffic(self) -> AsyncIterator[Call | Refusal]:
        assert self._traffic is not None
        return self._traffic.items()

    def usage(self) -> tuple[float, float, int]:
        user, system, peak = self._child.usage or measure(self.pid)
        served = [server.usage() for server in self._servers]
        return user + sum(times[0] for times in served), system + sum(times[1] for times in served), peak

    # -- for the driver ------------------------------------------------------------------------------------------------

    def go_on(
        self, state: str, grow: Grow | None = None, *, asks_cpus: bool = False, with_memory: bool = False
    ) -> None:  # fmt: skip
        """Load the state at this address and run the guest; `connect` waits for the answers. A QEMU that still loads forgets
        `cont`, so it is said again when the load is over. What *grow* returns is plugged in between: before the guest's first
        instruction, but for a larger disk. *with_memory*: it is in the state."""
        slots = self._monitor.send(CPU_SLOTS) if asks_cpus else None
        self.ask("migrate-set-capabilities", capabilities(with_memory=with_memory))
        # Nobody on a network knows the clone yet; its guest's driver would be busy with telling them five times.
        self.ask("migrate-set-parameters", {"announce-rounds": 0})
        self.ask("migrate-incoming", {"uri": state})
        self._grows = grow is not None
        if not self._grows:
            self.ask("cont")
        self._migration.ended.add_done_callback(lambda _: self._loaded(grow, slots))

    def ask(self, command: str, arguments: dict[str, Any] | None = None) -> None:
        """Send a command whose answer `connect` waits for."""
        self._preliminaries.append((command, self._monitor.send(command, arguments)))

    async def call(self, command: str, arguments: dict[str, Any] | None = None, *, fds: Sequence[int] = ()) -> Any:
        """A command and its answer, or the reason why there is none."""
        return await self.answer(self._monitor.send(command, arguments, fds=fds), command)

    async def answer(self, future: asyncio.Future[Any], command: str) -> Any:
        return await self._monitor.answer(future, command, self._timeout)

    async def receive(self, address: str, *, timeout: float) -> None:
        """Load a state with memory, of a guest that is not to run here; returns when all of it has come."""
        await self.call("migrate-set-capabilities", capabilities(with_memory=True))
        await self.call("migrate-incoming", {"uri": address})
        await self._migrated(self._migration.ended, "the state of the other guest was not loaded", timeout)

    async def migrate(
        self, address: str, *, timeout: float, with_memory: bool = False, switch: Switch | None = None
    ) -> None:
        """Write the device state to an address, or all of the guest *with_memory*; returns when it is complete. A guest that runs does
        so until the rest of it is written, and goes on by `resume`. *switch* is done before that, when the guest stands still. After
        an error the guest goes on, if it ran."""
        doing, self._doing = self._doing, "writing its state"
        await self.call("migrate-set-capabilities", capabilities(with_memory=with_memory, pauses=switch is not None))
        await self.call("migrate-set-parameters", QUICKLY)
        self._migration = migration = Migration()
        problem = "QEMU could not write its state"
        try:
            await self.call("migrate", {"uri": address})
            if switch is not None:
                await self._migrated(migration.paused, problem, timeout)
                await switch()
                await self.call("migrate-continue", {"state": PAUSED})
            await self._migrated(migration.ended, problem, timeout)
        except BaseException:  # re-raised: a cancel, too, is to leave no migration behind
            if not migration.ended.done() and not self._over.done():
                self._monitor.send("migrate_cancel")
                await to_its_end(asyncio.ensure_future(self._until(migration.ended, LAST_RESORT)))
            raise
        self._doing = doing

    async def _migrated(self, stage: asyncio.Future[str], problem: str, timeout: float) -> None:
        """Wait until the migration has come so far."""
        migration = self._migration
        await self._until(stage, timeout)
        if self._over.done():
            raise self._death()
        if not stage.done():
            raise QmpError(f"{problem} within {timeout:g} s")
        if migration.ended.done() and migration.ended.result() != "completed":
            why = (await self.call("query-migrate")).get("error-desc", migration.ended.result())
            raise QmpError(f"{problem}: {why}")

    async def _until(self, stage: asyncio.Future[str], timeout: float | None) -> None:
        ends: set[asyncio.Future[Any]] = {stage, self._over}
        await asyncio.wait(ends, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)

    # -- what QEMU tells -----------------------------------------------------------------------------------------------

    def _event(self, name: str, details: dict[str, Any]) -> None:
        if name == "MIGRATION":
            self._migration.hear(str(details.get("status")))
        event = translate(name, details)
        if event is not None:
            self._history.tell(event)

    def _loaded(self, grow: Grow | None, slots: asyncio.Future[Any] | None) -> None:
        """A disk grows when QEMU has taken it over, which it does at `cont`; newer ones refuse it before."""
        if self._migration.ended.result() != "completed":
            return
        try:
            commands = grow(slots.result() if slots is not None and slots.done() else None) if grow else ()
        except HypervisorError as exc:
            refused = self._loop.create_future()
            settle(refused, exc)  # `connect` raises it
            self._preliminaries.append((CPU_SLOTS, refused))
            return
        for command, arguments in commands:
            if command == RESIZE:
                self._monitor.send("cont")
            self.ask(command, arguments)
        self._monitor.send("stop" if self.is_paused else "cont")

    def _ended(self, status: int) -> None:
        self._monitor.drain()  # the event that explains the end may have come in the same instant
        self._over.set_result(status)
        self._monitor.fail(self._death())
        self._held.close()
        if self._traffic is not None:
            self._traffic.end()
        words = (self._child.last_words().splitlines() or [ended(status)])[-1][:300]
        self._history.tell(DomainEvent(EventKind.EXITED, words, status, self._death()))

    def _share_ended(self, server: Server, _: object) -> None:
        """It ends by itself when QEMU does, and may be seen to do so first."""
        self._loop.call_later(LAST_WORDS, self._tell_of_loss, server)

    def _tell_of_loss(self, server: Server) -> None:
        if not self._over.done() and self._doing != "stopping":
            loss = server.loss()
            self._history.tell(DomainEvent(EventKind.SHARE_LOST, loss.message, why=loss))

    def _death(self) -> BelljarError:
        if self._doing == "stopping" and self._child.status == 0:
            return DomainDied("QEMU has ended")
        from belljar.hypervisor.qemu.process.complaints import explain

        return explain(self._child.last_words(), self._child.status, self._doing)


def translate(name: str, details: dict[str, Any]) -> DomainEvent | None:
    """QEMU's event in our words; None when it is not ours to tell."""
    match name, details:
        case "SHUTDOWN", {"guest": True, "reason": "guest-reset"}:
            return DomainEvent(EventKind.RESET, "the guest asked for a reboot")
        case "SHUTDOWN", {"guest": True, "reason": "guest-panic"}:
            return None  # GUEST_PANICKED came before it
        case "SHUTDOWN", {"guest": True}:
            return DomainEvent(EventKind.SHUTDOWN, str(details.get("reason", "")))
        case "GUEST_PANICKED", _:
            return DomainEvent(EventKind.PANICKED, "the guest's kernel panicked")
        case "BLOCK_IO_ERROR", {"nospace": True}:
            return DomainEvent(EventKind.DISK_FULL, str(details.get("reason", "")))
        case "BLOCK_IO_ERROR", _:
            return DomainEvent(EventKind.DISK_ERROR, str(details.get("reason", "")))
    return None


def measure(pid: int) -> tuple[float, float, int]:
    """User seconds, system seconds, peak resident bytes of a running process; zeros when it is gone."""
    user, system = cpu_times(pid)
    peak = 0
    with suppress(OSError, ValueError, IndexError):
        for line in Path(f"/proc/{pid}/status").read_bytes().splitlines():
            if line.startswith(b"VmHWM:"):
                peak = int(line.split()[1]) * 1024
    return user, system, peak


class History:
    """Everything since the start. EXITED is the last of it."""

    def __init__(self) -> None:
        self.all: list[DomainEvent] = []
        self._news = asyncio.Event()

    def tell(self, event: DomainEvent) -> None:
        self.all.append(event)
        self._news.set()

    async def events(self) -> AsyncIterator[DomainEvent]:
        """From the first to EXITED; waits for what is still to come."""
        for number in count():
            while number == len(self.all):
                self._news.clear()
                await self._news.wait()
            yield self.all[number]
            if self.all[number].kind is EventKind.EXITED:
                return
