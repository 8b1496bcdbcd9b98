"""One attempt to start a domain, from the connection to the running guest. It blocks, and may be given up at any moment.

The guest is started paused, so that its events are listened to before anything can happen in it.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from belljar.errors import BelljarError, DomainDied, LibvirtRefused
from belljar.host.processes import command_line
from belljar.hypervisor import DomainEvent, DomainSpec, EventKind, LibvirtSettings
from belljar.hypervisor.libvirt.lines import Lines
from belljar.hypervisor.libvirt.link import Link, library
from belljar.hypervisor.libvirt.xml import NAME
from belljar.hypervisor.qemu.cmdline import machine_uuid
from belljar.hypervisor.qemu.process.launch import explain, last_line
from belljar.records import dataclass, field


class Heard:
    """What libvirt tells about a domain, kept until somebody listens. Fed by libvirt's event thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[DomainEvent] = []
        self._listener: Callable[[DomainEvent], None] | None = None

    def tell(self, event: DomainEvent) -> None:
        with self._lock:
            if self._listener is None:
                self._waiting.append(event)
            else:
                self._listener(event)

    def listen(self, listener: Callable[[DomainEvent], None]) -> None:
        with self._lock:
            for event in self._waiting:
                listener(event)
            self._listener = listener


@dataclass
class Started:
    """A domain that runs."""

    link: Link
    handle: Any  # libvirt's
    pid: int
    pidfd: int
    argv: tuple[str, ...]
    channel: socket.socket
    console: socket.socket
    card: socket.socket | None  # where the frames of its card arrive, when somebody of ours carries them
    lines: Lines
    heard: Heard = field(default_factory=Heard)


def undo(started: Started) -> None:
    """End a domain of which nothing is made. The daemon destroys what a lost connection started."""
    started.link.abandon("the start failed")
    with suppress(ProcessLookupError, PermissionError):
        signal.pidfd_send_signal(started.pidfd, signal.SIGKILL)
    for end in (started.channel, started.console, started.card):
        if end is not None:
            end.close()
    os.close(started.pidfd)
    started.lines.close()


class Attempt:
    """`run` starts the domain, or leaves nothing of it. Whoever does not take what it returns calls `give_up`."""

    def __init__(
        self, spec: DomainSpec, connect: Callable[[], Link], settings: LibvirtSettings, lines: Lines, write: Callable[[], str],
        find: Callable[[], int], emulator: str,
    ) -> None:  # fmt: skip
        self._spec, self._connect, self._settings, self._lines = spec, connect, settings, lines
        self._write, self._find, self._emulator = write, find, emulator
        self._making = threading.Lock()  # held while something of the machine is made on this host
        self._link: Link | None = None
        self._started: Started | None = None
        self._is_given_up = False

    def give_up(self) -> None:
        """From another thread: what is done is undone. Nothing of the machine is made here after this returned."""
        with self._making:
            self._is_given_up = True
            if self._started is not None:
                undo(self._started)
            elif self._link is not None:
                self._link.abandon("the start was given up")

    def _go_on(self) -> None:
        if self._is_given_up:
            raise LibvirtRefused("the start was given up")

    def run(self) -> Started:
        """Raises LibvirtLost, LibvirtRefused, or what QEMU complained about."""
        try:
            with self._making:
                self._go_on()
                self._lines.open()
                document = self._write()
            started = self._start(document)
            with self._making:
                if self._is_given_up:
                    undo(started)
                self._go_on()
                self._started = started
            return started
        except BaseException:
            with self._making:
                if self._link is not None:
                    self._link.abandon("the start failed")
                self._lines.close(keep_log=not self._is_given_up)
            raise

    def _start(self, document: str) -> Started:
        libvirt, heard = library(), Heard()
        link = self._connect()
        with self._making:
            self._link = link
            self._go_on()
        # A daemon that does not know this QEMU runs it a few times first, which may take longer than the start itself.
        with suppress(LibvirtRefused):
            ask = lambda it: it.getDomainCapabilities(self._emulator)  # noqa: E731
            link.call(f"what QEMU can do ({self._emulator})", ask, self._settings.start_timeout)
        flags = libvirt.VIR_DOMAIN_START_AUTODESTROY | libvirt.VIR_DOMAIN_START_PAUSED
        handle = self._create(link, lambda it: it.createXML(document, flags))
        if not is_machine(handle, self._spec.id):
            raise LibvirtRefused(f"libvirt was asked for domain {NAME}{self._spec.id} and answers with another one")
        link.call("the domain's events", lambda it: register(libvirt, it, handle, heard))
        pid = self._find()
        try:
            pidfd = os.pidfd_open(pid)
        except OSError as exc:  # 0: nobody was found
            raise DomainDied("QEMU ended before its guest was started") from exc
        ends: list[socket.socket] = []
        try:
            for name in self._lines.names:
                ends.append(self._lines.accept(name))
            self._create(link, lambda _: handle.resume())
        except BaseException:
            os.close(pidfd)
            for end in ends:
                end.close()
            raise
        argv = tuple(word.decode(errors="replace") for word in command_line(pid))
        card = ends[2] if ends[2:] else None
        return Started(link, handle, pid, pidfd, argv, ends[0], ends[1], card, self._lines, heard)

    def _create(self, link: Link, work: Callable[[Any], Any]) -> Any:
        """What starts a process, or lets it run: a refusal may hold the last words of QEMU."""
        try:
            return link.call(f"domain {NAME}{self._spec.id}", work, self._settings.start_timeout)
        except LibvirtRefused as refused:
            with self._making:
                self._go_on()
                raise complaint(refused, self._spec) from refused


def complaint(refused: LibvirtRefused, spec: DomainSpec) -> BelljarError:
    """The error for what libvirt says, which quotes QEMU where QEMU ended. QEMU's log of the machine gets it too."""
    with suppress(OSError):
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        log = os.open(spec.folder / "qemu.log", flags, 0o600)
        try:
            os.write(log, (refused.message + "\n").encode(errors="replace"))
        finally:
            os.close(log)
    told = explain(refused.message.replace(" qemu-system", "\nqemu-system"), None, "starting, by libvirt")
    if isinstance(told, DomainDied):
        ended = "qemu-system" in refused.message or "exited while" in refused.message
        return DomainDied(f"QEMU ended while starting, by libvirt: {last_line(refused.message)}") if ended else refused
    return told


def is_machine(handle: Any, id: str) -> bool:
    """Is libvirt's domain the one that was made for this machine? Others may have its name."""
    return bool(handle.UUIDString() == machine_uuid(id))


def register(libvirt: Any, connection: Any, handle: Any, heard: Heard) -> None:
    """Have libvirt's events of this domain told in our words."""

    def lifecycle(_: Any, __: Any, event: int, detail: int, ___: Any) -> None:
        if (told := translate(libvirt, event, detail)) is not None:
            heard.tell(told)

    def trouble(_: Any, __: Any, path: str, alias: str, action: int, reason: str, ___: Any) -> None:
        heard.tell(DomainEvent(EventKind.DISK_FULL if reason == "enospc" else EventKind.DISK_ERROR, reason))

    def reboot(_: Any, __: Any, ___: Any) -> None:
        heard.tell(DomainEvent(EventKind.RESET, "the guest asked for a reboot"))

    connection.domainEventRegisterAny(handle, libvirt.VIR_DOMAIN_EVENT_ID_LIFECYCLE, lifecycle, None)
    connection.domainEventRegisterAny(handle, libvirt.VIR_DOMAIN_EVENT_ID_IO_ERROR_REASON, trouble, None)
    connection.domainEventRegisterAny(handle, libvirt.VIR_DOMAIN_EVENT_ID_REBOOT, reboot, None)


def translate(libvirt: Any, event: int, detail: int) -> DomainEvent | None:
    """libvirt's event in our words. EXITED here means that libvirt is done with the domain.
    https://libvirt.org/html/libvirt-libvirt-domain.html#virDomainEventType"""
    if event == libvirt.VIR_DOMAIN_EVENT_SHUTDOWN:
        is_guests = detail != libvirt.VIR_DOMAIN_EVENT_SHUTDOWN_HOST
        return DomainEvent(EventKind.SHUTDOWN, "guest-shutdown") if is_guests else None
    if event == libvirt.VIR_DOMAIN_EVENT_CRASHED:
        return DomainEvent(EventKind.PANICKED, "the guest's kernel panicked")
    if event == libvirt.VIR_DOMAIN_EVENT_STOPPED:
        name = {
            libvirt.VIR_DOMAIN_EVENT_STOPPED_SHUTDOWN: "shut down", libvirt.VIR_DOMAIN_EVENT_STOPPED_DESTROYED: "destroyed",
            libvirt.VIR_DOMAIN_EVENT_STOPPED_CRASHED: "crashed", libvirt.VIR_DOMAIN_EVENT_STOPPED_FAILED: "failed",
        }.get(detail, f"detail {detail}")  # fmt: skip
        return DomainEvent(EventKind.EXITED, name)
    return None
