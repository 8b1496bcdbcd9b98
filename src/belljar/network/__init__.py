"""The door of the network room: connects a machine to a network, or to none.

A `Link` is what the guest sees. Joining a network may make something on this host: what that is goes into the journal
before it is made, is gone with the process that holds it or by `discard`, and is described in docs/jobs/networks.md.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from enum import Enum
from pathlib import Path

from belljar.errors import BadSetting, BelljarError
from belljar.hints import TYPE_CHECKING
from belljar.host.quick_imports import sha256
from belljar.model import MachineId, NetworkMode, setting
from belljar.records import dataclass, replace

if TYPE_CHECKING:
    from belljar.host.guard.egress import Egress, Place
    from belljar.network.isolated import Part as Part

Intend = Callable[[str, Path], None]  # writes down what is about to be made, and where
MADE = ("port", "nft-table")  # what may be in the journal, to be given to `discard`
FOLDER = "networks"  # below the folder of live machines: one folder per isolated group


class EgressMode(str, Enum):
    GUARDED, OPEN = "guarded", "open"


class AntiSpoofing(str, Enum):
    AUTO, REQUIRED, OFF = "auto", "required", "off"


class Publish(str, Enum):
    NONE, LOOPBACK, ANY = "none", "loopback", "any"


@dataclass(frozen=True)
class Settings:
    """`[network]` in the settings files."""

    egress: EgressMode = setting(EgressMode.GUARDED,
        "guarded: a user network reaches no private, link-local or own address of the host; open: all it reaches")  # fmt: skip
    allow: tuple[str, ...] = setting((),
        "what a guarded machine may reach nevertheless: ADDRESS[/PREFIX][:PORT[/tcp|udp]], IPv4. With NAME[:PORT], *.NAME[:PORT] or none among these: what it may reach at all")  # fmt: skip
    deny: tuple[str, ...] = setting((), "what a guarded machine may never reach, in the same form; stronger than allow")
    publish: Publish = setting(Publish.ANY,
        "where on this host ports of machines may be published; loopback: its own users alone can connect")  # fmt: skip
    bridges: tuple[str, ...] = setting((), "bridges of this host machines may be put on; the first is that of `--network bridge`")  # fmt: skip
    bridge_addresses: tuple[str, ...] = setting((),
        "addresses for machines on a bridge: [BRIDGE:]ADDRESS/PREFIX or FIRST-LAST/PREFIX; none: the guest asks for one")  # fmt: skip
    bridge_gateway: str = setting("",
        "gateway of machines with such an address; of several, blanks between, the one in its network")  # fmt: skip
    bridge_dns: str = setting("", "name server of machines with such an address")
    anti_spoofing: AntiSpoofing = setting(AntiSpoofing.AUTO,
        "keep machines on a bridge from using others' addresses, by nftables; auto: only root's machines, where nft is")  # fmt: skip
    mac_pool: tuple[str, ...] = setting((),
        "MAC addresses for machines on a bridge, ADDRESS or FIRST-LAST; none: they follow from the machines' ids")  # fmt: skip
    isolated_net: str = setting("10.98.0.0/24", "network of an isolated group; a machine has its number in the last octet")  # fmt: skip


def nets_of(settings: Settings, bridge: str) -> tuple[str, ...]:
    """The networks whose addresses this host gives on that bridge. Raises BadSetting."""
    from ipaddress import IPv4Interface

    from belljar.network.bridge import addresses, ranges_of

    firsts = (next(addresses((text,))) for text in ranges_of(settings.bridge_addresses, bridge))
    return tuple(dict.fromkeys(str(IPv4Interface(first).network) for first in firsts))


@dataclass(frozen=True)
class Link:
    """A machine's card as the guest sees it. mode NONE: no card at all."""

    mode: NetworkMode
    mac: str = ""
    address: str = ""
    gateway: str = ""
    dns: str = ""
    egress: Egress | None = None  # the rules for a guard of a user network
    has_line: bool = False  # its frames are carried by a descriptor, not by QEMU's own user network
    fd: int = -1  # that descriptor, open in this process while the link is joined


class Joined:
    """A link. `close` removes what was made for it, if anything; closing twice is fine."""

    def __init__(self, link: Link) -> None:
        self.link = link

    def close(self) -> None:
        """Nothing was made on this host."""


class Networks:
    """Joins machines to their networks, by the settings of this host."""

    def __init__(self, settings: Settings, run: Path) -> None:
        self._settings, self._folder = settings, run / FOLDER

    async def join(
        self, mode: NetworkMode, name: str, id: MachineId, *, uid: int, intend: Intend, answers: Iterable[Place] = (),
        allow: tuple[str, ...] = (), secret: tuple[str, ...] = (),
    ) -> Joined:  # fmt: skip
        """Join a network. *answers*: places that the machine's supervisor answers for; *allow*, *secret*: see `egress_of`. Raises
        BadOption, NetworkFailed, BadSetting, CommandMissing."""
        settings, link = self._settings, plan(mode, id)
        if mode is NetworkMode.USER:
            from belljar.network.egress import egress_of

            return Joined(replace(link, egress=egress_of(settings, tuple(answers), allow, secret)))
        if mode is NetworkMode.BRIDGE:
            from belljar.network.bridge import bridge_of, join_bridge

            bridge, _, address = name.partition("@")
            return await join_bridge(settings, link, bridge_of(settings, bridge), id, intend, address)
        if mode is NetworkMode.ISOLATED:
            from belljar.network.isolated import join_group

            return join_group(settings, self._folder, link, name, uid, intend)
        return Joined(link)


def discard(run: Path, id: MachineId, what: str, path: Path) -> None:
    """Remove what the journal of a dead machine says was made. Removing what is not there is success."""
    if what == "port" and path.parent.parent == run / FOLDER:
        from belljar.network.isolated import sweep

        sweep(path.parent)
    elif what == "nft-table":
        from belljar.network.bridge import remove_table

        remove_table(id)


def part_of(run: Path, group: str, numbers: Iterable[int]) -> Part:
    """This host's part of a group, for who carries frames to machines *numbers* of others. Raises BadOption, NetworkFailed."""
    from belljar.network.isolated import Part

    return Part(run / FOLDER, group, numbers)


def sweep(run: Path) -> None:
    """Remove what processes that were killed have left of isolated groups. A group that is busy just now sweeps itself."""
    from belljar.network.isolated import sweep

    folder = run / FOLDER
    for name in sorted(os.listdir(folder)) if folder.exists() else ():
        with suppress(OSError, BelljarError):
            sweep(folder / name)


def mistakes(settings: Settings) -> Iterator[tuple[str, BadSetting]]:
    """(key, what is wrong) of each value that could not be used, though its type is right. Looks at nothing of this host."""
    from belljar.network.bridge import addresses, bridge_of, check_address, macs
    from belljar.network.egress import list_of, rules_of
    from belljar.network.isolated import subnet

    def check_range(text: str) -> None:
        name, colon, _ = text.rpartition(":")
        if colon and name not in settings.bridges:
            raise BadSetting(f"network.bridge_addresses: {text!r}: {name} is not in `network.bridges`")
        list(addresses((text,)))

    checks: list[tuple[str, Iterable[str], Callable[[str], object]]] = [
        ("allow", settings.allow, lambda text: list_of("network.allow", (text,), BadSetting)),
        ("deny", settings.deny, lambda text: rules_of("deny", (text,))),
        ("bridges", settings.bridges, lambda name: bridge_of(Settings(bridges=(name,)), name)),
        ("bridge_addresses", settings.bridge_addresses, check_range),
        ("bridge_gateway", settings.bridge_gateway.split(), lambda text: check_address("bridge_gateway", text)),
        ("bridge_dns", (settings.bridge_dns,), lambda text: check_address("bridge_dns", text)),
        ("mac_pool", settings.mac_pool, lambda text: list(macs((text,)))),
        ("isolated_net", (settings.isolated_net,), subnet),
    ]
    for key, texts, check in checks:
        for text in texts:
            try:
                check(text)
            except BadSetting as exc:
                yield key, exc


def shortfalls(settings: Settings, *, is_root: bool) -> tuple[str, ...]:
    """What these settings do not do for machines of root, or of ordinary users, against what one might expect."""
    if not settings.bridges or settings.anti_spoofing is not AntiSpoofing.AUTO:
        return ()
    from belljar.network.bridge import obstacle

    if not (why := obstacle(is_root=is_root)):
        return ()
    what = f"a machine on a bridge ({', '.join(settings.bridges)}) can use any MAC and IP address of that network"
    words = '"required" refuses such machines, "off" says that it may be so'
    return (f'network.anti_spoofing = "auto" does nothing here ({why}): {what}; {words}',)


# QEMU's user network always has these: the guest's, the gateway's, the name server's. Machines never see others'.
USER_ADDRESSES = ("10.0.2.15/24", "10.0.2.2", "10.0.2.3")


def plan(mode: NetworkMode, id: MachineId) -> Link:
    """The link as far as it is known before it is joined: enough for a template."""
    if mode is NetworkMode.NONE:
        return Link(mode)
    if mode is NetworkMode.USER:
        return Link(mode, mac_address(id), *USER_ADDRESSES)
    return Link(mode, mac_address(id), has_line=True)


def mac_address(id: MachineId) -> str:
    """A unicast address, a pure function of the machine's id."""
    return (b"\x52" + sha256(id.encode("ascii")).digest()[:5]).hex(":")
