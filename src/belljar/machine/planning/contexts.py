"""How a guest is contextualized if not in the usual way (belljar's ramdisk, see `Planner`): the image's own init, a
disc, a layer.

A layer is an image with the agent put in, for guests that boot by firmware with an init of their own:

    images/layers/<image>-<agent>.qcow2    what the workshop changed; the image below it is never written
    images/layers/<image>-<agent>.lock     held by whoever makes it

Which file it is, is part of a template's key: of one that is made again the files have other times.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from belljar.context import Chosen, Means, choose, cloud_init_seed, user_seed
from belljar.errors import UsageError
from belljar.host.files import no_space_as_error, sync
from belljar.host.quick_imports import sha256
from belljar.host.threads import in_thread
from belljar.hypervisor import guest_uuid
from belljar.image import AGENT_PATH, UNIT_PATH, BootFiles, Image, agent_unit, layer_name
from belljar.machine.life.claim import locking
from belljar.machine.planning import GuestContext
from belljar.machine.services import Keep, Services
from belljar.machine.workshop.workshop import Workshop
from belljar.model import Context, NetworkMode, Request
from belljar.records import replace

OWN = "it knows its own work"
LAYER_PATIENCE = 900.0  # seconds: another process boots a machine and works in it

# Where nobody answers a guest's DHCP requests its own init would wait two minutes for a network (seen with Debian 12 and 13): it has
# none, or the agent gives the card its address.
UNANSWERED = (NetworkMode.NONE, NetworkMode.ISOLATED)
NO_WAITING = "systemd.mask=systemd-networkd-wait-online.service systemd.mask=NetworkManager-wait-online.service"

# How long a boot may take is belljar's to say (`qemu.boot_timeout`). By systemd's own 90 s for a device an emulated guest on a
# host with seven processes for each processor had no /boot/efi yet, and went into emergency mode (seen with Debian 13).
PATIENCE = "systemd.default_timeout_start_sec=3600 systemd.default_device_timeout_sec=3600"


async def decide(request: Request, image: Image, services: Services, keep: Keep) -> GuestContext:
    """How the guest of a request is contextualized. Raises UsageError, ImageError."""
    images = services.images
    work = request.work
    if not work.has_agent:  # its own init, without the agent; a disc brings its user data
        data, id = work.user_data, request.id
        seed = None if data is None else user_seed(data, guest_uuid(id), f"belljar-{id}")
        files = patient(images.boot_files(image, Context.NONE), image)
        return GuestContext(Chosen(Context.NONE, OWN), files, image, seed, private=OWN)
    if image.is_disc:
        problem = "is a disc whose guests know their own work: no command can be run in one"
        hint = "Give it user data with --user-data, and no command."
        raise UsageError(f"image {request.machine.image} {problem}", hint=hint)
    chosen = choose(request.machine.context, means_of(image.facts, image.kernel is not None), request.machine.image)
    files = patient(images.boot_files(image, chosen.context), image)
    grows = (request.machine.disk or 0) > image.virtual_size
    recipe = image.recipe
    network = request.machine.network if recipe is None else recipe.network  # with which it boots
    if files.init and network in UNANSWERED:
        files = replace(files, append=f"{files.append} {NO_WAITING}")
    if chosen.context is Context.CLOUD_INIT:
        python = await in_thread(images.interpreter)
        seed = cloud_init_seed(python, agent_unit(), work.user_data or b"", grows=grows)
        private = "" if work.user_data is None else "it has user data of its own"
        return GuestContext(chosen, files, image, seed, private=private)
    if chosen.context is Context.INJECT and not files.init:
        image, layer = await layer_of(image, services, keep)
        return GuestContext(chosen, files, image, layer=layer)
    return GuestContext(chosen, files, image)


def patient(files: BootFiles, image: Image) -> BootFiles:
    """The same, where an init of the image's own is started directly: it does not give up before belljar does."""
    is_systemd = files.init and image.facts.get("init_system") == "systemd"
    return replace(files, append=f"{files.append} {PATIENCE}") if is_systemd else files


def means_of(properties: Mapping[str, Any], has_kernel: bool) -> Means:
    """What is known of an image, in the words of `choose`."""
    own = properties.get("context") or Context.AUTO.value
    return Means(
        ramdisk=has_kernel and bool(properties.get("agent_in_initrd")),
        init=str(properties.get("init_system") or ""),
        cloud_init=bool(properties.get("cloud_init")),
        agent=bool(properties.get("agent")),
        is_known="cloud_init" in properties,  # the least an import tells of a root it has looked into
        own=Context(own) if own in {each.value for each in Context} else Context.AUTO,
    )


async def layer_of(image: Image, services: Services, keep: Keep) -> tuple[Image, str]:
    """The image with its layer (made if missing), and its digest. Raises ImageError, LockTimeout, NoSpace."""
    path = services.images.work_folder("layers") / f"{layer_name(image)}.qcow2"
    if path.exists():
        return replace(image, disk=path), digest_of(path)
    what = f"Putting the agent into {image.called}, once, in a machine (without KVM this takes minutes)"
    with services.showing(what):
        purpose = f"put the agent into {path.stem:.12}"
        async with locking(path.with_suffix(".lock"), timeout=LAYER_PATIENCE, what=purpose):
            if not path.exists():
                await _make_layer(path, image, services, keep)
    return replace(image, disk=path), digest_of(path)


async def _make_layer(path: Path, image: Image, services: Services, keep: Keep) -> None:
    draft = path.with_suffix(".draft")
    draft.unlink(missing_ok=True)
    try:
        services.overlays.create(draft, image, None)
        default = services.rules.default_image
        await in_thread(lambda: services.images.ensure(default))  # the workshop's may have to be built first
        workshop = Workshop(keep, services.overlays, default)
        agent = await in_thread(services.images.interpreter)
        await workshop.inject(draft, (AGENT_PATH, agent.path), (UNIT_PATH, agent_unit()))
        with no_space_as_error(path):
            draft.chmod(0o400)
            sync(draft)
            draft.rename(path)
    finally:
        draft.unlink(missing_ok=True)


def digest_of(layer: Path) -> str:
    """Of its name and its stamp: nobody writes to it."""
    status = os.stat(layer, follow_symlinks=False)
    return sha256(f"{layer.name} {status.st_size} {status.st_mtime_ns} {status.st_ino}".encode()).hexdigest()
