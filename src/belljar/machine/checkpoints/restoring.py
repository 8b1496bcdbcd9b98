"""A machine that goes on from a checkpoint: which one, what is asked for then, and its files in their places."""

from __future__ import annotations

import os
from pathlib import Path

from belljar.errors import CheckpointUnfit, ImageUnknown
from belljar.hints import TYPE_CHECKING
from belljar.host.files import read_capped, write_whole
from belljar.host.threads import wholly_in_thread
from belljar.hypervisor import DomainSpec, Hypervisor
from belljar.machine.checkpoints import DISK, LARGEST_SEED, Checkpoint, Checkpoints, content, newest, read, take
from belljar.machine.extras import Equipment
from belljar.machine.extras.disks import EXCHANGE, Exchange
from belljar.machine.life.life import Lifecycle
from belljar.model import SEED, Request, RunPayload
from belljar.records import replace

if TYPE_CHECKING:
    from belljar.image.images import Images


def find(path: Path, images: Images) -> Checkpoints:
    """In a thread: all of it is read. Raises MachineBusy, CheckpointUnfit, UnsafeFolder, HostError."""
    checkpoints = take(path)
    try:
        checkpoints.origin, checkpoints.complaints = newest(path, read)
        if (origin := checkpoints.origin) is not None:
            image, name = origin.manifest.spec.image_digest, origin.manifest.request.machine.image
            try:
                images.resolve(image)
            except ImageUnknown as exc:
                hint = "Bring it here, or go on where it is."
                raise CheckpointUnfit(f"{origin.folder}: its image {name} ({image}) is not here", hint=hint) from exc
        return checkpoints
    except BaseException:  # re-raised: nobody else has the lock to release
        checkpoints.release()
        raise


def request_of(checkpoint: Checkpoint | None, asked: Request) -> Request:
    """What the machine is, by its checkpoint; whose it is, and how long it may go on, by who asks."""
    if checkpoint is None:
        return asked
    before = checkpoint.manifest.request
    machine, work = replace(before.machine, image=checkpoint.manifest.spec.image_digest), before.work
    if isinstance(work, RunPayload) and isinstance(asked.work, RunPayload):  # what comes out may go elsewhere now
        pairs = zip(work.payload.outputs, asked.work.payload.outputs, strict=False)
        outputs = tuple(replace(then, outside=now.outside, skip=now.skip) for then, now in pairs)
        work = replace(work, payload=replace(work.payload, outputs=outputs))
    return replace(asked, machine=machine, work=work)


def as_it_was(checkpoint: Checkpoint, spec: DomainSpec) -> DomainSpec:
    """The machine with all that it had become."""
    had, nic = checkpoint.manifest.spec, spec.nic
    return replace(
        spec, cpus=had.cpus, memory=had.memory, disk_size=had.disk_size, frame=had.frame, layout=None,
        nic=replace(nic, mac=checkpoint.manifest.identity.mac) if nic else None,
    )  # fmt: skip


def check(checkpoint: Checkpoint, spec: DomainSpec, hypervisor: Hypervisor) -> None:
    """Raise CheckpointUnfit where a machine of this host cannot load its state."""
    accelerator = hypervisor.accelerator(spec.boot)[0].value
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


class RestoredDisks(Exchange):
    """What it had beside its own disk."""

    def __init__(self, checkpoint: Checkpoint, size: int) -> None:
        super().__init__(size)
        self._checkpoint = checkpoint

    async def prepare(self, life: Lifecycle, there: Equipment) -> Equipment:
        """Raises NoSpace, CommandFailed."""
        for disk in self._checkpoint.manifest.spec.disks:
            if disk.name == EXCHANGE:
                there = await super().prepare(life, there)
                continue
            path = life.attach(disk.name.rstrip("0123456789"), disk.name)
            await content.read_further_disk(self._checkpoint.folder / f"{disk.name}.qcow2", path)
            there = there.with_disk(replace(disk, path=path))
        life.point("after-attachments")
        return there
