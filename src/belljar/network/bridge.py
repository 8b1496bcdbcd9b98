"""Puts a machine on a bridge of its host: a tap that is gone with the last process that holds it.

Root makes the tap itself; anybody else has it made by qemu-bridge-helper, which is setuid root where a site wants that and
obeys /etc/qemu/bridge.conf. See tun/tap in the kernel's documentation and qemu-bridge-helper.c.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from ipaddress import IPv4Address
from pathlib import Path

from belljar.errors import BadSetting, BelljarError, NetworkFailed
from belljar.host.threads import in_thread, wholly_in_thread
from belljar.model import MachineId
from belljar.network import AntiSpoofing, Link, Settings
from belljar.network.claims import Claim, addresses, claim, macs
from belljar.network.joining import guards_addresses
from belljar.network.spoofing import has_nft, make_table, remove_table, table_of

HELPERS = (
    "/usr/lib/qemu/qemu-bridge-helper",
    "/usr/libexec/qemu-bridge-helper",
    "/usr/local/libexec/qemu-bridge-helper",
)
PATIENCE = 10.0  # seconds the helper may take
TUNSETIFF, TUNGETIFF, IFF_TAP, IFF_NO_PI, IFF_UP = 0x400454CA, 0x800454D2, 0x2, 0x1000, 0x1
SIOCGIFFLAGS, SIOCSIFFLAGS, SIOCGIFMTU, SIOCSIFMTU, SIOCGIFHWADDR, SIOCSIFHWADDR, SIOCBRADDIF = (
    0x8913, 0x8914, 0x8921, 0x8922, 0x8927, 0x8924, 0x89A2,
)  # fmt: skip


async def join_bridge(
    settings: Settings, link: Link, bridge: str, id: MachineId, intend: Callable[[str, Path], None]
) -> OnBridge:
    """A tap on *bridge*. Raises NetworkFailed, BadSetting; nothing is left then."""
    if not os.access(f"/sys/class/net/{bridge}/bridge", os.F_OK):
        raise NetworkFailed(f"this host has no bridge {bridge}", hint="Make it, or correct `network.bridges`.")
    has_rules = guards_addresses(settings, is_root=os.geteuid() == 0, has_nft=has_nft())
    joined = OnBridge(link, id, has_rules)
    try:
        joined.claim(settings)
        name = f"bj{id}"
        if os.geteuid() == 0:
            joined.fd = make_tap(name, bridge)
            if settings.anti_spoofing is not AntiSpoofing.OFF:
                guard_port(name)
        else:
            joined.fd = await in_thread(lambda: ask_helper(bridge), undo=os.close)
            name = name_of(joined.fd)
        joined.link = replace(joined.link, fd=joined.fd)
        if has_rules:
            intend("nft-table", Path(table_of(id)))
            address = joined.link.address.partition("/")[0]
            await wholly_in_thread(lambda: make_table(id, name, joined.link.mac, address))
    except BaseException:
        joined.close()
        raise
    return joined


class OnBridge:
    """A machine on a bridge: tap, rules, and the addresses it was given."""

    def __init__(self, link: Link, id: MachineId, has_rules: bool) -> None:
        self.link, self.fd = link, -1
        self._id, self._has_rules = id, has_rules
        self._claims: list[Claim] = []

    def claim(self, settings: Settings) -> None:
        """Addresses of the site's, where it gives any."""
        if settings.mac_pool:
            self._claims.append(claim("mac_pool", macs(settings.mac_pool)))
            self.link = replace(self.link, mac=self._claims[-1].value)
        if settings.bridge_addresses:
            self._claims.append(claim("bridge_addresses", addresses(settings.bridge_addresses)))
            gateway = check_address("bridge_gateway", settings.bridge_gateway)
            dns = check_address("bridge_dns", settings.bridge_dns)
            self.link = replace(self.link, address=self._claims[-1].value, gateway=gateway, dns=dns)

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
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


def make_tap(name: str, bridge: str) -> int:
    """As root: a tap on the bridge, up. Raises NetworkFailed."""
    tap = -1
    try:
        tap = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
        fcntl.ioctl(tap, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_NO_PI))
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
            _join(control, name, bridge)
        return tap
    except OSError as exc:
        if tap >= 0:
            os.close(tap)
        raise NetworkFailed(f"no tap can be put on the bridge {bridge}: {exc.strerror}") from exc


def guard_port(name: str) -> None:
    """No BPDU from this port makes it the spanning tree's way to the root; one that no rule has dropped closes the port. See
    ip-link(8) on bridge_slave. Raises NetworkFailed."""
    for what in ("root_block", "bpdu_guard"):
        switch = Path(f"/sys/class/net/{name}/brport/{what}")
        try:
            switch.write_text("1")
        except OSError as exc:
            raise NetworkFailed(
                f"{switch}: {exc.strerror}: a guest could take over the bridge's spanning tree",
                hint='Let root write to /sys, or set `network.anti_spoofing = "off"`.',
            ) from exc


def _join(control: socket.socket, name: str, bridge: str) -> None:
    """A bridge takes over the lowest MAC address of its ports; ours is to be the highest."""
    mac = bytearray(_ask(control, SIOCGIFHWADDR, name)[:8])
    mac[2] = 0xFE
    _ask(control, SIOCSIFHWADDR, name, bytes(mac))
    _ask(control, SIOCSIFMTU, name, _ask(control, SIOCGIFMTU, bridge)[:4])
    _ask(control, SIOCBRADDIF, bridge, struct.pack("i", socket.if_nametoindex(name)))
    flags = struct.unpack("H", _ask(control, SIOCGIFFLAGS, name)[:2])[0]
    _ask(control, SIOCSIFFLAGS, name, struct.pack("H", flags | IFF_UP))


def _ask(control: socket.socket, request: int, name: str, value: bytes = b"") -> bytes:
    return fcntl.ioctl(control, request, struct.pack("16s24s", name.encode(), value))[16:]


def name_of(tap: int) -> str:
    return fcntl.ioctl(tap, TUNGETIFF, bytes(40))[:16].rstrip(b"\0").decode("ascii")


def ask_helper(bridge: str) -> int:
    """A tap on the bridge, made by QEMU's helper. Raises NetworkFailed with what it said."""
    import subprocess

    helper = next((path for path in HELPERS if os.access(path, os.X_OK)), None)
    if helper is None:
        raise NetworkFailed("qemu-bridge-helper is not installed, and only root can do without it")
    ours, theirs = socket.socketpair()
    with ours, theirs:
        argv = [helper, f"--br={bridge}", f"--fd={theirs.fileno()}"]
        try:
            done = subprocess.run(
                argv,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=PATIENCE,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as exc:
            raise NetworkFailed(f"{helper}: {exc}") from exc
        if done.returncode:
            said = done.stderr.decode(errors="replace").strip().splitlines()
            raise NetworkFailed(
                f"{helper} puts no tap on the bridge {bridge}: {said[-1] if said else f'exit {done.returncode}'}",
                hint=f"It has to be setuid root, and /etc/qemu/bridge.conf has to say `allow {bridge}`.",
            )
        ours.setblocking(False)
        try:
            _, fds, _, _ = socket.recv_fds(ours, 1, 1)
        except BlockingIOError:
            fds = []
    if not fds:
        raise NetworkFailed(f"{helper} ended well and gave no tap")
    os.set_inheritable(fds[0], False)
    return fds[0]
