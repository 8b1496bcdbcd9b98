"""One template per image, for machines of every size: which it is, and the gate before the payload of a clone of it.

A machine for whose exact size there is no template is cloned from the base template of its image, and what it has more is
plugged in. Its payload starts when the guest has all of that in use, or not at all.
"""

from __future__ import annotations

import resource
from dataclasses import replace
from typing import TYPE_CHECKING

from belljar.errors import GuestRefused, PlugRefused
from belljar.guest import Guest
from belljar.hypervisor import DomainSpec, Templates
from belljar.image import Image
from belljar.machine.life.life import Life
from belljar.model import MIB, Context

if TYPE_CHECKING:
    from belljar.machine.planning.contexts import Way

BASE_MEMORY = 512 * MIB  # of an image that is known to start with it
CAREFUL_MEMORY = 1024 * MIB  # of one that boots its own init: one that needs more than is known of it is not given less
BOOKKEEPING = 32  # the guest's kernel takes less than the 32nd part of new memory for itself


def in_base_frame(spec: DomainSpec, image: Image, way: Way | None, templates: Templates) -> DomainSpec | None:
    """The machine as a clone of its image's base template; None where there is none of any use to it."""
    if image.is_disc or (way is not None and way.ssh is not None) or _counts_what_is_never_used():
        return None
    least = image.facts.get("least_memory", 0)
    has_own_init = way is not None and way.chosen.context is not Context.RAMDISK
    usual = CAREFUL_MEMORY if has_own_init else BASE_MEMORY
    memory = max(usual, least) if isinstance(least, int) else usual
    frame = templates.frame(spec, memory=memory, disk=image.virtual_size)
    # An init of the image's own looks after the cards that it finds when it boots.
    return None if frame is None else replace(spec, frame=replace(frame, has_card=has_own_init))


def _counts_what_is_never_used() -> bool:
    """Are we under a limit on what a process could use (`ulimit -v`, `-d`)? Whole blocks of memory may be too much for it."""
    limits = (resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA))
    return any(limit != resource.RLIM_INFINITY for limit in limits)


async def take_all_into_use(guest: Guest, spec: DomainSpec, life: Life) -> None:
    """The gate. Raises PlugRefused: the machine then boots cold."""
    wanted = spec.growth
    if spec.frame is None or not wanted:
        return
    disk = spec.disk_size if spec.disk_size > spec.of_template.disk_size else 0
    try:
        cpus, memory = await guest.grow(spec.cpus, plugged=spec.plugged, surplus=spec.surplus, disk=disk)
    except GuestRefused as error:
        raise PlugRefused(f"the clone did not grow to its size: {error.message}") from error
    least = spec.plugged - spec.plugged // BOOKKEEPING
    if cpus != spec.cpus or memory < least:
        raise PlugRefused(
            f"the clone has {cpus} processors and {memory // MIB} MiB of memory in use,"
            f" and should have {spec.cpus} and more than {least // MIB} MiB"
        )
    life.record.write("grown", by=sorted(wanted), cpus=cpus, memory=memory)
