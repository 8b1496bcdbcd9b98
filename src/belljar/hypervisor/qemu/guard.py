"""The guard of a QEMU with a user network: each connection and each datagram that names an address is judged, and made, here.

A thread installs a filter on itself and starts QEMU, so that QEMU has it from its first instruction; the thread stays, for
QEMU's death signal is tied to it. A second thread answers what the filter reports. It never says "go on": it reads the
address once, judges what it read, and makes the call itself on QEMU's socket, so nothing that QEMU changes meanwhile
counts. Should the guard fail, every such call fails. What a QEMU could use to get round it is refused by the filter:
docs/develop/decisions/0012-the-guard.md.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import stat
import struct
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from belljar.errors import NetworkFailed
from belljar.host.guard import seccomp
from belljar.host.guard.egress import DNS, Egress, Transport, Verdict, decide, is_own
from belljar.host.guard.names import NO_DATA, NO_SUCH_NAME, query
from belljar.host.guard.seccomp import Notice, among, beside, failing
from belljar.host.guard.traffic import Call, Refusal, Refusals, Tell
from belljar.host.threads import begin_thread
from belljar.hypervisor.qemu.process.launch import spawn

CLOSE, DUP2, SOCKET, CONNECT, SENDTO, SENDMSG, RECVMSG, BIND, LISTEN, SETSOCKOPT = 3, 33, 41, 42, 44, 46, 47, 49, 50, 54
PTRACE, DUP3, SENDMMSG, VM_READ, VM_WRITE, CLOSE_RANGE, PIDFD_GETFD = 101, 292, 307, 310, 311, 436, 438
IO_URING = (425, 426, 427)
IP_OPTIONS, IP_RECVERR = 4, 11  # a source route would lead elsewhere than to the address that is judged
NAME_SERVER = struct.pack("!H4s", DNS, socket.inet_aton("10.0.2.3"))  # slirp's, which asks the first of the host's
INET_SIZE, LONGEST_ADDRESS, LONGEST_DATAGRAM = 16, 128, 65535
REFUSED = errno.ENETUNREACH  # slirp tells the guest that the network is unreachable
TRANSPORTS: dict[tuple[int, int], Transport] = {
    (socket.SOCK_STREAM, socket.IPPROTO_TCP): Transport.TCP,
    (socket.SOCK_DGRAM, socket.IPPROTO_UDP): Transport.UDP,
    (socket.SOCK_DGRAM, socket.IPPROTO_ICMP): Transport.ICMP,
}


def program(sealed: Sequence[int], *, answers_queries: bool = False) -> bytes:
    """The filter. *sealed*: QEMU's connected sockets, where it may send anything; it can put no others there. *answers_queries*: on
    sockets of another family, from which slirp would take the answer for an error."""
    rules: list[seccomp.Rule] = [
        ((CONNECT,), seccomp.NOTIFY, ()),
        ((SENDTO,), seccomp.NOTIFY, [beside(4, (0,))]),  # not a null pointer
        ((SENDTO,), seccomp.NOTIFY, [beside(4, (0,), half=1)]),
        ((SENDMSG,), failing(errno.EACCES), [beside(0, sealed)]),
        ((CLOSE,), failing(0), [among(0, sealed)]),
        ((DUP2, DUP3), failing(errno.EPERM), [among(1, sealed)]),
        ((CLOSE_RANGE, *IO_URING), failing(errno.ENOSYS), ()),
        ((BIND, LISTEN, SENDMMSG), failing(errno.EACCES), ()),
        ((PTRACE, VM_READ, VM_WRITE, PIDFD_GETFD), failing(errno.EPERM), ()),
        ((SOCKET,), failing(errno.EAFNOSUPPORT), [beside(0, (socket.AF_UNIX, socket.AF_INET))]),
        ((SOCKET,), failing(errno.EPROTONOSUPPORT), [beside(1, (socket.SOCK_STREAM, socket.SOCK_DGRAM), mask=0xF)]),
        ((SOCKET,), failing(errno.EPROTONOSUPPORT), [beside(2, (0, 1, 6, 17))]),
        ((SETSOCKOPT,), failing(errno.EPERM), [among(1, (socket.IPPROTO_IP,)), among(2, (IP_OPTIONS,))]),
    ]
    if answers_queries:
        rules += [
            ((SETSOCKOPT,), failing(0), [among(1, (socket.IPPROTO_IP,)), among(2, (IP_RECVERR,))]),
            ((RECVMSG,), failing(errno.EAGAIN), [among(2, (socket.MSG_ERRQUEUE,), mask=socket.MSG_ERRQUEUE)]),
        ]
    return seccomp.program(rules)


class QemuGuard:
    """Guards one QEMU. `tell` is called on the guard's thread."""

    def __init__(self, egress: Egress, tell: Tell) -> None:
        self._egress, self._tell, self._refusals = egress, tell, Refusals(tell)
        self._listener = self._pidfd = self._pid = -1
        self._failure: BaseException | None = None
        self._calls: dict[int, Callable[[Notice], int]] = {CONNECT: self._connect, SENDTO: self._send}

    def spawn(self, argv: Sequence[str], fds: Iterable[int], stderr: int) -> int:
        """Start a program under guard. Raises NetworkFailed, and what the plain `spawn` raises."""
        inherited, has_started = list(fds), threading.Event()
        sealed = [fd for fd in inherited if stat.S_ISSOCK(os.fstat(fd).st_mode)]
        filter = program(sealed, answers_queries=bool(self._egress.only))
        start = partial(spawn, argv, inherited, stderr)
        keeper = begin_thread(self._keep, start, filter, has_started, name="guard-parent")
        has_started.wait()
        if self._failure is not None:
            keeper.join()
            raise self._failure
        begin_thread(self._serve, keeper, name="guard")
        return self._pid

    def _keep(self, start: Callable[[], int], filter: bytes, has_started: threading.Event) -> None:
        """The parent's whole life. It is under the filter itself, so it does nothing but wait for its child's end."""
        try:
            self._listener = seccomp.install(filter)
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
            self._tell(Refusal("", 0, "", why, self._refusals.count))
        finally:
            os.close(self._listener)  # whatever waits for an answer fails
            keeper.join()
            os.close(self._pidfd)

    def _answer(self, notice: Notice) -> None:
        value = code = 0
        try:
            value = self._calls[notice.call](notice)
        except OSError as exc:
            code = exc.errno or errno.EPERM
        seccomp.answer(self._listener, notice, value, code)

    # -- the calls -----------------------------------------------------------------------------------------------

    def _connect(self, notice: Notice) -> int:
        _, pointer, size = notice.args[:3]
        address = self._address(notice, pointer, size)
        with self._socket(notice) as ours:
            transport = transport_of(ours)
            verdict = self._judge(address, transport)
            if verdict is Verdict.ANSWERED:
                return self._take_call(notice, ours, address)
            if verdict is Verdict.QUERY:
                raise OSError(errno.EPERM, "a connected socket could ask for anything")
            if transport is Transport.TCP and os.get_blocking(ours.fileno()):
                raise OSError(errno.EPERM, "one guest's connection must not hold up all others")
            ours.connect(place_of(address))
        return 0

    def _send(self, notice: Notice) -> int:
        _, data_at, size, _, pointer, address_size = notice.args
        address = self._address(notice, pointer, address_size)
        if size > LONGEST_DATAGRAM:
            raise OSError(errno.EMSGSIZE, os.strerror(errno.EMSGSIZE))
        with self._socket(notice) as ours:
            transport = transport_of(ours)
            if transport is Transport.TCP:  # a fast open: nothing that slirp does
                raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
            verdict = self._judge(address, transport)
            data = self._read(notice, data_at, size) if size else b""
            sent = self._judge_query(notice, data) if verdict is Verdict.QUERY else data
            if sent or not data:
                ours.sendto(sent, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL, place_of(address))
            return len(data)

    def _address(self, notice: Notice, pointer: int, size: int) -> bytes:
        """The IPv4 address a call points to. Every other family is refused, whose own sockets are."""
        if not INET_SIZE <= size & 0xFFFFFFFF <= LONGEST_ADDRESS:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        address = self._read(notice, pointer, INET_SIZE)
        if int.from_bytes(address[:2], "little") != socket.AF_INET:  # 0 is taken for IPv4 by some calls, not by us
            raise OSError(errno.EAFNOSUPPORT, os.strerror(errno.EAFNOSUPPORT))
        return address

    def _read(self, notice: Notice, pointer: int, size: int) -> bytes:
        """The child's memory. Raises OSError when it is not all there."""
        try:
            data = seccomp.read_memory(self._pid, pointer, size)
        except PermissionError:
            self._refusals.add("", 0, "", "everything: this process is not allowed to trace QEMU")
            raise
        if len(data) != size:
            raise OSError(errno.EFAULT, os.strerror(errno.EFAULT))
        if not seccomp.is_valid(self._listener, notice):
            raise OSError(errno.ESRCH, os.strerror(errno.ESRCH))
        return data

    def _socket(self, notice: Notice) -> socket.socket:
        """The child's socket, as ours. Closing it closes ours alone. One on which a query was answered is as it was before."""
        fd = seccomp.take_descriptor(self._pidfd, notice.args[0] & 0xFFFFFFFF)
        try:
            end = socket.socket(fileno=fd)
        except OSError:
            os.close(fd)
            raise
        if (end.family, end.type) == (socket.AF_UNIX, socket.SOCK_DGRAM):
            end.close()
            end = socket.socket(socket.AF_INET, socket.SOCK_DGRAM, socket.IPPROTO_UDP)
            seccomp.put_descriptor(self._listener, notice, end.fileno())
        return end

    # -- the judgement -------------------------------------------------------------------------------------------------

    def _judge(self, address: bytes, transport: Transport) -> Verdict:
        """Raises OSError for what is refused."""
        host, port = place_of(address)
        verdict, reason = decide(self._egress, host, port, transport)
        if verdict is Verdict.ALLOWED and not reason and is_own(host):
            verdict, reason = Verdict.REFUSED, "this host"
        if verdict is Verdict.REFUSED:
            self._refusals.add(host, port, transport.value, reason)
            raise OSError(REFUSED, os.strerror(REFUSED))
        return verdict

    def _judge_query(self, notice: Notice, data: bytes) -> bytes:
        """What is sent to a name server in the place of this; nothing where it is answered here. Raises OSError for what is no
        query. That a name does not exist is final; with REFUSED programs try again, and musl waits as if nothing had come."""
        try:
            asked = query(data)
        except ValueError as exc:
            self._refusals.add("", DNS, Transport.UDP.value, f"a DNS query: {exc}")
            raise OSError(REFUSED, os.strerror(REFUSED)) from None
        is_reached = self._egress.reaches(asked.host)
        if is_reached and asked.is_for_address:
            return asked.wire
        reason = "a DNS query of another type than A and AAAA" if is_reached else "not allowed"
        self._refusals.add(asked.host, DNS, Transport.UDP.value, reason)
        self._answer_query(notice, asked.answer(NO_DATA if is_reached else NO_SUCH_NAME))
        return b""

    def _answer_query(self, notice: Notice, answer: bytes) -> None:
        """Put a socket in the place of QEMU's on which this has come. A sender from port 53 by IPv4 has to be root; but slirp takes
        any sender's address for one of IPv4, so this one's name has the same bytes."""
        theirs, sender = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        with theirs, sender:
            sender.bind(NAME_SERVER + os.urandom(8))
            sender.send(answer)
            seccomp.put_descriptor(self._listener, notice, theirs.fileno())

    def _take_call(self, notice: Notice, ours: socket.socket, address: bytes) -> int:
        """Put one end of a socket pair in the place of QEMU's socket; the other end is told."""
        line, theirs = socket.socketpair()
        with theirs:
            line.setblocking(False)
            theirs.setblocking(False)
            is_taken = False
            try:
                seccomp.put_descriptor(self._listener, notice, theirs.fileno())
                is_taken = self._tell(Call(*place_of(address), line))
            finally:
                if not is_taken:
                    line.close()  # the guest finds its connection closed
        return 0


def transport_of(end: socket.socket) -> Transport:
    """Raises OSError for a socket no guarded child should have."""
    kind = TRANSPORTS.get((end.type & 0xF, end.proto)) if end.family == socket.AF_INET else None
    if kind is None:
        raise OSError(errno.EPROTONOSUPPORT, os.strerror(errno.EPROTONOSUPPORT))
    return kind


def place_of(address: bytes) -> tuple[str, int]:
    port, host = struct.unpack_from("!H4s", address, 2)
    return socket.inet_ntoa(host), port


def prove(confine: Callable[[list[str]], list[str]]) -> str:
    """Guard a small program for a moment: "" when its attempt to connect was seen and refused, or why not."""
    reports: list[Call | Refusal] = []

    def tell(item: Call | Refusal) -> bool:
        reports.append(item)
        return True

    silence = os.open("/dev/null", os.O_WRONLY | os.O_CLOEXEC)
    try:
        argv = confine(["/bin/bash", "-c", "exec 3<>/dev/tcp/127.0.0.1/9"])
        pid = QemuGuard(Egress(), tell).spawn(argv, [], silence)
    except NetworkFailed as exc:
        return exc.message
    finally:
        os.close(silence)
    os.waitpid(pid, 0)
    if any(isinstance(item, Refusal) and item.port == 9 for item in reports):
        return ""
    return "what a machine sends cannot be looked at from here: tracing of other processes is not allowed"
