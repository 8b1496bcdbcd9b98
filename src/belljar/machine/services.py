"""What a supervisor works with: the rooms it needs, handed in once by the assembly."""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from belljar.context import Settings as ContextSettings
from belljar.guest import Guest, Streams
from belljar.hints import TYPE_CHECKING
from belljar.host.room import Settings as HostSettings
from belljar.hypervisor import Hypervisor
from belljar.hypervisor import Settings as QemuSettings
from belljar.machine import Folders, Settings
from belljar.machine.extras import Extra
from belljar.machine.orders import Orders
from belljar.model import Outcome, Request
from belljar.network import Networks, Publish
from belljar.records import dataclass, field

if TYPE_CHECKING:
    from belljar.host.devices.pci import Site
    from belljar.image.images import Images
    from belljar.image.store.qcow2 import Overlays

# `Supervisor.keep`, for those who have a part of their own work done in a machine.
Keep = Callable[[Request, Streams, Orders, Sequence[Extra]], Awaitable[Outcome]]
# Given a text about what takes long; shows it while inside.
Showing = Callable[[str], AbstractContextManager[object]]


@dataclass(frozen=True)
class Rules:
    """The settings that a supervisor goes by."""

    machine: Settings = field(default_factory=Settings)
    host: HostSettings = field(default_factory=HostSettings)
    context: ContextSettings = field(default_factory=ContextSettings)
    qemu: QemuSettings = field(default_factory=QemuSettings)
    default_image: str = ""  # of machines that work on other images
    hs06_per_cpu: float = 0.0  # told to payloads as a machine feature; 0: not told
    publish: Publish = Publish.ANY
    devices: Callable[[], Site] = tuple  # the site's classes of devices, read by machines that have one
    root: Path = Path("/")  # where the host's /sys and /dev are


@dataclass(frozen=True)
class Services:
    """`point` is called with each named point of a machine's life."""

    hypervisor: Hypervisor
    images: Images
    overlays: Overlays
    make_guest: Callable[[socket.socket], Guest]
    folders: Folders
    rules: Rules
    point: Callable[[str], None]
    networks: Networks | None = None  # None: nothing is joined, as for fakes
    showing: Showing = nullcontext
