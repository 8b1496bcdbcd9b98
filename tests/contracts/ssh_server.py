"""A real sshd of this host as a guest: in namespaces of its own, so that it may be given names, accounts and keys.

Its /etc is an overlay, its /run and /proc are its own, and all of it is gone with its first process. Root alone can."""

import asyncio
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import asyncssh

from belljar.guest import Settings, SshKeys
from belljar.guest.ssh import Parcel, SshGuest
from belljar.guest.ssh_link import Patience
from belljar.host.python.interpreter import Interpreter

SSHD = shutil.which("sshd", path="/usr/sbin:/sbin:/usr/bin")
CAN_RUN = os.geteuid() == 0 and SSHD is not None and shutil.which("unshare") is not None
SETUP = """\
set -e
mount --make-rprivate /
mount -t tmpfs tmpfs {folder}/own
mkdir {folder}/own/upper {folder}/own/work {folder}/own/lib {folder}/own/work-of-lib
mount -t overlay overlay -o lowerdir=/usr/lib,upperdir={folder}/own/lib,workdir={folder}/own/work-of-lib /usr/lib
mount -t tmpfs tmpfs /sys/fs/cgroup
mount -t tmpfs tmpfs /sys/class
mount -t overlay overlay -o lowerdir=/etc,upperdir={folder}/own/upper,workdir={folder}/own/work /etc
mount -t tmpfs tmpfs /run
mkdir -p /run/sshd
mount -t proc proc /proc
rm -f /etc/ssh/ssh_host_*
echo visitor:x:4321:4321::/:/bin/sh >> /etc/passwd
cp {folder}/authorized /etc/ssh/visitors
chmod 644 /etc/ssh/visitors
cp {folder}/host /etc/ssh/ssh_host_ed25519_key
chmod 600 /etc/ssh/ssh_host_ed25519_key
exec setpriv --bounding-set=-sys_time,-sys_module {sshd} -D -e -f {folder}/config -p {port}
"""
CONFIG = """\
ListenAddress 127.0.0.1
HostKey /etc/ssh/ssh_host_ed25519_key
AuthorizedKeysFile {folder}/authorized
PidFile /run/sshd.pid
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
StrictModes no
UsePAM no
MaxStartups 100
Match User visitor
AuthorizedKeysFile /etc/ssh/visitors
"""


@dataclass
class Server:
    """An sshd, and how one gets in."""

    folder: Path
    port: int
    keys: SshKeys
    process: subprocess.Popen[bytes]
    told: list[str] = field(default_factory=list)
    lines: list[socket.socket] = field(default_factory=list)

    async def dial(self) -> socket.socket:
        line = socket.socket()
        line.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(line, ("127.0.0.1", self.port))
        except BaseException:
            line.close()
            raise
        self.lines.append(line)
        return line

    @asynccontextmanager
    async def guest(self, patience: Patience | None = None, *, is_draft: bool = False) -> AsyncIterator[SshGuest]:
        """One without a port: the agent is brought there, and speaks over the session."""
        ours, theirs = socket.socketpair()
        guest = SshGuest(
            ours, self.dial, self.keys, Parcel("", no_interpreter), Settings(), self.told.append, is_draft=is_draft,
            patience=patience,
        )  # fmt: skip
        try:
            await guest.greet()
            yield guest
        finally:
            guest.close()
            ours.close()
            theirs.close()


def no_interpreter() -> Interpreter:
    raise AssertionError("this host has a Python of its own")


def without_penalties() -> str:
    """From 9.8 on an sshd hangs up on addresses that failed before, and every test has the same address."""
    line = "PerSourcePenalties no"
    said = subprocess.run([str(SSHD), "-t", "-o", line], capture_output=True, check=False, timeout=30).stderr
    return "" if b"Bad configuration option" in said else f"{line}\n"


def new_key() -> tuple[str, str]:
    key = asyncssh.generate_private_key("ssh-ed25519")
    return key.export_private_key().decode(), key.export_public_key().decode().strip()


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@contextmanager
def server(folder: Path) -> Iterator[Server]:
    """An sshd that lets belljar in."""
    (private, public), (host, host_public), port = new_key(), new_key(), free_port()
    (folder / "own").mkdir()
    (folder / "authorized").write_text(public + "\n")
    (folder / "host").write_text(host)
    (folder / "config").write_text(without_penalties() + CONFIG.format(folder=folder))
    setup = SETUP.format(folder=folder, sshd=SSHD, port=port)
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(
            ["unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child", "sh", "-c", setup],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    try:
        yield Server(folder, port, SshKeys(private, host_public=host_public), process)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
