"""What the drivers have in common: what a host's QEMU can do, whether KVM works with it, the templates that were made with it,
and the processes that say they are a machine's."""

from __future__ import annotations

import os
import time
from functools import cached_property
from pathlib import Path

from belljar.errors import DomainDied, HostError
from belljar.hints import TYPE_CHECKING
from belljar.host.files import private_folder
from belljar.host.locks import locked
from belljar.host.processes import all_pids, command_line, has_no_parent, kill_and_wait
from belljar.hypervisor import NO_TRACES, Accelerator, Boot, Settings, Template, Traces, account
from belljar.hypervisor.devices import server_of
from belljar.hypervisor.qemu import abilities, cmdline
from belljar.hypervisor.qemu.abilities import Abilities
from belljar.hypervisor.qemu.process import launch as process
from belljar.hypervisor.qemu.process.launch import Wiring
from belljar.hypervisor.qemu.template.folders import TemplateStore
from belljar.model import MachineId

if TYPE_CHECKING:
    from belljar.hypervisor.qemu.proof import Proof

TEMPLATES, MEMORY = "templates", "qemu"
OF_LIBVIRT = b",debug-threads="  # how libvirt goes on after a domain's name
# What an emulated processor offers: see docs/develop/decisions/0003-a-quick-start.md for what others cost.
EMULATED_CPU, NATIVE_CPU = "max", "host"


class QemuHost:
    """What the drivers for this host's QEMU have in common."""

    def __init__(self, settings: Settings, store: Path) -> None:
        self._settings, self._store = settings, store
        self._templates = templates = TemplateStore(store / TEMPLATES, days=settings.template_days)
        self.templates, self.abandoned_templates = templates.all, templates.abandoned
        self.remove_template, self.expire_templates = templates.remove, templates.expire

    @cached_property
    def abilities(self) -> Abilities:
        """What the QEMU of the settings can do. Raises CommandMissing, HostError."""
        return abilities.ask(abilities.find(self._settings.binary), self._memory("abilities"))

    @cached_property
    def _uefi(self) -> str:
        from belljar.hypervisor.qemu.values import find_uefi

        return find_uefi(self._settings.uefi)

    def _cpu(self, accelerator: Accelerator) -> str:
        if self._settings.cpu not in ("", "auto"):
            return self._settings.cpu
        return NATIVE_CPU if accelerator is Accelerator.KVM else EMULATED_CPU

    def verify_template(self, template: Template) -> list[str]:
        wrong = self._templates.changes(template)
        if template.facts.get("qemu") != [self.abilities.identity, self.abilities.name]:
            wrong.append("it was made with another QEMU than the present one")
        return wrong

    # -- by the mark -------------------------------------------------------------------------------------------------

    def alive(self) -> list[tuple[MachineId, int]]:
        return [(id, pid) for pid in all_pids() if (id := claimed(pid))]

    def is_kept(self, id: MachineId, pid: int) -> bool:
        """A QEMU of libvirt's is the daemon's child: a process of its supervisor's holds the connection."""
        if any(OF_LIBVIRT in word for word in command_line(pid)):
            from belljar.hypervisor.libvirt.connection import is_held

            return is_held(id)
        return not has_no_parent(pid)

    def discard(self, id: MachineId, traces: Traces = NO_TRACES, *, patience: float = 5.0) -> None:
        suspects = {pid for machine, pid in self.alive() if machine == id} | {pid for pid, _ in traces.processes}
        is_its = lambda pid: traces.name(pid) or (traces.fit(pid) and claimed(pid) == id)  # noqa: E731
        survivors = kill_and_wait(suspects, timeout=patience, still=is_its)
        if survivors:
            raise DomainDied(f"QEMU of machine {id} (pid {survivors[0]}) does not go away, not even by SIGKILL")

    # -- accelerator -------------------------------------------------------------------------------------------------

    def accelerator(self, boot: Boot) -> tuple[Accelerator, str]:
        insisted = self._settings.accelerator
        if insisted is Accelerator.TCG:
            return insisted, "the settings ask for it"
        from belljar.hypervisor.qemu import proof

        answer = proof.Proof(False, why) if (why := proof.obstacle()) else self._proof(boot)
        if answer.works:
            return Accelerator.KVM, answer.why
        if insisted is Accelerator.KVM:
            from belljar.hypervisor.qemu.process.complaints import NO_KVM

            raise HostError(f"KVM does not work on this host: {answer.why}", hint=NO_KVM)
        return Accelerator.TCG, answer.why

    def _proof(self, boot: Boot) -> Proof:
        """The remembered answer, or a new one; one process finds out while others wait for it."""
        from belljar.hypervisor.qemu import proof

        cpuinfo = proof.first_processor()
        name = proof.memory_name(boot.digest, self.abilities.identity, os.uname().release, proof.cpu_flags(cpuinfo))
        memory = self._memory(name)
        if known := proof.recall(memory, time.time()):
            return known
        patience = 2 * self._settings.proof_timeout + 10
        with locked(memory.with_suffix(".lock"), timeout=patience, what="find out whether KVM works"):
            if known := proof.recall(memory, time.time()):
                return known
            if boot.kernel is None and not proof.has_native_flag(cpuinfo):
                answer = proof.Proof(False, "this processor offers no virtualization (no vmx, no svm)")
            else:
                answer = self._try_kvm(boot)
            if answer.was_tried:
                proof.remember(memory, answer, time.time())
        return answer

    def _try_kvm(self, boot: Boot) -> Proof:
        from belljar.hypervisor.qemu import proof

        # The user QEMU will be, where that is known, for a site may have given the device to him.
        prover = account(self._settings.user) if os.geteuid() == 0 else (os.geteuid(), os.getegid())
        groups = process.kvm_groups()
        with Wiring(prover) as wires:
            kernel, initrd = (wires.readable(path) if path else "" for path in (boot.kernel, boot.initrd))
            append = f"{boot.append} {proof.WORD}"
            tiny = cmdline.tiny_guest(self.abilities, self._cpu(Accelerator.KVM), append, kernel=kernel, initrd=initrd)
            argv = process.confined(tiny, prover, groups=groups)
            return proof.prove(argv, wires.fds, timeout=self._settings.proof_timeout)

    def _memory(self, name: str) -> Path:
        """Where an answer that took time is remembered."""
        return private_folder(self._store / MEMORY) / f"{name}.json"


def claimed(pid: int) -> MachineId | None:
    """The machine this process says it belongs to, as its QEMU or as what serves it a folder."""
    argv = command_line(pid)
    return cmdline.marked(argv) or server_of(argv)
