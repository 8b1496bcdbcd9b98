"""Keeps a machine on a bridge from using others' addresses: nftables rules, two tables per machine, named by its id.

The rules see what comes in from the machine's own tap, before the bridge does. https://wiki.nftables.org
"""

from __future__ import annotations

import os
import re

from belljar.errors import BelljarError, NetworkFailed
from belljar.host.commands import run, which
from belljar.model import MachineId

PATIENCE = 10.0
FAMILIES = ("bridge", "netdev")
ID, MAC = re.compile(r"[0-9a-f]{12}"), re.compile(r"[0-9a-f]{2}(:[0-9a-f]{2}){5}")
TAP, ADDRESS = re.compile(r"[A-Za-z0-9._-]{1,15}"), re.compile(r"[0-9.]{7,15}")

# What is for the bridge itself (spanning tree, pause, LLDP) the kernel takes off before most hooks of the family bridge.
NO_BPDUS = "ether daddr & ff:ff:ff:ff:ff:f0 == 01:80:c2:00:00:00 drop"


def table_of(id: MachineId) -> str:
    return f"belljar_{id}"


def rules(id: MachineId, tap: str, mac: str, address: str) -> str:
    """What nft is to load. *address* "": the machine gets its address from somebody else's DHCP, and may use any."""
    for text, form in ((id, ID), (tap, TAP), (mac, MAC), *([(address, ADDRESS)] if address else [])):
        assert form.fullmatch(text), f"{text!r} has no place in a rule"
    lines = [
        f"ether saddr != {mac} drop",
        "ether type != { ip, ip6, arp } drop",
        f"ether type arp arp saddr ether != {mac} drop",
        "udp sport { 67, 547 } drop",  # a DHCP server
        "udp dport { 68, 546 } drop",  # whatever its port: clients look at their own alone
        "icmpv6 type { nd-router-advert, nd-redirect } drop",  # a router
        "frag nexthdr { 0, 43, 44, 60 } drop",  # https://www.rfc-editor.org/rfc/rfc7113: it hides what it says
    ]
    if address:
        lines += [
            "ether type ip6 drop",
            f"ether type ip ip saddr != {address} drop",
            f"ether type arp arp saddr ip != {{ {address}, 0.0.0.0 }} drop",
        ]
    own = "\n".join(f'        iifname "{tap}" {line}' for line in lines)
    return _table("bridge", id, "prerouting", own) + _table(
        "netdev", id, f'ingress device "{tap}"', f"        {NO_BPDUS}"
    )


def _table(family: str, id: MachineId, hook: str, body: str) -> str:
    return (
        f"table {family} {table_of(id)} {{\n    chain from_machine {{\n"
        f"        type filter hook {hook} priority -300; policy accept;\n{body}\n    }}\n}}\n"
    )


def make_table(id: MachineId, tap: str, mac: str, address: str) -> None:
    """Raises NetworkFailed where nft refuses."""
    try:
        run([_nft(), "-f", "-"], timeout=PATIENCE, stdin=rules(id, tap, mac, address).encode())
    except BelljarError as exc:
        raise NetworkFailed(f"the rules against spoofed addresses cannot be set: {exc.message}") from exc


def remove_table(id: MachineId) -> None:
    """Removing what is not there is success. Raises NetworkFailed when it is there and stays."""
    nft = which("nft")
    if not ID.fullmatch(id) or nft is None or os.geteuid() != 0:
        return
    # nft makes what is missing first, so that both go in one step, whatever is there.
    text = "".join(f"{act} table {family} {table_of(id)}\n" for family in FAMILIES for act in ("add", "delete"))
    try:
        run([nft, "-f", "-"], timeout=PATIENCE, stdin=text.encode())
    except BelljarError as exc:
        raise NetworkFailed(f"nftables tables {table_of(id)} cannot be removed: {exc.message}") from exc


def has_nft() -> bool:
    return which("nft") is not None


def _nft() -> str:
    return which("nft") or "nft"
