"""A running machine becomes a template. Its memory goes, while it runs, into a second QEMU whose memory is in files, and which is
frozen as every template is; its disk is split while it stands still for the last of that, and never copied.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from belljar.errors import HypervisorError
from belljar.host.files import no_space_as_error, private
from belljar.host.threads import wholly_in_thread
from belljar.hypervisor import DomainSpec
from belljar.hypervisor.devices.disk import WRITTEN
from belljar.hypervisor.qemu.domain import QemuDomain, Switch
from belljar.hypervisor.qemu.template.folders import DISK, give
from belljar.hypervisor.qemu.template.making import copy_data, create_overlay
from belljar.model import MIB

HEIR = "heir"
SLOWEST = 50 * MIB  # bytes of memory a second that are moved even on a busy host


@asynccontextmanager
async def split(
    domain: QemuDomain, spec: DomainSpec, layer: Path, point: Callable[[str], None]
) -> AsyncIterator[Switch]:
    """What splits its disk while the guest stands still: into what it has written, only read from then on, and the *layer*. All else is
    done before; a layer that was made for nothing is removed."""
    node = f"disk-{spec.fork}"
    await create_overlay(layer, spec.disk, spec.disk_size)

    async def switch() -> None:
        await domain.call("blockdev-snapshot", {"node": domain.disk, "overlay": node})
        domain.disk = node
        point("fork-split")

    try:
        with open(layer, "r+b", opener=private) as file:  # noqa: ASYNC230
            give(file.fileno(), spec.owner)
            number = (await domain.call("add-fd", fds=[file.fileno()]))["fdset-id"]
        # Its file is a node of its own: one that belonged to it would have to be opened again, to be only read after the next fork.
        below = {"driver": "file", "filename": f"/dev/fdset/{number}", "node-name": f"{node}-file"}
        await domain.call("blockdev-add", below | WRITTEN)
        whole = {"driver": "qcow2", "node-name": node, "file": f"{node}-file", "backing": None}
        await domain.call("blockdev-add", whole | WRITTEN)
        yield switch
    finally:
        if domain.disk != node:
            with suppress(HypervisorError):
                for name in (node, f"{node}-file"):
                    await domain.call("blockdev-del", {"node-name": name})
            layer.unlink(missing_ok=True)  # noqa: ASYNC240


async def hand_on(written: Path, draft: Path) -> None:
    """What was written is the template's disk, too: the same file, but for a store in another file system. Raises NoSpace."""

    def copy() -> None:
        with (
            no_space_as_error(draft),
            open(written, "rb") as source,
            open(draft / DISK, "xb", opener=private) as target,
        ):
            copy_data(source.fileno(), target.fileno())

    try:
        os.link(written, draft / DISK)
    except OSError:
        await wholly_in_thread(copy)


async def move(domain: QemuDomain, switch: Switch, *, is_live: bool, timeout: float) -> float:
    """The guest's memory into the HEIR, a descriptor that QEMU has by this name. It runs meanwhile if *is_live*, and goes on in any
    case, also after an error. Returns for how many seconds it stood still."""
    loop = asyncio.get_running_loop()
    stood = loop.time()

    async def stand_still() -> None:
        nonlocal stood
        stood = loop.time() if is_live else stood
        await switch()

    try:
        if not is_live:
            domain.ask("stop")
        await domain.migrate(f"fd:{HEIR}", timeout=timeout, with_memory=True, switch=stand_still)
    finally:
        if not domain.is_paused:
            await domain.resume()
    return loop.time() - stood
