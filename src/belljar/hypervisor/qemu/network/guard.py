"""The guard of a QEMU with a user network: its filter, and what of its calls is QEMU's own. How a guard works: host/guard.py.

What a QEMU could use to get round it is refused by the filter: docs/decisions/0012-the-guard.md.
"""

from __future__ import annotations

import errno
import os
import socket
import stat
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from belljar.errors import CommandMissing, NoGuard
from belljar.host.commands import which
from belljar.host.guard import seccomp
from belljar.host.guard.egress import Egress, Transport
from belljar.host.guard.guard import (  # fmt: skip
    BIND,
    CLOSE,
    CLOSE_RANGE,
    CONNECT,
    DUP2,
    DUP3,
    IO_URING,
    IP_OPTIONS,
    LISTEN,
    PIDFD_GETFD,
    PTRACE,
    SENDMMSG,
    SENDMSG,
    SENDTO,
    SETSOCKOPT,
    SOCKET,
    VM_READ,
    VM_WRITE,
    Guard,
    place_of,
    transport_of,
)
from belljar.host.guard.seccomp import ANY, Notice, Program, failing
from belljar.host.traffic import Call, Refusal, Tell
from belljar.hypervisor.qemu.cmdline import FORWARD_ADDRESS, FORWARD_PORT
from belljar.hypervisor.qemu.network.outside import second_of
from belljar.hypervisor.qemu.process.launch import Spawn, spawn

ANY_PORT, BACKLOG = ("127.0.0.1", 0), 16


def program(sealed: Sequence[int], *, listens: bool = False) -> bytes:
    """The filter. *sealed* are connected sockets QEMU inherits: on these it may send as it likes, so it cannot put others
    in their place."""
    rules = Program()
    rules.always((CONNECT, *((BIND, LISTEN) if listens else ())), seccomp.NOTIFY)
    rules.unless_null(SENDTO, 4, seccomp.NOTIFY)
    rules.unless_in(SENDMSG, 0, sealed, failing(errno.EACCES))
    rules.if_in(CLOSE, 0, sealed, failing(0))
    rules.if_in(DUP2, 1, sealed, failing(errno.EPERM))
    rules.if_in(DUP3, 1, sealed, failing(errno.EPERM))
    rules.always((CLOSE_RANGE, *IO_URING), failing(errno.ENOSYS))
    rules.always((BIND, LISTEN, SENDMMSG), failing(errno.EACCES))
    rules.always((PTRACE, VM_READ, VM_WRITE, PIDFD_GETFD), failing(errno.EPERM))
    rules.unless_in(SOCKET, 0, (socket.AF_UNIX, socket.AF_INET), failing(errno.EAFNOSUPPORT))
    rules.unless_in(SOCKET, 1, (socket.SOCK_STREAM, socket.SOCK_DGRAM), failing(errno.EPROTONOSUPPORT), mask=0xF)
    rules.unless_in(SOCKET, 2, (0, 1, 6, 17), failing(errno.EPROTONOSUPPORT))
    rules.if_all(SETSOCKOPT, ((1, ANY, IP_OPTIONS[0]), (2, ANY, IP_OPTIONS[1])), failing(errno.EPERM))
    return rules.assembled()


class QemuGuard(Guard):
    """Guards one QEMU."""

    whom = "QEMU"

    def __init__(self, egress: Egress, tell: Tell, forward: Path | None = None) -> None:
        super().__init__(egress, tell)
        self._may_listen = egress.listens or forward is not None
        self._forwarding: set[int] = set()  # the inodes of such sockets
        places = () if forward is None else (forward, second_of(forward))
        # Where sockets are to listen in place of the ports QEMU asks for.
        self._forwards = {(FORWARD_ADDRESS, FORWARD_PORT + number): path for number, path in enumerate(places)}
        self._calls |= {BIND: self._bind, LISTEN: self._listen}

    def spawn(self, start: Spawn, argv: Sequence[str], fds: Iterable[int], stderr: int) -> int:
        """Start a program under guard, as *start* would. Raises NoGuard, and what *start* raises."""
        wanted = list(fds)
        filter = program(_sockets(wanted), listens=self._may_listen)
        return self.start(lambda: start(argv, wanted, stderr), filter)

    def _bind(self, notice: Notice) -> int:
        """To the host's loopback alone, at a port the kernel chooses: libslirp does so without listening there, too, to have
        a number for each connection it takes. In place of the port it forwards it gets a socket of ours."""
        fd, pointer, size = notice.args[:3]
        address = self._address(notice, pointer, size)
        if (path := self._forwards.pop(place_of(address), None)) is not None:
            return self._give_forward(notice, fd, path)
        with self._socket(fd) as ours:
            if transport_of(ours) is not Transport.TCP or place_of(address) != ANY_PORT:
                raise OSError(errno.EACCES, os.strerror(errno.EACCES))
            self._libc.bind(ours.fileno(), address)
        return 0

    def _listen(self, notice: Notice) -> int:
        """Where it was bound before: otherwise the kernel would choose all addresses of the host."""
        with self._socket(notice.args[0]) as ours:
            if os.fstat(ours.fileno()).st_ino in self._forwarding:
                return 0  # it does so already
            is_bound = self._egress.listens and transport_of(ours) is Transport.TCP
            if not is_bound or ours.getsockname()[0] != ANY_PORT[0] or not ours.getsockname()[1]:
                raise OSError(errno.EACCES, os.strerror(errno.EACCES))
            ours.listen(BACKLOG)
        return 0

    def _give_forward(self, notice: Notice, fd: int, path: Path) -> int:
        """A socket in the machine's folder that listens: QEMU takes who connects there for a client of its port."""
        with socket.socket(socket.AF_UNIX) as line:
            listen_at(line, path)
            self._forwarding.add(os.fstat(line.fileno()).st_ino)
            seccomp.put_descriptor(self._listener, notice, line.fileno(), fd & 0xFFFFFFFF)
        return 0

    def _take_call(self, notice: Notice, ours: socket.socket, address: bytes) -> int:
        """Put one end of a socket pair in the place of QEMU's socket; the other end is told."""
        line, theirs = socket.socketpair()
        with theirs:
            line.setblocking(False)
            theirs.setblocking(False)
            try:
                seccomp.put_descriptor(self._listener, notice, theirs.fileno(), notice.args[0] & 0xFFFFFFFF)
                is_taken = self._tell(Call(*place_of(address), line))
            except BaseException:
                line.close()
                raise
        if not is_taken:
            line.close()  # the guest finds its connection closed
        return 0


def listen_at(line: socket.socket, path: Path) -> None:
    """Listen at a path, in a folder that is ours alone, however long that path is."""
    path.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_PATH | os.O_CLOEXEC)
    try:
        line.bind(f"/proc/self/fd/{folder}/{path.name}")
    finally:
        os.close(folder)
    path.chmod(0o600)
    line.listen(BACKLOG)


def _sockets(fds: Iterable[int]) -> list[int]:
    """Those of the descriptors that are sockets."""
    found = []
    for fd in fds:
        with suppress(OSError):
            if stat.S_ISSOCK(os.fstat(fd).st_mode):
                found.append(fd)
    return found


def prove(confine: Callable[[list[str]], list[str]]) -> str:
    """Guard a small program for a moment. Returns "" when its attempt to connect was seen and refused, or why not.
    *confine* makes a command line one of another user."""
    told: list[Call | Refusal] = []

    def tell(item: Call | Refusal) -> bool:
        told.append(item)
        return True

    shell = which("bash")
    if shell is None:
        raise CommandMissing("bash: no such program on this host; it plays the guest here")
    silence = os.open("/dev/null", os.O_WRONLY | os.O_CLOEXEC)
    try:
        argv = confine([shell, "-c", "exec 3<>/dev/tcp/127.0.0.1/9"])
        pid = QemuGuard(Egress(), tell).spawn(spawn, argv, [], silence)
    except NoGuard as exc:
        return exc.message
    finally:
        os.close(silence)
    os.waitpid(pid, 0)
    if any(isinstance(item, Refusal) and item.port == 9 for item in told):
        return ""
    return "what a machine sends cannot be looked at from here: tracing of other processes is not allowed"
