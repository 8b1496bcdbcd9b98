"""The Hypervisor that asks libvirt for its domains. Every start is a cold one: libvirt has nothing a clone could be made of.

What needs no domain (which accelerator works, the templates of the direct driver) it has as that has it.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from belljar.errors import DomainDied, DriverLacks, TemplateError
from belljar.host.files import remove_tree
from belljar.host.processes import all_pids, command_line, kill_and_wait, owner
from belljar.host.threads import in_thread
from belljar.hypervisor import NO_TRACES, DomainSpec, LibvirtSettings, Settings, Template, Traces
from belljar.hypervisor.libvirt.domain import Carrier, LibvirtDomain
from belljar.hypervisor.libvirt.lines import Lines, default_log_folder, has_keeper
from belljar.hypervisor.libvirt.link import Link, open_link, read_driver
from belljar.hypervisor.libvirt.starting import Attempt, Started
from belljar.hypervisor.libvirt.xml import NAME, Ends, domain_xml
from belljar.hypervisor.qemu import abilities
from belljar.hypervisor.qemu import driver as direct
from belljar.hypervisor.qemu.host import QemuHost
from belljar.hypervisor.qemu.process.launch import layers
from belljar.model import MachineId

CHANNEL = "channel"
WITH_STREAMS = (7, 2, 0)  # QEMU that has `-netdev stream`
COLD = "machines by libvirt are always booted cold"
OF_LIBVIRT = b",debug-threads="  # how libvirt goes on after a domain's name


class LibvirtHypervisor(QemuHost):
    """Implements `Hypervisor`."""

    def __init__(self, driver: str, settings: Settings, libvirt: LibvirtSettings, store: Path) -> None:
        super().__init__(settings, store)
        meant = read_driver(driver)
        self.uri = meant.uri
        self._is_callers = meant.is_session and os.geteuid() != 0  # root's session is the system's daemon
        self._libvirt = libvirt
        self._base = Path(libvirt.folder) if libvirt.folder else default_folder(os.geteuid())
        self._logs = Path(libvirt.log_folder) if libvirt.log_folder else default_log_folder(os.geteuid())

    # -- starting ----------------------------------------------------------------------------------------------------

    def check(self, spec: DomainSpec) -> None:
        if spec.warm:
            raise DriverLacks(
                "a folder shared by virtiofs: not with machines by libvirt",
                hint="Share the folder without `virtiofs:`; docs/libvirt.md tells what machines by libvirt do not have.",
            )
        if spec.nic is not None and self.abilities.version < WITH_STREAMS:
            raise DriverLacks(
                f"a machine's network with {self.abilities.name}: by libvirt it takes QEMU 7.2",
                hint='Ask for no network, or have the machine run by `machine.hypervisor = "qemu"`.',
            )

    def start(self, spec: DomainSpec) -> LibvirtDomain:
        """Blocks until the guest runs or a deadline of `[libvirt]` has passed; `launch` does not."""
        return self._domain(spec, self._attempt(spec).run())

    async def launch(self, spec: DomainSpec, template: Template | None) -> LibvirtDomain:
        if template is not None:
            raise TemplateError(COLD)
        attempt = self._attempt(spec)
        run = asyncio.ensure_future(in_thread(attempt.run))
        try:
            started = await run
        except asyncio.CancelledError:
            attempt.give_up()
            raise
        return self._domain(spec, started)

    def _domain(self, spec: DomainSpec, started: Started) -> LibvirtDomain:
        carry = None
        if started.card is not None:
            binary, card = self.abilities.binary, started.card
            carry = lambda on_end: Carrier(spec, binary, card, on_end)  # noqa: E731
        return LibvirtDomain(started, carry)

    def _attempt(self, spec: DomainSpec) -> Attempt:
        self.check(spec)
        names = (CHANNEL, "console", *(["card"] if spec.nic else []))
        lines = Lines(self._base / spec.id, spec.owner, names, (self._log_of(spec.id), spec.folder / "qemu.log"))
        write = lambda: domain_xml(spec, self._ends(spec, lines))  # noqa: E731
        emulator = abilities.find(self._settings.binary)
        return Attempt(spec, self._connect, self._libvirt, lines, write, lambda: self._pid_of(spec), emulator)

    def _ends(self, spec: DomainSpec, lines: Lines) -> Ends:
        boot = spec.boot
        return Ends(
            accelerator=spec.accelerator,
            channel=lines.path(CHANNEL),
            console=lines.path("console"),
            layers=tuple(lines.reached(path) for path in layers(spec.disk)),
            kernel=lines.readable(boot.kernel, "kernel") if boot.kernel else None,
            initrd=lines.readable(boot.initrd, "initrd") if boot.initrd else None,
            firmware=self._uefi if direct.uses_uefi(boot) else "",
            emulator=abilities.find(self._settings.binary),
            cpu=self._cpu(spec.accelerator),
            below=tuple(self._below(it, lines) for it in spec.disks),
            label=None if self._is_callers else spec.owner,
            seed=lines.readable(spec.seed, "seed") if spec.seed else None,
            card=lines.path("card") if spec.nic else None,
        )

    def _below(self, disk: Any, lines: Lines) -> tuple[Path, ...]:
        lines.reached(disk.path)
        return tuple(lines.reached(path) for path in layers(disk.path)[1:]) if disk.chained else ()

    @property
    def cloning(self) -> str:
        return f"there is no template: {COLD}"

    def _connect(self) -> Link:
        return open_link(self.uri, self._libvirt.timeout)

    def examine(self) -> str:
        """Who answers, in words. Raises LibvirtLost, LibvirtRefused, CommandMissing."""
        link = self._connect()
        try:
            version = link.call("its version", lambda it: it.getLibVersion())
            emulator = abilities.find(self._settings.binary)
            link.call("what QEMU can do", lambda it: it.getDomainCapabilities(emulator), self._libvirt.start_timeout)
        finally:
            link.abandon()
        number = f"{version // 1000000}.{version // 1000 % 1000}.{version % 1000}"
        return f"libvirt {number} answers at {self.uri}"

    # -- by the mark -------------------------------------------------------------------------------------------------

    def alive(self) -> list[tuple[MachineId, int]]:
        """By their command lines, which needs no daemon: after its end its domains are found all the same."""
        found = []
        for pid in all_pids():
            id = marked(command_line(pid))
            if id:
                found.append((id, pid))
        return found

    def is_kept(self, id: MachineId, pid: int) -> bool:
        """By the lock beside the sockets it was started with: `libvirt.folder` may be another one by now."""
        return has_keeper(folder_of(command_line(pid), id) or self._base, id)

    def discard(self, id: MachineId, traces: Traces = NO_TRACES, *, patience: float = 5.0) -> None:
        """By signals, which no daemon can delay."""
        ours = [pid for found, pid in self.alive() if found == id and (traces.name(pid) or traces.fit(pid))]
        survivors = kill_and_wait(ours, timeout=patience, still=lambda pid: marked(command_line(pid)) == id)
        with suppress(OSError):
            remove_tree(self._base / id)
        with suppress(OSError):
            self._log_of(id).unlink()
        if survivors:
            raise DomainDied(f"QEMU of machine {id} (pid {survivors[0]}) does not go away, not even by SIGKILL")
        direct.discard(id, traces, patience)  # what carried its network

    def _log_of(self, id: MachineId) -> Path:
        return self._logs / f"{NAME}{id}.log"

    def _pid_of(self, spec: DomainSpec) -> int:
        return next((pid for id, pid in self.alive() if id == spec.id and owner(pid) == spec.owner[0]), 0)


def default_folder(uid: int) -> Path:
    return Path("/run/belljar-libvirt") if uid == 0 else Path(f"/tmp/belljar-libvirt-{uid}")


def marked(argv: list[bytes]) -> MachineId | None:
    """The machine whose QEMU libvirt started with this command line; None also for a stranger's domain of that name."""
    id = direct.marked(argv)
    is_libvirts = id and any(word.startswith(f"guest={NAME}{id}".encode() + OF_LIBVIRT) for word in argv)
    return id if id and is_libvirts and direct.has_uuid_of(argv, id) else None


def folder_of(argv: list[bytes], id: MachineId) -> Path | None:
    """Where the folder of a machine's sockets lies, by the command line of its QEMU."""
    end = f"/{id}/{CHANNEL}"
    for word in argv:
        path = os.fsdecode(word).partition(",path=")[2].split(",")[0]
        if path.startswith("/") and path.endswith(end):
            return Path(path.removesuffix(end))
    return None
