"""One QEMU while it lives: process, monitor, channel, console, and what happens to it."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from pathlib import Path

from belljar.errors import BelljarError, DomainDied, HypervisorError, PlugRefused, QmpError
from belljar.hints import TYPE_CHECKING, Any
from belljar.host.processes import cpu_times
from belljar.hypervisor import DomainEvent, EventKind
from belljar.hypervisor.qemu.process.launch import Child, Launch, ended
from belljar.hypervisor.qemu.process.qmp import Monitor
from belljar.model import QEMU_LOG
from belljar.records import dataclass

if TYPE_CHECKING:
    from belljar.host.guard.egress import Egress
    from belljar.host.guard.traffic import Call, Refusal
    from belljar.hypervisor.qemu.network.guard import Outside
    from belljar.hypervisor.qemu.virtiofs import FolderServer

Command = tuple[str, dict[str, Any]]
CPU_SLOTS = "query-hotpluggable-cpus"
RESIZE = "block_resize"
PLUGGING = ("object-add", "device_add", RESIZE)
FINAL = ("completed", "failed", "cancelled")  # states of a migration that do not change any more
LAST_RESORT = 10.0  # seconds SIGKILL may take; longer means a process in state D
LAST_WORDS = 1.0  # seconds in which QEMU's own end explains the end of what served it


@dataclass(frozen=True)
class Growing:
    """What a clone is given when its state is loaded: before its first instruction, but for a larger disk."""

    commands: Callable[[Any], Sequence[Command]]  # made of QEMU's answer to CPU_SLOTS
    wants_cpus: bool = False


class Lines:
    """The three connections to a QEMU: our ends, and its ends until it has them."""

    def __init__(self) -> None:
        self.ours: dict[str, socket.socket] = {}
        self.theirs: dict[str, socket.socket] = {}
        for name in ("monitor", "channel", "console"):
            self.ours[name], self.theirs[name] = socket.socketpair()
            self.ours[name].setblocking(False)

    def hang_up(self, *, ours: bool) -> None:
        for end in (*self.theirs.values(), *(self.ours.values() if ours else ())):
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
        self._migration: asyncio.Future[str] | None = None
        self._is_loading = self._is_paused = False
        self._preliminaries: list[tuple[str, asyncio.Future[Any]]] = []
        self._to_plug: Callable[[], Sequence[Command]] | None = None  # asked when the state is loaded
        self._is_plugged: asyncio.Future[None] | None = None
        self._over: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._outside = None if launch.egress is None else _outside(launch.egress)
        log, start = launch.spec.folder / QEMU_LOG, self._outside.start if self._outside else None
        try:
            self._child = Child(argv, fds, log, self._ended, start)
        except BaseException:
            self._held.close()
            raise
        self.pid, self.argv = self._child.pid, tuple(argv)
        self._monitor = Monitor(lines.ours["monitor"], self._event)
        for server in servers:
            server.over.add_done_callback(lambda _, server=server: self._share_ended(server))  # type: ignore[misc]

    # -- the Domain protocol -----------------------------------------------------------------------------------------

    async def connect(self) -> None:
        await self.answer(self._monitor.handshake, "qmp_capabilities")
        if self._is_plugged is not None:
            ends: set[asyncio.Future[Any]] = {self._is_plugged, self._over}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if self._is_plugged.done():
                self._is_plugged.result()
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

    async def traffic(self) -> AsyncIterator[Call | Refusal]:
        if self._outside is None:
            await asyncio.wait({self._over})
            return
        async for item in self._outside.traffic():
            yield item

    def usage(self) -> tuple[float, float, int]:
        user, system, peak = self._child.usage or measure(self.pid)
        served = [server.usage() for server in self._servers]
        return user + sum(one[0] for one in served), system + sum(one[1] for one in served), peak

    # -- for the driver ------------------------------------------------------------------------------------------------

    def go_on(self, state: str, growing: Growing | None = None) -> None:
        """Load the device state at this address and run the guest; `connect` waits for the answers. A QEMU that still loads
        forgets `cont`, so it is said again when the load is over. What *growing* tells is plugged in between."""
        self._is_loading = True
        slots = self._monitor.send(CPU_SLOTS) if growing is not None and growing.wants_cpus else None
        wanted = [{"capability": name, "state": True} for name in ("x-ignore-shared", "events")]
        self.ask("migrate-set-capabilities", {"capabilities": wanted})
        # Nobody on a network knows the clone yet; its guest's driver would be busy with telling them five times.
        self.ask("migrate-set-parameters", {"announce-rounds": 0})
        self.ask("migrate-incoming", {"uri": state})
        if growing is None:
            return self.ask("cont")
        self._is_plugged = asyncio.get_running_loop().create_future()
        self._to_plug = lambda: growing.commands(slots.result() if slots is not None and slots.done() else None)

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
        self._migration = asyncio.get_running_loop().create_future()
        await self.call("migrate", {"uri": state})
        ends: set[asyncio.Future[Any]] = {self._migration, self._over}
        await asyncio.wait(ends, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        if self._over.done():
            raise self._death()
        if not self._migration.done():
            raise QmpError(f"QEMU did not write its device state within {timeout:g} s")
        if self._migration.result() != "completed":
            told = await self.call("query-migrate")
            raise QmpError(f"QEMU could not write its device state: {told.get('error-desc', self._migration.result())}")

    # -- what QEMU tells -----------------------------------------------------------------------------------------------

    def _event(self, name: str, details: dict[str, Any]) -> None:
        if name == "MIGRATION" and details.get("status") in FINAL:
            if self._is_loading and details["status"] == "completed":
                self._loaded()
            self._is_loading = False
            self._migrated(str(details["status"]))
        event = translate(name, details)
        if event is not None:
            self._history.tell(event)

    def _loaded(self) -> None:
        """A disk grows when QEMU has taken it over, which it does at `cont`; newer ones refuse it before."""
        try:
            wanted = self._to_plug() if self._to_plug is not None else ()
        except HypervisorError as exc:
            if self._is_plugged is not None and not self._is_plugged.done():
                self._is_plugged.set_exception(exc)
                self._is_plugged.exception()  # `connect` raises it
            return
        grown = [one for one in wanted if one[0] == RESIZE]
        for command, arguments in (one for one in wanted if one[0] != RESIZE):
            self.ask(command, arguments)
        if grown or not self._is_paused:
            self._monitor.send("cont")
        for command, arguments in grown:
            self.ask(command, arguments)
        if grown and self._is_paused:
            self._monitor.send("stop")
        if self._is_plugged is not None and not self._is_plugged.done():
            self._is_plugged.set_result(None)

    def _migrated(self, status: str) -> None:
        if self._migration is not None and not self._migration.done():
            self._migration.set_result(status)

    def _ended(self, status: int) -> None:
        self._monitor.drain()  # the event that explains the end may have come in the same instant
        self._over.set_result(status)
        self._monitor.fail(self._death())
        self._held.close()
        if self._outside is not None:
            self._outside.end()
        words = (self._child.said().splitlines() or [ended(status)])[-1][:300]
        self._history.tell(DomainEvent(EventKind.EXITED, words, status, self._death()))

    def _share_ended(self, server: FolderServer) -> None:
        """It ends by itself when QEMU does, and may be seen to do so first."""
        asyncio.get_running_loop().call_later(LAST_WORDS, self._tell_of_loss, server)

    def _tell_of_loss(self, server: FolderServer) -> None:
        if not self._over.done() and self._doing != "stopping":
            loss = server.loss()
            self._history.tell(DomainEvent(EventKind.SHARE_LOST, loss.message, why=loss))

    def _death(self) -> BelljarError:
        if self._doing == "stopping" and self._child.status == 0:
            return DomainDied("QEMU has ended")
        from belljar.hypervisor.qemu.process.complaints import explain

        return explain(self._child.said(), self._child.status, self._doing)


def _outside(egress: Egress) -> Outside:
    """Imported by machines that have a network alone."""
    from belljar.hypervisor.qemu.network.guard import Outside

    return Outside(egress)


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
        self._all: list[DomainEvent] = []
        self._news = asyncio.Event()

    def tell(self, event: DomainEvent) -> None:
        self._all.append(event)
        self._news.set()

    @property
    def last(self) -> DomainEvent:
        """Raises IndexError before anything has happened."""
        return self._all[-1]

    async def events(self) -> AsyncIterator[DomainEvent]:
        """From the first to EXITED; waits for what is still to come."""
        seen = 0
        while True:
            while seen < len(self._all):
                yield self._all[seen]
                if self._all[seen].kind is EventKind.EXITED:
                    return
                seen += 1
            self._news.clear()
            await self._news.wait()
