"""By what others on a network know this guest: its card's addresses, and its ssh server's host keys. No two clones share them.

The card is set up by ioctl: no tool of the image is needed.
"""

from __future__ import annotations

import _signal as signal
import _socket
import fcntl
import os
import stat
import struct
from contextlib import suppress

from belljar.agent.guest.system import Refused, kill_quietly, read_file, write_quietly

RESCAN = "/sys/bus/pci/rescan"
SSH = "/etc/ssh"
SSH_KEYGEN = "/usr/bin/ssh-keygen"
KEY_KINDS = ("ed25519", "ecdsa")
SSHD_PIDS = ("/run/sshd.pid", "/var/run/sshd.pid")
SIOCADDRT, SIOCGIFFLAGS, SIOCSIFFLAGS, SIOCSIFADDR, SIOCSIFNETMASK = 0x890B, 0x8913, 0x8914, 0x8916, 0x891C
SIOCSIFHWADDR, SIOCGIFHWADDR, ARPHRD_ETHER, IFF_UP = 0x8924, 0x8927, 1, 1
SOCK_DIAG, BY_FAMILY, DESTROY, REQUEST, DUMP = 4, 20, 21, 1, 0x301
LIVE = sum(1 << state for state in (1, 2, 4, 5, 8, 9, 11))  # of TCP's states: neither listening nor over
# `struct nlmsghdr` and `struct inet_diag_req_v2`, whose last part names a connection.
MESSAGE = struct.Struct("=IHH8xBBxxI48s")
ANSWER, NAMED_AT = struct.Struct("=IH"), 20
ROUTE, RTF_UP_GATEWAY = struct.Struct("@L16s16s16sH62x"), 3  # of `struct rtentry` what is not zero


def configure_card(mac: str, address: str, gateway: str) -> str:
    """Give the guest's one card its MAC, and its address where it has one. Returns the MAC that the kernel then has."""
    control = _socket.socket(_socket.AF_INET, _socket.SOCK_DGRAM | _socket.SOCK_CLOEXEC)
    name = card_name().encode()

    def ask(request: int, value: bytes = b"") -> bytes:
        return fcntl.ioctl(control, request, struct.pack("16s24s", name, value))[16:]

    ask(SIOCSIFHWADDR, struct.pack("=H6s", ARPHRD_ETHER, bytes.fromhex(mac.replace(":", ""))))
    if address:
        number, _, prefix = address.partition("/")
        mask = (0xFFFFFFFF << (32 - int(prefix))) & 0xFFFFFFFF
        ask(SIOCSIFADDR, inet(_socket.inet_aton(number)))
        ask(SIOCSIFNETMASK, inet(mask.to_bytes(4)))
        (flags,) = struct.unpack_from("=H", ask(SIOCGIFFLAGS))
        ask(SIOCSIFFLAGS, struct.pack("=H", flags | IFF_UP))
    if address and gateway:
        route = ROUTE.pack(0, inet(bytes(4)), inet(_socket.inet_aton(gateway)), inet(bytes(4)), RTF_UP_GATEWAY)
        with suppress(FileExistsError):
            fcntl.ioctl(control, SIOCADDRT, route)
    return ask(SIOCGIFHWADDR)[2:8].hex(":")


def leave_network(address: str) -> None:
    """Take the card's address away, and end the connections that have it."""
    control, name = _socket.socket(_socket.AF_INET, _socket.SOCK_DGRAM | _socket.SOCK_CLOEXEC), card_name().encode()
    fcntl.ioctl(control, SIOCSIFADDR, struct.pack("16s24s", name, inet(bytes(4))))
    fcntl.ioctl(control, SIOCSIFFLAGS, struct.pack("16s24s", name, b""))  # down
    end_connections(_socket.inet_aton(address.partition("/")[0]))


def end_connections(address: bytes) -> None:
    """The TCP connections of an address: the programs at their ends are told. A kernel that cannot do that (before 4.5, or without
    INET_DIAG_DESTROY) leaves them to time out. https://man7.org/linux/man-pages/man7/sock_diag.7.html"""
    kernel = _socket.socket(_socket.AF_NETLINK, _socket.SOCK_RAW | _socket.SOCK_CLOEXEC, SOCK_DIAG)

    def ask(what: int, flags: int, family: int, connection: bytes = b"") -> None:
        kernel.send(MESSAGE.pack(MESSAGE.size, what, flags, family, _socket.IPPROTO_TCP, LIVE, connection))

    for family in (_socket.AF_INET, _socket.AF_INET6):
        ask(BY_FAMILY, DUMP, family)
        kind, connections = BY_FAMILY, []
        while kind == BY_FAMILY:
            data = kernel.recv(1 << 16)
            while data:
                length, kind = ANSWER.unpack_from(data)
                connections.append(data[NAMED_AT:length][:48])
                data = data[length:]
        for connection in connections:
            if address in (connection[4:8], connection[16:20]):  # an IPv6 socket has it behind ::ffff:
                ask(DESTROY, REQUEST, family, connection)
    kernel.close()


def inet(address: bytes) -> bytes:
    """A `struct sockaddr_in` without a port."""
    return struct.pack("=HH4s8x", _socket.AF_INET, 0, address)


def card_name() -> str:
    """A clone's card may be one that its template did not have: then the kernel is told to look at the bus anew. Raises Refused."""
    for _ in range(2):
        for name in sorted(os.listdir("/sys/class/net")):
            if os.path.exists(f"/sys/class/net/{name}/device"):
                return name
        write_quietly(RESCAN, b"1")
    raise Refused("refused", "the guest has no network card, or its kernel no driver for it")


def host_keys_since(boot: float, folder: str) -> list[str]:
    """Host keys made since this moment: the template's, which its clones would share. Older ones are the image's."""
    keys = []
    for leaf in sorted(os.listdir(folder)) if os.path.isdir(folder) else ():
        path = f"{folder}/{leaf}"
        if leaf.startswith("ssh_host_") and leaf.endswith("_key"):
            status = os.lstat(path)
            if stat.S_ISREG(status.st_mode) and status.st_mtime >= boot:
                keys.append(path)
    return keys


def renew_host_keys(old: list[str], folder: str) -> None:
    """Replace these keys, for the server that runs too. By no RSA key: an emulated guest takes a minute for one."""
    if not old:
        return
    paths = {kind: f"{folder}/ssh_host_{kind}_key" for kind in KEY_KINDS}
    new = {kind: path for kind, path in paths.items() if path in old} or {KEY_KINDS[0]: paths[KEY_KINDS[0]]}
    for kind, path in new.items():
        remove(path + ".new", path + ".new.pub")
        status = os.spawnv(os.P_WAIT, SSH_KEYGEN, ["ssh-keygen", "-q", "-t", kind, "-N", "", "-f", path + ".new"])
        if status:
            raise Refused("refused", f"ssh-keygen ended with {status}: no host keys of its own")
    for path in old:
        remove(path, path + ".pub", path + "-cert.pub")
    for path in new.values():
        for end in ("", ".pub"):
            os.rename(f"{path}.new{end}", path + end)
    for path in SSHD_PIDS:
        number = read_file(path, 16).strip()
        if number.isdigit() and read_file(f"/proc/{int(number)}/comm", 16).strip() == b"sshd":
            return restart_sshd(int(number))


def remove(*paths: str) -> None:
    for path in paths:
        if os.path.lexists(path):
            os.unlink(path)


def service_of(cgroups: bytes) -> str:
    """The systemd service a process belongs to, by /proc/PID/cgroup; empty if it belongs to none."""
    for line in cgroups.decode("utf-8", "replace").splitlines():
        leaf = line.rpartition("/")[2]
        if leaf.endswith(".service") and leaf.startswith(("ssh", "openssh")):
            return leaf
    return ""


def restart_sshd(pid: int) -> None:
    """Have it read its keys. One of systemd's may have its sockets from systemd, and would not get them again by itself."""
    unit = service_of(read_file(f"/proc/{pid}/cgroup"))
    if not unit:
        return kill_quietly(pid, signal.SIGHUP)
    status = os.spawnvp(os.P_WAIT, "systemctl", ["systemctl", "restart", unit])
    if status:
        raise Refused("refused", f"the ssh server ({unit}) did not start again with its own keys: {status}")
