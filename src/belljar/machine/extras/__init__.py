"""What a machine has beside its own disk: each kind is a small class of one shape, imported by machines that have one."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from belljar.guest import Guest
from belljar.hints import TYPE_CHECKING
from belljar.hypervisor import ExtraDisk, HostDevice
from belljar.hypervisor.devices import share_kind, tagged
from belljar.machine.life.life import Lifecycle
from belljar.model import MachineSpec, Payload
from belljar.network import Joined
from belljar.records import dataclass, replace

if TYPE_CHECKING:
    from belljar.host.guard.egress import Place
    from belljar.host.guard.traffic import Call
    from belljar.host.guard.vault import Vault


@dataclass(frozen=True)
class Equipment:
    """What was made for a machine, for those who start it."""

    disks: tuple[ExtraDisk, ...] = ()
    devices: tuple[HostDevice, ...] = ()  # of this host
    outlasts: bool = False  # a disk of it outlives the machine, so QEMU is given time to write all of it
    joined: Joined | None = None  # its network
    answers: tuple[Place, ...] = ()  # places of a user network that its supervisor answers, and how
    answer: Callable[[Call], Awaitable[None]] | None = None
    vault: Vault | None = None  # its secrets

    def with_disk(self, disk: ExtraDisk, *, outlasts: bool = False) -> Equipment:
        return replace(self, disks=(*self.disks, disk), outlasts=self.outlasts or outlasts)

    @property
    def outputs_url(self) -> str:
        """Where the guest may put files that are kept; "": nowhere."""
        return f"http://{self.answers[-1][0]}/joboutputs" if self.answers else ""


class Extra:
    """One kind of it. Each does what it has to of these; files of the machine's own are the `Lifecycle`'s to remove."""

    async def prepare(self, life: Lifecycle, there: Equipment) -> Equipment:
        """Make it, before the machine is started; returns what is *there* with it."""
        return there

    async def freeze(self, draft: Path) -> None:
        """The machine stands still to become this checkpoint: put what goes on with it there."""

    async def furnish(self, guest: Guest, payload: Payload, devices: Mapping[str, str]) -> None:
        """Put it where the payload looks for it. *devices*: of the machine's disks in the guest, by their names."""

    def release(self) -> None:
        """The machine is gone, or never was; also where `prepare` did not come to its end."""


class Shares(Extra):
    """All of a machine's shares: a payload never starts with one missing."""

    def __init__(self, machine: MachineSpec) -> None:
        self._machine = machine

    async def furnish(self, guest: Guest, payload: Payload, devices: Mapping[str, str]) -> None:
        """Every share in its place, outer ones first, for one may lie in another."""
        for tag, share in sorted(tagged(self._machine.shares), key=lambda tagged: tagged[1].target):
            await guest.mount(share, tag, share_kind(share.kind).filesystem)
