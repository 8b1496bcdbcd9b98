"""Network classes kept apart: the rules for nft, from the settings. Pure.

A class is a bridge with addresses of its own. Nodes of one class reach no other class's, and of the host itself only `services`; nodes
of a closed class reach nothing else either, whether this host routes for them (inet) or one of its cards is on the bridge (bridge).
That a node uses no address but its own is seen to at its tap (docs/jobs/networks.md). https://wiki.nftables.org

Conntrack and the name of the bridge are modules of their own in the family bridge, which not every kernel has: there a frame's class
is that of its address, and every packet but the first of a connection passes.
"""

from __future__ import annotations

from collections.abc import Iterable
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


def matches(rule: Rule) -> list[str]:
    """As nft says it; a port without a transport is one of both."""
    to = f"ip daddr {IPv4Network((rule.network, bin(rule.mask).count('1')))}"
    kinds = (rule.transport.value,) if rule.transport is not None else ("tcp", "udp")
    return [to] if rule.port is None else [f"{to} {kind} dport {rule.port}" for kind in kinds]


def _inet(nets: Nets, shut: list[str], services: list[str]) -> str:
    forward = ["ct state established,related accept"]
    for name, own in nets.items():
        here = f'iifname "{name}"'
        forward += [f"{here} ip saddr != {_set(own)} drop", f"{here} meta protocol ip6 drop"] if own else []
        if others := [f'"{other}"' for other in nets if other != name]:
            forward.append(f"{here} oifname {_set(others)} drop")
        forward += _limits(here, name, f'oifname "{name}"', nets, shut, services)
    known = _set(f'"{name}"' for name in nets)
    inward = [f"iifname != {known} accept", "ct state established,related accept", "icmp type echo-request accept"]
    inward += [f"{service} accept" for service in services]
    return _chain("forward", forward) + _chain("input", [*inward, "drop"])


def _bridge(nets: Nets, shut: list[str], services: list[str]) -> str:
    """Frames that leave by another port than a node's tap: a card of the host's."""
    lines = ['iifname != "bj*" accept', 'oifname "bj*" accept', "ether type arp accept"]
    for name, own in nets.items():
        if own:
            lines += _limits(f"ip saddr {_set(own)}", name, "tcp flags & (syn | ack) != syn", nets, shut, services)
    return _chain("forward", lines)


def _limits(here: str, name: str, also: str, nets: Nets, shut: list[str], services: list[str]) -> list[str]:
    """A closed class reaches services, and what is *also* accepted; an open one no other class, not by way of the site's router either."""
    if name in shut:
        return [*(f"{here} {to} accept" for to in (also, *services)), f"{here} drop"]
    others = [net for other, owned in nets.items() if other != name for net in owned]
    return [f"{here} ip daddr {_set(others)} drop"] if others else []


def _set(words: Iterable[str]) -> str:
    return f"{{ {', '.join(words)} }}"


def _chain(hook: str, lines: list[str]) -> str:
    body = "".join(f"        {line}\n" for line in lines)
    return f"    chain {hook} {{\n        type filter hook {hook} priority {EARLY}; policy accept;\n{body}    }}\n"
