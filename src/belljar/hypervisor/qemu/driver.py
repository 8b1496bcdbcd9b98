"""The Hypervisor that runs QEMU: puts the other files of this room together, decides nothing that they can."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from belljar.errors import TemplateError
from belljar.hints import TYPE_CHECKING, Any
from belljar.host.threads import in_thread, wholly_in_thread
from belljar.hypervisor import Accelerator, Boot, DomainSpec, Frame, Settings, Template, Templates
from belljar.hypervisor.devices import serve, served, share_kind, share_kinds, stop_serving
from belljar.hypervisor.qemu import abilities, cmdline
from belljar.hypervisor.qemu.domain import Lines, QemuDomain
from belljar.hypervisor.qemu.host import TEMPLATES, QemuHost
from belljar.hypervisor.qemu.process import launch as process
from belljar.hypervisor.qemu.process.launch import Launch, Wiring
from belljar.hypervisor.qemu.template.folders import DISK, STATE, TemplateStore, copy_overlay, is_key, key_of
from belljar.model import Firmware
from belljar.records import replace

if TYPE_CHECKING:
    from belljar.hypervisor.devices import Server


class QemuHypervisor(QemuHost):
    """Implements `Hypervisor`."""

    can_pin = True

    def __init__(self, settings: Settings, store: Path, site_store: Path | None = None) -> None:
        """*site_store*: whose base templates serve the user of *store*; None: those of *store* serve others."""
        super().__init__(settings, store)
        self._site: TemplateStore | None = None
        if site_store and settings.site_templates:
            self._site = TemplateStore(site_store / TEMPLATES, days=settings.template_days)
        self._serves_others = settings.site_templates and site_store is None and os.geteuid() == 0

    # -- starting ----------------------------------------------------------------------------------------------------

    def check(self, spec: DomainSpec) -> None:
        for kind in share_kinds(spec):
            kind.check(self._settings)

    async def launch(self, spec: DomainSpec, template: Template | None) -> QemuDomain:
        with Wiring(spec.owner) as wires:
            launch = process.prepare(spec, template, wires)
            servers: Sequence[Server] = ()
            if served(spec):
                from belljar.hypervisor.qemu.template.making import make_memory

                # What serves folders beside QEMU reads and writes the guest's memory, so all of it is shared with that: it is the
                # machine's own, and a clone's is a copy of its template's.
                memory, source = spec.of_template.memory, Path(process.reopened(launch.ram)) if template else None
                if not (spec.layout or spec.pages):  # else it makes it itself
                    launch.ram = wires.take(await in_thread(lambda: make_memory(memory, source), undo=os.close))
                servers = await serve(spec, self._settings)
                launch.folders = tuple(server.line.fileno() for server in servers)
            try:
                return self._run(launch, wires, servers)
            except BaseException:
                if servers:
                    await stop_serving(servers)
                raise
            finally:
                for server in servers:
                    server.line.close()

    def start(self, spec: DomainSpec, template: Template | None = None) -> QemuDomain:
        """`launch` of a machine without folders that are served, which needs no waiting."""
        with Wiring(spec.owner) as wires:
            return self._run(process.prepare(spec, template, wires), wires)

    def start_template(self, spec: DomainSpec) -> QemuDomain:
        with Wiring(spec.owner) as wires:
            return self._run(process.prepare_draft(spec.of_template, self.template_draft(spec), wires), wires)

    def _run(self, launch: Launch, wires: Wiring, servers: Sequence[Server] = ()) -> QemuDomain:
        """Spawn QEMU. `abilities` is asked first, so that a QEMU that is missing leaves nothing behind."""
        ours, spec = self.abilities, launch.spec
        with Lines("monitor", "channel", "console") as lines:
            process.plug(launch, wires, lines.theirs, self._uefi if uses_uefi(spec.boot) else "")
            argv = cmdline.command_line(launch, ours, self._cpu(spec.accelerator))
            groups = process.kvm_groups() if spec.accelerator is Accelerator.KVM else ()
            confined = process.confined(argv, spec.owner, capabilities=cmdline.capabilities(spec), groups=groups)
            domain = QemuDomain(launch, confined, wires.fds, lines, servers, timeout=self._settings.qmp_timeout)
        if launch.incoming >= 0 and not launch.is_draft:
            grow = None  # most clones get nothing beyond their template
            if not launch.is_grown and (servers or spec.devices or spec.growth):
                from belljar.hypervisor.qemu.template.plugging import commands

                grow = partial(commands, spec)
            state = cmdline.state_address(launch.incoming, ours, is_stream=launch.is_stream)
            asks_cpus, with_memory = grow is not None and spec.cpus > spec.of_template.cpus, launch.ram < 0
            domain.go_on(state, grow, asks_cpus=asks_cpus, with_memory=with_memory)
        return domain

    def restore(self, spec: DomainSpec, memory: int) -> QemuDomain:
        with Wiring(spec.owner) as wires:
            disks = (*wires.disk(spec.disk).values(),)
            launch = Launch(spec, disks, "going on from its checkpoint", is_stream=True, is_grown=True)
            launch.incoming = wires.lend(memory)
            launch.seed = wires.open(spec.seed) if spec.seed else -1
            return self._run(launch, wires)

    async def write_memory(self, domain: Any, pipe: int, *, timeout: float) -> None:
        await domain.call("getfd", {"fdname": "memory"}, fds=[pipe])
        await domain.migrate("fd:memory", timeout=timeout, with_memory=True)

    def traits(self, spec: DomainSpec) -> Mapping[str, str]:
        cpu = self._cpu(spec.accelerator)
        release = ".".join(self.abilities.name.removeprefix("QEMU emulator version ").split(".")[:2])
        processor = f"{spec.accelerator.value} {cpu} {self._host_cpu(spec)}".strip()
        hardware = " ".join(cmdline.hardware_now(spec, self.abilities, cpu))
        return {"QEMU": release, "processor": processor, "hardware": hardware}

    # -- templates ---------------------------------------------------------------------------------------------------

    def frame(self, spec: DomainSpec, *, memory: int, disk: int) -> Frame | None:
        from belljar.hypervisor.qemu.template.plugging import frame_of

        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return frame_of(spec, self.abilities, memory=memory, disk=disk, cpus=os.cpu_count() or 1, total=total)

    @property
    def cloning(self) -> Templates:
        return self

    def find_template(self, spec: DomainSpec) -> Template | None:
        template = self._templates.find(self._key(spec))
        if template is None and abilities.READONLY_RAM in self.abilities.features:
            return self._template_of_site(spec)
        return template

    def _template_of_site(self, spec: DomainSpec) -> Template | None:
        """Imported by those who have no template of their own. Exact templates are their users' own affair."""
        if self._site is None or spec.frame is None:
            return None
        from belljar.hypervisor.qemu.template.making import find_for_user

        return find_for_user(self._site, self._facts(spec))

    async def adopt_template(self, spec: DomainSpec) -> Template | None:
        site, template = self._site, self._template_of_site(spec)
        if site is None or template is None:
            return None
        from belljar.hypervisor.qemu.template.making import copy, publish

        draft = await self._begin(spec)
        await wholly_in_thread(lambda: copy(site, template, draft))
        ram_is_read = abilities.READONLY_RAM in self.abilities.features
        return await publish(self._templates, self._facts(spec), template.grows, ram_is_read=ram_is_read)

    def clone_disk(self, template: Template, spec: DomainSpec) -> None:
        copy_overlay(template, spec.disk, spec.owner)

    def template_lock(self, spec: DomainSpec) -> Path:
        return self._templates.lock(self._key(spec))

    def template_draft(self, spec: DomainSpec) -> Path:
        return self._templates.draft(self._key(spec))

    async def prepare_template(self, spec: DomainSpec, image_disk: Path) -> None:
        from belljar.hypervisor.qemu.template.making import create_overlay

        draft, base = await self._begin(spec), await in_thread(image_disk.resolve)
        await create_overlay(draft / DISK, base, spec.of_template.disk_size)

    async def _begin(self, spec: DomainSpec) -> Path:
        key, memory = self._key(spec), spec.of_template.memory
        more = cmdline.pieces(spec.plugged, memory) if spec.fork else ()
        return await wholly_in_thread(lambda: self._templates.begin(key, memory, spec.owner, more, spec.seed))

    async def save_template(self, spec: DomainSpec, domain: Any, grows: Set[str] = frozenset()) -> Template:
        from belljar.hypervisor.qemu.template.making import freeze, publish

        await freeze(domain, self.template_draft(spec) / STATE, self.abilities, timeout=self._settings.boot_timeout)
        ram_is_read, is_open = abilities.READONLY_RAM in self.abilities.features, self._serves_others and bool(grows)
        return await publish(self._templates, self._facts(spec), grows, ram_is_read=ram_is_read, is_open=is_open)

    async def fork(
        self, domain: Any, spec: DomainSpec, layer: Path, point: Callable[[str], None]
    ) -> tuple[Template, float]:
        from belljar.hypervisor.qemu.template.forking import HEIR, SLOWEST, hand_on, move, split

        draft, timeout = await self._begin(spec), self._settings.boot_timeout + spec.memory / SLOWEST
        is_whole = abilities.DIRTY_TCG in self.abilities.features and not spec.plugged
        # No socket: the guard of a user network keeps QEMU from writing to one.
        reader, writer = os.pipe()
        with ExitStack() as ends:
            ends.callback(os.close, writer)
            with Wiring(spec.owner) as wires:
                heir = self._run(process.prepare_heir(spec, draft, wires.take(reader), wires), wires)
            receiving = asyncio.ensure_future(heir.receive(f"fd:{reader}", timeout=timeout))
            receiving.add_done_callback(lambda task: end_of(heir, task))
            try:
                async with split(domain, spec, layer, point) as switch:
                    point("fork-moving")
                    await domain.call("getfd", {"fdname": HEIR}, fds=[writer])
                    ends.close()
                    still = await move(
                        domain, switch, is_live=spec.accelerator is Accelerator.KVM or is_whole, timeout=timeout
                    )
                await receiving
                point("fork-moved")
                await hand_on(spec.disk, draft)
                return await self.save_template(spec, heir), still
            finally:
                receiving.cancel()
                heir.kill()
                await asyncio.shield(heir.quit(grace=0.0))
                heir.channel.close()
                heir.console.close()

    def fork_lock(self, key: str) -> Path:
        if not is_key(key):
            raise TemplateError(f"{key[:40]!r}: not the key of a fork")
        return self._templates.lock(key)

    def of_fork(self, spec: DomainSpec, key: str) -> DomainSpec:
        template = self._templates.read(key)
        if template is None or "fork" not in template.facts:
            raise TemplateError("the fork is gone: it goes with the last machine of it")
        had = template.facts["fork"]
        frame, boot = Frame(**had["frame"]) if had["frame"] else None, replace(spec.boot, digest=had["boot"])
        return replace(spec, **{**had, "owner": (*had["owner"],), "frame": frame, "boot": boot})

    def _key(self, spec: DomainSpec) -> str:
        return key_of(self._facts(spec))

    def _host_cpu(self, spec: DomainSpec) -> str:
        """What of this host's processor a guest may have seen."""
        if spec.accelerator is not Accelerator.KVM:
            return ""
        from belljar.hypervisor.qemu.proof import cpu_flags, first_processor

        return cpu_flags(first_processor())

    def _facts(self, spec: DomainSpec) -> Mapping[str, Any]:
        """Everything that a template and its clones must have in common."""
        frame, whole, spec = spec.frame, spec, spec.of_template
        image = {"image_digest": spec.image_digest, "image_stored": spec.image_stored, "boot": spec.boot.digest}
        sizes = {"cpus": spec.cpus, "memory": spec.memory, "disk_size": spec.disk_size}
        host = {"accelerator": spec.accelerator.value, "host_cpu": self._host_cpu(spec), "owner": spec.owner[0]}
        return {
            **image,
            **sizes,
            **host,
            "qemu": [self.abilities.identity, self.abilities.name],
            "hardware": cmdline.hardware(spec, self.abilities, self._cpu(spec.accelerator)),
            **({"grows_to": [frame.most_cpus, frame.most_memory, frame.held]} if frame else {}),
            **({"shares": [share_kind(share.kind).name for share in spec.shares]} if spec.shares else {}),
            **({"fork": whole.of_fork, "disk_size": whole.disk_size} if whole.fork else {}),
            **({"uefi": abilities.identity(self._uefi)} if uses_uefi(spec.boot) else {}),
        }


def end_of(heir: QemuDomain, receiving: asyncio.Task[None]) -> None:
    """One that reads no more would have the migration wait for it, and even for a cancelled one to be over."""
    if not receiving.cancelled() and receiving.exception() is not None:
        heir.kill()


def uses_uefi(boot: Boot) -> bool:
    return boot.kernel is None and boot.firmware is Firmware.UEFI
