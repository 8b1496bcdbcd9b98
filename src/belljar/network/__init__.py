"""The door of the network room: gives a machine a way out, or none.

A `Link` is what the guest sees. Joining a network may make something on this host: what that is goes into the journal
before it is made, is gone with the process that holds it or by `discard`, and is described in docs/networks.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from belljar.host.quick_imports import sha256
from belljar.model import FileServer, MachineId, NetworkMode, setting
from belljar.records import dataclass

if TYPE_CHECKING:
    from belljar.errors import BadSetting
    from belljar.host.guard.egress import Egress, Place

MADE = ("port", "nft-table")  # what may be in the journal, to be given to `discard`
FOLDER = "networks"  # below the folder of live machines: one folder per isolated group


class EgressMode(str, Enum):
    GUARDED = "guarded"
    OPEN = "open"


class AntiSpoofing(str, Enum):
    AUTO = "auto"
    REQUIRED = "required"
    OFF = "off"


@dataclass(frozen=True)
class Settings:
    """`[network]` in the settings files."""

    egress: EgressMode = setting(
        EgressMode.GUARDED,
        "guarded: machines with a user network reach no private, link-local or own address of their host; open: all it reaches",
    )
    allow: tuple[str, ...] = setting(
        (), "what a guarded machine may reach nevertheless: ADDRESS[/PREFIX][:PORT[/tcp|udp]], IPv4"
    )
    deny: tuple[str, ...] = setting((), "what a guarded machine may never reach, in the same form; stronger than allow")
    bridges: tuple[str, ...] = setting(
        (), "bridges of this host machines may be put on; the first is that of `--network bridge`"
    )
    bridge_addresses: tuple[str, ...] = setting(
        (),
        "addresses this host gives to machines on a bridge: ADDRESS/PREFIX or FIRST-LAST/PREFIX; none: the guest asks for one itself",
    )
    bridge_gateway: str = setting("", "gateway of the machines that were given an address")
    bridge_dns: str = setting("", "name server of the machines that were given an address")
    anti_spoofing: AntiSpoofing = setting(
        AntiSpoofing.AUTO,
        "keep machines on a bridge from using others' addresses, by nftables: auto (only machines of root's, where nft is), required or off",
    )
    mac_prefix: str = setting(
        "52", "first octets of the machines' MAC addresses; the rest follows from the machine's id"
    )
    mac_pool: tuple[str, ...] = setting(
        (), "MAC addresses for machines on a bridge, ADDRESS or FIRST-LAST, in place of those by prefix and id"
    )
    isolated_net: str = setting(
        "10.98.0.0/24", "network of an isolated group; a machine has its number in the last octet"
    )


@dataclass(frozen=True)
class Link:
    """A machine's card as the guest sees it. mode NONE: no card at all."""

    mode: NetworkMode
    mac: str = ""
    address: str = ""
    gateway: str = ""
    dns: str = ""
    egress: Egress | None = None  # what a guard of a user network goes by
    has_line: bool = False  # its frames are carried by a descriptor, not by QEMU's own user network
    fd: int = -1  # that descriptor, open in this process while the link is joined


class Joined(Protocol):
    """A link that is there. `close` takes away what it made; closing twice is fine."""

    link: Link

    def close(self) -> None: ...


class Networks:
    """Joins machines to their networks, by the settings of this host."""

    def __init__(self, settings: Settings, run: Path) -> None:
        self._settings, self._folder = settings, run / FOLDER

    async def join(
        self,
        mode: NetworkMode,
        name: str,
        id: MachineId,
        *,
        uid: int,
        intend: Callable[[str, Path], None],
        grants: Iterable[Place] = (),
        answers: Iterable[Place] = (),
    ) -> Joined:
        """Join a network. *grants*: places this machine may reach whatever is blocked; *answers*: places its supervisor
        answers. Raises NoSuchNetwork, NetworkFailed, BadSetting, CommandMissing."""
        from belljar.network import joining

        return await joining.join(
            self._settings, self._folder, plan(mode, id), name, id,
            uid=uid, intend=intend, grants=tuple(grants), answers=tuple(answers),
        )  # fmt: skip


def discard(run: Path, id: MachineId, what: str, path: Path) -> None:
    """Take away what the journal of a dead machine says was made. Taking away what is not there is success."""
    from belljar.network import joining

    joining.discard(run / FOLDER, id, what, path)


def mistakes(settings: Settings) -> Iterator[tuple[str, BadSetting]]:
    """(key, what is wrong) of each value that could not be used, though its type is right. Looks at nothing of this host."""
    from belljar.network.joining import mistakes

    return mistakes(settings)


def shortfalls(settings: Settings, *, is_root: bool) -> tuple[str, ...]:
    """What these settings do not do for machines of root's, or of ordinary users', though one might think so."""
    from belljar.network.joining import shortfalls

    return shortfalls(settings, is_root=is_root)


USER_ADDRESSES = (
    "10.0.2.15/24",
    "10.0.2.2",
    "10.0.2.3",
)  # QEMU's user network always has these; machines never see others'


def plan(mode: NetworkMode, id: MachineId) -> Link:
    """The link as far as it is known before it is joined: enough for a template."""
    if mode is NetworkMode.NONE:
        return Link(mode)
    return (
        Link(mode, mac_address(id), *USER_ADDRESSES)
        if mode is NetworkMode.USER
        else Link(mode, mac_address(id), has_line=True)
    )


def mac_address(id: MachineId, prefix: str = "52") -> str:
    """A unicast address that begins with these octets, a pure function of the machine's id."""
    octets = bytes(int(octet, 16) for octet in prefix.split(":"))
    return ":".join(f"{octet:02x}" for octet in (octets + sha256(id.encode("ascii")).digest())[:6])


def seen_by_guest(link: Link, address: str) -> str:
    """Where a guest of this link finds what the host finds at *address*; "" where it finds nothing there.

    In a user network the gateway stands for the host's 127.0.0.1, other loopback addresses and IPv6 lead nowhere, and
    addresses of its own net are the net's. An isolated group sees nothing of the host."""
    from ipaddress import ip_address, ip_network

    there = ip_address(address.partition("%")[0])
    if link.mode in (NetworkMode.NONE, NetworkMode.ISOLATED):
        return ""
    if link.mode is not NetworkMode.USER:
        return "" if there.is_loopback or there.is_unspecified or there.is_link_local else str(there)
    if str(there) in ("127.0.0.1", "0.0.0.0"):
        return link.gateway
    is_own = there in ip_network(link.address, strict=False)
    # Nobody's file server is link-local, but a cloud's metadata service is.
    return "" if there.version != 4 or there.is_loopback or there.is_link_local or is_own else str(there)


async def find_server(source: str, link: Link) -> FileServer:
    """The server of nfs://HOST:PORT/EXPORT, which has answered. Raises ShareMissing, ServerSilent."""
    from belljar.network.nfs import find

    return await find(source, link)
