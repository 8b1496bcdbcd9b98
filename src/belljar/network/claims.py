"""Addresses this host gives out, each to one machine at a time, whoever's it is.

A claim is an abstract socket with the address in its name: the kernel lets nobody else have it, and gives it back when its
holder ends, however that comes. There is no file to be left behind. Any user of the host could take such a name and so
keep an address from being used; nobody can use it twice.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator
from ipaddress import IPv4Address, IPv4Interface

from belljar.errors import BadSetting, NetworkFailed

MOST = 4096  # addresses of one range


class Claim:
    """One address, until `close`."""

    def __init__(self, value: str, holder: socket.socket) -> None:
        self.value, self._holder = value, holder

    def close(self) -> None:
        self._holder.close()


def claim(kind: str, candidates: Iterable[str]) -> Claim:
    """The first that nobody holds. Raises NetworkFailed when all are held."""
    count = 0
    for value in candidates:
        holder = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            holder.bind(f"\0belljar {kind} {value.partition('/')[0]}")
            return Claim(value, holder)
        except OSError:
            holder.close()
            count += 1
    raise NetworkFailed(
        f"all {count} addresses of network.{kind} are in use",
        hint="Wait for other machines to end, or give this host more.",
    )


def addresses(texts: Iterable[str]) -> Iterator[str]:
    """Each address with its prefix. Raises BadSetting."""
    for text in texts:
        range, slash, prefix = text.partition("/")
        first, _, last = range.partition("-")
        try:
            low, high = IPv4Address(first.strip()), IPv4Address((last or first).strip())
            net = IPv4Interface(f"{low}/{prefix}").network
            if not slash or high < low or high not in net or int(high) - int(low) >= MOST:
                raise ValueError
        except ValueError:
            raise BadSetting(
                f"network.bridge_addresses: {text!r} is neither ADDRESS/PREFIX nor FIRST-LAST/PREFIX of at most {MOST}"
            ) from None
        yield from (f"{IPv4Address(number)}/{prefix}" for number in _numbers(int(low), int(high)))


def macs(texts: Iterable[str]) -> Iterator[str]:
    """Each MAC address. Raises BadSetting."""
    for text in texts:
        first, _, last = text.partition("-")
        try:
            low, high = _mac(first), _mac(last or first)
            if high < low or high - low >= MOST or low >> 40 & 1:
                raise ValueError
        except ValueError:
            raise BadSetting(
                f"network.mac_pool: {text!r} is neither a unicast MAC address nor FIRST-LAST of at most {MOST}"
            ) from None
        for number in _numbers(low, high):
            yield ":".join(f"{octet:02x}" for octet in number.to_bytes(6, "big"))


def _numbers(low: int, high: int) -> Iterator[int]:
    yield from range(low, high + 1)


def _mac(text: str) -> int:
    octets = text.strip().split(":")
    if len(octets) != 6 or any(len(octet) != 2 for octet in octets):
        raise ValueError(text)
    return int("".join(octets), 16)
