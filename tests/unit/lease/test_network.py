"""Who has which address on a lease's own network."""

from __future__ import annotations

import pytest

from belljar.lease import Instance, Lease, Settings, Slot, Wanted
from belljar.lease.decisions.case import Case
from belljar.lease.network import MOST, address_of, name_of, net_of, placed, ports_of
from belljar.lease.orders import Facts, MachineOrder, Peer, Reach

SETTINGS = Settings(networks=(("out", "user"), ("own", "private")), private_net="10.5.0.0/16")


def case(network: str, count: int = 3) -> Case:
    """Two machines on the first node, the others on the second."""
    lease = Lease("r-1", "ada", Wanted("debian12", count, network=network, per_node=2))
    slots = tuple(Slot("r-1", 1, rank, "p", facts=Facts("wn", reach=Reach(f"wn{rank}:1", "pin"))) for rank in range(2))
    return Case(
        lease,
        tuple(
            Instance(
                f"i-{index}",
                "r-1",
                index,
                "ada",
                slot=slots[index // 2].id,
                address=address_of(SETTINGS, network, index),
            )
            for index in range(count)
        ),
        slots,
    )


def test_address_and_name_are_known_before_anything_has_started() -> None:
    order = placed(MachineOrder("debian12"), case("own"), "i-1", SETTINGS)
    assert (order.network, order.name) == ("isolated:r-1+0@10.5.0.2/16", "node2")
    assert order.hosts == (("node1", "10.5.0.1"), ("node2", "10.5.0.2"), ("node3", "10.5.0.3"))
    assert order.peers == (Peer(1, Reach("wn1:1", "pin"), (3,)),)
    other = placed(MachineOrder("debian12"), case("own"), "i-2", SETTINGS)
    assert other.network == "isolated:r-1+1@10.5.0.3/16" and other.peers == (Peer(0, Reach("wn0:1", "pin"), (1, 2)),)
    assert (address_of(SETTINGS, "own", MOST - 1), name_of(MOST - 1)) == ("10.5.0.254", "node254")


def test_pilots_listen_only_where_they_have_to() -> None:
    assert ports_of(SETTINGS, Wanted("x", 2, network="own")) == "0"
    assert ports_of(SETTINGS, Wanted("x", 2, network="own", per_node=2)) == ""
    assert ports_of(SETTINGS, Wanted("x", 2, network="out")) == ""


def test_other_networks_are_as_the_site_says() -> None:
    assert placed(MachineOrder("debian12"), case("out"), "i-0", SETTINGS) == MachineOrder("debian12", network="user")
    assert placed(MachineOrder("debian12"), case("gone"), "i-0", SETTINGS).network == "none"


@pytest.mark.parametrize("net", ["10.0.0.0/25", "10.0.0.1/24", "fd00::/64", "x", ""])
def test_a_net_without_room_for_a_lease_is_none(net: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        net_of(Settings(private_net=net))
