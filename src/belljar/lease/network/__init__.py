"""The network between the machines of one lease: an isolated group of belljar's (docs/jobs/networks.md), of which each node has a part. Each
machine's address and name follow from its number in the lease, and so are known before anything has started. Pure."""

from __future__ import annotations

import re
from ipaddress import IPv4Network

from belljar.errors import BadRequest
from belljar.lease import Settings, Wanted
from belljar.lease.decisions.case import Case
from belljar.lease.orders import MachineOrder, Peer
from belljar.records import replace

PRIVATE = "private"
MOST = 254  # machines of one isolated group
WORDS = re.compile(rf"none|user|bridge|bridge:[A-Za-z0-9][A-Za-z0-9._-]{{0,14}}|{PRIVATE}")
PORTS = re.compile(r"[0-9]{1,5}(-[0-9]{1,5})?")


def net_of(settings: Settings) -> IPv4Network:
    """`lease.private_net`. Raises ValueError."""
    net = IPv4Network(settings.private_net)
    if net.prefixlen > 24:
        raise ValueError(f"{net} has no room for {MOST} machines")
    return net


def class_of(settings: Settings, asked: Wanted) -> str:
    """The network class that is asked for, or the default. Raises BadRequest."""
    classes = dict(settings.networks)
    name = asked.network or next(iter(classes), "")
    if name and name not in classes:
        known = ", ".join(classes)
        raise BadRequest(f"network {name[:40]!r}: no such class; there are {known}", hint="See `lease.networks`.")
    if _is_private(settings, name) and asked.count > MOST:
        raise BadRequest(f"{asked.count} machines: a private network has {MOST} at most")
    return name


def ports_of(settings: Settings, terms: Wanted) -> str:
    """Where its pilots take each other's connections; "": they take none."""
    return settings.private_ports if _is_private(settings, terms.network) and terms.nodes > 1 else ""


def address_of(settings: Settings, name: str, index: int) -> str:
    """For the machine with this number, from 0, on a network of this class; "": it is not ours to say."""
    return str(net_of(settings)[index + 1]) if _is_private(settings, name) else ""


def name_of(index: int) -> str:
    """It has the last number of the address."""
    return f"node{index + 1}"


def placed(order: MachineOrder, case: Case, instance: str, settings: Settings) -> MachineOrder:
    """The order for a machine of this lease, on the network of its class."""
    own, name = next(machine for machine in case.instances if machine.id == instance), case.lease.wanted.network
    if not _is_private(settings, name):
        return replace(order, network=dict(settings.networks).get(name, "none"))
    rank = next((slot.rank for slot in case.slots if slot.id == own.slot), 0)
    numbers: dict[str, tuple[int, ...]] = {}  # of machines, by slot
    for machine in case.instances:
        numbers[machine.slot] = (*numbers.get(machine.slot, ()), machine.index + 1)
    others = [slot for slot in case.slots if slot.id != own.slot and slot.id in numbers]
    return replace(
        order, network=f"isolated:{case.lease.id}+{rank}@{own.address}/{net_of(settings).prefixlen}",
        name=name_of(own.index), hosts=tuple((name_of(machine.index), machine.address) for machine in case.instances),
        peers=tuple(Peer(slot.rank, slot.facts.reach, numbers[slot.id]) for slot in others if slot.facts.reach is not None),
    )  # fmt: skip


def _is_private(settings: Settings, name: str) -> bool:
    return dict(settings.networks).get(name) == PRIVATE
