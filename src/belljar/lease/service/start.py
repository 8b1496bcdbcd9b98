"""The service as a process."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

from belljar.errors import BelljarError
from belljar.host.files import read_secret, write_whole
from belljar.host.values import size as size_of
from belljar.lease import Settings, Size
from belljar.lease.broker.broker import Broker
from belljar.lease.decisions.policy import Policy
from belljar.lease.desk import Desk
from belljar.lease.ec2 import keyring
from belljar.lease.ec2.front import front_end
from belljar.lease.ec2.office import Office
from belljar.lease.service.daemon import Daemon
from belljar.lease.service.door import Door
from belljar.lease.service.jobs import Jobs
from belljar.lease.store import open_store
from belljar.pool import pilots_of
from belljar.service import kept
from belljar.service.credentials.certificates import own_certificate
from belljar.service.systemd import serving
from belljar.service.telling import Tell

KEY, CERTIFICATE, OLD_PILOTS = "site.key", "service.pem", "legacy.secret"
Load = Callable[[], tuple[Settings, tuple[Policy, ...]]]
# Those that are known on this host, by name: when each was made, and the size of its disk.
Images = Callable[[], Mapping[str, tuple[float, int]]]


async def serve(load: Load, folder: Path, tell: Tell, images: Images = dict) -> None:
    """Until TERM or INT; HUP reads policies again. Raises HostError where another service works in this folder."""
    with kept.alone(folder, "service"):
        async with AsyncExitStack() as stack:
            await _serve(load, folder, tell, images, stack)


async def _serve(load: Load, folder: Path, tell: Tell, images: Images, stack: AsyncExitStack) -> None:
    settings, policies = load()
    site_key = _site_key(folder / KEY)
    pin = own_certificate(folder / CERTIFICATE, (settings.address, "localhost"))
    store = open_store(settings.database, folder)
    stack.callback(store.close)
    jobs = Jobs(settings, pilots_of(settings.system), site_key, pin)
    daemon = Daemon(settings, store, jobs, site_key, tell)

    def reload() -> None:
        nonlocal policies
        try:
            _, policies = load()
        except BelljarError as exc:
            return tell("settings refused", why=exc.message)
        tell("policies read", count=len(policies))

    desk = Desk(store, settings, lambda: policies, jobs.queue, least_disk=lambda name: images().get(name, (0.0, 0))[1])
    sizes, keys = types(settings), partial(keyring.answer, store, site_key)
    door = Door(desk, daemon, jobs, sizes, keys)
    broker = Broker(desk, daemon.channel, door, site_key, tell)
    door.acts["cluster"], daemon.after_look = broker.answer, broker.look
    stack.callback((await daemon.channel.serve(settings.listen, settings.port, folder / CERTIFICATE)).close)
    stack.callback((await door.serve(settings.door)).close)
    if settings.legacy_listen:
        from belljar.lease.service.legacy import Notices

        notices = Notices(settings, _site_key(folder / OLD_PILOTS).decode(), store, daemon.hear, tell)
        await stack.enter_async_context(notices.serve(settings.legacy_listen))
    tell("lease service started", pid=os.getpid(), address=f"{settings.address}:{settings.port}", door=settings.door)
    works = [daemon.looks()]
    if settings.ec2_listen:
        order, console = daemon.channel.order, daemon.channel.console
        known = lambda: {name: made for name, (made, _) in images().items()}  # noqa: E731
        office = Office(desk, settings, sizes, daemon.wake, order, known, console)
        works.append(front_end(office, site_key, folder / CERTIFICATE, tell))
    await serving(*works, reload=reload)
    tell("lease service stopped")


def types(settings: Settings) -> dict[str, Size]:
    """`lease.types`, by name."""
    parts = {name: text.split("/") for name, text in settings.types}
    return {name: Size(int(cpus), size_of(memory), size_of(disk)) for name, (cpus, memory, disk) in parts.items()}


def _site_key(path: Path) -> bytes:
    """Made where it is missing: who has it can make the key of every lease."""
    if not path.exists():
        write_whole(path, secrets.token_hex(32).encode() + b"\n", durable=True)
    return read_secret(path)
