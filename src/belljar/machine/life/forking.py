"""A fork: a running machine becomes a template, from which other machines go on where it stands. The template has no name, and goes
when nobody holds it any more: first its maker, for whoever asked for it, then the machines that were cloned from it."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from belljar.errors import ForkRefused, GuestError
from belljar.host.locks import locked
from belljar.host.room import Need, own_groups
from belljar.machine.life.claim import room_now
from belljar.machine.life.life import Lifecycle
from belljar.machine.life.work import Running
from belljar.machine.planning.placement import keeps_from_cloning
from belljar.machine.services import Services
from belljar.model import OwnWork, State
from belljar.records import replace

PATIENCE = 10.0  # seconds for the lock of a template that is looked at by a reaper


@contextmanager
def held(life: Lifecycle, services: Services, lock: Path) -> Iterator[None]:
    """The fork of this lock stays as long as this lasts. The last one who holds it removes it, and a reaper for those who died."""
    life.record.intend("template", lock)
    try:
        with locked(lock, timeout=PATIENCE, what="keep a fork", shared=True):
            yield
    finally:
        services.hypervisor.expire_templates(time.time())


async def check(services: Services, life: Lifecycle, running: Running, count: int) -> None:
    """Raises ForkRefused, and NoMemory and its like for so many more machines; TemplateError where nothing can be cloned."""
    machine, work = life.request.machine, life.request.work
    assert services.hypervisor.cloning
    names = ", ".join(disk.name for disk in running.equipment.disks)
    outlasts = life.request.keep or (isinstance(work, OwnWork) and work.reboots)
    uncloned = keeps_from_cloning(running.plan.spec, machine.pages) if running.plan else ""
    refusals = (
        (life.state is not State.RUNNING or running.domain is None, f"it is {life.state.value}, not running"),
        (running.guest is None, "it has no agent of belljar's (`--ready agent`)"),
        (machine.shares, "it has shared folders, which stay its own"),
        (machine.devices, "it has devices of this host, which stay its own"),
        (uncloned, uncloned),
        (life.checkpoint, "it goes on from a checkpoint"),
        (names, f"it has further disks ({names}), which are not copied"),
        (outlasts, "its disk is to outlast it or a reboot, and a fork divides it"),
    )
    for applies, why in refusals:
        if applies:
            raise ForkRefused(f"it cannot be forked: {why}")
    room_now(life.folders, services.rules.host).refuse(
        Need(count * machine.memory, count * machine.cpus, 0, own_groups())
    )
    assert running.guest is not None
    try:
        await running.guest.set_clock()
    except GuestError as error:
        raise ForkRefused(f"it cannot be forked: its agent does not answer: {error.message}") from error


@asynccontextmanager
async def forked(services: Services, life: Lifecycle, running: Running) -> AsyncIterator[str]:
    """The key of the template that this machine becomes, held as long as this lasts. Raises what `Templates.fork` does."""
    assert running.domain is not None and running.spec is not None
    templates, spec = services.hypervisor.cloning, replace(running.spec, fork=os.urandom(8).hex())
    life.record.intend("template", templates.template_draft(spec))
    with held(life, services, templates.template_lock(spec)):
        async with running.forking:
            running.forks += 1
            layer = life.attach("layer", f"layer{running.forks}")
            life.point("fork-begun")
            try:
                template, still = await templates.fork(
                    running.domain, replace(spec, disk=running.spec.disk), layer, life.point
                )
            finally:
                if layer.exists():
                    running.spec = replace(running.spec, disk=layer)
            life.point("fork-made")
        life.record.tell("forked", key=template.key, still=round(still, 4))
        yield template.key
