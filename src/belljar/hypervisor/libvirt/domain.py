"""One domain of libvirt's while it lives. Its process is the daemon's child, not ours: its end is seen by a pidfd, the
reason for it is what libvirt tells, and its use of the host is measured as long as it is there."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from belljar.errors import DomainDied, HostError, LibvirtLost, LibvirtRefused
from belljar.host.files import private
from belljar.host.guard.traffic import Call, Refusal
from belljar.host.processes import command_line
from belljar.hypervisor import LAST_RESORT, DomainEvent, EventKind
from belljar.hypervisor.libvirt.connection import Connection
from belljar.hypervisor.qemu.domain import History, measure

LOCKS = Path("/var/lock")
DONE = 20.0  # seconds for libvirt to be done with one that has ended, and to tell why: until then it writes to its log
ACPI_BUTTON = 1  # VIR_DOMAIN_SHUTDOWN_ACPI_POWER_BTN
KILLED, FAILED = int(signal.SIGKILL), 1 << 8  # wait statuses
STATUSES = {"shut down": 0, "destroyed": KILLED}  # of a process that ended by itself, by libvirt's word for it


class LibvirtDomain:
    """Implements `Domain`."""

    def __init__(self, connection: Connection, pid: int, logs: tuple[Path, Path]) -> None:
        """*logs*: libvirt's own of this domain, which goes with it, and the machine's. Raises DomainDied."""
        try:
            self._pidfd = os.pidfd_open(pid)
        except OSError as exc:  # 0: it was not found
            raise DomainDied("QEMU ended before its guest was started") from exc
        self._loop = asyncio.get_running_loop()
        self._connection, self._logs = connection, logs
        self.pid, self.argv = pid, tuple(word.decode(errors="replace") for word in command_line(pid))
        self.channel, self.console = connection.channel, connection.console
        self._history = History()
        self._gone = asyncio.Event()  # the process has ended
        self._done = asyncio.Event()  # libvirt is done with it, and `_reason` is its word for the end
        self._reason = ""
        self._sent: signal.Signals | None = None
        self._loss: LibvirtLost | None = None  # of the daemon, while the process ran
        self._usage = measure(pid)
        self._loop.add_reader(self._pidfd, self._ended)
        connection.on_event, connection.on_loss = self._hear, self._lose
        self._end = self._loop.create_task(self._conclude())  # gives the wait status

    # -- the Domain protocol -----------------------------------------------------------------------------------------

    async def connect(self) -> None:
        """The daemon has answered already: it started the guest."""
        if self._gone.is_set() or self._connection.lost:
            await asyncio.shield(self._end)  # it says why
            raise self._history.all[-1].why or DomainDied("QEMU has ended")

    async def pause(self) -> None:
        await self._ask("a pause", "suspend")

    async def resume(self) -> None:
        await self._ask("its resumption", "resume")

    async def pin(self, cpus: Sequence[int]) -> Mapping[str, int]:
        raise HostError("libvirt places its domains itself")

    async def press_power(self) -> None:
        await self._ask("the power button", "shutdownFlags", ACPI_BUTTON)

    async def quit(self, *, grace: float) -> int:
        """QEMU is asked first: it then closes its disk in good order. SIGKILL after *grace* seconds."""
        self._measure()
        if grace > 0:
            self._signal(signal.SIGTERM)
            await _set_within(self._gone, grace)
        if not self._gone.is_set():
            self.kill()
            await _set_within(self._gone, LAST_RESORT)
        if not self._gone.is_set():
            raise DomainDied(f"QEMU (pid {self.pid}) does not go away: it hangs in the host's kernel")
        status = await asyncio.shield(self._end)
        await self._connection.ended.wait()
        return status

    def kill(self) -> None:
        self._measure()
        self._signal(signal.SIGKILL)

    def events(self) -> AsyncIterator[DomainEvent]:
        return self._history.events()

    def traffic(self) -> AsyncIterator[Call | Refusal]:
        raise AssertionError("libvirt's networks have no guard: `check` refuses a machine that is to have one")

    def usage(self) -> tuple[float, float, int]:
        self._measure()
        return self._usage

    async def _ask(self, what: str, *call: Any) -> None:
        """A call whose failure is the domain's affair: a daemon that was lost ends it anyway."""
        if self._gone.is_set():
            raise DomainDied("QEMU has ended")
        try:
            await self._connection.call("ask", *call, what=what)
        except (LibvirtLost, LibvirtRefused) as exc:
            kind = DomainDied if self._gone.is_set() else LibvirtRefused
            raise kind(exc.message) from exc

    def _signal(self, number: signal.Signals) -> None:
        """To the process itself, which needs no daemon."""
        if not self._gone.is_set():
            self._sent = number
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def _measure(self) -> None:
        if not self._gone.is_set():
            self._usage = tuple(map(max, self._usage, measure(self.pid)))  # type: ignore[assignment]

    # -- what happens ----------------------------------------------------------------------------------------------------

    def _hear(self, event: DomainEvent) -> None:
        """libvirt's last word explains an end that the pidfd has shown, or is about to."""
        if event.kind is EventKind.EXITED:
            self._reason = event.detail
            self._done.set()
        else:
            self._measure()
            self._history.tell(event)

    def _ended(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._gone.set()

    def _lose(self, why: str) -> None:
        """The daemon tells nothing more, and without it the domain is nobody's: it may have ended of that, before this was heard."""
        if not self._gone.is_set() or (self._sent is None and not self._done.is_set()):
            self._loss = LibvirtLost(f"libvirt's daemon was lost while the machine ran: {why}")
            self.kill()
        self._done.set()

    async def _conclude(self) -> int:
        """The last event, when libvirt has said why or had its time to; then nothing of the domain is held. The wait status."""
        await self._gone.wait()
        await _set_within(self._done, 0.0 if self._connection.lost else DONE)
        detail, status = self._reason or (self._sent.name if self._sent else "ended"), 0
        why: LibvirtLost | DomainDied | None = self._loss
        if self._loss is None and self._sent is not None:
            status = 0 if self._sent is signal.SIGTERM else KILLED
        elif self._loss is None and (status := STATUSES.get(self._reason, FAILED)) == FAILED:
            why = DomainDied(f"QEMU ended by itself (libvirt: {detail})")
        self._history.tell(DomainEvent(EventKind.EXITED, why.message if why else detail, status, why))
        self._connection.end()
        if self._loss is not None:
            remove_locks(self._logs[0].stem)
        with suppress(OSError):
            take_over(*self._logs)
        return status


async def _set_within(event: asyncio.Event, seconds: float) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()


# -- libvirt's own log of a domain: a file for each, which libvirt keeps for ever -------------------------------------

LONGEST_LOG = 64 << 10  # bytes from the end of it that are read
# libvirt's own lines: the command with its variables, one word a line, and what begins with the time in this form.
LIBVIRTS = re.compile(rb"\\$|-msg timestamp=on$|\d{4}-\d\d-\d\d [\d:.]+\+0000: ")


def remove_locks(name: str) -> None:
    """libvirt keeps one for the channel of each domain. A daemon that was killed leaves it."""
    for path in LOCKS.glob(f"LCK..*-{name}_*"):
        with suppress(OSError):
            path.unlink()


def take_over(log: Path, into: Path) -> None:
    """Append what QEMU said to *into*, and remove the log. Raises OSError."""
    lines = log.read_bytes()[-LONGEST_LOG:].splitlines()
    log.unlink()
    append(into, b"".join(line + b"\n" for line in lines if not LIBVIRTS.search(line)))


def append(log: Path, words: bytes) -> None:
    """Raises OSError."""
    with open(log, "ab", buffering=0, opener=private) as file:
        file.write(words)
