"""A machine that goes on from a checkpoint: which one, what is asked for then, and its files in their places."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from belljar.errors import CheckpointUnfit, ImageUnknown
from belljar.guest import ExchangeDisk, Guest
from belljar.hints import TYPE_CHECKING
from belljar.host.files import read_capped, write_whole
from belljar.host.threads import wholly_in_thread
from belljar.hypervisor import Boot, DomainSpec, ExtraDisk, Hypervisor
from belljar.image import Image
from belljar.machine.checkpoints import DISK, Checkpoint, Checkpoints, content, take
from belljar.machine.extras import Equipment, Extra
from belljar.machine.extras.disks import EXCHANGE, sparse
from belljar.machine.life.life import Lifecycle
from belljar.model import SEED, Payload, Request, RunPayload
from belljar.records import replace

if TYPE_CHECKING:
    from belljar.image.images import Images

LARGEST_SEED = 1 << 30


class Origin:
    """Where a machine goes on from: the folder, which is its own from now on, the checkpoint where one is whole, and the complaints
    about those that are not."""

    def __init__(self, checkpoints: Checkpoints) -> None:
        self.checkpoints = checkpoints
        self.checkpoint, self.complaints = checkpoints.newest()

    def request(self, asked: Request) -> Request:
        """What the machine is, by its checkpoint; whose it is, and how long it may go on, by the asker."""
        if self.checkpoint is None:
            return asked
        before = self.checkpoint.manifest
        machine, work = replace(before.request.machine, image=before.image), before.request.work
        if isinstance(work, RunPayload) and isinstance(asked.work, RunPayload):  # what comes out may go elsewhere now
            pairs = zip(work.payload.outputs, asked.work.payload.outputs, strict=False)
            outputs = tuple(replace(then, outside=now.outside, skip=now.skip) for then, now in pairs)
            work = replace(work, payload=replace(work.payload, outputs=outputs))
        return replace(asked, machine=machine, work=work)


def find(path: Path, images: Images) -> Origin:
    """In a thread: all of it is read. Raises MachineBusy, CheckpointUnfit, UnsafeFolder, HostError."""
    checkpoints = take(path)
    try:
        origin = Origin(checkpoints)
        if origin.checkpoint is not None:
            _check_image(origin.checkpoint, images)
        return origin
    except BaseException:  # re-raised: nobody else has the lock to release
        checkpoints.release()
        raise


def _check_image(checkpoint: Checkpoint, images: Images) -> None:
    image, name = checkpoint.manifest.image, checkpoint.manifest.request.machine.image
    try:
        images.resolve(image)
    except ImageUnknown as exc:
        hint = "Bring it here, or go on where it is."
        raise CheckpointUnfit(f"{checkpoint.folder}: its image {name} ({image}) is not here", hint=hint) from exc


def boot_of(checkpoint: Checkpoint, image: Image) -> Boot:
    had = checkpoint.manifest.hardware
    return Boot(kernel=image.kernel if had.has_kernel else None, firmware=had.firmware, is_disc=had.is_disc)


def as_it_was(checkpoint: Checkpoint, spec: DomainSpec) -> DomainSpec:
    """The machine with all that it had become."""
    had, nic = checkpoint.manifest.hardware, spec.nic
    return replace(
        spec, cpus=had.cpus, memory=had.memory, disk_size=had.disk_size, frame=had.frame, layout=None,
        nic=replace(nic, mac=checkpoint.manifest.identity.mac) if nic else None,
    )  # fmt: skip


def check(checkpoint: Checkpoint, spec: DomainSpec, boot: Boot, hypervisor: Hypervisor) -> None:
    """Raise CheckpointUnfit where a machine of this host cannot load its state."""
    accelerator = hypervisor.accelerator(boot)[0].value
    if accelerator != spec.accelerator.value:
        raise CheckpointUnfit(f"{checkpoint.folder}: written by {spec.accelerator.value}, this host has {accelerator}")
    then, now = checkpoint.manifest.traits, hypervisor.cloning.traits(spec)
    for name in now:
        if then.get(name) != now[name]:
            was, is_here = (f" {kind[name]}" if len(kind.get(name, "")) < 80 else "" for kind in (then, now))
            raise CheckpointUnfit(f"{checkpoint.folder}: written with another {name}{was} than this host has{is_here}")


async def place(checkpoint: Checkpoint, spec: DomainSpec, base: Path) -> None:
    """Its disk and its disc, for this machine alone."""
    await content.read_disk(checkpoint.folder / DISK, base, spec.disk)
    if spec.owner[0] != os.geteuid():
        os.chown(spec.disk, *spec.owner)
    if (seed := spec.seed) is not None:
        await wholly_in_thread(lambda: write_whole(seed, read_capped(checkpoint.folder / SEED, LARGEST_SEED)))


class RestoredDisks(Extra):
    """What it had beside its own disk."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._exchange = ""

    async def prepare(self, life: Lifecycle, there: Equipment) -> Equipment:
        """Raises NoSpace, CommandFailed."""
        for disk in self._checkpoint.manifest.hardware.disks:
            path = life.attach(disk.name.rstrip("0123456789"), disk.name)
            if disk.has_content:
                await content.read_further_disk(self._checkpoint.folder / f"{disk.name}.qcow2", disk.format, path)
            else:
                sparse(path, disk.size)
                self._exchange = str(path)
            there = there.with_disk(ExtraDisk(disk.name, path, disk.format, disk.readonly, disk.is_late))
        life.point("after-attachments")
        return there

    async def furnish(self, guest: Guest, payload: Payload, devices: Mapping[str, str]) -> None:
        if self._exchange:
            guest.exchange_by(ExchangeDisk(self._exchange, EXCHANGE.encode()))
