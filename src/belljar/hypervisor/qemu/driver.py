"""The Hypervisor that runs QEMU: puts the other files of this room together, decides nothing that they can."""

from __future__ import annotations

import os
import resource
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from pathlib import Path

from belljar.errors import DomainDied, ImageCorrupt, TemplateError
from belljar.hints import TYPE_CHECKING, Any
from belljar.host.processes import all_pids, command_line, has_no_parent, kill_and_wait
from belljar.hypervisor import (
    NO_TRACES,
    Accelerator,
    Boot,
    DomainSpec,
    ExtraDisk,
    Frame,
    Settings,
    Template,
    Templates,
    Traces,
)
from belljar.hypervisor.qemu import abilities, cmdline
from belljar.hypervisor.qemu.cmdline import MARK, Plugs, Ram, machine_uuid
from belljar.hypervisor.qemu.domain import Lines, QemuDomain
from belljar.hypervisor.qemu.host import TEMPLATES, QemuHost
from belljar.hypervisor.qemu.process import launch as process
from belljar.hypervisor.qemu.process.launch import Wiring, layers, wiring
from belljar.hypervisor.qemu.template.folders import DISK, RAM, SEED, STATE, TemplateStore, copy_overlay, key_of
from belljar.model import Firmware, MachineId
from belljar.records import replace

if TYPE_CHECKING:
    from belljar.hypervisor.qemu.virtiofs import FolderServer

FEW_WORKERS = 8  # where a limit counts their stacks (batch/sizes.py, DATA_SPACE)
OF_LIBVIRT = b",debug-threads=on"  # how libvirt ends a domain's name
RUNNERS = ("setpriv",)  # what a QEMU of ours is for the millisecond before it is QEMU


class QemuHypervisor(QemuHost):
    """Implements `Hypervisor`."""

    def __init__(self, settings: Settings, store: Path, site_store: Path | None = None) -> None:
        """*site_store*: whose base templates serve the user of *store*; None: those of *store* serve others."""
        super().__init__(settings, store)
        shares = settings.site_templates
        self._site = (
            TemplateStore(site_store / TEMPLATES, days=settings.template_days) if site_store and shares else None
        )
        self._serves_others = shares and site_store is None and os.geteuid() == 0

    # -- starting ----------------------------------------------------------------------------------------------------

    def check(self, spec: DomainSpec) -> None:
        if spec.warm:
            from belljar.hypervisor.qemu.virtiofs import check

            check(self._settings.virtiofsd, self.abilities)

    async def launch(self, spec: DomainSpec, template: Template | None) -> QemuDomain:
        return await self._launch_served(spec, template) if spec.warm else self.start(spec, template)

    def start(self, spec: DomainSpec, template: Template | None = None) -> QemuDomain:
        with wiring(spec.owner) as wires:
            return self._start(spec, wires, template, self._standing(wires, template))

    async def _launch_served(self, spec: DomainSpec, template: Template | None) -> QemuDomain:
        """With folders that are served. Who serves them reads and writes the guest's memory, so all of it is shared with them:
        it is the machine's own, and a clone's is a copy of its template's."""
        from belljar.hypervisor.qemu.template.making import own_memory
        from belljar.hypervisor.qemu.virtiofs import end, path_of, serve

        with wiring(spec.owner) as wires:
            here = self._standing(wires, template)
            fd = wires.adopt(await own_memory(spec.of_template.memory, here / RAM if here else None))
            memory = Ram(f"/proc/self/fd/{fd}", private=False)
            servers = await serve(spec, path_of(self._settings.virtiofsd))
            try:
                return self._start(spec, wires, template, here, memory, servers)
            except BaseException:
                await end(servers)
                raise
            finally:
                for server in servers:
                    server.line.close()

    def _standing(self, wires: Wiring, template: Template | None) -> Path | None:
        """The template's folder, of which all files are of one boot: another may be made in its place meanwhile."""
        try:
            return wires.folder(template.folder) if template else None
        except ImageCorrupt as exc:
            assert template is not None
            raise gone(template, exc.message) from exc

    def _start(
        self,
        spec: DomainSpec,
        wires: Wiring,
        template: Template | None,
        here: Path | None,
        memory: Ram | None = None,
        servers: Sequence[FolderServer] = (),
    ) -> QemuDomain:
        """*memory*: the machine's own; else a clone maps its template's privately."""
        if template is None or here is None:
            return self._launch(spec, wires, self._disk(wires, spec.disk), "starting", memory, servers=servers)
        try:
            disk = self._disk(wires, spec.disk)
            state = wires.open(here / STATE, os.O_RDONLY)
            if memory is None:
                ram = wires.open(here / RAM, os.O_RDONLY)  # QEMU reopens it, as its own user
                memory = Ram(f"/proc/self/fd/{ram}", private=True, readonly=self.abilities.readonly_ram)
            spec = replace(spec, seed=here / SEED) if spec.seed else spec
        except ImageCorrupt as exc:
            raise gone(template, exc.message) from exc
        if not is_same(disk[1:2], here / DISK):
            raise gone(template, "another was made in its place meanwhile")
        doing = "going on from its template"
        domain = self._launch(spec, wires, disk, doing, memory, incoming=state, servers=servers)
        address = cmdline.state_address(state, self.abilities)
        growing = None
        if servers or spec.growth:  # most clones get nothing beyond their template
            from belljar.hypervisor.qemu.template import plugging

            growing = plugging.growing(spec, [server.device for server in servers])
        domain.go_on(address, growing)
        return domain

    def start_template(self, spec: DomainSpec) -> QemuDomain:
        spec = spec.of_template
        spec = replace(spec, disks=(), nic=replace(spec.nic, fd=-1) if spec.nic else None)  # each clone brings its own
        draft = self.template_draft(spec)
        with wiring(spec.owner) as wires:
            try:
                disk = self._disk(wires, draft / DISK)
                ram = wires.open(draft / RAM, os.O_RDONLY)
            except ImageCorrupt as exc:
                raise TemplateError(f"the template's draft is damaged: {exc.message}") from exc
            memory = Ram(f"/proc/self/fd/{ram}", private=False)
            return self._launch(spec, wires, disk, "booting a template", memory, is_draft=True)

    def _launch(
        self,
        spec: DomainSpec,
        wires: Wiring,
        disk: tuple[int, ...],
        doing: str,
        ram: Ram | None = None,
        *,
        incoming: int = -1,
        is_draft: bool = False,
        servers: Sequence[FolderServer] = (),
    ) -> QemuDomain:
        """Spawn QEMU. `abilities` is asked first, so that a QEMU that is missing leaves nothing behind."""
        ours, boot, lines = self.abilities, spec.boot, Lines()
        try:
            plugs = Plugs(
                firmware=self._uefi if uses_uefi(spec.boot) else "",
                monitor=wires.lend(lines.theirs["monitor"].fileno()),
                channel=wires.lend(lines.theirs["channel"].fileno()),
                console=wires.lend(lines.theirs["console"].fileno()),
                layers=disk,
                kernel=wires.readable(boot.kernel) if boot.kernel and incoming < 0 else "",
                initrd=wires.readable(boot.initrd) if boot.initrd and incoming < 0 else "",
                ram=ram,
                incoming=incoming,
                folders=tuple(wires.lend(server.line.fileno()) for server in servers),
                disks=tuple(wires.open(it.path, os.O_RDONLY if it.readonly else os.O_RDWR) for it in spec.disks),
                below=tuple(_below(wires, it) for it in spec.disks),
                seed=wires.open(spec.seed, os.O_RDONLY) if spec.seed else -1,
                network=wires.lend(spec.nic.fd) if spec.nic and spec.nic.fd >= 0 else -1,
                is_draft=is_draft,
                workers=0 if resource.getrlimit(resource.RLIMIT_DATA)[0] == resource.RLIM_INFINITY else FEW_WORKERS,
            )
            argv = self._confined(spec, cmdline.command_line(spec, ours, self._cpu(spec.accelerator), plugs))
            log = spec.folder / "qemu.log"
            egress = spec.nic.egress if spec.nic and not is_draft else None
            timeout = self._settings.qmp_timeout
            domain = QemuDomain(
                argv, wires.fds, lines, log, timeout=timeout, doing=doing, egress=egress, servers=servers,
            )  # fmt: skip
        except BaseException:
            lines.hang_up(ours=True)
            raise
        lines.hang_up(ours=False)
        return domain

    def _confined(self, spec: DomainSpec, argv: list[str]) -> list[str]:
        groups = process.kvm_groups() if spec.accelerator is Accelerator.KVM else ()
        return process.confined(argv, spec.owner, capabilities=cmdline.capabilities(spec), groups=groups)

    def _disk(self, wires: Wiring, overlay: Path) -> tuple[int, ...]:
        top, *below = layers(overlay)
        return wires.open(top, os.O_RDWR), *(wires.open(path, os.O_RDONLY) for path in below)

    # -- templates ---------------------------------------------------------------------------------------------------

    def frame(self, spec: DomainSpec, *, memory: int, disk: int) -> Frame | None:
        from belljar.hypervisor.qemu.template.plugging import frame_of

        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return frame_of(spec, self.abilities, memory=memory, disk=disk, cpus=os.cpu_count() or 1, total=total)

    @property
    def cloning(self) -> Templates:
        return self

    def find_template(self, spec: DomainSpec) -> Template | str:
        found = self._templates.find(self._key(spec))
        if isinstance(found, str) and self.abilities.readonly_ram:
            return self._template_of_site(spec) or found
        return found

    def _template_of_site(self, spec: DomainSpec) -> Template | None:
        """Imported by those who have no template of their own. Exact templates are their users' own affair."""
        if self._site is None or spec.frame is None:
            return None
        from belljar.hypervisor.qemu.template.making import find_for_user

        return find_for_user(self._site, self._facts(spec))

    async def adopt_template(self, spec: DomainSpec) -> Template | None:
        if self._site is None or (template := self._template_of_site(spec)) is None:
            return None
        from belljar.hypervisor.qemu.template.making import adopt

        key, facts, is_read = self._key(spec), self._facts(spec), self.abilities.readonly_ram
        return await adopt(self._site, template, self._templates, key, facts, spec, ram_is_read=is_read)

    def clone_disk(self, template: Template, spec: DomainSpec) -> None:
        copy_overlay(template, spec.disk, spec.owner)

    def template_lock(self, spec: DomainSpec) -> Path:
        return self._templates.lock(self._key(spec))

    def template_draft(self, spec: DomainSpec) -> Path:
        return self._templates.draft(self._key(spec))

    async def prepare_template(self, spec: DomainSpec, image_disk: Path) -> None:
        from belljar.host.threads import in_thread, wholly_in_thread
        from belljar.hypervisor.qemu.template.making import keep_seed, make_overlay

        key, seed = self._key(spec), spec.seed
        booted = spec.of_template
        draft = await wholly_in_thread(lambda: self._templates.begin(key, booted.memory, spec.owner))
        base = await in_thread(image_disk.resolve)
        await make_overlay(draft / DISK, base, booted.disk_size)
        if seed:
            await wholly_in_thread(lambda: keep_seed(draft / SEED, seed))

    def abandon_template(self, spec: DomainSpec) -> None:
        self._templates.abandon(self._key(spec))

    async def save_template(self, spec: DomainSpec, domain: Any, grows: Set[str] = frozenset()) -> Template:
        from belljar.hypervisor.qemu.template.making import freeze, publish

        key, facts = self._key(spec), self._facts(spec)
        await freeze(domain, self._templates.draft(key) / STATE, self.abilities, timeout=self._settings.boot_timeout)
        ram_is_read = self.abilities.readonly_ram
        open_to, booted = self._serves_others and bool(grows), spec.of_template
        return await publish(self._templates, key, facts, booted, grows, ram_is_read=ram_is_read, is_open=open_to)

    def _key(self, spec: DomainSpec) -> str:
        return key_of(self._facts(spec))

    def _facts(self, spec: DomainSpec) -> Mapping[str, Any]:
        """Everything that a template and its clones must have in common."""
        native, frame, spec = spec.accelerator is Accelerator.KVM, spec.frame, spec.of_template
        return {
            "image_digest": spec.image_digest,
            "image_stored": spec.image_stored,
            "boot": spec.boot.digest,
            "cpus": spec.cpus,
            "memory": spec.memory,
            "disk_size": spec.disk_size,
            "accelerator": spec.accelerator.value,
            "qemu": [self.abilities.identity, self.abilities.name],
            "hardware": cmdline.hardware(spec, self.abilities, self._cpu(spec.accelerator)),
            "host_cpu": _host_cpu() if native else "",
            "owner": spec.owner[0],
            **({"grows_to": [frame.most_cpus, frame.most_memory, frame.held]} if frame else {}),
            **({"warm": list(spec.warm)} if spec.warm else {}),
            **({"uefi": abilities.identity(self._uefi)} if uses_uefi(spec.boot) else {}),
        }

    # -- by the mark -------------------------------------------------------------------------------------------------

    def alive(self) -> list[tuple[MachineId, int]]:
        return alive()

    def is_kept(self, id: MachineId, pid: int) -> bool:
        """One that libvirt started has another parent: the driver for libvirt knows its supervisor, this one does not."""
        return not has_no_parent(pid) or any(OF_LIBVIRT in word for word in command_line(pid))

    def discard(self, id: MachineId, traces: Traces = NO_TRACES, *, patience: float = 5.0) -> None:
        discard(id, traces, patience)


def alive() -> list[tuple[MachineId, int]]:
    """(machine, pid) of each process that says it is of one."""
    return [(id, pid) for pid in all_pids() if (id := claimed(pid))]


def discard(id: MachineId, traces: Traces, patience: float) -> None:
    """See `Hypervisor.discard`."""
    suspects = {pid for found, pid in alive() if found == id} | {pid for pid, _ in traces.processes}
    is_its = lambda pid: traces.name(pid) or (traces.fit(pid) and claimed(pid) == id)  # noqa: E731
    survivors = kill_and_wait(suspects, timeout=patience, still=is_its)
    if survivors:
        raise DomainDied(f"QEMU of machine {id} (pid {survivors[0]}) does not go away, not even by SIGKILL")


def _below(wires: Wiring, disk: ExtraDisk) -> tuple[int, ...]:
    """The layers a chained disk stands on."""
    return tuple(wires.open(path, os.O_RDONLY) for path in layers(disk.path)[1:]) if disk.chained else ()


def claimed(pid: int) -> MachineId | None:
    """The machine this process says it belongs to, as its QEMU or as what serves it a folder."""
    from belljar.hypervisor.qemu.virtiofs import served

    argv = command_line(pid)
    return marked(argv) or served(argv)


def gone(template: Template, why: str) -> TemplateError:
    return TemplateError(f"the template {template.key} cannot be used any more: {why}")


def is_same(opened: Sequence[int], path: Path) -> bool:
    """Was this file opened, and is it there still?"""
    with suppress(FileNotFoundError):
        return any(os.path.samestat(os.fstat(fd), os.stat(path)) for fd in opened)
    return False


def marked(argv: list[bytes]) -> MachineId | None:
    """The machine whose QEMU has this command line; None for any other process."""
    if not argv or not argv[0].rpartition(b"/")[2].startswith((b"qemu", *(name.encode() for name in RUNNERS))):
        return None
    with suppress(ValueError, IndexError):
        word = argv[argv.index(b"-name") + 1]
        if word.startswith(MARK.encode()):
            id = word[len(MARK) :].partition(b",")[0].decode("ascii", "replace")
            return id if b"-uuid" not in argv or has_uuid_of(argv, id) else None
    return None


def has_uuid_of(argv: list[bytes], id: MachineId) -> bool:
    """Is it this machine's QEMU? By libvirt anybody may have a domain of such a name."""
    at = argv.index(b"-uuid") + 1 if b"-uuid" in argv else len(argv)
    return argv[at : at + 1] == [machine_uuid(id).encode()]


def uses_uefi(boot: Boot) -> bool:
    return boot.kernel is None and boot.firmware is Firmware.UEFI


def _host_cpu() -> str:
    from belljar.hypervisor.qemu.proof import cpu_flags, first_processor

    return cpu_flags(first_processor())
