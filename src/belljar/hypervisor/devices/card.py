"""The network card, and what it is plugged into on this host."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from belljar.errors import UsageError
from belljar.hints import TYPE_CHECKING
from belljar.hypervisor import DomainSpec, Nic
from belljar.hypervisor.devices import LACKS, MODERN, Kind
from belljar.hypervisor.devices.disk import LAST_SLOT
from belljar.model import NetworkMode

if TYPE_CHECKING:
    from belljar.hypervisor.qemu.process.launch import Launch

UPLINK = "uplink"  # what a warm image is prepared with
CARD_SLOT = LAST_SLOT - 4  # of a card that its template did not have; further disks do not come so far down


class Card(Kind):
    """The same whatever it is plugged into. One that its template does not have is in a slot at the end of the bus."""

    def words(self, launch: Launch) -> list[str]:
        spec, nic = launch.spec, launch.spec.nic
        assert nic is not None
        place = f",addr={CARD_SLOT:#x}" if spec.of_template.nic is None else ""
        backend = ["-netdev", backend_of(nic, launch.network, is_draft=launch.is_draft)]
        return [
            *(uplink() if launch.has_uplink else backend),
            *("-device", f"virtio-net-pci-non-transitional,netdev=net,mac={nic.mac},romfile={place}"),
        ]

    def xml(self, spec: DomainSpec, ends: object, place: Callable[[], str]) -> Iterator[str]:
        """On QEMU's own user network."""
        nic = spec.nic
        assert nic is not None
        if nic.mode is not NetworkMode.USER:
            raise UsageError(f"--network {nic.mode.value}: by libvirt there is `none` and an open `user`", hint=LACKS)
        if nic.egress is not None:
            hint = 'Ask for no network, or let the site set `network.egress = "open"` and `context.metadata = "off"`.'
            raise UsageError("a user network with a guard or a metadata service: libvirt has no guard", hint=hint)
        card = f'<mac address="{nic.mac}"/><model type="{MODERN}"/><rom enabled="no"/>{place()}'
        yield f'<interface type="user">{card}</interface>'


def backend_of(nic: Nic, line: int, *, is_draft: bool = False) -> str:
    """QEMU's own user network, a tap, a socket that carries frames, or, without a *line*, a hub with nobody else."""
    if not nic.has_line:
        return "user,id=net,ipv6=off" + (",restrict=on" if is_draft else "")
    if line < 0:
        return "hubport,id=net,hubid=0"
    kind = "tap,id=net,vhost=off" if nic.mode is NetworkMode.BRIDGE else "socket,id=net"
    return f"{kind},fd={line}"


def uplink() -> list[str]:
    """A user network that can be taken away from its card, by a hub between them: QEMU 10 keeps what a card is plugged into until the
    card goes, too."""
    backends = ("hubport,id=net,hubid=0", f"user,id={UPLINK},ipv6=off", f"hubport,id=wire,hubid=0,netdev={UPLINK}")
    return [word for backend in backends for word in ("-netdev", backend)]


CARD = Card()
