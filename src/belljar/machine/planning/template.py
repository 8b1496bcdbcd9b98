"""Makes a template: boots an image once, lets the guest settle, freezes it. One process at a time for each kind."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress

from belljar.errors import AgentLost, BelljarError, BootFailed, GuestRefused, HypervisorError, TemplateError
from belljar.guest import Guest
from belljar.hypervisor import Domain, DomainEvent, DomainSpec, EventKind, Hypervisor, Template, Templates, cloning_of
from belljar.image import Image
from belljar.journal import Record
from belljar.machine.cleaning.put_away import deadline, last_words
from belljar.machine.life.waiting import lock_of
from belljar.model import Account

KEPT = 1 << 15  # bytes of the console's end
LAST_WORDS = 2.0  # seconds for the console's end to arrive after QEMU's


class Mould:
    """`make` gives the template for a spec, made by us or by whoever was quicker."""

    def __init__(self, hypervisor: Hypervisor, make_guest: Callable[[socket.socket], Guest], *, timeout: float) -> None:
        self._hypervisor, self._make_guest, self._timeout = hypervisor, make_guest, timeout

    async def make(
        self,
        spec: DomainSpec,
        image: Image,
        record: Record,
        account: Account | None,
        awaited: str,
        make_guest: Callable[[Domain], Guest] | None = None,
    ) -> Template:
        """Raises BootFailed and BootTimeout, when the guest does not come up; TemplateError, LockTimeout, NoSpace: the
        caller then boots cold. *awaited*: what the boot waits for, in words. *make_guest*: for guests without an agent."""
        templates = cloning_of(self._hypervisor)
        path = templates.template_lock(spec)
        record.tell("template-wait", lock=str(path), owner=spec.owner[0])
        lock = await lock_of(path, timeout=self._timeout, what="make this template")
        try:
            found = templates.find_template(spec)
            if isinstance(found, Template):
                return found
            record.intend("template", templates.template_draft(spec))
            try:
                if (adopted := await self._of_site(templates, spec, record)) is not None:
                    return adopted
                await templates.prepare_template(spec, image.disk)
                return await self._cast(templates, spec, account, awaited, make_guest)
            except BaseException:
                with suppress(OSError):  # it is in the journal
                    templates.abandon_template(spec)
                raise
        finally:
            lock.release()

    @staticmethod
    async def _of_site(templates: Templates, spec: DomainSpec, record: Record) -> Template | None:
        """A copy of the site's, where that can be had: what stands in its way is no reason not to make one."""
        try:
            return await templates.adopt_template(spec)
        except TemplateError as error:
            record.tell("site-template", reason=error.message)
            return None

    async def _cast(
        self,
        templates: Templates,
        spec: DomainSpec,
        account: Account | None,
        awaited: str,
        make_guest: Callable[[Domain], Guest] | None,
    ) -> Template:
        domain = templates.start_template(spec)
        guest = self._make_guest(domain.channel) if make_guest is None else make_guest(domain)
        said = bytearray()
        drain = asyncio.ensure_future(_drain(domain.console, said))
        died = asyncio.ensure_future(_exit_of(domain))
        settling = asyncio.ensure_future(self._settle(domain, guest, account, spec, awaited))
        try:
            await asyncio.wait({settling, died}, return_when=asyncio.FIRST_COMPLETED)
            if settling.done() and isinstance(settling.exception(), AgentLost):
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
            with suppress(HypervisorError):
                await asyncio.shield(domain.quit(grace=0.0))
            domain.channel.close()
            domain.console.close()

    async def _settle(
        self, domain: Domain, guest: Guest, account: Account | None, spec: DomainSpec, awaited: str
    ) -> frozenset[str]:
        async with deadline(self._timeout, awaited):
            await domain.connect()
            await guest.greet()
            if account is not None:  # whoever the template is made for is most likely to come again
                await guest.add_account(account)
            for what in spec.warm:
                with suppress(GuestRefused):  # an older agent, or a kernel without: the mount will say so
                    await guest.prepare_for(what)
            return await guest.settle()


async def _exit_of(domain: Domain) -> DomainEvent:
    last = DomainEvent(EventKind.EXITED)
    async for event in domain.events():
        last = event
        if event.kind is not EventKind.RESET:
            break
    return last


def _complaint(last: DomainEvent, said: bytearray) -> BelljarError:
    """A guest that gave up by itself and said why on its console would do so again; anything else is QEMU's affair."""
    if why := last_words(said.decode(errors="replace"), ours_only=True):
        return BootFailed(f"the guest powered itself off before a payload was started: {why}")
    return TemplateError(f"QEMU ended while the template was booted: {last.kind.value} {last.detail}".strip())


async def _drain(console: socket.socket, said: bytearray) -> None:
    """Read the console, for a full pipe would stop the guest; keep the end of it."""
    loop = asyncio.get_running_loop()
    with suppress(OSError):
        while data := await loop.sock_recv(console, 1 << 16):
            said += data
            del said[:-KEPT]
