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
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from belljar import errors
from belljar.guest import Guest
from belljar.host.files import read_capped
from belljar.hypervisor import LESS_MEMORY, Domain, DomainEvent, DomainSpec, EventKind, Hypervisor, Template, Templates
from belljar.image import Image
from belljar.journal import Record
from belljar.machine import DOUBTS
from belljar.machine.cleaning.put_away import deadline, last_words
from belljar.machine.life.claim import lock_of
from belljar.model import MIB, Account
from belljar.records import dataclass, replace

KEPT = 1 << 15  # bytes of the console's end
LAST_WORDS = 2.0  # seconds for the console's end to arrive after QEMU's
BASE_MEMORY = 512 * MIB  # of an image that is known to start with it
CAREFUL_MEMORY = 1024 * MIB  # of one that boots its own init: one that needs more than is known of it is not given less
DOUBTS_ENOUGH = 2
# Seconds a boot without success is remembered: the host was busy, or the guest lacks something.
FAILED_FOR, REFUSED_FOR = 3600.0, 7 * 86400.0
LONGEST_REASON = 1000


def in_base_frame(spec: DomainSpec, image: Image, templates: Templates, *, has_own_init: bool) -> DomainSpec | None:
    """The machine as a clone of its image's base template; None where there is none of any use to it."""
    if image.is_disc or _counts_what_is_never_used():
        return None
    least = image.facts.get("least_memory", 0)
    enough = max(BASE_MEMORY, least) if isinstance(least, int) else BASE_MEMORY
    memory = max(CAREFUL_MEMORY, enough) if has_own_init else enough
    frame = templates.frame(spec, memory=memory, disk=image.virtual_size)
    # An init of the image's own looks after the cards that it finds when it boots.
    return None if frame is None else replace(spec, frame=replace(frame, has_card=has_own_init, held=memory - enough))


def _counts_what_is_never_used() -> bool:
    """Are we under a limit on what a process could use (`ulimit -v`, `-d`)? Whole blocks of memory may be too much for it."""
    limits = (resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA))
    return any(limit != resource.RLIM_INFINITY for limit in limits)


@dataclass(frozen=True)
class Making:
    """How a template's guest is booted and spoken to."""

    disk: Path  # of its image
    make_guest: Callable[[socket.socket], Guest]
    account: Account | None  # made in it: whoever it is made for is most likely to come again
    awaited: str  # what its boot waits for, in words
    timeout: float


async def make_template(hypervisor: Hypervisor, spec: DomainSpec, making: Making, record: Record) -> Template:
    """The template for a spec, made by us or by whoever was quicker. Raises BootFailed, BootTimeout; and TemplateError,
    LockTimeout, NoSpace, after which the caller boots cold."""
    templates = hypervisor.cloning
    path = templates.template_lock(spec)
    record.tell("template-wait", lock=str(path), owner=spec.owner[0])
    began = time.time()
    lock = await lock_of(path, timeout=making.timeout, what="make this template")
    try:
        if (template := templates.find_template(spec)) is not None:
            return template
        if why := failed_before(path, since=began):  # who had the lock before us
            raise errors.TemplateError(why)
        os.truncate(path, 0)
        record.intend("template", templates.template_draft(spec))
        try:
            if (adopted := await _of_site(templates, spec, record)) is not None:
                return adopted
            await templates.prepare_template(spec, making.disk)
            return await _boot_and_freeze(templates, spec, making)
        except BaseException as error:  # re-raised: a cancel leaves no draft either
            if isinstance(error, (errors.BootTimeout, errors.BootFailed, errors.GuestRefused)):
                _remember(path, error)
            with suppress(OSError):  # it is in the journal
                templates.abandon_template(spec)
            raise
    finally:
        lock.release()


def failed_before(lock: Path, since: float = 0.0) -> str:
    """Why the last boot for such a template failed; it counts for an hour, or a week if the guest refused."""
    with suppress(OSError, ValueError):
        facts = os.stat(lock)
        until, _, reason = read_capped(lock, LONGEST_REASON).decode(errors="replace").partition(" ")
        if facts.st_mtime >= since and time.time() < float(until):
            return reason
    return ""


def _remember(lock: Path, error: errors.BelljarError) -> None:
    until = time.time() + (REFUSED_FOR if isinstance(error, errors.GuestRefused) else FAILED_FOR)
    with suppress(OSError, errors.BelljarError):
        lock.write_bytes(f"{until:.0f} {error.message}".encode()[:LONGEST_REASON])


async def _of_site(templates: Templates, spec: DomainSpec, record: Record) -> Template | None:
    """A copy of the site's, where that can be had: what stands in its way is not a reason not to make one."""
    try:
        return await templates.adopt_template(spec)
    except errors.TemplateError as error:
        record.tell("site-template", reason=error.message)
        return None


async def _boot_and_freeze(templates: Templates, spec: DomainSpec, making: Making) -> Template:
    domain = templates.start_template(spec)
    guest = making.make_guest(domain.channel)
    said = bytearray()
    drain = asyncio.ensure_future(_drain(domain.console, said))
    died = asyncio.ensure_future(_exit_of(domain))
    settling = asyncio.ensure_future(_settle(domain, guest, spec, making))
    try:
        await asyncio.wait({settling, died}, return_when=asyncio.FIRST_COMPLETED)
        if settling.done() and isinstance(settling.exception(), errors.AgentLost):
            await asyncio.wait({died}, timeout=LAST_WORDS)  # a channel that breaks is how QEMU's end shows first
        if died.done() and (not settling.done() or settling.exception() is not None):
            await asyncio.wait({drain}, timeout=LAST_WORDS)
            raise _complaint(died.result(), said)
        grows = await settling
        guest.close()
        died.cancel()
        return await templates.save_template(spec, domain, grows if spec.frame else frozenset())
    finally:
        for task in (drain, died, settling):
            task.cancel()
        await asyncio.wait({drain, died, settling})
        guest.close()
        domain.kill()
        with suppress(errors.HypervisorError):
            await asyncio.shield(domain.quit(grace=0.0))
        domain.channel.close()
        domain.console.close()


async def _settle(domain: Domain, guest: Guest, spec: DomainSpec, making: Making) -> frozenset[str]:
    async with deadline(making.timeout, making.awaited):
        await domain.connect()
        await guest.greet()
        if making.account is not None:
            await guest.add_account(making.account)
        for what in spec.warm:
            with suppress(errors.GuestRefused):  # an older agent, or a kernel without: the mount will say so
                await guest.prepare_for(what)
        return await _settled(guest, spec)


async def _settled(guest: Guest, spec: DomainSpec) -> frozenset[str]:
    """Hold back what most clones do not ask for, so that they need not, and settle. What its clones can be given."""
    if spec.frame is None or not spec.frame.held:
        return await guest.settle()
    try:
        await guest.grow(spec.frame.cpus, plugged=0, surplus=spec.frame.held, disk=0)
    except errors.GuestRefused:
        return await guest.settle() - {LESS_MEMORY}
    return await guest.settle()


async def _exit_of(domain: Domain) -> DomainEvent:
    last = DomainEvent(EventKind.EXITED)
    async for event in domain.events():
        last = event
        if event.kind is not EventKind.RESET:
            break
    return last


def _complaint(last: DomainEvent, said: bytearray) -> errors.BelljarError:
    """A guest that gave up by itself and said why on its console would do so again; anything else is QEMU's affair."""
    if why := last_words(said.decode(errors="replace"), ours_only=True):
        return errors.BootFailed(f"the guest powered itself off before a payload was started: {why}")
    return errors.TemplateError(f"QEMU ended while the template was booted: {last.kind.value} {last.detail}".strip())


async def _drain(console: socket.socket, said: bytearray) -> None:
    """Read the console, for a full pipe would stop the guest; keep the end of it."""
    loop = asyncio.get_running_loop()
    with suppress(OSError):
        while data := await loop.sock_recv(console, 1 << 16):
            said += data
            del said[:-KEPT]


def judge(error: errors.BelljarError, template: Template, spec: DomainSpec, hypervisor: Hypervisor) -> None:
    """Remove the template if a clone's failure is surely its own: others start from it, and it takes minutes to make.
    Silence may be the host's: then only after DOUBTS_ENOUGH in a row, counted in a file that a good clone removes."""
    newest = hypervisor.cloning.find_template(spec)
    if newest is not None and newest.created != template.created:
        return
    if isinstance(error, (errors.HostKeysRefused, errors.PlugRefused)):
        return  # the image lacks something, or the host; the next template would be no better
    if not isinstance(error, (errors.BootTimeout, errors.AgentLost)) or _doubt(template) >= DOUBTS_ENOUGH:
        hypervisor.remove_template(template.key)


def _doubt(template: Template) -> int:
    """How often in a row, this time included."""
    with suppress(OSError):  # it is gone already, or the disk is full: the next failure says more
        descriptor = os.open(template.folder / DOUBTS, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, b".")
            return os.fstat(descriptor).st_size
        finally:
            os.close(descriptor)
    return 0
