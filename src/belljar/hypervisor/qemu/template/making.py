"""Makes a template's files: its disk before the boot, its device state and the rest after it. Nothing here is quick."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Set
from functools import partial
from pathlib import Path
from typing import Any

from belljar.errors import BelljarError, HypervisorError, TemplateError
from belljar.host.commands import run_beside
from belljar.host.files import no_space_as_error, read_capped, write_whole
from belljar.host.threads import wholly_in_thread
from belljar.hypervisor import DomainSpec, Template
from belljar.hypervisor.qemu.abilities import FILE_MIGRATION, Abilities
from belljar.hypervisor.qemu.cmdline import STATE_SET, state_address
from belljar.hypervisor.qemu.domain import QemuDomain
from belljar.hypervisor.qemu.template.folders import CLONE, DISK, STATE, TemplateStore

CAPABILITIES = ("events", "x-ignore-shared")  # tell us when it is done; leave the memory in its file
QUIT_GRACE = 30.0  # seconds QEMU may take to write what it holds of the disk
OVERLAY_TIMEOUT = 60.0
LARGEST_SEED = 1 << 30


async def make_overlay(path: Path, base: Path, size: int) -> None:
    """An empty qcow2 disk of *size* bytes on top of *base*, which is no link."""
    argv = [
        "qemu-img",
        "create",
        "-q",
        "-f",
        "qcow2",
        "-F",
        "qcow2",
        "-b",
        str(base),
        str(path),
        str(size),
    ]
    await run_beside(argv, timeout=OVERLAY_TIMEOUT)
    os.chmod(path, 0o600)


def keep_seed(path: Path, seed: Path) -> None:
    """A copy of the disc that the clones' guests still see in its drive."""
    with no_space_as_error(path):
        write_whole(path, read_capped(seed, LARGEST_SEED))


async def freeze(domain: QemuDomain, state: Path, abilities: Abilities, *, timeout: float) -> None:
    """Stop the guest and write its device state; its memory is in a file already. The domain has ended afterwards."""
    try:
        await domain.connect()
        await domain.pause()
        capabilities = [{"capability": name, "state": True} for name in CAPABILITIES]
        await domain.call("migrate-set-capabilities", {"capabilities": capabilities})
        fd = os.open(state, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            if FILE_MIGRATION in abilities.features:
                await domain.call("add-fd", {"fdset-id": STATE_SET}, fds=[fd])
            else:
                await domain.call("getfd", {"fdname": STATE}, fds=[fd])
            await domain.migrate(state_address(STATE, abilities), timeout=timeout)
        finally:
            os.close(fd)
        await domain.quit(grace=QUIT_GRACE)
    except TemplateError:
        raise
    except HypervisorError as exc:
        raise TemplateError(f"the booted guest could not be saved: {exc.message}") from exc
    finally:
        domain.kill()
        await domain.quit(grace=0.0)


async def publish(
    store: TemplateStore,
    key: str,
    facts: Mapping[str, Any],
    spec: DomainSpec,
    grows: Set[str],
    *,
    ram_is_read: bool,
    is_open: bool = False,
) -> Template:
    """Digest, sync, and give the template its name."""

    draft, given_up = store.draft(key), threading.Event()
    # Its backing file has the name the folder will have; nothing is opened here.
    base = str(store.path(key).resolve() / DISK)
    argv = ["qemu-img", "create", "-q", "-u", "-f", "qcow2", "-F", "qcow2", "-b", base]
    publishing = partial(
        store.publish,
        key,
        facts,
        time.time(),
        grows=grows,
        ram_is_read=ram_is_read,
        is_open=is_open,
        given_up=given_up.is_set,
    )
    try:
        await run_beside([*argv, str(draft / CLONE), str(spec.disk_size)], timeout=OVERLAY_TIMEOUT)
        return await wholly_in_thread(publishing, give_up=given_up.set)
    except TemplateError:
        raise
    except (BelljarError, OSError) as exc:
        raise TemplateError(f"the template could not be stored: {exc}") from exc
