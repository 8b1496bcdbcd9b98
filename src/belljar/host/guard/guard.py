"""Guards what a child sends: each connection and each datagram that names an address is judged, and made, here.

A thread installs a filter on itself and starts the child, so that the child has it from its first instruction; the thread
stays, for the child's death signal is tied to it. A second thread answers what the filter reports. It never says "go on": it
reads the address once, judges what it read, and makes the call itself on the child's socket, so nothing that the child changes
meanwhile counts. Should the guard fail, every such call fails. What is the child's own (its filter, further calls) is said
by whoever starts it: QEMU's in the hypervisor room. docs/decisions/0012-the-guard.md.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable

from belljar.host.guard import seccomp
from belljar.host.guard.egress import Egress, Transport, Verdict, decide
from belljar.host.guard.seccomp import Libc, Notice
from belljar.host.traffic import Refusal, Tell

CLOSE, DUP2, SOCKET, CONNECT, SENDTO, SENDMSG, BIND, LISTEN, SETSOCKOPT = 3, 33, 41, 42, 44, 46, 49, 50, 54
PTRACE, DUP3, SENDMMSG, VM_READ, VM_WRITE, CLOSE_RANGE, PIDFD_GETFD = 101, 292, 307, 310, 311, 436, 438
IO_URING = (425, 426, 427)
IP_OPTIONS = (socket.IPPROTO_IP, 4)  # a source route would lead elsewhere than to the address that is judged
INET_SIZE, LONGEST_ADDRESS, LONGEST_DATAGRAM = 16, 128, 65535
REFUSED = errno.ENETUNREACH  # slirp tells the guest that the network is unreachable
TOLD = 16  # refusals that are told
TENS = frozenset(10**power for power in range(2, 10))
TRANSPORTS: dict[tuple[int, int], Transport] = {
    (socket.SOCK_STREAM, socket.IPPROTO_TCP): Transport.TCP,
    (socket.SOCK_DGRAM, socket.IPPROTO_UDP): Transport.UDP,
    (socket.SOCK_DGRAM, socket.IPPROTO_ICMP): Transport.ICMP,
}


class Guard(ABC):
    """Guards one child. `tell` is called on the guard's thread."""

    whom = "its child"  # in words to people

    def __init__(self, egress: Egress, tell: Tell) -> None:
        self.refused = 0  # calls, in all
        self._egress, self._tell = egress, tell
        self._told: set[tuple[str, int, str]] = set()
        self._is_blind = False
        self._libc = Libc()
        self._listener = self._pidfd = self._pid = -1
        self._failure: BaseException | None = None
        self._calls: dict[int, Callable[[Notice], int]] = {CONNECT: self._connect, SENDTO: self._send}

    @abstractmethod
    def _take_call(self, notice: Notice, ours: socket.socket, address: bytes) -> int:
        """Put a connection to us in the place of the child's socket, of which *ours* is a duplicate, and tell of it."""

    def start(self, start: Callable[[], int], filter: bytes) -> int:
        """Run *start*, which starts a program and returns its process id, under this filter. Raises NoGuard, and what
        *start* raises."""
        has_started = threading.Event()
        keeper = threading.Thread(
            target=self._keep, args=(start, filter, has_started), name="guard-parent", daemon=True
        )
        keeper.start()
        has_started.wait()
        if self._failure is not None:
            keeper.join()
            raise self._failure
        threading.Thread(target=self._serve, args=(keeper,), name="guard", daemon=True).start()
        return self._pid

    def _keep(self, start: Callable[[], int], filter: bytes, has_started: threading.Event) -> None:
        """The parent's whole life. It is under the filter itself, so it does nothing but wait for its child's end."""
        try:
            self._listener = self._libc.install(filter)
            self._pid = start()
            self._pidfd = os.pidfd_open(self._pid)
        except BaseException as exc:
            self._failure = exc
            for fd in (self._listener, self._pidfd):
                if fd >= 0:
                    os.close(fd)
            return
        finally:
            has_started.set()
        end = select.poll()
        end.register(self._pidfd, select.POLLIN)
        end.poll()

    def _serve(self, keeper: threading.Thread) -> None:
        """Answer until the child has ended."""
        news = select.poll()
        news.register(self._listener, select.POLLIN)
        news.register(self._pidfd, select.POLLIN)
        try:
            while True:
                ready = dict(news.poll())
                if ready.get(self._listener, 0) & select.POLLIN:  # it hangs up, too, when child and parent are gone
                    notice = seccomp.receive(self._listener)
                    if notice is not None:
                        self._answer(notice)
                elif self._pidfd in ready:
                    return
        except Exception as exc:
            why = f"the guard failed, so nothing leaves this machine any more: {exc}"
            self._tell(Refusal("", 0, "", why, self.refused))
        finally:
            os.close(self._listener)  # whatever waits for an answer fails
            keeper.join()
            os.close(self._pidfd)

    def _answer(self, notice: Notice) -> None:
        try:
            value = self._calls[notice.call](notice)
        except OSError as exc:
            seccomp.answer(self._listener, notice, 0, exc.errno or errno.EPERM)
        else:
            seccomp.answer(self._listener, notice, value)

    # -- the calls -----------------------------------------------------------------------------------------------

    def _connect(self, notice: Notice) -> int:
        fd, pointer, size = notice.args[:3]
        address = self._address(notice, pointer, size)
        with self._socket(fd) as ours:
            transport = transport_of(ours)
            if self._judge(address, transport) is Verdict.ANSWERED:
                return self._take_call(notice, ours, address)
            if transport is Transport.TCP and os.get_blocking(ours.fileno()):
                raise OSError(errno.EPERM, "one guest's connection must not hold up all others")
            self._libc.connect(ours.fileno(), address)
        return 0

    def _send(self, notice: Notice) -> int:
        fd, data_at, size, _, pointer, address_size = notice.args
        address = self._address(notice, pointer, address_size)
        if size > LONGEST_DATAGRAM:
            raise OSError(errno.EMSGSIZE, os.strerror(errno.EMSGSIZE))
        with self._socket(fd) as ours:
            transport = transport_of(ours)
            if transport is Transport.TCP:  # a fast open: nothing that slirp does
                raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
            self._judge(address, transport)
            data = self._read(notice, data_at, size) if size else b""
            return self._libc.send_to(ours.fileno(), data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL, address)

    def _address(self, notice: Notice, pointer: int, size: int) -> bytes:
        """The IPv4 address a call points to. Every other family is refused, whose own sockets are."""
        check_size(size)
        return check_family(self._read(notice, pointer, INET_SIZE))

    def _read(self, notice: Notice, pointer: int, size: int) -> bytes:
        """The child's memory. Raises OSError when it is not all there."""
        try:
            data = self._libc.read_memory(self._pid, pointer, size)
        except PermissionError:
            self._tell_blindness()
            raise
        if len(data) != size:
            raise OSError(errno.EFAULT, os.strerror(errno.EFAULT))
        if not seccomp.is_valid(self._listener, notice):
            raise OSError(errno.ESRCH, os.strerror(errno.ESRCH))
        return data

    def _tell_blindness(self) -> None:
        """Once: nothing of this machine can be judged, so all of it is refused."""
        self.refused += 1
        if not self._is_blind:
            self._is_blind = True
            why = f"everything: this process is not allowed to trace {self.whom}"
            self._tell(Refusal("", 0, "", why, self.refused))

    def _socket(self, number: int) -> socket.socket:
        """The child's socket, as ours. Closing it closes ours alone."""
        fd = self._libc.take_descriptor(self._pidfd, number & 0xFFFFFFFF)
        try:
            return socket.socket(fileno=fd)
        except OSError:
            os.close(fd)
            raise

    # -- the judgement -------------------------------------------------------------------------------------------------

    def _judge(self, address: bytes, transport: Transport) -> Verdict:
        """Raises OSError for what is refused."""
        host, port = place_of(address)
        verdict, reason = decide(self._egress, host, port, transport)
        if verdict is Verdict.ALLOWED and not reason and is_own(host):
            verdict, reason = Verdict.REFUSED, "this host"
        if verdict is Verdict.REFUSED:
            self.refused += 1
            key = (host, port, transport.value)
            is_new = key not in self._told and len(self._told) < TOLD
            if is_new or self.refused in TENS:
                self._told.add(key)
                self._tell(Refusal(*key, reason, self.refused))
            raise OSError(REFUSED, os.strerror(REFUSED))
        return verdict


def is_own(address: str) -> bool:
    """Is this an address of this host, or of all hosts on one of its networks? Asked of the kernel, which knows of today;
    nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))
            return bool(probe.getsockname()[0] == address)
        except OSError as exc:
            return exc.errno == errno.EACCES  # a broadcast address


def check_size(size: int) -> None:
    """Can this be the length of an IPv4 address? Raises OSError."""
    if not INET_SIZE <= size & 0xFFFFFFFF <= LONGEST_ADDRESS:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))


def check_family(address: bytes) -> bytes:
    """Raises OSError for what is no IPv4 address."""
    if int.from_bytes(address[:2], "little") != socket.AF_INET:  # 0 is taken for IPv4 by some calls, not by us
        raise OSError(errno.EAFNOSUPPORT, os.strerror(errno.EAFNOSUPPORT))
    return address


def transport_of(one: socket.socket) -> Transport:
    """Raises OSError for a socket no guarded child should have."""
    kind = TRANSPORTS.get((one.type & 0xF, one.proto)) if one.family == socket.AF_INET else None
    if kind is None:
        raise OSError(errno.EPROTONOSUPPORT, os.strerror(errno.EPROTONOSUPPORT))
    return kind


def place_of(address: bytes) -> tuple[str, int]:
    port, host = struct.unpack_from("!H4s", address, 2)
    return socket.inet_ntoa(host), port
