"""What to start, decided before anything is started: image, accelerator, disk, links, and clone or cold."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from belljar.errors import (
    BelljarError,
    BootTimeout,
    ImpossibleSize,
    NoMemory,
    NotPermitted,
    ShareMissing,
    TemplateError,
)
from belljar.host.threads import in_thread
from belljar.hypervisor import Boot, DomainSpec, Hypervisor, Nic, SharedFolder, Template
from belljar.image import Image, ImageStore, Overlays
from belljar.machine import Settings
from belljar.machine.life import Life
from belljar.machine.mould import Mould
from belljar.model import MIB, NetworkMode, Request, Start
from belljar.network import Link
from belljar.network import plan as plan_link

SMALLEST_MEMORY = 64 * MIB
LARGE_PAGE = 2 * MIB


@dataclass(frozen=True)
class Plan:
    """A start, decided. `reason` says why it is not a clone."""

    spec: DomainSpec
    link: Link
    template: Template | None
    reason: str = ""


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
    ) -> None:
        self._hypervisor, self._images, self._overlays = hypervisor, images, overlays
        self._mould, self._settings, self._qemu_owner = mould, settings, qemu_owner

    def image(self, request: Request) -> Image:
        """The request's image, and the refusals that need nothing else. Raises UsageError or ImageError."""
        check_size(request)
        check_shares(request)
        image = self._images.resolve(request.machine.image)
        self._overlays.size(image, request.machine.disk)
        return image

    async def plan(self, life: Life, image: Image) -> Plan:
        """The start that is wanted and can be had."""
        spec, link = await self._spec(life, image)
        wanted = life.request.machine.start
        if wanted is Start.COLD:
            return await self._with_disk(life, image, Plan(spec, link, None, "asked for"))
        template: Template | str = self._hypervisor.find_template(spec)
        if isinstance(template, str):
            template = await self._make_template(life, image)
        if isinstance(template, str):
            if wanted is Start.CLONE:
                raise TemplateError(f"no clone can be started: {template}")
            return await self._with_disk(life, image, Plan(spec, link, None, template))
        life.record.intend("overlay", spec.disk)
        self._hypervisor.clone_disk(template, spec)
        return Plan(spec, link, template)

    async def template(self, life: Life, image: Image) -> Template:
        """The template for a request, made now where there is none. Raises why it cannot be had."""
        spec, _ = await self._spec(life, image)
        found = self._hypervisor.find_template(spec)
        if isinstance(found, Template):
            return found
        payload = life.request.payload
        with life.phase("template"):
            return await self._mould.make(spec, image, life.record, payload.account if payload else None)

    async def cold(self, life: Life, image: Image, reason: str) -> Plan:
        """A cold start instead of what was planned first."""
        spec, link = await self._spec(life, image)
        return await self._with_disk(life, image, Plan(spec, link, None, reason))

    async def _make_template(self, life: Life, image: Image) -> Template | str:
        """A template made now, by us or by somebody who was before us; or why there is none."""
        try:
            return await self.template(life, image)
        except BootTimeout:
            raise  # this was a cold boot already, with all the time there is: a second one would not answer either
        except BelljarError as error:
            return f"no template could be made: {error.message}"

    async def _with_disk(self, life: Life, image: Image, plan: Plan) -> Plan:
        life.record.intend("overlay", plan.spec.disk)
        size = self._overlays.create(plan.spec.disk, image, life.request.machine.disk)
        if plan.spec.owner[0] != os.geteuid():
            os.chown(plan.spec.disk, *plan.spec.owner)
        return replace(plan, spec=replace(plan.spec, disk_size=size))

    async def _spec(self, life: Life, image: Image) -> tuple[DomainSpec, Link]:
        request = life.request
        files = self._images.boot_files(image)
        boot = Boot(files.kernel, files.initrd, files.append, files.digest)
        accelerator, _ = await in_thread(lambda: self._hypervisor.accelerator(boot))
        link = plan_link(request.machine.network, request.id)
        shares = tuple(
            SharedFolder(f"share{n}", item.source, item.readonly) for n, item in enumerate(request.machine.shares)
        )
        spec = DomainSpec(
            id=request.id, cpus=request.machine.cpus, memory=-(-request.machine.memory // LARGE_PAGE) * LARGE_PAGE,
            image_digest=image.digest, boot=boot, disk=life.folders.overlay(request.id),
            disk_size=request.machine.disk or image.virtual_size, accelerator=accelerator, folder=life.folder,
            nic=None if link.mode is NetworkMode.NONE else Nic(link.mode, link.mac), shares=shares,
            owner=qemu_owner(request, self._qemu_owner, os.geteuid()),
        )  # fmt: skip
        return spec, link


def qemu_owner(request: Request, setting: str, euid: int) -> tuple[int, int]:
    """Who QEMU runs as. Only root has a choice: the payload's user, or for root's own payloads a user with no rights.

    Root's writable shares are the exception: files in them are to be root's, so QEMU stays root there, without
    capabilities but those that 9p needs.
    """
    if euid != 0:
        return euid, os.getegid()
    if setting not in ("", "auto"):
        return _account(setting)
    account = request.payload.account if request.payload is not None else None
    if account is not None and account.uid != 0:
        return account.uid, account.gid
    if request.machine.shares:
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


def check_shares(request: Request) -> None:
    for share in request.machine.shares:
        if not os.path.isdir(share.source):
            what = "is not a folder" if os.path.exists(share.source) else "does not exist"
            raise ShareMissing(f"--share {share.source}: {what}")
        # A site shares /home with all jobs: what each may write to there is for the files' own modes to say.
        is_writer = not share.readonly and request.requester == "cli"
        if not os.access(share.source, os.R_OK | os.X_OK | (os.W_OK if is_writer else 0)):
            raise ShareMissing(
                f"--share {share.source}: uid {os.geteuid()} may not {'write to' if is_writer else 'read'} it"
            )


def host_memory() -> tuple[int, int]:
    """(total, available) bytes of this host."""
    facts = {}
    with open("/proc/meminfo", encoding="ascii") as file:
        for line in file:
            name, _, rest = line.partition(":")
            if name in ("MemTotal", "MemAvailable"):
                facts[name] = int(rest.split()[0]) * 1024
            if len(facts) == 2:
                break
    return facts["MemTotal"], facts["MemAvailable"]


def _account(name: str) -> tuple[int, int]:
    import pwd

    try:
        entry = pwd.getpwnam(name)
    except KeyError:
        raise NotPermitted(
            f"qemu.user = {name!r}: no such user on this host", hint='Create the user, or set `qemu.user = "auto"`.'
        ) from None
    return entry.pw_uid, entry.pw_gid
