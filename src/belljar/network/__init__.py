"""The door of the network room: gives a machine a way out, or none."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256

from belljar.model import MachineId, NetworkMode


@dataclass(frozen=True)
class Link:
    """A machine's card as the guest sees it. mode NONE: no card at all."""

    mode: NetworkMode
    mac: str = ""
    address: str = ""
    gateway: str = ""
    dns: str = ""


def plan(mode: NetworkMode, id: MachineId) -> Link:
    """The link of a machine. Nothing is made on the host: QEMU's own user network carries it."""
    if mode is NetworkMode.NONE:
        return Link(mode)
    # QEMU's user network always has these addresses; machines never see each other's.
    return Link(mode, mac_address(id), "10.0.2.15/24", "10.0.2.2", "10.0.2.3")


def mac_address(id: MachineId) -> str:
    """A locally administered unicast address, a pure function of the machine's id."""
    tail = sha256(id.encode("ascii")).digest()[:5]
    return ":".join(f"{octet:02x}" for octet in (0x52, *tail))
