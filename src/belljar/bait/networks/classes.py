"""Network classes kept apart: the rules for nft, from the settings. Pure.

A class is a bridge with addresses of its own. Nodes of one class reach no other class's, and of the host itself only `services`; nodes
of a closed class reach nothing else either, whether this host routes for them (inet) or one of its cards is on the bridge (bridge).
That a node uses no address but its own is seen to at its tap (docs/jobs/networks.md). https://wiki.nftables.org

Conntrack and the name of the bridge are modules of their own in the family bridge, which not every kernel has: there a frame's class
is that of its address, and every packet but the first of a connection passes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from ipaddress import IPv4Network

from belljar.bait import Settings
from belljar.errors import BadSetting
from belljar.host.guard.egress import Rule
from belljar.host.guard.egress import rule as parsed
from belljar.network import AntiSpoofing, nets_of
from belljar.network import Settings as Network

Nets = dict[str, tuple[str, ...]]  # bridge -> networks of its nodes' addresses
TABLE, FAMILIES = "belljar_bait", ("inet", "bridge")
EARLY = -10  # before the site's own rules, which see what these let through


def rules(settings: Settings, network: Network) -> str:
    """For `nft -f -`, again and again: the tables of before go in the same step. Raises BadSetting where classes cannot be told apart."""
    bridges = dict(settings.networks)
    nets = {bridge: nets_of(network, bridge) for bridge in bridges.values()}
    shut = [bridges[kind] for kind in settings.closed]
    _check(nets, shut, network)
    services = [line for text in settings.services for line in matches(parsed(text))]
    tables = (("inet", _inet(nets, shut, services)), ("bridge", _bridge(nets, shut, services)))
    again = "".join(f"{act} table {family} {TABLE}\n" for family, _ in tables for act in ("add", "delete"))
    return again + "".join(f"table {family} {TABLE} {{\n{text}}}\n" for family, text in tables)


def _check(nets: Nets, shut: list[str], network: Network) -> None:
    owners = [net for owned in nets.values() for net in owned]
    bare = [bridge for bridge in nets if not nets[bridge] and (len(nets) > 1 or bridge in shut)]
    if bare or len(owners) != len(set(owners)):
        what = f"{bare[0]} has none" if bare else f"{max(owners, key=owners.count)} is on two bridges"
        raise BadSetting(
            f"network.bridge_addresses: {what}: classes are told apart by the addresses of their bridges",
            hint='Give each bridge its own, as in "br1:192.0.2.10-192.0.2.40/24".',
        )
    if shut and network.anti_spoofing is AntiSpoofing.OFF:
        what = 'network.anti_spoofing = "off": a node could use the address of another class'
        raise BadSetting(what, hint='Say "required".')


def matches(rule: Rule) -> Iterator[str]:
    """As nft says it; a port without a transport is one of both."""
    net = IPv4Network((rule.network, bin(rule.mask).count("1")))
    if rule.port is None:
        yield f"ip daddr {net}"
    for kind in ("tcp", "udp") if rule.port is not None else ():
        if rule.transport is None or rule.transport.value == kind:
            yield f"ip daddr {net} {kind} dport {rule.port}"


def _inet(nets: Nets, shut: list[str], services: list[str]) -> str:
    forward = ["ct state established,related accept"]
    for name in nets:
        here = f'iifname "{name}"'
        forward += (
            [f"{here} ip saddr != {_set(nets[name])} drop", f"{here} meta protocol ip6 drop"] if nets[name] else []
        )
        others = [f'"{other}"' for other in nets if other != name]
        if others:
            forward.append(f"{here} oifname {_set(others)} drop")
        if name in shut:
            forward += [f'{here} oifname "{name}" accept', *_only(here, services)]
        else:
            forward += _not_to(here, nets, name)
    known = _set(f'"{name}"' for name in nets)
    inward = [f"iifname != {known} accept", "ct state established,related accept", "icmp type echo-request accept"]
    return _chain("forward", forward) + _chain(
        "input", [*inward, *(f"{service} accept" for service in services), "drop"]
    )


def _bridge(nets: Nets, shut: list[str], services: list[str]) -> str:
    """Frames that leave by another port than a node's tap: a card of the host's."""
    lines = ['iifname != "bj*" accept', 'oifname "bj*" accept', "ether type arp accept"]
    for name, own in nets.items():
        here = f"ip saddr {_set(own)}"
        if name in shut:
            lines += [f"{here} tcp flags & (syn | ack) != syn accept", *_only(here, services)]
        elif own:
            lines += _not_to(here, nets, name)
    return _chain("forward", lines)


def _only(here: str, services: list[str]) -> list[str]:
    return [*(f"{here} {service} accept" for service in services), f"{here} drop"]


def _not_to(here: str, nets: Nets, own: str) -> list[str]:
    """Not by way of the site's router either."""
    others = [net for name, owned in nets.items() if name != own for net in owned]
    return [f"{here} ip daddr {_set(others)} drop"] if others else []


def _set(words: Iterable[str]) -> str:
    return f"{{ {', '.join(words)} }}"


def _chain(hook: str, lines: list[str]) -> str:
    body = "".join(f"        {line}\n" for line in lines)
    return f"    chain {hook} {{\n        type filter hook {hook} priority {EARLY}; policy accept;\n{body}    }}\n"
