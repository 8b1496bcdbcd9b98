"""By what others on a network know this guest: its card's addresses, and its ssh server's host keys. No two clones share them.

The card is set up by ioctl: no tool of the image is needed.
"""

import os
import select
import stat
import struct
import time

from belljar.agent.guest.system import Refused, kill_quietly, libc, read_file, say, write_file
from belljar.agent.wire import U32

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
else:  # what is below the library's modules of these names, and much quicker to import
    import _signal as signal

RESCAN = "/sys/bus/pci/rescan"
SSH = "/etc/ssh"
SSH_KEYGEN = "/usr/bin/ssh-keygen"
KEY_KINDS = ("ed25519", "ecdsa")
SSHD_PIDS = ("/run/sshd.pid", "/var/run/sshd.pid")
SSHD_PATIENCE = 20  # seconds, of these, for the server to listen again


class Card:
    """The guest's one network card."""

    def __init__(self) -> None:
        import _socket as socket
        import fcntl

        self.socket, self.ioctl = socket, fcntl.ioctl
        self.control = socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)

    def close(self) -> None:
        self.control.close()

    def name(self) -> str:
        """A clone's card may be one that its template did not have: then the kernel is told to look at the bus anew."""
        for look_anew in (False, True):
            if look_anew and os.path.exists(RESCAN):
                write_file(RESCAN, b"1", flags=0)
            for name in sorted(os.listdir("/sys/class/net")):
                if os.path.exists("/sys/class/net/%s/device" % name):
                    return name
        raise Refused("refused", "the guest has no network card, or its kernel no driver for it")

    def _ask(self, request: int, name: str, value: bytes = b"") -> bytes:
        answer = self.ioctl(self.control, request, struct.pack("16s24s", name.encode(), value))
        return bytes(answer)[16:]

    def _address(self, text: str) -> bytes:
        return struct.pack("=HH4s8x", self.socket.AF_INET, 0, self.socket.inet_aton(text))

    def up(self, name: str) -> None:
        flags = struct.unpack("=H", self._ask(0x8913, name)[:2])[0]  # SIOCGIFFLAGS
        if not flags & 1:
            self._ask(0x8914, name, struct.pack("=H", flags | 1))  # SIOCSIFFLAGS, IFF_UP

    def set_mac(self, name: str, mac: str) -> str:
        """Returns what the kernel says afterwards."""
        octets = bytes(int(octet, 16) for octet in mac.split(":"))
        self._ask(0x8924, name, struct.pack("=H6s", 1, octets))  # SIOCSIFHWADDR, ARPHRD_ETHER
        answer = self._ask(0x8927, name)  # SIOCGIFHWADDR
        return ":".join("%02x" % octet for octet in answer[2:8])

    def configure(self, name: str, address: str, gateway: str) -> None:
        number, _, prefix = address.partition("/")
        mask = (0xFFFFFFFF << (32 - int(prefix))) & 0xFFFFFFFF
        self._ask(0x8916, name, self._address(number))  # SIOCSIFADDR
        self._ask(0x891C, name, self._address(self.socket.inet_ntoa(U32.pack(mask))))  # SIOCSIFNETMASK
        self.up(name)
        if gateway:
            anywhere = self._address("0.0.0.0")
            route = struct.pack(
                "@L16s16s16sHhLPhPLLH", 0, anywhere, self._address(gateway), anywhere, 3, 0, 0, 0, 0, 0, 0, 0, 0
            )
            try:
                self.ioctl(self.control, 0x890B, route)  # SIOCADDRT, RTF_UP | RTF_GATEWAY
            except FileExistsError:
                pass


def host_keys_since(boot: float, folder: str) -> "list[str]":
    """Host keys made since this moment: the template's, which its clones would share. Older ones are the image's."""
    found = []
    for leaf in sorted(os.listdir(folder)) if os.path.isdir(folder) else ():
        path = folder + "/" + leaf
        if leaf.startswith("ssh_host_") and leaf.endswith("_key"):
            facts = os.lstat(path)
            if stat.S_ISREG(facts.st_mode) and facts.st_mtime >= boot:
                found.append(path)
    return found


def renew_host_keys(old: "list[str]", folder: str) -> None:
    """Replace these keys, for the server that runs too. By no RSA key: an emulated guest takes a minute for one."""
    if not old:
        return
    new = []  # type: list[str]
    for kind in KEY_KINDS:
        path = "%s/ssh_host_%s_key" % (folder, kind)
        if path in old or (kind == KEY_KINDS[0] and not new):
            for leaf in (path + ".new", path + ".new.pub"):
                if os.path.lexists(leaf):
                    os.unlink(leaf)
            status = os.spawnv(os.P_WAIT, SSH_KEYGEN, ["ssh-keygen", "-q", "-t", kind, "-N", "", "-f", path + ".new"])
            if status:
                raise Refused("refused", "ssh-keygen ended with %d: no host keys of its own" % status)
            new.append(path)
    for path in old:
        for leaf in (path, path + ".pub", path + "-cert.pub"):
            if os.path.lexists(leaf):
                os.unlink(leaf)
    for path in new:
        for end in ("", ".pub"):
            os.rename(path + ".new" + end, path + end)
    for path in SSHD_PIDS:
        number = read_file(path, 16).strip()
        if number.isdigit() and read_file("/proc/%d/comm" % int(number), 16).strip() == b"sshd":
            restart_sshd(int(number), path)
            break


def service_of(cgroups: bytes) -> str:
    """The systemd service a process belongs to, by /proc/PID/cgroup; empty where it is none."""
    for line in cgroups.decode("utf-8", "replace").splitlines():
        leaf = line.rpartition("/")[2]
        if leaf.endswith(".service") and leaf.startswith(("ssh", "openssh")):
            return leaf
    return ""


def restart_sshd(pid: int, pid_file: str) -> None:
    """Have it read its keys, and return when it listens again. One of systemd's may have its sockets from systemd, and would not
    get them again by itself; any other writes its pid when it listens."""
    unit = service_of(read_file("/proc/%d/cgroup" % pid))
    if unit:
        status = os.spawnvp(os.P_WAIT, "systemctl", ["systemctl", "restart", unit])
        if status:
            raise Refused("refused", "the ssh server (%s) did not start again with its own keys: %d" % (unit, status))
        return
    written = libc().watch_writes(os.path.dirname(pid_file).encode())
    try:
        before = os.stat(pid_file)
        kill_quietly(pid, signal.SIGHUP)
        deadline = time.monotonic() + SSHD_PATIENCE
        while True:
            try:
                now = os.stat(pid_file)
                if (now.st_ino, now.st_mtime_ns) != (before.st_ino, before.st_mtime_ns) and now.st_size:
                    return
            except FileNotFoundError:
                pass
            if not select.select([written], [], [], max(0.0, deadline - time.monotonic()))[0]:
                return say("sshd has not said within %d s that it read its keys anew" % SSHD_PATIENCE)
            os.read(written, 4096)
    finally:
        os.close(written)
