"""Makes a template: boots an image once, lets the guest settle, freezes it. One process at a time for each kind."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress

from belljar.errors import HypervisorError, LockTimeout, TemplateError
from belljar.guest import Guest
from belljar.host.locks import Lock, locked
from belljar.host.threads import in_thread
from belljar.hypervisor import Domain, DomainEvent, DomainSpec, EventKind, Hypervisor, Template
from belljar.image import Image
from belljar.journal import Record
from belljar.machine.fates import deadline
from belljar.model import Account


class Mould:
    """`make` gives the template for a spec, made by us or by whoever was quicker."""

    def __init__(self, hypervisor: Hypervisor, make_guest: Callable[[socket.socket], Guest], *, timeout: float) -> None:
        self._hypervisor, self._make_guest, self._timeout = hypervisor, make_guest, timeout

    async def make(self, spec: DomainSpec, image: Image, record: Record, account: Account | None) -> Template:
        """Raises TemplateError, BootTimeout, LockTimeout, NoSpace: the caller then boots cold."""
        record.write("template-wait", lock=str(self._hypervisor.template_lock(spec)))
        lock = await self._lock(spec)
        try:
            found = self._hypervisor.find_template(spec)
            if isinstance(found, Template):
                return found
            record.intend("template", self._hypervisor.template_draft(spec))
            self._hypervisor.prepare_template(spec, image.disk)
            return await self._cast(spec, account)
        finally:
            lock.release()

    async def _lock(self, spec: DomainSpec) -> Lock:
        """Wait until nobody else makes this template. Whoever gives up waiting does not get the lock later either."""
        path, given_up = self._hypervisor.template_lock(spec), False

        def take() -> Lock | None:
            with locked(path, timeout=self._timeout, what="make a template") as lock:
                if given_up:
                    return None
                held, lock.descriptor = Lock(path, lock.descriptor), -1
            return held

        try:
            async with asyncio.timeout(self._timeout):
                taken = await in_thread(take)
        except TimeoutError as exc:
            raise LockTimeout(f"another process makes this template for more than {self._timeout:g} s") from exc
        finally:
            given_up = True
        assert taken is not None
        return taken

    async def _cast(self, spec: DomainSpec, account: Account | None) -> Template:
        domain = self._hypervisor.start_template(spec)
        guest = self._make_guest(domain.channel)
        drain = asyncio.ensure_future(_drain(domain.console))
        died = asyncio.ensure_future(_exit_of(domain))
        settling = asyncio.ensure_future(self._settle(domain, guest, account))
        try:
            await asyncio.wait({settling, died}, return_when=asyncio.FIRST_COMPLETED)
            if not settling.done():
                raise TemplateError(f"QEMU ended while the template was booted: {died.result()}")
            await settling
            guest.close()
            died.cancel()
            return await self._hypervisor.save_template(spec, domain)
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

    async def _settle(self, domain: Domain, guest: Guest, account: Account | None) -> None:
        async with deadline(self._timeout, "the template's agent to answer and settle"):
            await domain.connect()
            await guest.greet()
            if account is not None:  # whoever the template is made for is most likely to come again
                await guest.add_account(account)
            await guest.settle()


async def _exit_of(domain: Domain) -> str:
    last = DomainEvent(EventKind.EXITED)
    async for event in domain.events():
        last = event
        if event.kind is not EventKind.RESET:
            break
    return f"{last.kind.value} {last.detail}".strip()


async def _drain(console: socket.socket) -> None:
    """Read the console to nowhere: a full pipe would stop the guest."""
    loop = asyncio.get_running_loop()
    with suppress(OSError):
        while await loop.sock_recv(console, 1 << 16):
            pass
