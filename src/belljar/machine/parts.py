"""What a supervisor works with: every room it needs, handed in once by whoever builds the house."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from belljar.context import Settings as ContextSettings
from belljar.guest import Guest, Streams
from belljar.hints import TYPE_CHECKING, Protocol
from belljar.host.room import Settings as HostSettings
from belljar.hypervisor import Hypervisor
from belljar.machine import Folders, Settings
from belljar.machine.extras import Extra
from belljar.machine.orders import Orders
from belljar.model import Outcome, Request
from belljar.network import Networks
from belljar.records import dataclass, field

if TYPE_CHECKING:
    from belljar.image.images import Images
    from belljar.image.store.qcow2 import Overlays

# Told what a job waits for that takes long, and of which image (its digest; "": none was measured); shows it while inside.
Showing = Callable[[str], AbstractContextManager[object]]


class Keep(Protocol):
    """`Supervisor.keep`, for those who have a part of their own work done in a machine."""

    async def __call__(
        self, request: Request, streams: Streams, orders: Orders, *, extras: Sequence[Extra] = ()
    ) -> Outcome: ...


@dataclass(frozen=True)
class Parts:
    """The rooms, the folders, the settings. `point` is told each named point of a machine's life."""

    hypervisor: Hypervisor
    images: Images
    overlays: Overlays
    make_guest: Callable[[socket.socket], Guest]
    folders: Folders
    settings: Settings
    boot_timeout: float
    point: Callable[[str], None]
    networks: Networks | None = None  # None: nothing is joined, as for fakes
    qemu_owner: str = "auto"  # who QEMU runs as where root starts it
    default_image: str = ""  # of machines that work on other images
    hs06_per_cpu: float = 0.0  # told to payloads as a machine feature; 0: not told
    context: ContextSettings = field(default_factory=ContextSettings)
    host: HostSettings = field(default_factory=HostSettings)
    showing: Showing = nullcontext
