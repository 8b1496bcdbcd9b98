"""What a supervisor works with: every room it needs, handed in once by whoever builds the house."""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from belljar.context import Settings as ContextSettings
from belljar.guest import Guest
from belljar.host.room import Settings as HostSettings
from belljar.hypervisor import Hypervisor
from belljar.image import ImageStore, Overlays
from belljar.machine import Folders, Settings
from belljar.machine.planning.boot_plan import Planner
from belljar.network import Networks

MakeGuest = Callable[[socket.socket], Guest]
Relay = Callable[[Guest, socket.socket], Awaitable[None]]  # lets a second client talk to the guest, until it closes


@dataclass(frozen=True)
class Parts:
    """The rooms, the folders, the settings. `point` is told each named point of a machine's life."""

    hypervisor: Hypervisor
    images: ImageStore
    overlays: Overlays
    planner: Planner
    make_guest: MakeGuest
    relay: Relay
    folders: Folders
    settings: Settings
    boot_timeout: float
    point: Callable[[str], None]
    networks: Networks | None = None  # None: nothing is joined, as for fakes
    hs06_per_cpu: float = 0.0  # told to payloads as a machine feature; 0: not told
    context: ContextSettings = field(default_factory=ContextSettings)
    host: HostSettings = field(default_factory=HostSettings)
