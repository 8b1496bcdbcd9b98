"""Templates: which one a machine is cloned from, how it is made, and what a clone that failed says of it.

An image is booted once, its guest settles and is frozen; one process at a time for each kind. A machine without a
template of its size is a clone of its image's base template, and the rest is plugged in.
"""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import time
from contextlib import suppress
from pathlib import Path

from belljar import errors
from belljar.guest import Guest, Streams
from belljar.hints import Any
from belljar.host.files import private, read_capped, remove_tree
from belljar.hypervisor import LESS_MEMORY, Domain, DomainEvent, DomainSpec, EventKind, Hypervisor, Template, Templates
from belljar.hypervisor.devices import share_kinds
from belljar.image import Image
from belljar.machine import DOUBTS
from belljar.machine.cleaning.put_away import deadline, last_words
from belljar.machine.life.claim import locking
from belljar.machine.life.life import Lifecycle
from belljar.machine.orders import LAST_WORDS, cancelled, unless_ended
from belljar.machine.planning import GuestContext
from belljar.machine.services import Services
from belljar.model import MIB, Account
from belljar.records import replace

KEPT = 1 << 15  # bytes of the console's end
BASE_MEMORY = 512 * MIB  # of an image that is known to start with it
CAREFUL_MEMORY = 1024 * MIB  # of one that boots its own init: one that needs more than is known of it is not given less
DOUBTS_ENOUGH = 2
# Seconds a boot without success is remembered: the host was busy, or the guest lacks something.
FAILED_FOR, REFUSED_FOR = 3600.0, 7 * 86400.0
REMEMBERED = (errors.BootTimeout, errors.BootFailed, errors.GuestRefused, errors.PrepareFailed)
LONGEST_REASON = 1000


def in_base_frame(spec: DomainSpec, image: Image, templates: Templates, *, has_own_init: bool) -> DomainSpec | None:
    """The machine as a clone of its image's base template; None where there is none of any use to it."""
    if (recipe := image.recipe) is not None:  # always: to prepare it again for each size would be dear
        changes: dict[str, Any] = {"cpus": recipe.cpus}
        memory = recipe.memory
    else:
        # Under a limit on what a process could use (`ulimit -v`, `-d`) whole blocks of memory may be too much.
        limits = (resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA))
        if image.is_disc or any(limit != resource.RLIM_INFINITY for limit in limits):
            return None
        enough = max(BASE_MEMORY, image.facts.get("least_memory", 0))
        memory = max(CAREFUL_MEMORY, enough) if has_own_init else enough
        # An init of the image's own looks after the cards that it finds when it boots.
        changes = {"has_card": has_own_init, "held": memory - enough}
    frame = templates.frame(spec, memory=memory, disk=image.virtual_size)
    return None if frame is None else replace(spec, frame=replace(frame, **changes))


async def make_template(
    services: Services, life: Lifecycle, spec: DomainSpec, context: GuestContext, streams: Streams | None = None
) -> Template:
    """The template for a spec, made by us or by whoever was quicker; *streams*: for what prepares a warm image. Raises BootFailed,
    BootTimeout, PrepareFailed; and TemplateError, LockTimeout, NoSpace, after which the caller boots cold."""
    record, templates, recipe = life.record, services.hypervisor.cloning, context.image.recipe
    path = templates.template_lock(spec)
    record.tell("template-wait", lock=str(path), owner=spec.owner[0])
    began, patience = time.time(), services.rules.qemu.boot_timeout + (recipe.timeout if recipe else 0.0)
    async with locking(path, timeout=patience, what="make this template"):
        if (template := templates.find_template(spec)) is not None:
            return template
        if why := failed_before(path, since=began):  # who had the lock before us
            raise errors.TemplateError(why)
        os.truncate(path, 0)
        record.intend("template", templates.template_draft(spec))
        try:
            try:
                if (adopted := await templates.adopt_template(spec)) is not None:
                    return adopted
            except errors.TemplateError as error:  # what is wrong with the site's is not an obstacle to one of our own
                record.tell("site-template", reason=error.message)
            await templates.prepare_template(spec, context.image.disk)
            return await _boot_and_freeze(services, life, spec, context, streams)
        except BaseException as error:  # re-raised: a cancel leaves no draft either
            if isinstance(error, REMEMBERED):
                until = time.time() + (REFUSED_FOR if isinstance(error, errors.GuestRefused) else FAILED_FOR)
                with suppress(OSError):
                    path.write_bytes(f"{until:.0f} {error.message}".encode()[:LONGEST_REASON])
            with suppress(OSError):  # it is in the journal
                remove_tree(templates.template_draft(spec))
            raise


def failed_before(lock: Path, since: float = 0.0) -> str:
    """Why the last boot for such a template failed; it counts for an hour, or a week if the guest refused."""
    with suppress(OSError, ValueError):
        status = os.stat(lock)
        until, _, reason = read_capped(lock, LONGEST_REASON).decode(errors="replace").partition(" ")
        if status.st_mtime >= since and time.time() < float(until):
            return reason
    return ""


async def _boot_and_freeze(
    services: Services, life: Lifecycle, spec: DomainSpec, context: GuestContext, streams: Streams | None
) -> Template:
    templates, account = services.hypervisor.cloning, life.request.work.account
    recipe, hear = context.image.recipe, None
    if recipe is not None and spec.uplink is not None:
        from belljar.machine.planning.warm import connected

        spec, hear = await connected(services, life, spec, recipe)
    domain = templates.start_template(spec)
    guest = services.make_guest(domain.channel)
    console = bytearray()
    drain = asyncio.ensure_future(_drain(domain.console, console))
    fate = asyncio.ensure_future(_fate_of(domain, drain, console))
    tasks = [drain, fate]
    if hear is not None:
        tasks.append(asyncio.ensure_future(hear(domain.traffic())))
    try:
        what = f"the template's agent to answer (context {context.chosen.context.value})"
        async with deadline(services.rules.qemu.boot_timeout, what):
            await unless_ended(_wake(domain, guest, spec, account), fate)
        if recipe is not None:
            from belljar.machine.planning.warm import prepare

            await prepare(guest, context.image, streams, fate)
        async with deadline(services.rules.qemu.boot_timeout, "the guest to settle"):
            grows = await unless_ended(_settle(guest, spec), fate)
        guest.close()
        fate.cancel()
        life.point("template-settled")
        return await templates.save_template(spec, domain, grows if spec.frame else frozenset())
    finally:
        for task in tasks:
            await cancelled(task)
        guest.close()
        domain.kill()
        with suppress(errors.HypervisorError):
            await asyncio.shield(domain.quit(grace=0.0))
        domain.channel.close()
        domain.console.close()


async def _wake(domain: Domain, guest: Guest, spec: DomainSpec, account: Account | None) -> None:
    """Boot it, with the *account* of whoever is most likely to come again."""
    await domain.connect()
    await guest.greet()
    if account is not None:
        await guest.add_account(account)
    for kind in share_kinds(spec):
        with suppress(errors.GuestRefused):  # an older agent, or a kernel without: the mount will say so
            await guest.prepare_for(kind.filesystem)


async def _settle(guest: Guest, spec: DomainSpec) -> frozenset[str]:
    """Let it settle, without what most clones do not ask for, so that they need not hold it back. What its clones can be given."""
    if spec.frame is not None and spec.frame.held:
        try:
            await guest.grow(spec.frame.cpus, plugged=0, surplus=spec.frame.held, disk=0)
        except errors.GuestRefused:
            return await guest.settle() - {LESS_MEMORY}
    return await guest.settle()


async def _fate_of(domain: Domain, drain: asyncio.Task[None], console: bytearray) -> errors.BelljarError:
    """Why it ended. A guest that gave up by itself and gave its reason on its console would do so again; anything else is
    QEMU's affair."""
    last = DomainEvent(EventKind.EXITED)
    async for event in domain.events():
        last = event
        if event.kind is not EventKind.RESET:
            break
    await asyncio.wait({drain}, timeout=LAST_WORDS)
    if why := last_words(console.decode(errors="replace"), ours_only=True):
        return errors.BootFailed(f"the guest powered itself off before a payload was started: {why}")
    return errors.TemplateError(f"QEMU ended while the template was booted: {last.kind.value} {last.detail}".strip())


async def _drain(line: socket.socket, console: bytearray) -> None:
    """Read the console, for a full pipe would stop the guest; keep the end of it."""
    loop = asyncio.get_running_loop()
    with suppress(OSError):
        while data := await loop.sock_recv(line, 1 << 16):
            console += data
            del console[:-KEPT]


def judge(error: errors.BelljarError, template: Template, spec: DomainSpec, hypervisor: Hypervisor) -> None:
    """Remove the template if a clone's failure is surely its own: others start from it, and it takes minutes to make.
    Silence may be the host's: then only after DOUBTS_ENOUGH in a row, counted in a file that a good clone removes."""
    # From a fork others are about to be cloned, and it goes by itself. Where the image or the host lacks something, the next template
    # would be no better.
    newest = hypervisor.cloning.find_template(spec)
    if spec.fork or isinstance(error, errors.PlugRefused) or (newest and newest.created != template.created):
        return
    if not isinstance(error, (errors.BootTimeout, errors.AgentLost)) or _doubt(template) >= DOUBTS_ENOUGH:
        hypervisor.remove_template(template.key)


def _doubt(template: Template) -> int:
    """How often in a row, this time included."""
    # It may be gone already, or the disk full: the next failure says more.
    with suppress(OSError), open(template.folder / DOUBTS, "ab", opener=private) as file:
        file.write(b".")
        return file.tell()
    return 0
