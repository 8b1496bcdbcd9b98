"""The virtiofsd of each folder that a guest gets by virtiofs: found, started in its enclosure, watched, ended.

It runs as QEMU's user, in namespaces in which there is that folder and nothing else (enclosure.py). Its socket has a name,
in the machine's folder, for the moment between `bind` and `connect`. The machine's id stands where the names of its
processes stand, so whoever cleans up after a crash finds them as he finds QEMU.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from belljar.errors import BelljarError, CommandFailed, NoFolderServer, NotPermitted, ShareLost
from belljar.host.commands import program, run
from belljar.host.threads import in_thread
from belljar.hypervisor import DomainSpec, SharedFolder
from belljar.hypervisor.qemu.process.launch import Child, ended
from belljar.model import MachineId, ShareKind

NAME = "virtiofsd"
PLACES = ("/usr/libexec", "/usr/lib/qemu", "/usr/lib")  # EL and newer Debian; Debian 12; others
ENCLOSURE = Path(__file__).with_name("enclosure.py")
INSIDE = ("/mnt", "/media", "/srv", "/tmp")  # folders one of which every host has: there the enclosure has its folder
LOG, SOCKET = "virtiofsd.log", "virtiofs.sock"  # files of a machine's folder
MARK = "virtiofsd:belljar-"
READY_TIMEOUT = 30.0  # seconds until it runs; a busy host needs one
QUESTION_TIMEOUT = 30.0
GIVES_GROUPS_UP = "setgroups() failed"
FILE_CAPABILITIES = 0x880000DB  # chown, dac_override, fowner, fsetid, setgid, setuid, mknod, setfcap
LAST_RESORT = 10.0  # seconds SIGKILL may take
# By the letter the enclosure says: what to do about it.
HINTS = {
    "N": "It takes user namespaces (`sysctl user.max_user_namespaces`, on some systems also"
    " `kernel.unprivileged_userns_clone` or `kernel.apparmor_restrict_unprivileged_userns`); share the folder without `virtiofs:`, which takes nothing.",
    "M": "A folder that virtiofs only lets be read takes Linux 5.12; share it without `virtiofs:`.",
    "P": "Correct `qemu.virtiofsd`, or share the folder without `virtiofs:`.",
}


def by_virtiofs(shares: Sequence[SharedFolder]) -> list[SharedFolder]:
    return [share for share in shares if share.kind is ShareKind.VIRTIOFS]


def find(setting: str) -> str:
    """The path of the virtiofsd to use. Raises CommandMissing."""
    hint = "Install it (package `virtiofsd`; Debian 12: `qemu-system-common`), or share the folder without `virtiofs:`."
    names = (NAME, *(f"{place}/{NAME}" for place in PLACES))
    return program(setting, names, key="qemu.virtiofsd", missing=NAME, hint=hint)


def command_line(is_of_qemu: bool, fd: int, place: str, *, is_root: bool) -> list[str]:
    """Its words after its name. *is_of_qemu*: the one in C, until 7.2; the one in Rust remembers files for a second."""
    if is_of_qemu:
        words = ["-o", f"source={place}", "-o", "sandbox=namespace", "-o", "cache=auto", "-o", "timeout=0"]
        return [f"--fd={fd}", *words, "-o", "log_level=warn", "--rlimit-nofile=0"]
    words = [f"--shared-dir={place}", f"--sandbox={'namespace' if is_root else 'none'}", "--cache=auto"]
    return [f"--fd={fd}", *words, "--log-level=warn", "--rlimit-nofile=0"]


def capabilities(is_of_qemu: bool, *, is_root: bool) -> str:
    """What it begins with, of its user namespace. Where it makes namespaces of its own, it gives them up itself."""
    return "all" if is_of_qemu or is_root else hex(FILE_CAPABILITIES)


def reads_as_of_qemu(line: str) -> bool | None:
    """Read `virtiofsd version 7.2.22 (Debian ...)`, which is QEMU's, or `virtiofsd 1.13.2`; None: neither. The former fails for
    a user with further groups, even when it is only asked this."""
    found = re.match(r"virtiofsd( version)? \d+\.\d+\.\d+", line)
    return True if GIVES_GROUPS_UP in line else found[1] is not None if found else None


def served(argv: Sequence[bytes]) -> MachineId | None:
    """The machine whose folder a process with this command line serves; None for any other process."""
    if not argv:
        return None
    is_python = argv[0].rpartition(b"/")[2].startswith(b"python")
    names = argv[3:4] if is_python and argv[2:3] == [os.fsencode(ENCLOSURE)] else argv[:1]
    for name in names:
        if name.startswith(MARK.encode()):
            return name[len(MARK) :].partition(b":")[0].decode("ascii", "replace")
    return None


class FolderServer:
    """One running virtiofsd. `line` is QEMU's end of its socket, ours to close when QEMU has it."""

    def __init__(self, spec: DomainSpec, share: SharedFolder, program: str, is_of_qemu: bool) -> None:
        self.share = share
        self.over: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        is_root, place = spec.owner[0] == 0, next(path for path in INSIDE if os.path.isdir(path))
        self._ready, ready = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            with _socket(spec.folder) as (listener, self.line):
                argv = [
                    *(sys.executable, "-IS", str(ENCLOSURE), f"{MARK}{spec.id}:{share.tag}", str(os.getpid())),
                    *(str(spec.owner[0]), str(spec.owner[1]), "ro" if share.readonly else "rw"),
                    *(capabilities(is_of_qemu, is_root=is_root), share.source, place, str(ready), program),
                    *command_line(is_of_qemu, listener.fileno(), place, is_root=is_root),
                ]
                self._child = Child(argv, [listener.fileno(), ready], spec.folder / LOG, self._ended)
        except BaseException:
            os.close(self._ready)
            raise
        finally:
            os.close(ready)

    async def ready(self) -> None:
        """Returns when virtiofsd itself runs. Raises NotPermitted, NoFolderServer."""
        loop, said = asyncio.get_running_loop(), bytearray()
        whole: asyncio.Future[None] = loop.create_future()

        def hear() -> None:
            data = os.read(self._ready, 4096)
            said.extend(data)
            if not data and not whole.done():
                whole.set_result(None)

        loop.add_reader(self._ready, hear)
        try:
            async with asyncio.timeout(READY_TIMEOUT):
                await whole
        except TimeoutError as exc:
            raise NoFolderServer(f"waited {READY_TIMEOUT:g} s for {NAME}", hint="The host is overloaded.") from exc
        finally:
            loop.remove_reader(self._ready)
            os.close(self._ready)
            self._ready = -1
        if said:
            raise self._impossible(said.decode(errors="replace"))

    def usage(self) -> tuple[float, float, int]:
        """As of a domain; zeros until it has ended."""
        return self._child.usage or (0.0, 0.0, 0)

    def kill(self) -> None:
        """It and all that it started. Whoever still waits for it to be ready gets an answer, too."""
        self.line.close()
        self._child.send(signal.SIGKILL)

    async def gone(self) -> None:
        """Returns when no process of it is left."""
        await asyncio.wait({self.over}, timeout=LAST_RESORT)
        if self._ready >= 0:
            os.close(self._ready)
            self._ready = -1

    def loss(self) -> ShareLost:
        """Its end, which nobody asked for, in words."""
        said, status = self._child.said().splitlines(), self._child.status or 0
        if os.WIFSIGNALED(status) or not said:
            how = ended(status) if os.WIFSIGNALED(status) else f"killed, or crashed ({ended(status)})"
        else:
            how = said[-1][:300]
        return ShareLost(f"--share virtiofs:{self.share.source}: {NAME} ended: {how}")

    def _ended(self, status: int) -> None:
        if not self.over.done():
            self.over.set_result(status)

    def _impossible(self, said: str) -> BelljarError:
        letter, _, why = said.partition(" ")
        why = "".join(char if char.isprintable() else "?" for char in why)
        if letter == "F":
            return NotPermitted(f"--share virtiofs:{why}", hint="The payload's user must be able to enter the folder.")
        return NoFolderServer(f"--share virtiofs:{self.share.source}: {why}", hint=HINTS.get(letter))


async def serve(spec: DomainSpec, program: str) -> list[FolderServer]:
    """One for each folder, all running. Raises NotPermitted, NoFolderServer, CommandMissing; then none is left."""
    is_of_qemu = await in_thread(lambda: is_of_qemu_itself(program))
    servers: list[FolderServer] = []
    try:
        for share in by_virtiofs(spec.shares):
            servers.append(FolderServer(spec, share, program, is_of_qemu))
        for server in servers:
            await server.ready()
    except BaseException:
        await asyncio.shield(end(servers))
        raise
    return servers


async def end(servers: Sequence[FolderServer], *, grace: float = 0.0) -> None:
    """Kill them, and wait until they are gone. In the *grace* they end by themselves: their line is closed."""
    if grace and servers:
        await asyncio.wait({server.over for server in servers}, timeout=grace)
    for server in servers:
        server.kill()
    for server in servers:
        await server.gone()


def is_of_qemu_itself(program: str) -> bool:
    """Asked each time: it answers within milliseconds. Raises NoFolderServer."""
    try:
        done = run([program, "--version"], timeout=QUESTION_TIMEOUT, check=False)
    except CommandFailed as exc:
        raise NoFolderServer(exc.message, hint=HINTS["P"]) from exc
    line = (done.out or done.err).decode(errors="replace").partition("\n")[0].strip()
    found = reads_as_of_qemu(line)
    if found is None:
        raise NoFolderServer(
            f"{program}: not a {NAME} that belljar knows: {line[:80]!r}",
            hint="It was tried with that of QEMU 7.2, and with 1.13 and 1.14; share the folder without `virtiofs:`.",
        )
    return found


@contextmanager
def _socket(folder: Path) -> Iterator[tuple[socket.socket, socket.socket]]:
    """A socket that listens, which is closed here, and the one that is connected to it already."""
    place = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    listener, line = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
    path = f"/proc/self/fd/{place}/{SOCKET}"  # short, however long the folder's own is
    try:
        with listener:
            _unnamed(path)
            try:
                listener.bind(path)
                listener.listen(1)
                line.connect(path)
            finally:
                _unnamed(path)
            yield listener, line
    except BaseException:
        line.close()
        raise
    finally:
        os.close(place)


def _unnamed(path: str) -> None:
    with suppress(FileNotFoundError):
        os.unlink(path)
