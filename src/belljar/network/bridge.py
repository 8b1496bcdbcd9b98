"""Puts a machine on a bridge of its host: a tap that is gone with the last process that holds it.

Root makes the tap itself; anybody else has it made by qemu-bridge-helper, which is setuid root where a site wants that and
obeys /etc/qemu/bridge.conf. See tun/tap in the kernel's documentation and qemu-bridge-helper.c.
"""

from __future__ import annotations

import fcntl
import os
import re
import socket
import struct
import subprocess
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, suppress
from ipaddress import IPv4Address, IPv4Interface
from pathlib import Path

from belljar.errors import BadOption, BadSetting, BelljarError, NetworkFailed
from belljar.host.commands import run, which
from belljar.host.threads import in_thread, wholly_in_thread
from belljar.model import MachineId
from belljar.network import AntiSpoofing, Intend, Joined, Link, Settings
from belljar.records import replace

FOLDERS = ("/usr/lib/qemu", "/usr/libexec", "/usr/local/libexec")
HELPERS = tuple(f"{folder}/qemu-bridge-helper" for folder in FOLDERS)
PATIENCE = 10.0  # seconds the helper, or nft, may take
INTERFACE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,14}")
TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x2, 0x1000


def obstacle(*, is_root: bool) -> str:
    """Why no rules can be made for a machine; "" when they can."""
    if not is_root:
        return "only root can set rules, and a user's machine is made without root's rights"
    return "" if which("nft") else "nft is not installed"


def bridge_of(settings: Settings, name: str) -> str:
    """The bridge that is meant. Raises BadOption for one the site did not name."""
    hint = "The site names its bridges in `network.bridges`."
    if not settings.bridges:
        raise BadOption("this site lets no machine onto a bridge", hint=hint)
    chosen = name or settings.bridges[0]
    if chosen not in settings.bridges:
        raise BadOption(f"bridge {chosen!r}: the site lets machines onto {', '.join(settings.bridges)} only", hint=hint)
    if not INTERFACE.fullmatch(chosen):
        raise BadSetting(f"network.bridges: {chosen!r} cannot be the name of a bridge")
    return chosen


def guards_addresses(settings: Settings, *, is_root: bool) -> bool:
    """Is a table of rules made for this machine? Raises BadSetting where there has to be one and cannot."""
    why = obstacle(is_root=is_root)
    if why and settings.anti_spoofing is AntiSpoofing.REQUIRED:
        hint = "Install nftables and run as root, or set `network.anti_spoofing` to auto or off."
        raise BadSetting(f'network.anti_spoofing = "required", and {why}', hint=hint)
    return not why and settings.anti_spoofing is not AntiSpoofing.OFF


async def join_bridge(
    settings: Settings, link: Link, bridge: str, id: MachineId, intend: Intend, wish: str = ""
) -> OnBridge:
    """A tap on *bridge*. *wish*: an address of this host's, where not any that is free will do. Raises NetworkFailed,
    BadSetting, BadOption; nothing is left then."""
    if not os.access(f"/sys/class/net/{bridge}/bridge", os.F_OK):
        raise NetworkFailed(f"this host has no bridge {bridge}", hint="Make it, or correct `network.bridges`.")
    is_root, tap = os.geteuid() == 0, f"bj{id}"
    has_rules, is_guarded = guards_addresses(settings, is_root=is_root), settings.anti_spoofing is not AntiSpoofing.OFF
    joined = OnBridge(link, id, has_rules)
    try:
        joined.claim(settings, wish, bridge)
        make = (lambda: make_tap(tap, bridge, is_guarded=is_guarded)) if is_root else (lambda: ask_helper(bridge))
        joined.link = replace(joined.link, fd=await in_thread(make, undo=os.close))
        if has_rules:
            intend("nft-table", Path(table_of(id)))
            address = joined.link.address.partition("/")[0]
            await wholly_in_thread(lambda: make_table(id, tap, joined.link.mac, address))
    except BaseException:
        joined.close()
        raise
    return joined


class OnBridge(Joined):
    """A machine on a bridge: tap, rules, and the addresses it was given."""

    def __init__(self, link: Link, id: MachineId, has_rules: bool) -> None:
        super().__init__(link)
        self._id, self._has_rules = id, has_rules
        self._claims: list[socket.socket] = []

    def claim(self, settings: Settings, wish: str = "", bridge: str = "") -> None:
        """Take addresses of the site, where it has any: *wish*, or one that is free."""
        if settings.mac_pool:
            mac, holder = claim("mac_pool", macs(settings.mac_pool))
            self._claims.append(holder)
            self.link = replace(self.link, mac=mac)
        offered = list(addresses(ranges_of(settings.bridge_addresses, bridge)))
        if wish:
            offered = [address for address in offered if address.startswith(f"{wish}/")]
            if not offered:
                hint = "The site names them in `network.bridge_addresses`."
                raise BadOption(f"{wish[:40]!r} is not an address that this host gives to machines", hint=hint)
        if offered:
            # Not the first that is free: that is the last machine's, which others believe to be there for a while.
            start = int(self._id, 16) % len(offered)
            address, holder = claim("bridge_addresses", [*offered[start:], *offered[:start]])
            self._claims.append(holder)
            gateway = gateway_for(address, settings.bridge_gateway)
            dns = check_address("bridge_dns", settings.bridge_dns)
            self.link = replace(self.link, address=address, gateway=gateway, dns=dns)

    def close(self) -> None:
        if self.link.fd >= 0:
            os.close(self.link.fd)
            self.link = replace(self.link, fd=-1)
        if self._has_rules:
            self._has_rules = False
            with suppress(BelljarError):
                remove_table(self._id)
        while self._claims:
            self._claims.pop().close()


def check_address(key: str, text: str) -> str:
    """The address, "" where none was given. Raises BadSetting."""
    try:
        return str(IPv4Address(text)) if text else ""
    except ValueError:
        raise BadSetting(f"network.{key} = {text!r}: no IPv4 address") from None


def make_tap(name: str, bridge: str, *, is_guarded: bool = False) -> int:
    """As root: a tap on the bridge, up. A bridge takes over the lowest MAC address of its ports; ours is to be the highest.
    *is_guarded*: no BPDU from this port makes it the spanning tree's way to the root, and one that no rule has dropped closes
    the port (ip-link(8), bridge_slave). Raises NetworkFailed."""
    try:
        with ExitStack() as unless_made:
            tap = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
            unless_made.callback(os.close, tap)
            fcntl.ioctl(tap, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_NO_PI))
            mac = "fe" + Path(f"/sys/class/net/{name}/address").read_text().strip()[2:]
            mtu = Path(f"/sys/class/net/{bridge}/mtu").read_text().strip()
            guard = ["type bridge_slave root_block on guard on"] if is_guarded else []
            acts = [f"address {mac} mtu {mtu}", f"master {bridge}", *guard, "up"]
            commands = "".join(f"link set dev {name} {act}\n" for act in acts).encode()
            run(["ip", "-batch", "-"], timeout=PATIENCE, stdin=commands)
            unless_made.pop_all()
    except (OSError, BelljarError) as exc:
        raise NetworkFailed(f"no tap can be put on the bridge {bridge}: {exc}") from exc
    return tap


def ask_helper(bridge: str) -> int:
    """A tap on the bridge, made by QEMU's helper. Raises NetworkFailed with what it said."""
    helper = next((path for path in HELPERS if os.access(path, os.X_OK)), None)
    if helper is None:
        raise NetworkFailed("qemu-bridge-helper is not installed, and only root can do without it")
    ours, theirs = socket.socketpair()
    with ours, theirs:
        argv, ends = [helper, f"--br={bridge}", f"--fd={theirs.fileno()}"], [theirs.fileno()]
        try:
            done = subprocess.run(
                argv, pass_fds=ends, stdin=subprocess.DEVNULL, capture_output=True, timeout=PATIENCE, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as exc:
            raise NetworkFailed(f"{helper}: {exc}") from exc
        if done.returncode:
            why = (done.stderr.decode(errors="replace").strip() or f"exit {done.returncode}").splitlines()[-1]
            hint = f"It has to be setuid root, and /etc/qemu/bridge.conf has to say `allow {bridge}`."
            raise NetworkFailed(f"{helper} puts no tap on the bridge {bridge}: {why}", hint=hint)
        ours.setblocking(False)
        try:
            _, (tap,), _, _ = socket.recv_fds(ours, 1, 1)
        except (BlockingIOError, ValueError):
            raise NetworkFailed(f"{helper} succeeded, but passed no tap") from None
    os.set_inheritable(tap, False)
    return tap


# -- against the use of others' addresses: nftables rules, two tables per machine, named by its id --------------------

# They see frames from the machine's own tap before the bridge does. https://wiki.nftables.org

FAMILIES = ("bridge", "netdev")
ID, MAC = re.compile(r"[0-9a-f]{12}"), re.compile(r"[0-9a-f]{2}(:[0-9a-f]{2}){5}")
TAP, ADDRESS = re.compile(r"[A-Za-z0-9._-]{1,15}"), re.compile(r"[0-9.]{7,15}")

# The kernel removes frames for the bridge itself (spanning tree, pause, LLDP) before most hooks of the family bridge.
NO_BPDUS = "ether daddr & ff:ff:ff:ff:ff:f0 == 01:80:c2:00:00:00 drop"


def table_of(id: MachineId) -> str:
    return f"belljar_{id}"


def rules(id: MachineId, tap: str, mac: str, address: str) -> str:
    """The rules for nft. *address* "": the machine gets its address from a DHCP server, and may use any."""
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
    own = [f'iifname "{tap}" {line}' for line in lines]
    return _table("bridge", id, "prerouting", own) + _table("netdev", id, f'ingress device "{tap}"', [NO_BPDUS])


def _table(family: str, id: MachineId, hook: str, rows: list[str]) -> str:
    chain = "".join(f"        {row}\n" for row in (f"type filter hook {hook} priority -300; policy accept;", *rows))
    return f"table {family} {table_of(id)} {{\n    chain from_machine {{\n{chain}    }}\n}}\n"


def make_table(id: MachineId, tap: str, mac: str, address: str) -> None:
    """Raises NetworkFailed where nft refuses."""
    try:
        run([which("nft") or "nft", "-f", "-"], timeout=PATIENCE, stdin=rules(id, tap, mac, address).encode())
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


# -- addresses that this host gives to its machines, each to one at a time --------------------------------------------

# A claim is an abstract socket with the address in its name: it is unique in the kernel, and gone when its holder ends, even
# by kill -9. Any user of the host could bind such a name and so block an address, but no address is used twice.

MOST = 4096  # addresses of one range


def claim(kind: str, candidates: Iterable[str]) -> tuple[str, socket.socket]:
    """The first of them that nobody holds, and what holds it until it is closed. Raises NetworkFailed when all are held."""
    count = 0
    for value in candidates:
        holder = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            holder.bind(f"\0belljar {kind} {value.partition('/')[0]}")
            return value, holder
        except OSError:
            holder.close()
            count += 1
    hint = "Wait for other machines to end, or give this host more."
    raise NetworkFailed(f"all {count} addresses of network.{kind} are in use", hint=hint)


def ranges_of(texts: Iterable[str], bridge: str) -> tuple[str, ...]:
    """Those that are for this bridge: `BRIDGE:RANGE`; where there are none, those that name no bridge."""
    split = [text.rpartition(":") for text in texts]
    own = tuple(range for name, _, range in split if name == bridge)
    return own or tuple(range for name, _, range in split if not name)


def gateway_for(address: str, texts: str) -> str:
    """Of several with blanks between them, the one in this address's network; one alone is that of all. Raises BadSetting."""
    gateways = [check_address("bridge_gateway", text) for text in texts.split()]
    net = IPv4Interface(address).network
    return next((gateway for gateway in gateways if len(gateways) == 1 or IPv4Address(gateway) in net), "")


def addresses(texts: Iterable[str]) -> Iterator[str]:
    """Each address with its prefix. Raises BadSetting."""
    for entry in texts:
        text = entry.rpartition(":")[2]
        span, _, prefix = text.partition("/")
        try:
            numbers = _numbers(span, lambda address: int(IPv4Address(address)))
            first = IPv4Interface((numbers[0], int(prefix)))
            if IPv4Address(numbers[-1]) not in first.network:
                raise ValueError
        except ValueError:
            forms = f"neither ADDRESS/PREFIX nor FIRST-LAST/PREFIX of at most {MOST}"
            raise BadSetting(f"network.bridge_addresses: {text!r} is {forms}") from None
        yield from (f"{IPv4Address(number)}/{prefix}" for number in numbers)


def macs(texts: Iterable[str]) -> Iterator[str]:
    """Each MAC address. Raises BadSetting."""
    for text in texts:
        try:
            numbers = _numbers(text, _mac)
        except ValueError:
            forms = f"neither a unicast MAC address nor FIRST-LAST of at most {MOST}"
            raise BadSetting(f"network.mac_pool: {text!r} is {forms}") from None
        yield from (number.to_bytes(6, "big").hex(":") for number in numbers)


def _numbers(text: str, read: Callable[[str], int]) -> range:
    """Of FIRST-LAST, or of one. Raises ValueError."""
    first, _, last = text.partition("-")
    low, high = read(first.strip()), read((last or first).strip())
    if not low <= high < low + MOST:
        raise ValueError(text)
    return range(low, high + 1)


def _mac(text: str) -> int:
    number = int(text.replace(":", ""), 16)
    if not MAC.fullmatch(text.lower()) or number >> 40 & 1:
        raise ValueError(text)
    return number
