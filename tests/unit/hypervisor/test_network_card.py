"""What a card is plugged into, and that a template does not care."""

from dataclasses import replace

import pytest
from tests.unit.hypervisor.test_cmdline import COLD, LAUNCH, QEMU

from belljar.host.guard.egress import Egress
from belljar.hypervisor import Nic
from belljar.hypervisor.qemu import cmdline
from belljar.model import NetworkMode

MAC = "52:00:00:00:00:01"
USER = Nic(NetworkMode.USER, MAC)
BRIDGE, ISOLATED = (Nic(mode, MAC, has_line=True, fd=9) for mode in (NetworkMode.BRIDGE, NetworkMode.ISOLATED))


@pytest.mark.parametrize(
    ("nic", "backend"),
    [(USER, "user,id=net,ipv6=off"), (BRIDGE, "tap,id=net,vhost=off,fd=9"), (ISOLATED, "socket,id=net,fd=9")],
)  # fmt: skip
def test_a_machine_has_what_carries_its_frames(nic: Nic, backend: str) -> None:
    assert cmdline.network_card(nic, replace(LAUNCH, network=nic.fd))[1] == backend


def test_a_guest_that_boots_a_template_gets_out_nowhere() -> None:
    assert cmdline.network_card(USER, replace(LAUNCH, is_draft=True))[1].endswith(",restrict=on")
    assert cmdline.network_card(BRIDGE, replace(LAUNCH, is_draft=True))[1] == "hubport,id=net,hubid=0"


def test_what_is_a_machines_own_is_no_part_of_its_templates_hardware() -> None:
    def hardware(nic: Nic) -> list[str]:
        return cmdline.hardware(replace(COLD, nic=nic), QEMU, "max")

    assert hardware(USER) == hardware(replace(USER, egress=Egress(resolvers=("192.0.2.1",)), mac="x"))
    assert hardware(BRIDGE) == hardware(replace(BRIDGE, fd=12)) == hardware(ISOLATED)
    assert hardware(USER) != hardware(BRIDGE)
