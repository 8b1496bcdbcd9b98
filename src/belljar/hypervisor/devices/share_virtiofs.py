"""Folders by virtiofs: the virtiofsd of each: found, started in its sandbox, watched, ended.

virtiofsd (the one in Rust) makes the sandbox: namespaces in which there is the folder and nothing else. It has to be root for that,
and is root of a user namespace in which QEMU's user is the only one, so it can do what that user can. What it shows and makes is
that user's, in the guest too. For root's own machines it is root, with the capabilities that files take.

Its socket has a name, in the machine's folder, for the moment between `bind` and `connect`. The command line of the process that
waits for it has the machine's id, so it is found after a crash as QEMU is; when that process is killed, the kernel kills the rest.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from belljar.errors import BelljarError, CommandFailed, HostError, NotPermitted, ShareLost
from belljar.host.commands import program, run
from belljar.host.files import short_path
from belljar.hypervisor import DomainSpec, Settings
from belljar.hypervisor.devices import MARK, ShareKind
from belljar.hypervisor.qemu.process.complaints import last_line
from belljar.hypervisor.qemu.process.launch import Child, confined, ended, spawn
from belljar.model import VIRTIOFSD_LOG, FileSystem, Share

NAME = "virtiofsd"
PLACES = ("/usr/libexec", "/usr/lib/qemu", "/usr/lib")  # Debian 13 and EL; others
LEAST = (1, 13)  # of EL 9.6 and Debian 13: the first that gives files other owners in the guest
READY_TIMEOUT = QUESTION_TIMEOUT = 30.0  # seconds; a busy host needs one
# Of root's own: what its sandbox takes, what files take, and nothing that makes devices.
CAPABILITIES = ("sys_admin", "setpcap", "chown", "dac_override", "fowner", "fsetid", "setgid", "setuid", "setfcap")
# VHOST_USER_GET_FEATURES, version 1, without a body: https://qemu-project.gitlab.io/qemu/interop/vhost-user.html
ANYBODY_THERE = struct.pack("=III", 1, 1, 0)
WITHOUT = "share the folder without `virtiofs:`."
INSTALL = f"Install it (package `virtiofsd` of Debian 13 or EL 9.6); on Debian 12 {WITHOUT}"
DENIED = r" does not exist$|OpenNewRoot|BindMountSharedDir"  # what it says on stderr before it answers
SWITCHES = "`kernel.unprivileged_userns_clone`, `kernel.apparmor_restrict_unprivileged_userns`"
NOT_SO = (
    "`belljar logs ID --virtiofsd` may say more. It takes a `qemu.virtiofsd` that can be run, and user namespaces"
    f" (`sysctl user.max_user_namespaces`, on some systems {SWITCHES}); or {WITHOUT}"
)


def find(setting: str) -> str:
    """The path of a virtiofsd that is new enough. Raises CommandMissing, HostError."""
    path = path_of(setting)
    try:
        answer = run([path, "--version"], timeout=QUESTION_TIMEOUT, check=False)
    except CommandFailed as exc:
        raise HostError(exc.message, hint=NOT_SO) from exc
    line = (answer.out or answer.err).decode(errors="replace").partition("\n")[0].strip()
    version = re.match(r"virtiofsd (\d+)\.(\d+)", line)
    if version is None or (int(version[1]), int(version[2])) < LEAST:
        what = f"{path}: {line[:60]!r}: shares by virtiofs need the virtiofsd in Rust, version 1.13"
        raise HostError(what, hint=INSTALL)
    return path


def path_of(setting: str) -> str:
    names = (NAME, *(f"{place}/{NAME}" for place in PLACES))
    return program(setting, names, key="qemu.virtiofsd", missing=NAME, hint=INSTALL)


# -- the servers -------------------------------------------------------------------------------------------------------


def command_line(spec: DomainSpec, tag: str, share: Share, program: str, fd: int) -> list[str]:
    """For the process that waits for virtiofsd, which serves on the socket *fd*."""
    uid, gid = spec.owner
    words = [program, f"--fd={fd}", f"--shared-dir={share.source}", "--sandbox=namespace", "--modcaps=-mknod"]
    # From 1.14 on it prefers handles, by which it could open files outside of the folder: they take CAP_DAC_READ_SEARCH.
    words += ["--inode-file-handles=never", "--cache=auto", "--log-level=error"]
    words += ["--readonly"] if share.readonly else []
    alone = ["unshare", "--pid", "--fork", "--kill-child=SIGKILL", "--ipc", "--uts"]
    if uid != 0:
        alone += ["--user", "--map-root-user"]
        for kind, number in (("uid", uid), ("gid", gid)):
            words += [f"--translate-{kind}=squash-guest:0:0:{2**32 - 1}", f"--translate-{kind}=host:0:{number}:1"]
    mark = f"{MARK.decode()}{spec.id}:{tag}"
    return confined([*alone, "--", "env", mark, *words], spec.owner, capabilities=() if uid else CAPABILITIES)


class FolderServer:
    """One running virtiofsd. `line` is QEMU's end of its socket, ours to close when QEMU has it."""

    def __init__(self, spec: DomainSpec, tag: str, share: Share, program: str) -> None:
        self.share, self._uid = share, spec.owner[0]
        self.over: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        with _socket(spec.folder) as (listener, self.line):
            argv = command_line(spec, tag, share, program, listener.fileno())
            self._child = Child(argv, [listener.fileno()], spec.folder / VIRTIOFSD_LOG, self.over.set_result, spawn)

    async def ready(self) -> None:
        """Returns when it answers. Raises NotPermitted, HostError."""
        loop = asyncio.get_running_loop()
        self.line.setblocking(False)
        try:
            async with asyncio.timeout(READY_TIMEOUT):
                with suppress(ConnectionError):
                    await loop.sock_sendall(self.line, ANYBODY_THERE)
                    if await loop.sock_recv(self.line, 20):
                        return self.line.setblocking(True)
                await asyncio.shield(self.over)
        except TimeoutError as exc:
            raise HostError(f"waited {READY_TIMEOUT:g} s for {NAME}", hint="The host is overloaded.") from exc
        raise self._impossible(self._child.last_words())

    def usage(self) -> tuple[float, float, int]:
        """As of a domain; zeros until it has ended."""
        return self._child.usage or (0.0, 0.0, 0)

    def kill(self) -> None:
        """It and all that it started."""
        self.line.close()
        self._child.send(signal.SIGKILL)

    def loss(self) -> ShareLost:
        """Its end, which nobody asked for, in words."""
        words, status = last_line(self._child.last_words()), self._child.status or 0
        how = words[:300] if words and not os.WIFSIGNALED(status) else f"killed, or crashed ({ended(status)})"
        return ShareLost(f"--share virtiofs:{self.share.source}: {NAME} ended: {how}")

    def _impossible(self, words: str) -> BelljarError:
        share = f"--share virtiofs:{self.share.source}"
        if re.search(DENIED, words, re.MULTILINE):
            hint = "The payload's user must be able to enter the folder."
            return NotPermitted(f"{share}: access denied to uid {self._uid}", hint=hint)
        return HostError(f"{share}: {last_line(words) or ended(self._child.status or 0)}", hint=NOT_SO)


@contextmanager
def _socket(folder: Path) -> Iterator[tuple[socket.socket, socket.socket]]:
    """A socket that listens, which is closed here, and the one that is connected to it already."""
    listener, line = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
    try:
        with listener, short_path(folder) as short:
            path = f"{short}/{KIND.name}.sock"
            try:
                listener.bind(path)
                listener.listen(1)
                line.connect(path)
            finally:
                with suppress(FileNotFoundError):
                    os.unlink(path)
            yield listener, line
    except BaseException:
        line.close()
        raise


class VirtioFs(ShareKind):
    is_served = True
    device, traits = "vhost-user-fs-pci", {"queue-size": 1024}
    filesystem = FileSystem("virtiofs", "virtiofs")
    complaints = ((r"vhost-user-fs|vhost_user|vhost-user|[Vv]host.*backend", HostError, NOT_SO),)

    def check(self, settings: Settings) -> None:
        find(settings.virtiofsd)

    def serve(self, spec: DomainSpec, tag: str, share: Share, settings: Settings) -> FolderServer:
        return FolderServer(spec, tag, share, path_of(settings.virtiofsd))


KIND = VirtioFs()
