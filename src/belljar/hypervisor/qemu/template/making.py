"""Makes a template's files: its disk before the boot, its device state and the rest after it. Nothing here is quick."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Mapping, Set
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from belljar.errors import BelljarError, HostError, NoMemory, TemplateError
from belljar.host.commands import run_beside
from belljar.host.files import private
from belljar.host.threads import wholly_in_thread
from belljar.hypervisor import Template
from belljar.hypervisor.devices.card import UPLINK
from belljar.hypervisor.qemu.abilities import FILE_MIGRATION, Abilities
from belljar.hypervisor.qemu.cmdline import state_address
from belljar.hypervisor.qemu.domain import QemuDomain
from belljar.hypervisor.qemu.template.folders import CLONE, DISK, RAM, STATE, TemplateStore, key_of
from belljar.model import MIB, SEED

QUIT_GRACE = 30.0  # seconds QEMU may take to write what it holds of the disk
OVERLAY_TIMEOUT = 60.0


async def create_overlay(path: Path, base: Path, size: int) -> None:
    """An empty qcow2 disk of *size* bytes on top of another, which is not opened."""
    argv = ["qemu-img", "create", "-q", "-u", "-f", "qcow2", "-F", "qcow2", "-b", str(base), str(path), str(size)]
    await run_beside(argv, timeout=OVERLAY_TIMEOUT)
    os.chmod(path, 0o600)


async def freeze(domain: QemuDomain, state: Path, abilities: Abilities, *, timeout: float) -> None:
    """Stop the guest and write its device state; its memory is in a file already. The domain has ended afterwards. Of the network of a
    preparation nothing is written, so that a clone's card can be in any other."""
    try:
        await domain.connect()
        await domain.pause()
        if domain.has_uplink:
            await domain.call("netdev_del", {"id": UPLINK})
        with open(state, "xb", opener=private) as file:  # noqa: ASYNC230
            name: int | str = STATE
            if FILE_MIGRATION in abilities.features:
                name = (await domain.call("add-fd", fds=[file.fileno()]))["fdset-id"]
            else:
                await domain.call("getfd", {"fdname": STATE}, fds=[file.fileno()])
            await domain.migrate(state_address(name, abilities), timeout=timeout)
        await domain.quit(grace=QUIT_GRACE)
    finally:
        domain.kill()
        await domain.quit(grace=0.0)


async def publish(
    store: TemplateStore, properties: Mapping[str, Any], grows: Set[str], *, ram_is_read: bool, is_open: bool = False
) -> Template:
    """Sync its files, and give the template its name."""
    key = key_of(properties)  # its disk has the name that the folder will have
    await create_overlay(store.draft(key) / CLONE, store.path(key).resolve() / DISK, properties["disk_size"])
    finish = partial(store.publish, key, properties, time.time(), grows=grows, ram_is_read=ram_is_read, is_open=is_open)
    try:
        return await wholly_in_thread(finish)
    except OSError as exc:
        raise TemplateError(f"the template could not be stored: {exc}") from exc


# -- the site's templates serve its users -----------------------------------------------------------------------------

# Mapped as they are where QEMU can read memory that it may not write, copied into the user's own store where it cannot.

OWNER = "owner"  # the one property in which templates of several users differ


def find_for_user(store: TemplateStore, properties: Mapping[str, Any]) -> Template | None:
    """A template of the site with these properties, whoever its QEMU ran as, that is whole and can be read by us."""
    with suppress(OSError):  # root's alone
        for template in store.all():
            if template.grows and {**template.facts, OWNER: None} == {**properties, OWNER: None}:
                with suppress(BelljarError):
                    if store.find(template.key) and os.access(template.folder / RAM, os.R_OK):
                        return template
    return None


def copy(site: TemplateStore, template: Template, draft: Path) -> None:
    """Its files into a draft that has its memory's file already. Raises TemplateError for one that changed meanwhile."""
    try:
        for name in (RAM, STATE, DISK, SEED):
            with suppress(FileNotFoundError), open(template.folder / name, "rb", buffering=0) as original:
                with open(draft / name, "wb", buffering=0, opener=private) as copied:
                    copy_data(original.fileno(), copied.fileno())
        changed = site.changes(template)
    except (OSError, ValueError, KeyError, BelljarError) as exc:
        raise TemplateError(f"the site's template {template.key} cannot be copied: {exc}") from exc
    if changed:
        raise TemplateError(f"the site's template {template.key} changed while it was copied: {changed[0]}")


# -- memory that other processes may map, too: an unnamed file of one machine's own, a clone's a copy of its template's


def make_memory(size: int, source: Path | None) -> int:
    """A descriptor of *size* bytes: zeros, or what is in *source*, a file with holes, and not its holes. It takes as long
    as the bytes are many. Raises NoMemory, HostError, TemplateError."""
    fd = os.memfd_create("belljar-ram", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, size)
        if source is not None:
            with open(source, "rb", buffering=0) as original:
                copy_data(original.fileno(), fd)
    except FileNotFoundError as exc:
        os.close(fd)
        raise TemplateError(f"the template cannot be used any more: {source}: missing") from exc
    except OSError as exc:
        os.close(fd)
        what = f"the guest's memory of {size // MIB} MiB"
        if exc.errno == errno.EFBIG:
            hint = "Raise the limit on the size of files (`ulimit -f`), or share the folders the usual way."
            raise HostError(f"{what} is more than a file may have here", hint=hint) from exc
        raise NoMemory(f"{what} is not available: {exc.strerror or exc}") from exc
    return fd


def copy_data(source: int, target: int) -> None:
    """What is in *source*, and none of its holes."""
    size, end = os.fstat(source).st_size, 0
    os.ftruncate(target, max(size, os.fstat(target).st_size))
    while end < size:
        try:
            at = os.lseek(source, end, os.SEEK_DATA)
        except OSError as exc:
            if exc.errno == errno.ENXIO:
                return  # nothing but a hole until the end
            raise
        end = min(os.lseek(source, at, os.SEEK_HOLE), size)
        os.lseek(target, at, os.SEEK_SET)
        while at < end:
            count = os.sendfile(target, source, at, end - at)
            if count == 0:
                raise OSError(errno.EIO, "it ends before its size")
            at += count
