"""Carries the frames of a card that libvirt's QEMU has: a second QEMU, without a guest, that is our own child.

libvirt's QEMU sends the frames to a socket of ours. At its other end this process has the network: a user network under
the guard that the direct driver has, the tap of a bridge, or the line of a group. It dies with its supervisor
and with its machine.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable

from belljar.errors import DriverLacks, NetworkFailed
from belljar.hypervisor import DomainSpec, Nic
from belljar.hypervisor.qemu import cmdline
from belljar.hypervisor.qemu.abilities import Abilities
from belljar.hypervisor.qemu.driver import FORWARD
from belljar.hypervisor.qemu.network.outside import Outside
from belljar.hypervisor.qemu.process.launch import Child, confined

WITH_STREAMS = (7, 2, 0)  # QEMU that has `-netdev stream`


def needs_carrier(nic: Nic | None, qemu: Abilities) -> bool:
    """Is this card's network carried by a process of ours? An older QEMU can send its frames nowhere: it has an open user
    network of its own, or none. Raises DriverLacks."""
    if nic is None or qemu.version >= WITH_STREAMS:
        return nic is not None
    if nic.has_line or nic.egress is not None or nic.forward or nic.is_shut:
        raise DriverLacks(
            f"a machine's network with {qemu.name}: by libvirt it takes QEMU 7.2",
            hint='Ask for no network, or for an open one with `network.egress = "open"`; see docs/libvirt.md.',
        )
    return False


class Carrier:
    """One running carrier, made in the event loop's thread. `on_end` is told why it ended, unless `close` ended it."""

    def __init__(
        self, spec: DomainSpec, binary: str, wire: socket.socket, on_end: Callable[[NetworkFailed], None]
    ) -> None:
        """Raises NoGuard, HostError."""
        assert spec.nic is not None
        nic, self._on_end, self._is_closed = spec.nic, on_end, False
        self.outside = Outside(nic.egress, spec.folder / FORWARD if nic.forward else None)
        argv = confined(cmdline.carrier(binary, spec.id, nic, wire.fileno()), spec.owner)
        lines = [wire.fileno(), *([nic.fd] if nic.fd >= 0 else [])]
        os.set_blocking(wire.fileno(), False)
        self._child = Child(argv, lines, spec.folder / "qemu.log", self._ended, self.outside.start)
        self.pid = self._child.pid

    def close(self) -> None:
        """End it. Ending it twice is fine."""
        self._is_closed = True
        self._child.send(signal.SIGKILL)

    def _ended(self, status: int) -> None:
        self.outside.end()
        if not self._is_closed:
            said = self._child.said().splitlines()[-1:] or [f"wait status {status}"]
            self._on_end(NetworkFailed(f"the process that carries this machine's network ended: {said[0][:300]}"))
