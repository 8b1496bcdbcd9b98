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
from belljar.errors import CheckpointFailed, GuestError, HypervisorError, MachineBusy, in_words
from belljar.guest import Guest, Process
from belljar.host.files import remove_tree
from belljar.host.locks import Lock
from belljar.host.room import touched
from belljar.host.threads import in_thread, to_its_end, wholly_in_thread
from belljar.hypervisor import Domain
from belljar.machine.checkpoints import DISK, FORMAT, MEMORY, Checkpoint, content, draft_in, publish, seal, take
from belljar.machine.extras.disks import EXCHANGE, check_room
from belljar.machine.life.life import Lifecycle
from belljar.machine.life.work import Running
from belljar.machine.orders import Freeze
from belljar.machine.planning.placement import keeps_from_cloning
from belljar.machine.planning.refusal import cannot_be_frozen
from belljar.machine.services import Services
from belljar.model import SEED, State
from belljar.records import replace


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
    folder, spec = order.folder, plan.spec
    if folder not in running.checkpoints:
        running.checkpoints[folder] = await in_thread(lambda: take(folder), undo=Lock.release)
    disks = [spec.disk, *(disk.path for disk in spec.disks if disk.name != EXCHANGE)]
    memory = touched(domain.pid) + (plan.template.size if plan.template else 0)  # as if nothing of it could be packed
    check_room(folder, memory + sum(os.stat(disk).st_blocks * 512 for disk in disks), "this machine needs up to")
    draft, began = draft_in(folder, life.record.intend), time.monotonic()
    try:
        with life.phase("freeze"):
            standstill = await guest.hold_still(process)
            life.point("freeze-held")
            await domain.pause()
            life.point("freeze-paused")
            left = life.deadline.at
            packer = await content.write_memory(services.hypervisor.cloning, domain, draft / MEMORY)
            life.point("freeze-memory")
            await _write_disks(draft, domain, running, life, services)
            for extra in running.extras:
                await extra.freeze(draft)
            life.point("freeze-disks")
            assert life.identity is not None
            checkpoint = Checkpoint(
                draft, FORMAT, __version__, dict(services.hypervisor.cloning.traits(spec)), plan.context.chosen.context,
                replace(spec, nic=None, uplink=None),
                replace(life.request, restore="", timeout=None if left is None else max(left - time.time(), 1.0)),
                replace(life.identity, entropy=b""), standstill, life.outcome.restarts, packer,
                await in_thread(lambda: seal(draft)),
            )  # fmt: skip
            number = await wholly_in_thread(lambda: publish(checkpoint, life.point))
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


async def _write_disks(draft: Path, domain: Domain, running: Running, life: Lifecycle, services: Services) -> None:
    """What was removed meanwhile, a template or what was put into the image, its QEMU has open."""
    plan, spec = running.plan, running.spec
    assert plan is not None and spec is not None
    between = [plan.template.disk] if plan.template else []
    if plan.context.layer:
        between.append(plan.context.image.disk)
    base = services.images.resolve(life.outcome.image_digest).disk.resolve()
    layers = [content.opened(domain.pid, path) for path in between]
    await content.write_disk(spec.disk, layers, base, draft / DISK)
    for disk in spec.disks:
        if disk.name != EXCHANGE:
            await content.convert(disk.path, "raw", draft / f"{disk.name}.qcow2", "qcow2")
    if spec.seed is not None:
        await content.copy(content.opened(domain.pid, spec.seed), draft / SEED)


async def _thaw(domain: Domain, guest: Guest, process: Process) -> None:
    """What stood still goes on. A guest or QEMU that is lost is reported by others."""
    with suppress(HypervisorError, GuestError):
        await domain.resume()
        await guest.go_on(process)
        await guest.set_clock()
