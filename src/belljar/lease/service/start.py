"""The service as a process."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterable
from contextlib import AsyncExitStack
from fnmatch import fnmatchcase
from pathlib import Path

from belljar.batch import pilots_of
from belljar.errors import HostError
from belljar.host.credentials.certificates import own_certificate
from belljar.host.files import private_folder, read_secret, write_whole
from belljar.host.locks import try_lock
from belljar.host.service.systemd import serving
from belljar.host.service.telling import Tell
from belljar.host.values import size as size_of
from belljar.lease import Settings, Size
from belljar.lease.belongings import Belongings
from belljar.lease.desk import Desk, Queue
from belljar.lease.ec2.keyring import Keyring
from belljar.lease.ec2.start import front_end
from belljar.lease.policy import Policy
from belljar.lease.service.daemon import Daemon
from belljar.lease.service.door import Door
from belljar.lease.service.jobs import Jobs
from belljar.lease.store import open_store

LOCK, KEY, CERTIFICATE = "lock", "site.key", "service.pem"
Load = Callable[[], tuple[Settings, tuple[Policy, ...]]]


async def serve(load: Load, folder: Path, tell: Tell, images: Callable[[], Iterable[str]] = tuple) -> None:
    """Until TERM or INT; HUP reads policies again. *images*: names of those that are known on this host. Raises HostError where another service works in this folder."""
    lock = try_lock(private_folder(folder) / LOCK)
    if lock is None:
        raise HostError(f"{folder}: another service works here", hint="One service, or each with its own --state.")
    try:
        async with AsyncExitStack() as stack:
            await _serve(load, folder, tell, images, stack)
    finally:
        lock.release()


async def _serve(
    load: Load, folder: Path, tell: Tell, images: Callable[[], Iterable[str]], stack: AsyncExitStack
) -> None:
    settings, policies = load()
    site_key = _site_key(folder / KEY)
    pin = own_certificate(folder / CERTIFICATE, (settings.address, "localhost"))
    store = open_store(settings.database, folder)
    stack.callback(store.close)
    pilots = pilots_of(settings.system)
    jobs = Jobs(settings, pilots, site_key, pin)
    daemon = Daemon(settings, store, jobs, site_key, tell)

    def reload() -> None:
        nonlocal policies
        _, policies = load()
        tell("policies read", count=len(policies))

    desk = Desk(store, settings, lambda: policies, lambda name: Queue(quantum=pilots.quantum))
    may_lease = lambda name: any(fnmatchcase(name, one) for one in settings.images)  # noqa: E731
    sizes, belongings = types(settings), Belongings(store)
    keys = Keyring(belongings, site_key).answer
    door = Door(desk, store, daemon.channel, jobs, sizes, settings.default_time, may_lease, daemon.wake, keys)
    for opening in (
        daemon.channel.serve(settings.listen, settings.port, folder / CERTIFICATE),
        door.serve(settings.door),
    ):
        server = await opening
        stack.callback(server.close)
    tell("lease service started", pid=os.getpid(), address=f"{settings.address}:{settings.port}", door=settings.door)
    works = [daemon.looks()]
    if settings.ec2_listen:
        works.append(front_end(
            settings, desk, belongings, sizes, lambda: policies, site_key=site_key, own_certificate=folder / CERTIFICATE,
            wake=daemon.wake, order=daemon.channel.order, images=images, tell=tell,
        ))  # fmt: skip
    await serving(*works, reload=reload)
    tell("lease service stopped")


def types(settings: Settings) -> dict[str, Size]:
    """`lease.types`. Raises HostError."""
    found = {}
    for name, text in settings.types:
        try:
            cpus, memory, disk = text.split("/")
            found[name] = Size(int(cpus), size_of(memory), size_of(disk))
        except (ValueError, TypeError) as exc:
            raise HostError(f"lease.types: {name} = {text!r}: {exc}", hint='As in small = "1/2G/10G".') from exc
    return found


def _site_key(path: Path) -> bytes:
    """Made where it is missing: who has it can make the key of every lease."""
    if not path.exists():
        write_whole(path, secrets.token_hex(32).encode() + b"\n", durable=True)
    return read_secret(path)
