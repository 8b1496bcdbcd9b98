"""Writes a running machine to a folder: its payload is held still, the guest is halted, memory and disks are written.

Whatever goes wrong, or takes longer than it may, the machine goes on as if nothing had been, and nothing of it is left.
"""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import suppress
from pathlib import Path

from belljar import __version__
from belljar.errors import CheckpointFailed, GuestError, HypervisorError, MachineBusy, NoSpace, in_words
from belljar.guest import Guest, Process
from belljar.host.files import free_bytes, no_space_as_error, read_capped, remove_tree, write_whole
from belljar.host.room import touched
from belljar.host.threads import in_thread, to_its_end, wholly_in_thread
from belljar.hypervisor import Domain
from belljar.machine.checkpoints import (
    DISK,
    FORMAT,
    LARGEST_SEED,
    MEMORY,
    Checkpoints,
    Manifest,
    Part,
    content,
    take,
    write_manifest,
)
from belljar.machine.extras.disks import EXCHANGE
from belljar.machine.life.life import Lifecycle
from belljar.machine.life.work import Running
from belljar.machine.orders import Freeze
from belljar.machine.planning.boot_plan import Plan
from belljar.machine.planning.placement import keeps_from_cloning
from belljar.machine.planning.refusal import cannot_be_frozen
from belljar.machine.services import Services
from belljar.model import MIB, SEED, State
from belljar.records import replace

LEAST_ROOM = 16 * MIB


async def freeze(order: Freeze, life: Lifecycle, running: Running, services: Services) -> int:
    """The new checkpoint's number. Raises BelljarError."""
    try:
        async with asyncio.timeout(order.within):
            return await _freeze(order, life, running, services)
    except TimeoutError as exc:
        raise CheckpointFailed(f"not written within {order.within:g} s") from exc
    except OSError as exc:
        raise CheckpointFailed(f"not written: {in_words(exc)}") from exc


async def _freeze(order: Freeze, life: Lifecycle, running: Running, services: Services) -> int:
    plan, domain, guest, process = running.plan, running.domain, running.guest, running.process
    if life.state is not State.RUNNING or plan is None or domain is None or guest is None or process is None:
        raise MachineBusy(f"{life.request.id}: its command does not run now, so it cannot be written to a folder")
    is_divided = running.forks or life.request.machine.fork
    why = "it is a fork, or was forked" if is_divided else cannot_be_frozen(life.request, services.hypervisor)
    if why := why or keeps_from_cloning(plan.spec):
        raise CheckpointFailed(f"{life.request.id} cannot be written to a folder: {why}")
    folder = order.folder
    if folder not in running.checkpoints:
        running.checkpoints[folder] = await in_thread(lambda: take(folder), undo=Checkpoints.release)
    checkpoints, before = running.checkpoints[folder], running.checkpoint
    _check_room(folder, domain, plan)
    with no_space_as_error(folder):
        draft = checkpoints.draft(life.record.intend)

    def publish() -> int:
        write_manifest(draft, manifest)
        life.point("freeze-manifest")
        return checkpoints.publish(draft)

    began = time.monotonic()
    try:
        with life.phase("freeze"):
            standstill = await guest.hold_still(process)
            life.point("freeze-held")
            await domain.pause()
            life.point("freeze-paused")
            packer = content.packer()
            files = await _write(draft, domain, plan, life, services, packer)
            assert life.identity is not None
            manifest = Manifest(
                FORMAT, __version__, time.time(), dict(services.hypervisor.cloning.traits(plan.spec)),
                plan.context.chosen.context, replace(plan.spec, nic=None, uplink=None), replace(life.request, restore=""),
                replace(life.identity, entropy=b""), standstill, life.outcome.restarts,
                (before.manifest.ran if before else 0.0) + time.time() - life.time_began, packer, files,
            )  # fmt: skip
            number = await wholly_in_thread(publish)
            life.point("freeze-published")
    except BaseException as error:  # re-raised: a cancel leaves no draft, and no guest that stands still
        await to_its_end(asyncio.ensure_future(_thaw(domain, guest, process)))
        with suppress(OSError):
            remove_tree(draft)
        life.record.tell("checkpoint-failed", folder=str(folder), reason=str(error) or type(error).__name__)
        raise
    if not order.stop:
        await _thaw(domain, guest, process)
    life.record.tell("checkpoint", folder=str(folder), number=number, seconds=round(time.monotonic() - began, 3))
    return number


async def _write(
    draft: Path, domain: Domain, plan: Plan, life: Lifecycle, services: Services, packer: str
) -> dict[str, Part]:
    """The large files. What was removed meanwhile, a template or what was put into the image, its QEMU has open."""
    spec, template = plan.spec, plan.template
    files = {MEMORY: await content.write_memory(services.hypervisor.cloning, domain, draft / MEMORY, packer)}
    life.point("freeze-memory")
    base = services.images.resolve(life.outcome.image_digest).disk.resolve()
    between = [template.disk] if template else []
    if plan.context.layer:
        between.append(plan.context.image.disk)
    layers = [content.opened(domain.pid, path) for path in between]
    files[DISK] = await content.write_disk(spec.disk, layers, base, draft / DISK)
    for disk in spec.disks:
        if disk.name != EXCHANGE:
            name = f"{disk.name}.qcow2"
            files[name] = await content.write_further_disk(disk.path, draft / name)
    if spec.seed is not None:
        seed = content.opened(domain.pid, template.folder / SEED) if template else spec.seed
        await wholly_in_thread(lambda: write_whole(draft / SEED, read_capped(seed, LARGEST_SEED)))
        files[SEED] = await content.sealed(draft / SEED)
    life.point("freeze-disks")
    return files


async def _thaw(domain: Domain, guest: Guest, process: Process) -> None:
    """What stood still goes on. A guest or QEMU that is lost is reported by others."""
    with suppress(HypervisorError, GuestError):
        await domain.resume()
        await guest.go_on(process)
        await guest.set_clock()


def _check_room(folder: Path, domain: Domain, plan: Plan) -> None:
    """Raise NoSpace where not even all of it unpacked surely fits: before anything stands still."""
    memory = touched(domain.pid) + (plan.template.size if plan.template else 0)
    disks = [plan.spec.disk, *(disk.path for disk in plan.spec.disks if disk.name != EXCHANGE)]
    needed = memory + sum(os.stat(disk).st_blocks * 512 for disk in disks) + LEAST_ROOM
    if (free := free_bytes(folder)) < needed:
        problem = f"{folder}: {free // MIB} MiB free, this machine needs up to {needed // MIB} MiB"
        raise NoSpace(problem, hint="Free space there, or name another folder.")
