"""A running machine becomes a template. Its memory goes, while it runs, into a second QEMU whose memory is in files, and which is
frozen as every template is; its disk is split while it stands still for the last of that, and never copied.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from belljar.errors import HypervisorError
from belljar.host.commands import run_beside
from belljar.host.files import no_space_as_error, private
from belljar.host.threads import wholly_in_thread
from belljar.hypervisor import Accelerator, DomainSpec
from belljar.hypervisor.devices.disk import WRITTEN
from belljar.hypervisor.qemu.domain import QemuDomain, Switch
from belljar.hypervisor.qemu.template.folders import DISK, give
from belljar.hypervisor.qemu.template.making import OVERLAY_TIMEOUT, copy_data
from belljar.model import MIB

HEIR = "heir"
# Seconds a guest may run while its memory is moved; one that writes more than is moved then waits for the rest. An emulated one stands
# still from the first: QEMU misses writes of its (fixed in 9.0: "physmem: Fix migration dirty bitmap coherency with TCG memory access").
LIVE = {Accelerator.KVM: 10.0, Accelerator.TCG: 0.0}
SLOWEST = 50 * MIB  # bytes of memory a second that are moved even on a busy host


class Split:
    """The disk of a running machine in two: what it has written, only read from then on, and what it writes."""

    def __init__(
        self, domain: QemuDomain, spec: DomainSpec, written: Path, further: Path, point: Callable[[str], None]
    ) -> None:  # fmt: skip
        self._domain, self._spec, self._written, self._further, self._point = domain, spec, written, further, point
        self._node, self._is_done = f"disk-{spec.fork}", False

    async def prepare(self) -> None:
        """All that can be done before the guest stands still."""
        argv = ["qemu-img", "create", "-q", "-u", "-f", "qcow2", "-F", "qcow2", "-b", str(self._written)]
        await run_beside([*argv, str(self._further), str(self._spec.disk_size)], timeout=OVERLAY_TIMEOUT)
        os.chmod(self._further, 0o600)
        with open(self._further, "r+b", opener=private) as file:  # noqa: ASYNC230
            give(file.fileno(), self._spec.owner)
            number = (await self._domain.call("add-fd", fds=[file.fileno()]))["fdset-id"]
        # Its file is a node of its own: one that belonged to it would have to be opened again, to be only read after the next fork.
        name = f"{self._node}-file"
        below = {"driver": "file", "filename": f"/dev/fdset/{number}", "node-name": name} | WRITTEN
        await self._domain.call("blockdev-add", below)
        whole = {"driver": "qcow2", "node-name": self._node, "file": name, "backing": None} | WRITTEN
        await self._domain.call("blockdev-add", whole)

    async def now(self) -> None:
        """As long as the guest stands still."""
        await self._domain.call("blockdev-snapshot", {"node": self._domain.disk, "overlay": self._node})
        self._domain.disk, self._is_done = self._node, True
        self._point("fork-split")

    async def finish(self) -> None:
        """The names follow what QEMU has done; what was made for nothing is removed."""
        if self._is_done:
            os.rename(self._spec.disk, self._written)
            os.rename(self._further, self._spec.disk)
            return
        with suppress(HypervisorError):
            for node in (self._node, f"{self._node}-file"):
                await self._domain.call("blockdev-del", {"node-name": node})
        self._further.unlink(missing_ok=True)

    async def hand_on(self, draft: Path) -> None:
        """What was written is the template's disk, too: the same file, but for a store in another file system."""
        try:
            os.link(self._written, draft / DISK)
        except OSError:
            await wholly_in_thread(lambda: copy(self._written, draft / DISK))


def copy(source: Path, target: Path) -> None:
    """Raises NoSpace."""
    with no_space_as_error(target), open(source, "rb") as original, open(target, "xb", opener=private) as copied:
        copy_data(original.fileno(), copied.fileno())


async def move(domain: QemuDomain, switch: Switch, *, live: float, timeout: float) -> float:
    """The guest's memory into the HEIR, a descriptor that QEMU has by this name. It runs for *live* seconds of that at
    most, and goes on, also after an error. Returns for how many seconds it stood still."""
    loop, stood = asyncio.get_running_loop(), 0.0

    def stop() -> None:
        nonlocal stood
        stood = stood or loop.time()
        domain.ask("stop")

    async def stand_still() -> None:
        nonlocal stood
        stood = stood or loop.time()
        await switch()

    too_long = loop.call_later(live, stop)
    try:
        if not live:
            stop()
        await domain.migrate(f"fd:{HEIR}", timeout=timeout, with_memory=True, switch=stand_still)
    finally:
        too_long.cancel()
        if not domain.is_paused:
            await domain.resume()
    return loop.time() - stood
