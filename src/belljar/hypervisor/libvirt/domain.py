"""One domain of libvirt's while it lives. Its process is the daemon's child, not ours: its end is seen by a pidfd, the
reason for it is what libvirt tells, and its use of the host is measured as long as it is there."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

from belljar.errors import (
    BelljarError,
    DomainDied,
    HypervisorError,
    LibvirtLost,
    LibvirtRefused,
    NetworkFailed,
)
from belljar.host.guard.traffic import Call, Refusal
from belljar.host.threads import in_thread
from belljar.hypervisor import DomainEvent, DomainSpec, EventKind
from belljar.hypervisor.libvirt.starting import Started, undo
from belljar.hypervisor.qemu import cmdline
from belljar.hypervisor.qemu.domain import LAST_RESORT, History, measure
from belljar.hypervisor.qemu.network.guard import Outside
from belljar.hypervisor.qemu.process.launch import Child, confined

ACPI_BUTTON = 1  # VIR_DOMAIN_SHUTDOWN_ACPI_POWER_BTN
LAST_WORDS = 2.0  # seconds for a process to go away that was killed without its daemon
DONE = 20.0  # seconds for libvirt to be done with one that has ended, and to tell why: until then it writes to its log
KILLED, FAILED = int(signal.SIGKILL), 1 << 8  # wait statuses
STATUSES = {"shut down": 0, "destroyed": KILLED}  # of a process that ended by itself, by libvirt's word for it


class LibvirtDomain:
    """Implements `Domain`."""

    def __init__(
        self, started: Started, carry: Callable[[Callable[[NetworkFailed], None]], Carrier] | None = None
    ) -> None:
        """*carry* starts what carries its network. What it raises is raised, and the domain has been ended."""
        self._loop = asyncio.get_running_loop()
        self._it = started
        self.pid, self.argv = started.pid, started.argv
        self.channel, self.console = started.channel, started.console
        self._history = History()
        self._gone = asyncio.Event()  # the process has ended
        self._done = asyncio.Event()  # libvirt is done with it
        self._over = asyncio.Event()  # EXITED was told
        self._status: int | None = None
        self._usage = measure(self.pid)
        self._losing: asyncio.Task[None] | None = None
        try:
            self._carrier = carry(self._cut_off) if carry is not None else None
        except BaseException:
            undo(started)
            raise
        if started.card is not None:
            started.card.close()  # the carrier has it
        self._loop.add_reader(started.pidfd, self._ended)
        started.heard.listen(self._soon(self._hear))
        started.link.on_loss(self._soon(self._lose))

    # -- the Domain protocol -----------------------------------------------------------------------------------------

    async def connect(self) -> None:
        try:
            await self._call("its state", lambda: self._it.handle.state())
        except LibvirtLost:
            await self._over.wait()  # the end that follows says why
            raise self._history.last.why or DomainDied("QEMU has ended") from None

    async def pause(self) -> None:
        await self._ask("suspend", lambda: self._it.handle.suspend())

    async def resume(self) -> None:
        await self._ask("resume", lambda: self._it.handle.resume())

    async def press_power(self) -> None:
        await self._ask("the power button", lambda: self._it.handle.shutdownFlags(ACPI_BUTTON))

    async def quit(self, *, grace: float) -> int:
        """QEMU is asked first: it then closes its disk in good order. SIGKILL after *grace* seconds."""
        self._measure()
        if not self._gone.is_set() and grace > 0:
            self._signal(signal.SIGTERM)
            await _set_within(self._gone, grace)
        if not self._gone.is_set():
            self.kill()
            await _set_within(self._gone, LAST_RESORT)
        if not self._gone.is_set():
            raise DomainDied(f"QEMU (pid {self.pid}) does not go away: it hangs in the host's kernel")
        if not self._it.link.lost:
            await _set_within(self._done, DONE)
        self._finish(self._status_of_end())
        assert self._status is not None
        return self._status

    def kill(self) -> None:
        self._measure()
        self._signal(signal.SIGKILL)

    def events(self) -> AsyncIterator[DomainEvent]:
        return self._history.events()

    async def traffic(self) -> AsyncIterator[Call | Refusal]:
        if self._carrier is None:
            await self._over.wait()
            return
        async for item in self._carrier.outside.traffic():
            yield item

    def usage(self) -> tuple[float, float, int]:
        self._measure()
        return self._usage

    # -- calls -----------------------------------------------------------------------------------------------------------

    async def _call(self, what: str, work: Callable[[], Any]) -> Any:
        if self._gone.is_set():
            raise DomainDied("QEMU has ended")
        try:
            return await in_thread(lambda: self._it.link.call(what, lambda _: work()))
        except LibvirtLost as exc:
            self._lose(self._it.link.lost or exc.message)
            raise
        except LibvirtRefused as exc:
            if self._gone.is_set() or not _lives(self.pid):
                raise DomainDied(f"QEMU has ended: {exc.message}") from exc
            raise

    async def _ask(self, what: str, work: Callable[[], Any]) -> None:
        """A call whose failure is the domain's affair: a daemon that was lost ends it anyway."""
        try:
            await self._call(what, work)
        except HypervisorError:
            raise
        except BelljarError as exc:
            raise LibvirtRefused(exc.message) from exc

    def _signal(self, number: signal.Signals) -> None:
        """To the process itself, which needs no daemon."""
        if not self._gone.is_set():
            self._sent = number
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._it.pidfd, number)

    # -- what happens ----------------------------------------------------------------------------------------------------

    def _soon(self, act: Callable[[Any], None]) -> Callable[[Any], None]:
        """*act* in the event loop, callable from any thread."""

        def from_thread(value: Any) -> None:
            with suppress(RuntimeError):  # the loop is closed: nobody is interested any more
                self._loop.call_soon_threadsafe(act, value)

        return from_thread

    def _hear(self, event: DomainEvent) -> None:
        """libvirt told something. Its last word explains an end that the pidfd has shown, or is about to."""
        if event.kind is not EventKind.EXITED:
            self._measure()
            self._history.tell(event)
            return
        self._reason = event.detail
        self._done.set()

    def _ended(self) -> None:
        self._loop.remove_reader(self._it.pidfd)
        self._gone.set()
        self._closing = self._loop.create_task(self._explain_end())

    async def _explain_end(self) -> None:
        """Tell of an end that nobody here asked for, when libvirt has said why or had its time to."""
        if not self._it.link.lost:
            await _set_within(self._done, DONE)
        if self._losing is None:
            self._finish(0 if self._cut else self._status_of_end(), self._cut)

    def _status_of_end(self) -> int:
        if self._sent is not None:
            return 0 if self._sent is signal.SIGTERM else KILLED
        return STATUSES.get(self._reason, FAILED)

    def _finish(self, status: int, why: BelljarError | None = None) -> None:
        """The last event, once; then nothing of the domain is held."""
        if self._over.is_set():
            return
        self._status = status
        detail = self._reason or ("ended" if self._sent is None else self._sent.name)
        if status == FAILED:
            why = DomainDied(f"QEMU ended by itself (libvirt: {detail})")
        self._history.tell(DomainEvent(EventKind.EXITED, why.message if why else detail, status, why))
        self._over.set()
        if self._carrier is not None:
            self._carrier.close()
        self._it.link.abandon()
        self._it.lines.close()
        if self._gone.is_set():
            os.close(self._it.pidfd)

    def _measure(self) -> None:
        if not self._gone.is_set():
            self._usage = tuple(map(max, self._usage, measure(self.pid)))  # type: ignore[assignment]

    def _cut_off(self, why: NetworkFailed) -> None:
        """A machine that lost its network would wait for it for ever."""
        if not self._gone.is_set() and self._losing is None:
            self._cut = why
            self.kill()

    def _lose(self, why: str) -> None:
        """The daemon is of no use any more, and without it the domain is nobody's."""
        if self._gone.is_set():
            self._done.set()  # it tells nothing more
        elif self._losing is None:
            self._losing = self._loop.create_task(self._close_out(why))

    async def _close_out(self, why: str) -> None:
        self._it.link.abandon(why)
        self.kill()
        await _set_within(self._gone, LAST_WORDS)
        self._finish(0, LibvirtLost(f"libvirt's daemon was lost while the machine ran: {why}"))

    _cut: NetworkFailed | None = None
    _sent: signal.Signals | None = None
    _reason = ""
    _closing: asyncio.Task[None] | None = None


async def _set_within(event: asyncio.Event, seconds: float) -> bool:
    """Is it set before the time is over?"""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
    return event.is_set()


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


# -- what carries the frames of its card: a second QEMU, without a guest, that is our own child -----------------------

# libvirt's QEMU sends the frames to a socket of ours. At its other end this process has the network of the direct driver:
# a user network under its guard, the tap of a bridge, or the line of a group.


class Carrier:
    """One running carrier, made in the event loop's thread. `on_end` is told why it ended, unless `close` ended it."""

    def __init__(
        self, spec: DomainSpec, binary: str, wire: socket.socket, on_end: Callable[[NetworkFailed], None]
    ) -> None:
        """Raises NoGuard, HostError."""
        assert spec.nic is not None
        nic, self._on_end, self._is_closed = spec.nic, on_end, False
        self.outside = Outside(nic.egress)
        argv = confined(cmdline.carrier(binary, spec.id, nic, wire.fileno()), spec.owner)
        lines = [wire.fileno(), *([nic.fd] if nic.fd >= 0 else [])]
        os.set_blocking(wire.fileno(), False)
        self._child = Child(argv, lines, spec.folder / "qemu.log", self._ended, self.outside.start)
        self.pid = self._child.pid

    def close(self) -> None:
        """End it. Ending it twice is fine."""
        self._is_closed = True
        self._child.send(signal.SIGKILL)

    def _ended(self, status: int) -> None:
        self.outside.end()
        if not self._is_closed:
            said = self._child.said().splitlines()[-1:] or [f"wait status {status}"]
            self._on_end(NetworkFailed(f"the process that carries this machine's network ended: {said[0][:300]}"))
