"""Requests that never become machines: what is refused before anything is made, and the record of it."""

from __future__ import annotations

import os
import time
from contextlib import closing, suppress

from belljar.errors import (
    BadOption,
    BelljarError,
    GuestRefused,
    ImageUnfit,
    NoMemory,
    OverLimit,
    TemplateError,
    UsageError,
    about,
)
from belljar.guest import OTHER_SHARE
from belljar.host.files import private_folder, write_whole
from belljar.host.room import host_memory
from belljar.hypervisor import Hypervisor
from belljar.hypervisor.devices import share_kind
from belljar.image import Image
from belljar.journal import Ledger, Record
from belljar.machine import OUTCOME, REQUEST, SMALLEST_MEMORY, Folders
from belljar.machine.services import Services
from belljar.machine.states import class_of_error
from belljar.model import GIB, MIB, NetworkMode, Outcome, Request, RunPayload, Start, Topology, dumps, to_json

INSTALLED = "Import the disk of a system that was installed; see `belljar image import --help`."
NO_CHECKPOINTS = "Leave out what is in the way, or checkpoints."
MORE = "Ask for more with --memory; a batch job, for more memory."
SMALLEST_SCRATCH, SMALLEST_CACHE, LARGEST_DISK = MIB, 16 * MIB, 4096 * GIB


def checked_image(request: Request, services: Services) -> Image:
    """The request's image, and the refusals that need nothing else. Raises UsageError or ImageError."""
    check_size(request)
    image = services.images.resolve(request.machine.image)
    if image.kernel is None and image.facts.get("firmware") == []:
        problem = "nothing to start in its disk: no kernel, no boot loader"
        raise ImageUnfit(f"image {image.called}: {problem}", hint=INSTALLED)
    check_least(request, image)
    check_shares(request, image)
    if request.checkpointable and (why := cannot_be_frozen(request, services.hypervisor)):
        raise BadOption(f"this machine cannot be written to a folder: {why}", hint=NO_CHECKPOINTS)
    services.overlays.size(image, None if image.is_disc else request.machine.disk)
    return image


def cannot_be_frozen(request: Request, hypervisor: Hypervisor) -> str:
    """Why a machine cannot be written to a folder, and go on from there; "" where it can."""
    machine, work = request.machine, request.work
    reasons = {
        "its guest knows its own work": not isinstance(work, RunPayload),
        "it has a terminal": isinstance(work, RunPayload) and work.payload.terminal,
        "it shares folders of this host (copy them with --in and --out)": machine.shares,
        "it has a cache disk, which other machines change": machine.cache is not None,
        "it has devices of this host": machine.devices,
        "others reach it by its network": machine.network not in (NetworkMode.NONE, NetworkMode.USER),
        "its memory is in reserved pages": machine.pages.size,
        "its guest sees the processors of this host": machine.topology is Topology.HOST,
        "it has secrets, which are this host's": machine.secrets,
    }
    try:
        assert hypervisor.cloning
    except TemplateError:
        return "its hypervisor cannot freeze a guest"
    return next((reason for reason, is_so in reasons.items() if is_so), "")


def check_size(request: Request) -> None:
    """Refuse what this host can never give, and say what it could."""
    machine, (total, available) = request.machine, host_memory()
    size = f"{machine.memory // MIB} MiB of memory"
    if not 1 <= machine.cpus <= (os.cpu_count() or 1):
        raise OverLimit(f"{machine.cpus} cpus: this host has {os.cpu_count()}")
    if machine.memory < SMALLEST_MEMORY:
        raise OverLimit(f"{size}: a machine needs at least {SMALLEST_MEMORY // MIB} MiB", hint=MORE)
    if machine.memory > total:
        raise OverLimit(f"{size}: this host has {total // MIB} MiB")
    if machine.memory > available and not machine.pages.size:
        raise NoMemory(f"{size}: only {available // MIB} MiB are free now")
    for what, disk, least in (("scratch", machine.scratch, SMALLEST_SCRATCH), ("cache", machine.cache, SMALLEST_CACHE)):
        if disk is not None and not least <= disk <= LARGEST_DISK:
            bounds = f"at least {least // MIB} MiB, at most {LARGEST_DISK // GIB} GiB"
            hint = f"Ask for another size with --{what}."
            raise OverLimit(f"a {what} disk of {disk} bytes: {bounds}", hint=hint)


def check_least(request: Request, image: Image) -> None:
    """Refuse less than the image is known to start with (an older one, or one that boots by firmware, does not say), or was prepared
    with; and a cold boot, which has nothing of what a warm image was prepared with."""
    machine, recipe = request.machine, image.recipe
    cpus, memory = (recipe.cpus, recipe.memory) if recipe else (1, image.facts.get("least_memory", 0))
    if recipe is not None and machine.start is Start.COLD:
        hint = f"Leave `--start cold` out, or use the image it was made from: {recipe.base_name}."
        raise BadOption(
            f"the image {machine.image} is warm: a cold boot has nothing of what it was prepared with", hint=hint
        )
    if machine.memory < memory or machine.cpus < cpus:
        least = f"the image {machine.image} needs at least {cpus} cpus and {memory // MIB} MiB"
        hint = f"Ask for --cpus {cpus} --memory {memory // MIB}M; a batch job, for more."
        raise OverLimit(f"{machine.cpus} cpus and {machine.memory // MIB} MiB of memory: {least}", hint=hint)


def check_shares(request: Request, image: Image) -> None:
    """Refuse what cannot be shared, and, before its boot, what the image's kernel cannot mount, where its import found that
    out. Raises UsageError, GuestRefused."""
    kinds = image.facts.get("mounts")
    for share in request.machine.shares:
        # A site shares /home with all jobs: what each may write to there is for the files' own modes to say.
        is_writer, problem = not share.readonly and request.requester == "cli", ""
        if not os.path.isdir(share.source):
            problem = "is not a folder" if os.path.exists(share.source) else "does not exist"
        elif not os.access(share.source, os.R_OK | os.X_OK | (os.W_OK if is_writer else 0)):
            problem = f"uid {os.geteuid()} may not {'write to' if is_writer else 'read'} it"
        if problem:
            hint = "Create the folder, or correct `--share SRC[:DST][:ro|rw]`."
            raise UsageError(f"--share {share.source}: {problem}", hint=hint)
        if isinstance(kinds, list) and (name := share_kind(share.kind).name) not in kinds:
            problem = f"the kernel of the image {image.called} has no {name}"
            raise GuestRefused(f"--share {share.source}: {problem}", hint=OTHER_SHARE)


def put_on_record(error: BelljarError, requester: str, image: str, folders: Folders) -> Outcome:
    """What came of a request that *error* ended before there was a machine. It has an id and is kept with the records of
    machines: its job is found there, and faults of the node are counted."""
    now, id = time.time(), os.urandom(6).hex()
    outcome = Outcome(
        id=id, cause=error.cause, klass=class_of_error(error), reason=error.message, hint=about(error.hint, id),
        error=type(error).__name__, started=now, ended=now, name=requester, image=image, requester=requester,
        uid=os.geteuid(),
    )  # fmt: skip
    request = {"id": id, "name": requester, "requester": requester, "created": now, "machine": {"image": image}}
    with suppress(OSError, BelljarError):
        private_folder(folders.logs)
        folder = private_folder(folders.ended(id))
        with closing(Record(folder)) as record:
            record.write("refused", requester=requester, reason=outcome.reason)
        write_whole(folder / REQUEST, dumps(request))
        write_whole(folder / OUTCOME, dumps(outcome))
        Ledger(folders.logs).append(to_json(outcome), now)
    return outcome
