"""What to start, decided before anything is started: accelerator, disk, links, and clone or cold."""

from __future__ import annotations

import os

from belljar.context import Chosen
from belljar.errors import BadOption, BelljarError, BootFailed, BootTimeout, PrepareFailed, TemplateError, UnsafeFolder
from belljar.guest import Streams
from belljar.hints import TYPE_CHECKING
from belljar.host.threads import in_thread
from belljar.hypervisor import Accelerator, Boot, DomainSpec, Nic, Template, account
from belljar.hypervisor.devices import share_kinds
from belljar.image import BootFiles, Image
from belljar.machine.extras import Equipment
from belljar.machine.life.life import Lifecycle
from belljar.machine.planning import GuestContext
from belljar.machine.planning.placement import check_memory, keeps_from_cloning, layout_of
from belljar.machine.planning.template import failed_before, in_base_frame, make_template
from belljar.machine.services import Keep, Services
from belljar.model import MIB, SEED, Context, NetworkMode, OwnWork, Request, Sign, Start, Work
from belljar.network import Link, mac_address
from belljar.network import plan as plan_link
from belljar.records import dataclass, replace

if TYPE_CHECKING:
    from belljar.machine.checkpoints import Checkpoint

RESTORED = "restored"
LARGE_PAGE = 2 * MIB
NO_CLONE = "Leave out `--start clone`, or fork again; a warm image has no other start (see `belljar doctor`)."


@dataclass(frozen=True)
class Plan:
    """A start, decided. `reason` says why it is not a clone."""

    spec: DomainSpec
    link: Link
    context: GuestContext
    template: Template | None = None
    reason: str = ""
    checkpoint: Checkpoint | None = None

    @property
    def start(self) -> str:
        """In one word."""
        return RESTORED if self.checkpoint else (Start.CLONE if self.template else Start.COLD).value

    @property
    def disc_in_drive(self) -> DomainSpec:
        """Its spec, with the path of the disc that its guest sees: a clone's is its template's."""
        seed = self.template.folder / SEED if self.template is not None and self.spec.seed else self.spec.seed
        return replace(self.spec, seed=seed)


class Planner:
    """Decides how one machine is started, and puts its disk in its place."""

    def __init__(self, services: Services, keep: Keep, life: Lifecycle, image: Image, equipment: Equipment) -> None:
        self._services, self._keep, self._life, self._image, self._equipment = services, keep, life, image, equipment
        self.streams: Streams | None = None  # of what prepares a warm image

    @property
    def must_clone(self) -> bool:
        """Is nothing but a clone what was asked for?"""
        machine = self._life.request.machine
        return machine.start is Start.CLONE or bool(machine.fork) or self._image.recipe is not None

    async def plan(self) -> Plan:
        """The start that is wanted and possible."""
        plan, start = await self._undecided(), self._life.request.machine.start
        if start is Start.COLD:
            return await self._with_disk(replace(plan, reason="asked for"))
        try:
            plan = await self._from_template(plan)
        except (BootTimeout, BootFailed, PrepareFailed, UnsafeFolder):
            raise
        except BelljarError as refusal:
            if self.must_clone:
                raise TemplateError(f"no clone can be started: {refusal.message}", hint=NO_CLONE) from refusal
            return await self._with_disk(replace(plan, reason=refusal.message))
        assert plan.template is not None
        self._services.overlays.check_room(plan.spec.disk.parent)
        self._intend(plan.spec)
        self._services.hypervisor.cloning.clone_disk(plan.template, plan.spec)
        return plan

    async def cold(self, reason: str) -> Plan:
        """A cold start instead of what was planned first."""
        return await self._with_disk(replace(await self._undecided(), reason=reason))

    async def restored(self, checkpoint: Checkpoint) -> Plan:
        """As it was when it was frozen. Raises CheckpointUnfit, NoSpace, CommandFailed."""
        from belljar.machine.checkpoints import content

        had, image, hypervisor = checkpoint.spec, self._image, self._services.hypervisor
        context = GuestContext(Chosen(checkpoint.context, "as its checkpoint"), BootFiles(None, None, "", ""), image)
        boot = replace(had.boot, kernel=image.kernel if had.boot.kernel else None, initrd=None)
        accelerator, _ = await in_thread(lambda: hypervisor.accelerator(boot))
        spec, link = self._domain(boot, accelerator, has_seed=had.seed is not None)
        spec = replace(
            spec, cpus=had.cpus, memory=had.memory, disk_size=had.disk_size, frame=had.frame, layout=None,
            nic=replace(spec.nic, mac=checkpoint.identity.mac) if spec.nic else None,
        )  # fmt: skip
        await in_thread(lambda: checkpoint.check(spec, hypervisor))
        self._intend(spec)
        await content.place(checkpoint, spec, image.disk.resolve())
        return Plan(spec, link, context, checkpoint=checkpoint)

    async def again(self) -> Plan:
        """A cold start from the disk that its guest has written."""
        plan = await self._undecided()
        plan.context.make_seed(plan.spec)
        return replace(plan, reason="its guest rebooted")

    async def template(self, *, exact: bool) -> Template:
        """The template it would be cloned from, or one of its *exact* size; made if missing. Raises why not."""
        plan, templates = await self._undecided(), self._services.hypervisor.cloning
        spec, has_own_init = plan.spec, plan.context.has_own_init
        if not exact or self._image.recipe is not None:
            spec = in_base_frame(spec, self._image, templates, has_own_init=has_own_init) or spec
        return templates.find_template(spec) or await self._make(spec, plan.context)

    async def _from_template(self, plan: Plan) -> Plan:
        """As a clone: of a template of exactly its size, else of its image's base template, else of one made of its size.
        Raises BootTimeout and BootFailed, where a template was booted with all the time there is: a second cold boot would not
        answer either; and TemplateError or what else kept one from being made."""
        if why := keeps_from_cloning(plan.spec, self._life.request.machine.pages):
            raise TemplateError(why)
        if key := self._life.request.machine.fork:
            return self._of_fork(plan, key)
        if plan.context.private:
            raise TemplateError(plan.context.private)
        if awaited_line(self._life.request.work):
            raise TemplateError("it is awaited by a line on its console, which a clone's template has written")
        spec, context, templates = plan.spec, plan.context, self._services.hypervisor.cloning
        is_warm = self._image.recipe is not None
        if not is_warm and (template := templates.find_template(spec)) is not None:
            return replace(plan, template=template)
        framed = in_base_frame(spec, self._image, templates, has_own_init=context.has_own_init)
        if framed is not None:
            try:
                base = templates.find_template(framed) or await self._make_unless_failed(framed, context)
            except BelljarError:
                has_more = framed.of_template.memory < framed.memory  # with which it may yet boot
                if is_warm or not (has_more and failed_before(templates.template_lock(framed))):
                    raise
            else:
                if framed.growth <= base.grows:
                    return replace(plan, spec=framed, template=base)
        if is_warm:
            raise TemplateError("its clones cannot be given another size by this host's QEMU and the image's kernel")
        return replace(plan, template=await self._make_unless_failed(spec, context))

    def _of_fork(self, plan: Plan, key: str) -> Plan:
        templates = self._services.hypervisor.cloning
        spec = templates.of_fork(plan.spec, key)
        if (template := templates.find_template(spec)) is None:
            raise TemplateError("the fork was made by another QEMU, or with other settings")
        return replace(plan, spec=spec, template=template)

    async def _make_unless_failed(self, spec: DomainSpec, context: GuestContext) -> Template:
        """A template made now, by us or by somebody before us, unless the last try failed a short time ago."""
        if why := failed_before(self._services.hypervisor.cloning.template_lock(spec)):
            raise TemplateError(why)
        return await self._make(spec, context)

    async def _make(self, spec: DomainSpec, context: GuestContext) -> Template:
        services, life = self._services, self._life
        doing = "Making a template of" if self._image.recipe is None else "Preparing the warm image"
        what = f"{doing} {life.request.machine.image}, once (without KVM this takes minutes)"
        with life.phase("template"), services.showing(what):
            context.make_seed(spec)
            return await make_template(services, life, spec, context, self.streams)

    async def _with_disk(self, plan: Plan) -> Plan:
        spec, image = plan.spec, plan.context.image
        check_memory(spec, self._life.request.machine.pages)
        self._intend(spec)
        plan.context.make_seed(spec)
        disk = None if image.is_disc else self._life.request.machine.disk
        size = self._services.overlays.create(spec.disk, image, disk)
        if spec.owner[0] != os.geteuid():
            os.chown(spec.disk, *spec.owner)
        return replace(plan, spec=replace(spec, disk_size=size))

    def _intend(self, spec: DomainSpec) -> None:
        """What is made for this start beside QEMU, which finds its processes by the machine's id."""
        life = self._life
        life.record.intend("overlay", spec.disk)
        for kind in share_kinds(spec):
            if kind.is_served:
                life.record.intend(kind.name, life.folder / f"{kind.name}.sock")

    async def _undecided(self) -> Plan:
        """The machine in the hypervisor's words, and how its guest is contextualized."""
        services, life, image, equipment = self._services, self._life, self._image, self._equipment
        request, machine = life.request, life.request.machine
        if has_usual_way(request, image):
            context = GuestContext(Chosen(Context.RAMDISK, ""), services.images.boot_files(image), image)
        else:  # what other ways take is imported by those who go them
            from belljar.machine.planning.contexts import decide

            context = await decide(request, image, services, self._keep)
        files = context.files
        if request.work.user_data is not None and not (equipment.answers or context.private):
            hint = "Give the machine `--network user` (it finds them at http://169.254.169.254), or `--context cloud-init`."
            raise BadOption(f"image {machine.image}: nothing would bring the user data to the guest", hint=hint)
        boot = Boot(files.kernel, files.initrd, files.append, context.digest, files.firmware, image.is_disc)
        accelerator, why = await in_thread(lambda: services.hypervisor.accelerator(boot))
        life.note(accelerator=accelerator.value, accelerator_reason=why)
        spec, link = self._domain(boot, accelerator, has_seed=context.seed is not None)
        if spec.shares or spec.devices:
            await in_thread(lambda: services.hypervisor.check(spec))
        return Plan(spec, link, context)

    def _domain(self, boot: Boot, accelerator: Accelerator, *, has_seed: bool) -> tuple[DomainSpec, Link]:
        """The request in the hypervisor's words."""
        services, life, image, equipment = self._services, self._life, self._image, self._equipment
        request, machine = life.request, life.request.machine
        link = equipment.joined.link if equipment.joined else plan_link(machine.network, request.id)
        recipe = image.recipe
        uplink = None if recipe is None or recipe.network is NetworkMode.NONE else Nic(recipe.network, "")
        if uplink is not None and link.mode is NetworkMode.NONE:  # it has a card all the same, in no network
            link = replace(link, mac=mac_address(request.id), has_line=True)
        nic = Nic(link.mode, link.mac, link.egress, link.has_line, link.fd) if link.mac else None
        block, cpus = machine.pages.size or LARGE_PAGE, life.placement.cpus
        memory, is_cloned = -(-machine.memory // block) * block, self.must_clone or request.checkpointable
        layout = layout_of(machine.topology, cpus, memory, block, must_clone=is_cloned) if cpus else None
        spec = DomainSpec(
            id=request.id, cpus=machine.cpus, memory=memory, layout=layout, pages=machine.pages.size,
            image_digest=image.digest, image_stored=image.created, boot=boot, disk=life.folders.overlay(request.id),
            disk_size=machine.disk or image.virtual_size, accelerator=accelerator, folder=life.folder,
            nic=nic, shares=machine.shares, owner=qemu_owner(request, services.rules.qemu.user, os.geteuid()),
            disks=equipment.disks, devices=equipment.devices, uplink=uplink, seed=life.folder / SEED if has_seed else None,
        )  # fmt: skip
        return spec, link


def has_usual_way(request: Request, image: Image) -> bool:
    """Is this a machine like most: belljar's ramdisk, in an image that has all it needs?"""
    properties, is_free = image.facts, request.machine.context in (Context.AUTO, Context.RAMDISK)
    has_all = image.kernel is not None and bool(properties.get("agent_in_initrd"))
    return is_free and not properties.get("context") and request.work.has_agent and has_all


def awaited_line(work: Work) -> bytes:
    """What is waited for on the console."""
    return work.ready.of.encode() if isinstance(work, OwnWork) and work.ready.sign is Sign.LINE else b""


def qemu_owner(request: Request, setting: str, euid: int) -> tuple[int, int]:
    """Who QEMU runs as. Only root has a choice: the payload's user, or for root's own payloads one with no rights. With
    root's writable shares QEMU stays root, with the capabilities of their kind alone: files in them are to be root's."""
    if euid != 0:
        return euid, os.getegid()
    if setting in ("", "auto"):
        user = request.work.account
        if user is not None and user.uid != 0:
            return user.uid, user.gid
        if request.machine.shares or request.machine.devices:
            return 0, 0
    return account(setting)
