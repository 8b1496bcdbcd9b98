"""The Hypervisor that asks libvirt for its domains. Every start is a cold one: libvirt has nothing a clone could be made of.

What needs no domain (which accelerator works, the templates of the direct driver) it has as that has it.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from pathlib import Path

from belljar.errors import BelljarError, DomainDied, LibvirtRefused, TemplateError
from belljar.host.processes import owner
from belljar.hypervisor import NO_TRACES, DomainSpec, LibvirtSettings, Settings, Template, Templates, Traces
from belljar.hypervisor.libvirt import Ends
from belljar.hypervisor.libvirt.connection import Connection, read_driver
from belljar.hypervisor.libvirt.domain import LibvirtDomain, append, remove_locks
from belljar.hypervisor.libvirt.xml import NAME, domain_xml
from belljar.hypervisor.qemu import abilities
from belljar.hypervisor.qemu.driver import uses_uefi
from belljar.hypervisor.qemu.host import QemuHost
from belljar.hypervisor.qemu.process.complaints import explain, last_line
from belljar.hypervisor.qemu.process.launch import Wiring
from belljar.model import QEMU_LOG, MachineId

COLD = "machines by libvirt are always booted cold"


class LibvirtHypervisor(QemuHost):
    """Implements `Hypervisor`."""

    can_pin = False

    def __init__(self, driver: str, settings: Settings, libvirt: LibvirtSettings, store: Path) -> None:
        super().__init__(settings, store)
        self.uri = read_driver(driver)
        is_root = os.geteuid() == 0
        self._is_callers = "///session" in self.uri and not is_root  # root's session is the system's daemon
        self._libvirt = libvirt
        # https://libvirt.org/kbase/debuglogs.html
        own = "/var/log/libvirt/qemu" if is_root else os.path.expanduser("~/.cache/libvirt/qemu/log")
        self._logs = Path(libvirt.log_folder or own)

    # -- starting ----------------------------------------------------------------------------------------------------

    def check(self, spec: DomainSpec) -> None:
        domain_xml(spec, Ends((spec.disk,), ((),) * len(spec.disks)))

    async def launch(self, spec: DomainSpec, template: Template | None) -> LibvirtDomain:
        if template is not None:
            raise TemplateError(COLD)
        document, log = domain_xml(spec, self._ends(spec)), spec.folder / QEMU_LOG
        connection = Connection(spec.id, self._libvirt, log)
        create = f"domain {NAME}{spec.id}"
        try:
            await connection.open(self.uri)
            with suppress(LibvirtRefused):
                await connection.learn(abilities.find(self._settings.binary))
            await connection.call("create", document, what=create, is_start=True)
            pids = [pid for id, pid in self.alive() if id == spec.id and owner(pid) == spec.owner[0]]
            domain = LibvirtDomain(connection, next(iter(pids), 0), (self._log_of(spec.id), log))
            await connection.call("ask", "resume", what=create, is_start=True)
        except BaseException as exc:
            await connection.close("the start failed")
            if isinstance(exc, LibvirtRefused):
                raise complaint(exc, log) from exc
            raise
        return domain

    def _ends(self, spec: DomainSpec) -> Ends:
        with Wiring(spec.owner) as wires:  # which is needed for the names alone
            layers = tuple(wires.disk(spec.disk))
            below = tuple(tuple(wires.disk(disk.path))[1:] if disk.chained else () for disk in spec.disks)
        firmware, label = self._uefi if uses_uefi(spec.boot) else "", None if self._is_callers else spec.owner
        emulator, cpu = abilities.find(self._settings.binary), self._cpu(spec.accelerator)
        return Ends(layers, below, firmware, emulator, cpu, label)

    @property
    def cloning(self) -> Templates:
        raise TemplateError(f"there is no template: {COLD}")

    def examine(self) -> str:
        """Which libvirt answers, in words. Raises LibvirtLost, LibvirtRefused, CommandMissing."""

        async def ask() -> int:
            connection = Connection("doctor", self._libvirt, Path("/dev/null"))
            try:
                version = await connection.open(self.uri)
                await connection.learn(abilities.find(self._settings.binary))
                return version
            finally:
                await connection.close()

        version = asyncio.run(ask())
        return f"libvirt {version // 1000000}.{version // 1000 % 1000}.{version % 1000} answers at {self.uri}"

    # -- by the mark -------------------------------------------------------------------------------------------------

    def discard(self, id: MachineId, traces: Traces = NO_TRACES, *, patience: float = 5.0) -> None:
        """By signals, which no daemon can delay."""
        try:
            super().discard(id, traces, patience=patience)
        finally:
            remove_locks(f"{NAME}{id}")
            with suppress(OSError):
                self._log_of(id).unlink()

    def _log_of(self, id: MachineId) -> Path:
        return self._logs / f"{NAME}{id}.log"


def complaint(refused: LibvirtRefused, log: Path) -> BelljarError:
    """The error for what libvirt says, which quotes QEMU where QEMU ended. QEMU's log of the machine gets it too."""
    with suppress(OSError):
        append(log, (refused.message + "\n").encode(errors="replace"))
    error = explain(refused.message.replace(" qemu-system", "\nqemu-system"), None, "starting, by libvirt")
    if not isinstance(error, DomainDied):
        return error
    is_qemus = "qemu-system" in refused.message or "exited while" in refused.message
    return DomainDied(f"QEMU ended while starting, by libvirt: {last_line(refused.message)}") if is_qemus else refused
