"""What a QEMU's user network has to do with the host: the guard it is started under, and the port of its guest that is
forwarded to a socket of ours."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from belljar.host.guard.egress import Egress
from belljar.host.traffic import Call, Refusal, Traffic
from belljar.hypervisor.qemu.process.launch import Spawn


class Outside:
    """Of one QEMU. Made in the event loop that listens to it; `end` when the process has ended."""

    def __init__(self, egress: Egress | None, forward: Path | None) -> None:
        self._loop = asyncio.get_running_loop()
        self._egress, self._forward = egress, forward
        self._traffic = Traffic()

    @property
    def start(self) -> Spawn | None:
        """How the process is to be started; None: as any other."""
        return None if self._egress is None else self._guarded(self._egress)

    def traffic(self) -> AsyncIterator[Call | Refusal]:
        """See `Domain.traffic`."""
        return self._traffic.items()

    async def dial(self) -> socket.socket:
        """See `Domain.dial`."""
        if self._forward is None:
            raise OSError(errno.ENOTCONN, "this machine forwards no port")
        line = socket.socket(socket.AF_UNIX)
        line.setblocking(False)
        folder = os.open(self._forward.parent, os.O_PATH | os.O_CLOEXEC)
        try:  # by a path that is short however long the folder's own is
            await self._loop.sock_connect(line, f"/proc/self/fd/{folder}/{self._forward.name}")
        except BaseException:
            line.close()
            raise
        finally:
            os.close(folder)
        return line

    def end(self) -> None:
        if self._forward is not None:
            self._forward.unlink(missing_ok=True)
        self._traffic.end()

    def _guarded(self, egress: Egress) -> Spawn:
        from belljar.hypervisor.qemu.network.guard import QemuGuard
        from belljar.hypervisor.qemu.process.launch import spawn

        guard = QemuGuard(egress, self._traffic.tell, self._forward)
        start: Callable[..., int] = lambda argv, fds, stderr: guard.spawn(spawn, argv, fds, stderr)  # noqa: E731
        return start
