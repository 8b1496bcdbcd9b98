"""The guard of a passt: its filter, and what of its calls is passt's own. How a guard works: host/guard.py.

passt sends the data of its TCP connections by `sendmsg`, which a filter cannot tell from one that names an address. So the
two kinds of sockets are told apart by number: a datagram socket is made here and put at a high number, where `sendmsg` is
refused, and nothing copies it to a low one. docs/decisions/0012-the-guard.md.
"""

from __future__ import annotations

import errno
import os
import resource
import select
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

from belljar.host import seccomp
from belljar.host.egress import Egress, Transport
from belljar.host.guard import (
    BIND,
    CONNECT,
    DUP2,
    DUP3,
    INET_SIZE,
    IO_URING,
    IP_OPTIONS,
    LISTEN,
    LONGEST_DATAGRAM,
    PIDFD_GETFD,
    PTRACE,
    SENDMMSG,
    SENDMSG,
    SENDTO,
    SETSOCKOPT,
    SOCKET,
    TRANSPORTS,
    VM_READ,
    VM_WRITE,
    Guard,
    check_family,
    check_size,
    place_of,
    transport_of,
)  # fmt: skip
from belljar.host.seccomp import ALLOW, ANY, NOTIFY, PIECES, Notice, Program, failing
from belljar.host.traffic import Call, Tell

DUP, ACCEPT, RECVMSG, GETSOCKNAME, SOCKETPAIR, FCNTL, PRCTL, ACCEPT4, RECVMMSG = 32, 43, 47, 51, 53, 72, 157, 288, 299
F_DUPFD, F_DUPFD_CLOEXEC, PR_SET_DUMPABLE = 0, 1030, 4
KIND, NETLINK_ROUTE, NETLINK_SIZE = 0xF, 0, 12  # of a socket's type; struct sockaddr_nl
MSG_FASTOPEN, TCP_FASTOPEN_CONNECT = 0x20000000, 30
SO_BINDTOIFINDEX, IP_UNICAST_IF = 62, 50

HIGH, SOCKETS = 32768, 65536  # the first number of a datagram socket; how many there may be: one per port of the guest
TRIES = 1024  # numbers looked at for one that is free
MESSAGE, VECTOR = 64, 16  # sizes of struct mmsghdr, struct iovec
MOST_MESSAGES, MOST_VECTORS, SLICE = 1024, 16, 1 << 20  # UIO_MAXIOV; per message; bytes that are read at a time
LOOPBACK, MEETING, STRANGERS = (
    "127.0.0.1",
    1.0,
    8,
)  # seconds a connection to ourselves may take; others who may come first


def program(line: int, high: int) -> bytes:
    """The filter. *line* is the socket to QEMU, from which no descriptor may be taken; *high* the first number of a datagram
    socket."""
    rules = Program()
    stream, datagram = (1, KIND, socket.SOCK_STREAM), (1, KIND, socket.SOCK_DGRAM)
    rules.if_at_least(SENDMSG, 0, high, failing(errno.EACCES))
    rules.if_all(SENDMSG, ((2, MSG_FASTOPEN, MSG_FASTOPEN),), failing(errno.EOPNOTSUPP))
    rules.unless_null(SENDTO, 4, NOTIFY)
    rules.if_all(SENDTO, ((3, MSG_FASTOPEN, MSG_FASTOPEN),), failing(errno.EOPNOTSUPP))
    rules.always((CONNECT, SENDMMSG), NOTIFY)
    for protocol in (0, socket.IPPROTO_TCP):
        rules.if_all(SOCKET, ((0, ANY, socket.AF_INET), stream, (2, ANY, protocol)), ALLOW)
    rules.if_all(SOCKET, ((0, ANY, socket.AF_INET), datagram), NOTIFY)
    rules.if_all(SOCKET, ((0, ANY, socket.AF_NETLINK), (2, ANY, NETLINK_ROUTE)), ALLOW)
    rules.always((SOCKET, SOCKETPAIR), failing(errno.EAFNOSUPPORT))
    rules.if_at_least(BIND, 0, high, NOTIFY)
    rules.if_all(BIND, ((2, ANY, NETLINK_SIZE),), ALLOW)  # too short for any other family
    rules.always((BIND,), failing(errno.EADDRNOTAVAIL))  # passt asks so whether a TCP destination is the host's own
    rules.if_at_least(GETSOCKNAME, 0, high, NOTIFY)
    rules.if_at_least(DUP2, 0, high, failing(errno.EPERM))
    for call in (DUP2, RECVMSG, RECVMMSG):
        rules.if_in(call, 0, (line,), failing(errno.EPERM))
    rules.if_in(FCNTL, 1, (F_DUPFD, F_DUPFD_CLOEXEC), failing(errno.EPERM))
    rules.always((DUP, DUP3, PTRACE, VM_READ, VM_WRITE, PIDFD_GETFD), failing(errno.EPERM))
    rules.always((LISTEN, ACCEPT, ACCEPT4), failing(errno.EACCES))
    rules.always(IO_URING, failing(errno.ENOSYS))
    for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):  # nobody's port is shared
        rules.if_all(SETSOCKOPT, ((1, ANY, socket.SOL_SOCKET), (2, ANY, option)), failing(0))
    for level, option in (
        IP_OPTIONS, (socket.IPPROTO_IP, IP_UNICAST_IF), (socket.IPPROTO_TCP, TCP_FASTOPEN_CONNECT),
        (socket.SOL_SOCKET, socket.SO_BINDTODEVICE), (socket.SOL_SOCKET, SO_BINDTOIFINDEX),
    ):  # fmt: skip
        rules.if_all(SETSOCKOPT, ((1, ANY, level), (2, ANY, option)), failing(errno.EPERM))
    rules.if_in(PRCTL, 0, (PR_SET_DUMPABLE,), failing(0))  # an ordinary user's guard could not read its addresses
    return rules.assembled()


class PasstGuard(Guard):
    """Guards one passt."""

    whom = "passt"

    def __init__(self, egress: Egress, tell: Tell) -> None:
        super().__init__(egress, tell)
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]  # passt takes all of it
        self.high = HIGH if most == resource.RLIM_INFINITY or most >= 2 * HIGH else most // 2
        self._count = SOCKETS if most == resource.RLIM_INFINITY else min(SOCKETS, most - self.high)
        self._next = 0
        self._asked: dict[int, int] = {}  # the port a socket was to have, by the socket's number
        self._calls |= {
            SOCKET: self._make, BIND: self._bind, GETSOCKNAME: self._name, SENDMMSG: self._send_many,
        }  # fmt: skip

    def spawn(self, start: Callable[[], int], line: int) -> int:
        """Start a program under guard. Raises NoGuard, and what *start* raises."""
        return self.start(start, program(line, self.high))

    def _make(self, notice: Notice) -> int:
        """A datagram socket, at a number where it may be used for calls that are looked at."""
        _, kind, protocol = (argument & 0xFFFFFFFF for argument in notice.args[:3])
        if kind & ~(KIND | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        if (socket.SOCK_DGRAM, protocol or socket.IPPROTO_UDP) not in TRANSPORTS:
            raise OSError(errno.EPROTONOSUPPORT, os.strerror(errno.EPROTONOSUPPORT))
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM, protocol or socket.IPPROTO_UDP) as one:
            os.set_blocking(one.fileno(), not kind & socket.SOCK_NONBLOCK)
            number = self._free_number()
            self._asked.pop(number, None)
            seccomp.put_descriptor(self._listener, notice, one.fileno(), number)
        return number

    def _free_number(self) -> int:
        for _ in range(min(TRIES, self._count)):
            number = self.high + self._next
            self._next = (self._next + 1) % self._count
            try:
                os.close(self._libc.take_descriptor(self._pidfd, number))
            except OSError as exc:
                if exc.errno == errno.EBADF:
                    return number
                raise
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    def _bind(self, notice: Notice) -> int:
        """To a port of the kernel's choice, whichever was asked for: a guest's port is no port of the host."""
        fd, pointer, size = notice.args[:3]
        address = self._address(notice, pointer, size)
        with self._socket(fd) as ours:
            if transport_of(ours) is Transport.TCP:
                raise OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))
            ours.bind(("0.0.0.0", 0))
        self._asked[fd & 0xFFFFFFFF] = place_of(address)[1]
        return 0

    def _name(self, notice: Notice) -> int:
        """The socket's own address, with the port that was asked for: a later passt gives up where it has another."""
        fd, pointer, size_at = notice.args[:3]
        if int.from_bytes(self._read(notice, size_at, 4), "little") < INET_SIZE:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        with self._socket(fd) as ours:
            transport_of(ours)
            host, port = ours.getsockname()
        name = struct.pack("=H", socket.AF_INET) + struct.pack(
            "!H4s8x", self._asked.get(fd & 0xFFFFFFFF, port), socket.inet_aton(host)
        )
        self._libc.write_memory(self._pid, pointer, name)
        self._libc.write_memory(self._pid, size_at, struct.pack("=I", INET_SIZE))
        return 0

    def _send_many(self, notice: Notice) -> int:
        """Each datagram on its own. What is refused, or cannot be sent, is lost as on any network."""
        fd, vector, count = notice.args[:3]
        count = min(count & 0xFFFFFFFF, MOST_MESSAGES)
        if not count:
            return 0
        with self._socket(fd) as ours:
            transport = transport_of(ours)
            if transport is Transport.TCP:
                raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
            allowed: set[bytes] = {b""}  # where it is connected to, which was judged when it was
            for address, data in self._messages(notice, vector, count):
                with suppress(OSError):
                    if address not in allowed:
                        self._judge(check_family(address), transport)
                        allowed.add(address)
                    self._libc.send_to(ours.fileno(), data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL, address)
        return count

    def _messages(self, notice: Notice, vector: int, count: int) -> Iterator[tuple[bytes, bytes]]:
        """(address, data) of each message of a `sendmmsg`; the address of one on a connected socket is empty. All of it is
        read once. Raises OSError."""
        heads = struct.iter_unpack("QI4xQQ32x", self._read(notice, vector, count * MESSAGE))
        places: list[tuple[int, int]] = []
        sizes: list[tuple[int, int]] = []
        for name, name_size, vectors, vector_count in heads:
            if vector_count > MOST_VECTORS:
                raise OSError(errno.EMSGSIZE, os.strerror(errno.EMSGSIZE))
            if name:
                check_size(name_size)
            sizes.append((INET_SIZE if name else 0, vector_count * VECTOR))
            places += [(name, INET_SIZE)] * bool(name) + [(vectors, vector_count * VECTOR)] * bool(vector_count)
        known = self._read_all(notice, places)
        messages: list[tuple[bytes, list[tuple[int, int]]]] = []
        at = 0
        for name_size, vector_size in sizes:
            address, pieces = known[at : at + name_size], known[at + name_size : at + name_size + vector_size]
            messages.append((address, [piece for piece in struct.iter_unpack("QQ", pieces) if piece[1]]))
            at += name_size + vector_size
        for _, wanted in messages:
            if sum(size for _, size in wanted) > LONGEST_DATAGRAM:
                raise OSError(errno.EMSGSIZE, os.strerror(errno.EMSGSIZE))
        yield from self._with_data(notice, messages)

    def _with_data(
        self, notice: Notice, messages: Sequence[tuple[bytes, list[tuple[int, int]]]]
    ) -> Iterator[tuple[bytes, bytes]]:
        """The data, not more of it at a time than memory is cheap for."""
        waiting: list[tuple[bytes, list[tuple[int, int]], int]] = []
        total = 0
        for address, pieces in messages:
            size = sum(length for _, length in pieces)
            if total + size > SLICE:
                yield from self._read_slice(notice, waiting)
                waiting, total = [], 0
            waiting.append((address, pieces, size))
            total += size
        yield from self._read_slice(notice, waiting)

    def _read_slice(
        self, notice: Notice, messages: Sequence[tuple[bytes, list[tuple[int, int]], int]]
    ) -> Iterator[tuple[bytes, bytes]]:
        data = self._read_all(notice, [piece for _, pieces, _ in messages for piece in pieces])
        at = 0
        for address, _, size in messages:
            yield address, data[at : at + size]
            at += size

    def _read_all(self, notice: Notice, places: Sequence[tuple[int, int]]) -> bytes:
        slices = (places[at : at + PIECES] for at in range(0, len(places), PIECES))
        return b"".join(self._read_pieces(notice, one) for one in slices)

    def _take_call(self, notice: Notice, ours: socket.socket, address: bytes) -> int:
        """passt wants to know of a connection what only a TCP socket knows, so its own is connected to us, on the loopback.
        Who else comes to that port, in the moment it is there, is not spoken to."""
        if os.get_blocking(ours.fileno()):
            raise OSError(errno.EPERM, "one guest's connection must not hold up all others")
        with socket.create_server((LOOPBACK, 0), backlog=1) as door:
            with suppress(BlockingIOError):
                ours.connect(door.getsockname())
            line = _meet(door, ours.getsockname())
        try:
            line.setblocking(False)
            is_taken = self._tell(Call(*place_of(address), line))
        except BaseException:
            line.close()
            raise
        if not is_taken:
            line.close()  # the guest finds its connection closed
        return 0


def _meet(door: socket.socket, caller: tuple[str, int]) -> socket.socket:
    """The connection that comes from this address. Raises OSError."""
    door.setblocking(False)
    waiting = select.poll()
    waiting.register(door, select.POLLIN)
    for _ in range(STRANGERS):
        if not waiting.poll(MEETING * 1000):
            break
        with suppress(BlockingIOError, ConnectionError):
            line, peer = door.accept()
            if peer == caller:
                return line
            line.close()
    raise OSError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
