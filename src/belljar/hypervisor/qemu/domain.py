"""One QEMU while it lives: process, monitor, channel, console, and what happens to it."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path

from belljar.errors import BelljarError, DomainDied, HypervisorError, PlugRefused, QmpError
from belljar.hints import TYPE_CHECKING, Any
from belljar.host.processes import cpu_times
from belljar.hypervisor import DomainEvent, EventKind
from belljar.hypervisor.qemu.process.launch import Child, Launch, Spawn, ended, spawn
from belljar.hypervisor.qemu.process.qmp import Monitor, settle
from belljar.model import QEMU_LOG

if TYPE_CHECKING:
    from belljar.host.guard.traffic import Call, Refusal, Traffic
    from belljar.hypervisor.qemu.virtiofs import FolderServer

Command = tuple[str, dict[str, Any]]
Grow = Callable[[Any], Sequence[Command]]  # from QEMU's answer to CPU_SLOTS, where it was asked
CPU_SLOTS = "query-hotpluggable-cpus"
RESIZE = "block_resize"
PLUGGING = ("object-add", "device_add", RESIZE)
# Of a migration: leave the memory in its file; tell us when it is done.
CAPABILITIES = {"capabilities": [{"capability": name, "state": True} for name in ("x-ignore-shared", "events")]}
FINAL = ("completed", "failed", "cancelled")  # states of a migration that do not change any more
LAST_RESORT = 10.0  # seconds SIGKILL may take; longer means a process in state D
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


class QemuDomain:
    """Implements `Domain`. `doing` says what it was last asked to do, for the message when it dies of it."""

    def __init__(
        self, launch: Launch, argv: Sequence[str], fds: Sequence[int], lines: Lines, servers: Sequence[FolderServer],
        *, timeout: float,
    ) -> None:  # fmt: skip
        """*servers*, of its folders by virtiofs, end with it; until it is made they are the caller's."""
        self._servers = servers
        self.channel, self.console = lines.ours["channel"], lines.ours["console"]
        # The channel stays up when its user closes it, so a template is saved with its port open: a clone's agent
        # then need not see the port close and open again.
        self._held = self.channel.dup()
        self._timeout, self._doing = timeout, launch.doing
        self._history = History()
        self._loop = asyncio.get_running_loop()
        self._migration: asyncio.Future[str] = self._loop.create_future()  # how the only one ended
        self._grows = self._is_paused = False
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
            await self._migrated(None)
        for command, future in self._preliminaries:
            try:
                await self.answer(future, command)
            except QmpError as exc:
                if command not in PLUGGING:
                    raise
                raise PlugRefused(f"{command}: {exc.message}") from exc
        self._preliminaries.clear()

    async def pause(self) -> None:
        self._is_paused = True
        await self.call("stop")

    async def resume(self) -> None:
        self._is_paused = False
        await self.call("cont")

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
        if self._servers:
            from belljar.hypervisor.qemu.virtiofs import end

            await end(self._servers, grace=LAST_WORDS)
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

    def go_on(self, state: str, grow: Grow | None = None, *, asks_cpus: bool = False) -> None:
        """Load the device state at this address and run the guest; `connect` waits for the answers. A QEMU that still loads
        forgets `cont`, so it is said again when the load is over. What *grow* returns is plugged in between: before the guest's
        first instruction, but for a larger disk."""
        slots = self._monitor.send(CPU_SLOTS) if asks_cpus else None
        self.ask("migrate-set-capabilities", CAPABILITIES)
        # Nobody on a network knows the clone yet; its guest's driver would be busy with telling them five times.
        self.ask("migrate-set-parameters", {"announce-rounds": 0})
        self.ask("migrate-incoming", {"uri": state})
        self._grows = grow is not None
        if not self._grows:
            self.ask("cont")
        self._migration.add_done_callback(lambda _: self._loaded(grow, slots))

    def ask(self, command: str, arguments: dict[str, Any] | None = None) -> None:
        """Send a command whose answer `connect` waits for."""
        self._preliminaries.append((command, self._monitor.send(command, arguments)))

    async def call(self, command: str, arguments: dict[str, Any] | None = None, *, fds: Sequence[int] = ()) -> Any:
        """A command and its answer, or the reason why there is none."""
        return await self.answer(self._monitor.send(command, arguments, fds=fds), command)

    async def answer(self, future: asyncio.Future[Any], command: str) -> Any:
        return await self._monitor.answer(future, command, self._timeout)

    async def migrate(self, state: str, *, timeout: float) -> None:
        """Write the device state to an address; returns when it is complete."""
        self._doing = "writing its device state"
        await self.call("migrate", {"uri": state})
        await self._migrated(timeout)
        if self._over.done():
            raise self._death()
        if not self._migration.done():
            raise QmpError(f"QEMU did not write its device state within {timeout:g} s")
        if self._migration.result() != "completed":
            why = (await self.call("query-migrate")).get("error-desc", self._migration.result())
            raise QmpError(f"QEMU could not write its device state: {why}")

    async def _migrated(self, timeout: float | None) -> None:
        ends: set[asyncio.Future[Any]] = {self._migration, self._over}
        await asyncio.wait(ends, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)

    # -- what QEMU tells -----------------------------------------------------------------------------------------------

    def _event(self, name: str, details: dict[str, Any]) -> None:
        if name == "MIGRATION" and details.get("status") in FINAL and not self._migration.done():
            self._migration.set_result(str(details["status"]))
        event = translate(name, details)
        if event is not None:
            self._history.tell(event)

    def _loaded(self, grow: Grow | None, slots: asyncio.Future[Any] | None) -> None:
        """A disk grows when QEMU has taken it over, which it does at `cont`; newer ones refuse it before."""
        if self._migration.result() != "completed":
            return
        try:
            commands = grow(slots.result() if slots is not None and slots.done() else None) if grow else ()
        except HypervisorError as exc:
            refused = self._loop.create_future()
            settle(refused, exc)  # `connect` raises it
            self._preliminaries.append((CPU_SLOTS, refused))
            return
        larger = [command for command in commands if command[0] == RESIZE]
        for command, arguments in commands:
            if command != RESIZE:
                self.ask(command, arguments)
        if larger or not self._is_paused:
            self._monitor.send("cont")
        for command, arguments in larger:
            self.ask(command, arguments)
        if larger and self._is_paused:
            self._monitor.send("stop")

    def _ended(self, status: int) -> None:
        self._monitor.drain()  # the event that explains the end may have come in the same instant
        self._over.set_result(status)
        self._monitor.fail(self._death())
        self._held.close()
        if self._traffic is not None:
            self._traffic.end()
        words = (self._child.last_words().splitlines() or [ended(status)])[-1][:300]
        self._history.tell(DomainEvent(EventKind.EXITED, words, status, self._death()))

    def _share_ended(self, server: FolderServer, _: object) -> None:
        """It ends by itself when QEMU does, and may be seen to do so first."""
        self._loop.call_later(LAST_WORDS, self._tell_of_loss, server)

    def _tell_of_loss(self, server: FolderServer) -> None:
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
