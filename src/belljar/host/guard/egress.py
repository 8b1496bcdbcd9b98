"""Which addresses a program of ours may speak to: a policy as a value, and the judgement as a pure function.

Whoever makes a policy (the network room) and whoever obeys it (a guard in the hypervisor room) share this, and nothing
else. Special ranges: https://www.iana.org/assignments/iana-ipv4-special-registry
"""

from __future__ import annotations

import errno
import re
import socket
from contextlib import suppress
from enum import Enum

from belljar.host.guard.names import Name
from belljar.records import dataclass

Place = tuple[str, int]  # IPv4 address, port
DNS = 53
FORM = re.compile(r"([0-9.]+)(?:/(\d{1,2}))?(?::(\d{1,5})(?:/(tcp|udp))?)?", re.ASCII)

# What a machine of a batch job has no business with, unless the site says so: (network, prefix, what it is).
PRIVATE = (
    ("0.0.0.0", 8, "this host"), ("10.0.0.0", 8, "private"), ("100.64.0.0", 10, "private"), ("127.0.0.0", 8, "this host"),
    ("168.63.129.16", 32, "the cloud's"),  # https://learn.microsoft.com/azure/virtual-network/what-is-ip-address-168-63-129-16
    ("169.254.0.0", 16, "link-local"), ("172.16.0.0", 12, "private"), ("192.0.0.0", 24, "private"),
    ("192.168.0.0", 16, "private"), ("198.18.0.0", 15, "private"), ("224.0.0.0", 4, "multicast"),
    ("240.0.0.0", 4, "broadcast"),
)  # fmt: skip


class Transport(str, Enum):
    TCP = "tcp"
    UDP = "udp"
    ICMP = "icmp"


@dataclass(frozen=True)
class Rule:
    """Some IPv4 addresses, and of them one port and one transport or all."""

    network: int
    mask: int
    port: int | None = None
    transport: Transport | None = None

    def fits(self, number: int, port: int, transport: Transport) -> bool:
        return (
            number & self.mask == self.network
            and self.port in (None, port)
            and self.transport in (None, transport)
            and not (self.port is not None and transport is Transport.ICMP)
        )


@dataclass(frozen=True)
class Only:
    """A list of what may be reached, and nothing else: places, and hosts by name, whose addresses the proxy looks up."""

    rules: tuple[Rule, ...] = ()
    names: tuple[Name, ...] = ()

    @property
    def ports(self) -> frozenset[int]:
        return frozenset(port for name in self.names for port in name.ports)

    def has(self, host: str, port: int | None) -> bool:
        return any(name.fits(host, port) for name in self.names)


@dataclass(frozen=True)
class Egress:
    """Where one machine may go. `answers`: places that are answered here, in the machine's own supervisor."""

    allow: tuple[Rule, ...] = ()
    deny: tuple[Rule, ...] = ()
    resolvers: tuple[str, ...] = ()  # the host's own, which a guest reaches through its gateway
    answers: tuple[Place, ...] = ()
    only: tuple[Only, ...] = ()  # each of these lists has to have it
    secret: Only = Only()  # hosts that are sent a secret, wherever else the machine may go

    @property
    def ports(self) -> frozenset[int]:
        """Whatever the guest connects to there is the proxy's: it reads the name, and makes the connection."""
        return self.secret.ports.union(*(only.ports for only in self.only))

    def reaches(self, host: str, port: int | None = None) -> bool:
        """*port* None: any."""
        return all(only.has(host, port) for only in self.only)


class Verdict(str, Enum):
    ALLOWED = "allowed"
    ANSWERED = "answered"
    REFUSED = "refused"
    QUERY = "query"  # allowed for what asks for the address of a name that is reached


def decide(egress: Egress, address: str, port: int, transport: Transport) -> tuple[Verdict, str]:
    """What becomes of a packet or connection there, and by which rule; "": it is nobody's in particular, and not allowed
    if it is the host's own. *address* is numeric IPv4."""
    if (address, port) in egress.answers and transport is Transport.TCP:
        return Verdict.ANSWERED, "answered here"
    verdict, reason = decide_by_address(egress, address, port, transport)
    if verdict is Verdict.REFUSED:
        return verdict, reason
    if egress.only and address in egress.resolvers and port == DNS:  # also where a rule has its network
        return (Verdict.QUERY, "resolver") if transport is Transport.UDP else (Verdict.REFUSED, "not allowed")
    number, is_tcp = as_number(address), transport is Transport.TCP
    is_listed = all(any(rule.fits(number, port, transport) for rule in only.rules) for only in egress.only)
    if is_tcp and port in (egress.secret.ports if is_listed else egress.ports):
        return Verdict.ANSWERED, "by its name"
    return (verdict, reason) if is_listed else (Verdict.REFUSED, "not allowed")


def decide_by_address(egress: Egress, address: str, port: int, transport: Transport) -> tuple[Verdict, str]:
    """`decide`, whatever its lists of names say."""
    number = as_number(address)
    if any(rule.fits(number, port, transport) for rule in egress.deny):
        return Verdict.REFUSED, "network.deny"
    fitting = [rule for rule in egress.allow if rule.fits(number, port, transport)]
    if any(rule.mask in (mask_of(32), mask_of(0)) for rule in fitting):
        return Verdict.ALLOWED, "network.allow"
    if address in egress.resolvers and port == DNS and transport is not Transport.ICMP:
        return Verdict.ALLOWED, "resolver"
    if fitting:
        return Verdict.ALLOWED, ""  # a network; whoever means the host that is in it names the host
    for rule, what in BLOCKED:
        if number & rule.mask == rule.network:
            return Verdict.REFUSED, what
    return Verdict.ALLOWED, ""


def rule(text: str) -> Rule:
    """ADDRESS[/PREFIX][:PORT[/tcp|udp]]. Raises ValueError."""
    if match := FORM.fullmatch(text.strip()):
        address, prefix, port, transport = match.groups()
        with suppress(ValueError):
            number, mask = as_number(address), mask_of(int(prefix or 32))
            if not number & ~mask and 1 <= int(port or 1) <= 65535:
                return Rule(number, mask, int(port) if port else None, Transport(transport) if transport else None)
    raise ValueError(f"{text!r}: not ADDRESS[/PREFIX][:PORT[/tcp|udp]], of IPv4 and with no bits beyond the prefix")


def mask_of(prefix: int) -> int:
    return (0xFFFFFFFF << (32 - prefix)) & 0xFFFFFFFF


def as_number(address: str) -> int:
    """Raises ValueError for what is not four numbers with dots between them."""
    try:
        return int.from_bytes(socket.inet_pton(socket.AF_INET, address), "big")
    except (OSError, ValueError):
        raise ValueError(f"{address!r} is no IPv4 address") from None


BLOCKED = tuple((Rule(as_number(network), mask_of(prefix)), what) for network, prefix, what in PRIVATE)


def is_own(address: str) -> bool:
    """Is this an address of this host, or a broadcast address? Asked of the kernel; nothing is sent."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))
            return bool(probe.getsockname()[0] == address)
        except OSError as exc:
            return exc.errno == errno.EACCES  # a broadcast address


def obstacle(egress: Egress, address: str, port: int) -> str:
    """Why no connection may be made there for a guest that asked for a name; "": it may."""
    verdict, reason = decide_by_address(egress, address, port, Transport.TCP)
    if verdict is Verdict.ALLOWED:
        return "this host" if not reason and is_own(address) else ""
    return reason


def is_public(address: str) -> bool:
    """Is it one of the whole internet: not of this host, not link-local, not of a private network, nor the cloud's?"""
    import ipaddress

    try:
        numeric = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    is_blocked = numeric.version == 4 and any(int(numeric) & rule.mask == rule.network for rule, _ in BLOCKED)
    return numeric.is_global and not is_blocked and not numeric.is_multicast and not is_own(str(numeric))
