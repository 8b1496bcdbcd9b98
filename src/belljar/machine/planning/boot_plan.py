"""What to start, decided before anything is started: image, accelerator, disk, links, and clone or cold."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from belljar.errors import (
    BadUserData,
    BelljarError,
    BootFailed,
    BootTimeout,
    GuestRefused,
    ImpossibleSize,
    NoMemory,
    NoNineP,
    NotPermitted,
    NoVirtiofs,
    ShareMissing,
    TemplateError,
)
from belljar.host.room import host_memory
from belljar.host.threads import in_thread
from belljar.hypervisor import Boot, DomainSpec, Hypervisor, Nic, SharedFolder, Template, cloning_of
from belljar.image import Image, ImageStore, Overlays
from belljar.machine import SEED, SMALLEST_MEMORY, VIRTIOFS_SOCKET, Settings
from belljar.machine.extras.shares import has_nfs, has_virtiofs, host_folders, no_way_to_the_server, warm_for
from belljar.machine.life.life import Life
from belljar.machine.life.waiting import Showing, in_silence
from belljar.machine.planning.sizes import in_base_frame
from belljar.machine.planning.template import Mould
from belljar.model import GIB, MIB, Context, NetworkMode, OwnWork, Request, ShareKind, Sign, Start, Work
from belljar.network import Link
from belljar.network import plan as plan_link

if TYPE_CHECKING:
    from belljar.machine.planning.contexts import Way
    from belljar.machine.planning.layers import Layers
    from belljar.machine.planning.ssh import SshHouse

LARGE_PAGE = 2 * MIB
SMALLEST_SCRATCH, LARGEST_SCRATCH = MIB, 4096 * GIB


@dataclass(frozen=True)
class Plan:
    """A start, decided. `reason` says why it is not a clone."""

    spec: DomainSpec
    link: Link
    template: Template | None
    reason: str = ""
    way: Way | None = None  # None: belljar's ramdisk, as usual

    @property
    def context(self) -> tuple[Context, str]:
        """How the guest is contextualized, and why so where that was a question."""
        return (Context.RAMDISK, "") if self.way is None else (self.way.chosen.context, self.way.chosen.reason)

    @property
    def awaited(self) -> str:
        """What its boot waits for, for a person who waited in vain."""
        if self.template is not None or self.way is None:
            return f"the {'clone' if self.template else 'guest'}'s agent to answer"
        return self.way.awaited


class Planner:
    """Turns a request into a Plan and puts the disk in its place."""

    def __init__(
        self,
        *,
        hypervisor: Hypervisor,
        images: ImageStore,
        overlays: Overlays,
        mould: Mould,
        settings: Settings,
        qemu_owner: str,
        layers: Callable[[], Layers],
        ssh: Callable[[], SshHouse] | None = None,
        showing: Showing = in_silence,
    ) -> None:
        self._ssh, self._showing = ssh, showing
        self._hypervisor, self._images, self._overlays = hypervisor, images, overlays
        self._mould, self._settings, self._qemu_owner = mould, settings, qemu_owner
        self._layers = layers

    def image(self, request: Request) -> Image:
        """The request's image, and the refusals that need nothing else. Raises UsageError or ImageError."""
        check_size(request)
        check_scratch(request)
        check_shares(request)
        image = self._images.resolve(request.machine.image)
        check_memory(request, image)
        check_mounts(request, image)
        self._overlays.size(image, None if image.is_disc else request.machine.disk)
        return image

    async def plan(self, life: Life, image: Image) -> Plan:
        """The start that is wanted and can be had."""
        spec, link, way = await self._spec(life, image)
        wanted = life.request.machine.start
        if wanted is Start.COLD:
            return await self._with_disk(life, image, Plan(spec, link, None, "asked for", way))
        private = (way.private if way is not None else "") or why_never_a_clone(life.request.work)
        if not private and isinstance(self._hypervisor.cloning, str):
            private = self._hypervisor.cloning
        if private:
            if wanted is Start.CLONE:
                raise TemplateError(f"no clone can be started: {private}")
            return await self._with_disk(life, image, Plan(spec, link, None, private, way))
        if way is not None and way.ssh is not None and way.ssh.never_cloned:
            template = cloning_of(self._hypervisor).find_template(spec)
            template = way.ssh.never_cloned if isinstance(template, str) else template
        else:
            spec, template = await self._template_for(life, spec, image, way)
        if isinstance(template, str):
            if wanted is Start.CLONE:
                raise TemplateError(f"no clone can be started: {template}")
            return await self._with_disk(life, image, Plan(spec, link, None, template, way))
        self._overlays.check_room(spec.disk.parent)
        self._intend(life, spec)
        if way is not None and way.ssh is not None and spec.nic is not None:
            from belljar.machine.planning.ssh import card_of_clone

            spec = replace(spec, nic=card_of_clone(spec.nic, link))
        cloning_of(self._hypervisor).clone_disk(template, spec)
        return Plan(spec, link, template, way=way)

    async def template(self, life: Life, image: Image) -> Template:
        """The template of exactly this size, made now where there is none. Raises why it cannot be had."""
        spec, _, way = await self._spec(life, image)
        found = cloning_of(self._hypervisor).find_template(spec)
        return found if isinstance(found, Template) else await self._make(life, spec, image, way)

    async def _template_for(
        self, life: Life, spec: DomainSpec, image: Image, way: Way | None
    ) -> tuple[DomainSpec, Template | str]:
        """One of exactly this size, if it is there; else the image's base template, made where it is missing, with the
        machine as a clone of it; else one of this size, made now; or why there is none."""
        found = cloning_of(self._hypervisor).find_template(spec)
        if isinstance(found, Template):
            return spec, found
        framed = in_base_frame(spec, image, way, cloning_of(self._hypervisor))
        if framed is not None:
            base = await self._base_template(life, framed, image, way)
            if isinstance(base, str):
                return spec, base
            if base is not None and framed.growth <= base.grows:
                return framed, base
        return spec, await self._make_template(life, spec, image, way)

    async def _base_template(
        self, life: Life, framed: DomainSpec, image: Image, way: Way | None
    ) -> Template | str | None:
        """Found or made; or why not; None where the machine may yet boot, for it has more memory."""
        found = cloning_of(self._hypervisor).find_template(framed)
        try:
            return await self._make_template(life, framed, image, way) if isinstance(found, str) else found
        except (BootTimeout, BootFailed):
            if framed.of_template.memory >= framed.memory:
                raise
            return None

    async def _make(self, life: Life, spec: DomainSpec, image: Image, way: Way | None) -> Template:
        with life.phase("template"):
            if way is not None:
                way.make_seed(spec)
            awaited = "the template's agent to answer" if way is None else way.awaited
            image = image if way is None else way.image
            account, make_guest = life.request.work.account, None
            if way is not None and way.ssh is not None:
                make_guest = way.ssh.guest(life, is_draft=True)
            what = f"Making a template of {life.request.machine.image}, once"
            try:
                with self._showing(what, spec.image_digest):
                    return await self._mould.make(spec, image, life.record, account, awaited, make_guest)
            except GuestRefused as error:
                if way is not None and way.ssh is not None:
                    way.ssh.remember(error)
                raise

    async def cold(self, life: Life, image: Image, reason: str) -> Plan:
        """A cold start instead of what was planned first."""
        spec, link, way = await self._spec(life, image)
        return await self._with_disk(life, image, Plan(spec, link, None, reason, way))

    async def _make_template(self, life: Life, spec: DomainSpec, image: Image, way: Way | None) -> Template | str:
        """A template made now, by us or by somebody who was before us; or why there is none."""
        try:
            return await self._make(life, spec, image, way)
        except (BootTimeout, BootFailed):
            raise  # this was a cold boot already, with all the time there is: a second one would not answer either
        except BelljarError as error:
            return f"no template could be made: {error.message}"

    async def _with_disk(self, life: Life, image: Image, plan: Plan) -> Plan:
        self._intend(life, plan.spec)
        if plan.way is not None:
            plan.way.make_seed(plan.spec)
            image = plan.way.image
        size = self._overlays.create(plan.spec.disk, image, None if image.is_disc else life.request.machine.disk)
        if plan.spec.owner[0] != os.geteuid():
            os.chown(plan.spec.disk, *plan.spec.owner)
        return replace(plan, spec=replace(plan.spec, disk_size=size))

    def _intend(self, life: Life, spec: DomainSpec) -> None:
        """What is made for this start beside QEMU, which finds its processes by the machine's id."""
        life.record.intend("overlay", spec.disk)
        if has_virtiofs(life.request.machine):
            life.record.intend("virtiofsd", life.folder / VIRTIOFS_SOCKET)

    async def _spec(self, life: Life, image: Image) -> tuple[DomainSpec, Link, Way | None]:
        request = life.request
        way = None if has_usual_way(request, image) else await self._way(request, image)
        files = self._images.boot_files(image) if way is None else way.files
        digest = files.digest if way is None else way.digest
        if request.work.user_data is not None and not (life.answers or (way is not None and way.private)):
            raise no_way_for_user_data(request)
        initrd = files.initrd if way is None else way.ramdisk(life.folder)
        boot = Boot(files.kernel, initrd, files.append, digest, files.firmware, image.is_disc)
        shared = replace(boot, initrd=files.initrd)  # a ramdisk of the machine's own is not there yet
        accelerator, why = await in_thread(lambda: self._hypervisor.accelerator(shared))
        life.note(accelerator=accelerator.value, accelerator_reason=why)
        link = life.joined.link if life.joined else plan_link(request.machine.network, request.id)
        nic = nic_of(link) if way is None or way.ssh is None else way.ssh.card(link)
        if isinstance(request.work, OwnWork):
            from belljar.machine.life.own_work import with_port

            nic = with_port(nic, request.work)
        folders = host_folders(request.machine)
        shares = tuple(SharedFolder(tag, item.source, item.readonly, item.kind) for tag, item in folders)
        spec = DomainSpec(
            id=request.id, cpus=request.machine.cpus, memory=-(-request.machine.memory // LARGE_PAGE) * LARGE_PAGE,
            image_digest=image.digest, image_stored=image.created, boot=boot, disk=life.folders.overlay(request.id),
            disk_size=request.machine.disk or image.virtual_size, accelerator=accelerator, folder=life.folder,
            nic=nic, shares=shares,
            owner=qemu_owner(request, self._qemu_owner, os.geteuid()),
            warm=warm_for(request.machine), disks=life.disks,
            seed=life.folder / SEED if way is not None and way.seed is not None else None,
        )  # fmt: skip
        if has_virtiofs(request.machine):
            self._hypervisor.check(spec)
        return spec, link, way

    async def _way(self, request: Request, image: Image) -> Way:
        """Imported only by those who leave the usual way."""
        from belljar.machine.planning.contexts import decide

        return await decide(request, image, self._images, self._layers, self._ssh)


def nic_of(link: Link) -> Nic | None:
    """The card of a link, in the hypervisor's words."""
    if link.mode is NetworkMode.NONE:
        return None
    return Nic(link.mode, link.mac, link.egress, link.has_line, link.fd)


def why_never_a_clone(work: Work) -> str:
    """Why a guest with this work can be no clone; "": it can."""
    is_by_line = isinstance(work, OwnWork) and work.ready.sign is Sign.LINE
    return "it is awaited by a line on its console, which a clone's template has written" if is_by_line else ""


def has_usual_way(request: Request, image: Image) -> bool:
    """Is this a machine like most: belljar's ramdisk, in an image that has all it needs?"""
    facts = image.facts
    wanted = request.machine.context in (Context.AUTO, Context.RAMDISK) and not facts.get("context")
    wanted = wanted and request.work.has_agent
    return wanted and image.kernel is not None and bool(facts.get("agent_in_initrd") and facts.get("python"))


def no_way_for_user_data(request: Request) -> BadUserData:
    return BadUserData(
        f"image {request.machine.image}: nothing would bring the user data to the guest",
        hint="Give the machine `--network user`, where it finds them at http://169.254.169.254, or `--context cloud-init`.",
    )


def qemu_owner(request: Request, setting: str, euid: int) -> tuple[int, int]:
    """Who QEMU runs as. Only root has a choice: the payload's user, or for root's own payloads a user with no rights.

    Root's writable shares are the exception: files in them are to be root's, so QEMU stays root there, without
    capabilities but those that 9p needs.
    """
    if euid != 0:
        return euid, os.getegid()
    if setting not in ("", "auto"):
        return _account(setting)
    account = request.work.account
    if account is not None and account.uid != 0:
        return account.uid, account.gid
    if host_folders(request.machine):
        return 0, 0
    try:
        return _account("belljar")
    except NotPermitted:
        return _account("nobody")


def check_size(request: Request) -> None:
    """Refuse what this host can never give, and say what it could."""
    machine = request.machine
    if not 1 <= machine.cpus <= (os.cpu_count() or 1):
        raise ImpossibleSize(f"{machine.cpus} cpus: this host has {os.cpu_count()}")
    if machine.memory < SMALLEST_MEMORY:
        raise ImpossibleSize(
            f"{machine.memory} bytes of memory: a machine needs at least {SMALLEST_MEMORY // MIB} MiB",
            hint="Ask for more with --memory.",
        )
    total, available = host_memory()
    if machine.memory > total:
        raise ImpossibleSize(f"{machine.memory // MIB} MiB of memory: this host has {total // MIB} MiB")
    if machine.memory > available:
        raise NoMemory(f"{machine.memory // MIB} MiB of memory: only {available // MIB} MiB are free now")


def check_memory(request: Request, image: Image) -> None:
    """Refuse what the image is known not to start with. Of an older image, or one that boots by firmware, it is not known."""
    least = image.facts.get("least_memory", 0)
    if isinstance(least, int) and request.machine.memory < least:
        raise ImpossibleSize(
            f"{request.machine.memory // MIB} MiB of memory: the image {request.machine.image} does not start with less than"
            f" {least // MIB} MiB",
            hint="Ask for more with --memory; a batch job, for more memory.",
        )


def check_scratch(request: Request) -> None:
    size = request.machine.scratch
    if size is not None and not SMALLEST_SCRATCH <= size <= LARGEST_SCRATCH:
        raise ImpossibleSize(
            f"a scratch disk of {size} bytes: at least {SMALLEST_SCRATCH // MIB} MiB, at most {LARGEST_SCRATCH // GIB} GiB",
            hint="Ask for another size with --scratch.",
        )


def check_shares(request: Request) -> None:
    if has_nfs(request.machine) and request.machine.network is NetworkMode.NONE:
        raise no_way_to_the_server(request)
    for _, share in host_folders(request.machine):
        if not os.path.isdir(share.source):
            what = "is not a folder" if os.path.exists(share.source) else "does not exist"
            raise ShareMissing(f"--share {share.source}: {what}")
        # A site shares /home with all jobs: what each may write to there is for the files' own modes to say.
        is_writer = not share.readonly and request.requester == "cli"
        if not os.access(share.source, os.R_OK | os.X_OK | (os.W_OK if is_writer else 0)):
            raise ShareMissing(
                f"--share {share.source}: uid {os.geteuid()} may not {'write to' if is_writer else 'read'} it"
            )


def check_mounts(request: Request, image: Image) -> None:
    """Refuse before its boot what the image's kernel cannot mount, where its import found that out. Raises NoNineP, NoVirtiofs."""
    known = image.facts.get("mounts")
    if not isinstance(known, list):
        return
    for _, share in host_folders(request.machine):
        if share.kind.value not in known:
            kind = NoVirtiofs if share.kind is ShareKind.VIRTIOFS else NoNineP
            raise kind(f"--share {share.source}: the kernel of the image {image.called} has no {share.kind.value}")


def _account(name: str) -> tuple[int, int]:
    import pwd

    try:
        entry = pwd.getpwnam(name)
    except KeyError:
        raise NotPermitted(
            f"qemu.user = {name!r}: no such user on this host", hint='Create the user, or set `qemu.user = "auto"`.'
        ) from None
    return entry.pw_uid, entry.pw_gid
