"""An ssh server's host keys, which no two clones may share: which are the template's, and how they are made anew."""

import os
import select
import stat
import time

from belljar.agent.guest.libc import libc
from belljar.agent.guest.system import Refused, kill_quietly, read_file, say

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
else:  # what is below the library's modules of these names, and much quicker to import
    import _signal as signal

SSH = "/etc/ssh"
SSH_KEYGEN = "/usr/bin/ssh-keygen"
KEY_KINDS = ("ed25519", "ecdsa")
SSHD_PIDS = ("/run/sshd.pid", "/var/run/sshd.pid")
SSHD_PATIENCE = 20  # seconds, of these, for the server to listen again


def host_keys_since(boot: float, folder: str) -> "list[str]":
    """The keys of an ssh server that were made since this moment. Those are the template's, and all its clones would share
    them; older ones came with the image, and are its owner's choice."""
    found = []
    for leaf in sorted(os.listdir(folder)) if os.path.isdir(folder) else ():
        path = folder + "/" + leaf
        if leaf.startswith("ssh_host_") and leaf.endswith("_key"):
            facts = os.lstat(path)
            if stat.S_ISREG(facts.st_mode) and facts.st_mtime >= boot:
                found.append(path)
    return found


def renew_host_keys(old: "list[str]", folder: str) -> None:
    """Other keys in the place of these, for the server that runs too. Only kinds that are made at once: an emulated guest
    may take a minute for an RSA key, and who speaks to a server of today speaks Ed25519."""
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
                return say(
                    "sshd was told to read its keys anew and has not said within %d s that it did" % SSHD_PATIENCE
                )
            os.read(written, 4096)
    finally:
        os.close(written)
