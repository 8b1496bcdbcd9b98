"""The guard of a passt, with a tiny child in its place that tries every way out it knows."""

import array
import json
import os
import resource
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from belljar.host.egress import Egress, rule
from belljar.host.traffic import Call, Refusal
from belljar.hypervisor.qemu.process import spawn
from belljar.network.passt_guard import HIGH, PasstGuard, _meet

PROGRAM = str(Path(__file__).with_name("under_passt_guard.py"))
METADATA = ("169.254.169.254", 80)


class Under:
    """Runs children under a guard and hears what they and it say."""

    def __init__(self, egress: Egress) -> None:
        self.told: list[Call | Refusal] = []
        self.takes = True
        self.guard = PasstGuard(egress, self._tell)
        self.status = 0

    def _tell(self, item: Call | Refusal) -> bool:
        self.told.append(item)
        if isinstance(item, Call) and self.takes:
            threading.Thread(target=_serve, args=(item.connection,)).start()
        return self.takes

    def run(self, *words: object, line: int = -1) -> Any:
        """What the child found out; None when it died of it."""
        said, theirs = os.pipe2(os.O_CLOEXEC)
        ours, end = socket.socketpair()
        with ours, end:
            line = end.fileno() if line < 0 else line
            argv = [sys.executable, "-I", PROGRAM, str(self.guard.high), str(line), *map(str, words)]
            try:
                pid = self.guard.spawn(lambda: spawn(argv, [line], theirs), line)
            finally:
                os.close(theirs)
            with open(said, "rb") as file:
                text = file.read().decode()
        _, self.status = os.waitpid(pid, 0)
        assert not text or text.startswith("{"), text
        return json.loads(text) if text else None


def _serve(connection: socket.socket) -> None:
    connection.setblocking(True)
    with connection:
        asked = connection.recv(100)
        connection.sendall(b"answer to " + asked)


@pytest.fixture
def server() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as one:
        one.settimeout(10)
        yield one


def _datagrams() -> socket.socket:
    one = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 20)
    one.bind(("127.0.0.1", 0))
    one.settimeout(10)
    return one


@pytest.fixture
def datagrams() -> Iterator[socket.socket]:
    with _datagrams() as one:
        yield one


@pytest.fixture
def forbidden() -> Iterator[socket.socket]:
    with _datagrams() as one:
        yield one


def port_of(one: socket.socket) -> int:
    return int(one.getsockname()[1])


def allowing(*texts: str) -> Egress:
    return Egress(allow=tuple(rule(text) for text in texts))


def is_silent(one: socket.socket) -> bool:
    one.setblocking(False)
    try:
        one.recv(100)
    except BlockingIOError:
        return True
    return False


def test_what_is_allowed_is_sent_and_nothing_else(
    server: socket.socket, datagrams: socket.socket, forbidden: socket.socket
) -> None:
    under = Under(allowing(f"127.0.0.1:{port_of(server)}/tcp", f"127.0.0.1:{port_of(datagrams)}/udp"))
    found = under.run("sending", port_of(server), port_of(datagrams), port_of(forbidden))
    assert found == {
        "bind": "None", "numbers": "True", "nonblocking": "True", "connect": "EINPROGRESS", "own test": "EADDRNOTAVAIL",
        "not allowed": "ENETUNREACH", "stream": "9", "many": "4", "sendto": "5", "sendto elsewhere": "ENETUNREACH",
        "connect elsewhere": "ENETUNREACH", "unconnected": "1", "connect there": "None", "connected": "1", "send": "4",
        "connected, and elsewhere": "1", "large": "20",
    }  # fmt: skip
    with server.accept()[0] as taken:
        assert taken.recv(100) == b"by stream"
    first, (_, port) = datagrams.recvfrom(100)
    assert first == b"one" and port != port_of(datagrams) + 1, "a port of the host's was not the guest's to choose"
    assert [datagrams.recv(100) for _ in range(5)] == [b"t.w.o", b"", b"three", b"four", b"five"]
    assert all(len(datagrams.recv(1 << 16)) == 60000 for _ in range(20))
    assert is_silent(datagrams) and is_silent(forbidden)
    assert {(one.port, one.transport) for one in under.told if isinstance(one, Refusal)} == {
        (port_of(forbidden), "tcp"), (port_of(forbidden), "udp"),
    }  # fmt: skip
    assert under.guard.refused == 5


def test_ways_round_it_are_closed(server: socket.socket) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, _datagrams() as gift:
        ours.sendmsg([b"frame"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [gift.fileno()]))])
        found = Under(allowing("0.0.0.0/0")).run("ways_round", port_of(server), line=theirs.fileno())
        assert ours.recv(100) == b"frame"
    assert found == {
        "sendmsg": "EACCES", "fast open": "ENOTSUP", "fast open by sendto": "ENOTSUP", "fast open to nobody": "ENOTSUP",
        "fast open later": "EPERM", "stream by sendmmsg": "ENOTSUP",
        "dup": "EPERM", "dup2": "EPERM", "dup3": "EPERM", "dup2 with high bits": "EPERM", "fcntl": "EPERM", "fcntl cloexec": "EPERM",
        "dup2 to a high one": "True", "which may not send": "EACCES", "not by minus one": "EACCES",
        "recvmsg of the line": "EPERM", "recvmmsg of the line": "EPERM", "the line elsewhere": "EPERM", "the line sends": "5",
        "pair": "EAFNOSUPPORT", "unix": "EAFNOSUPPORT", "pidfd_getfd": "EPERM", "ptrace": "EPERM", "readv": "EPERM",
        "writev": "EPERM", "io_uring": "ENOSYS", "io_uring_enter": "ENOSYS", "inet6": "EAFNOSUPPORT", "raw": "EAFNOSUPPORT",
        "packet": "EAFNOSUPPORT", "sctp": "EAFNOSUPPORT", "mptcp": "EAFNOSUPPORT", "udplite": "EPROTONOSUPPORT",
        "seqpacket": "EAFNOSUPPORT", "netlink of sockets": "EAFNOSUPPORT", "vsock": "EAFNOSUPPORT", "odd flags": "EINVAL",
        "short bind": "EINVAL", "bind": "EADDRNOTAVAIL", "listen": "EACCES", "accept": "EACCES", "source route": "EPERM", "device": "EPERM", "interface": "EPERM",
        "unspecified": "EAFNOSUPPORT", "to inet6": "EAFNOSUPPORT", "unspecified stream": "EAFNOSUPPORT", "blocking": "EPERM",
    }  # fmt: skip
    server.setblocking(False)
    with pytest.raises(BlockingIOError):
        server.accept()


def test_what_passt_needs_it_has() -> None:
    assert Under(Egress()).run("harmless") == {
        "netlink": "None", "links": "20", "heard": "True", "netlink to others": "EINVAL", "reuse": "0", "bind": "None", "name": "('0.0.0.0', 5353)",
        "name of none": "('0.0.0.0', 0)", "short name": "EINVAL", "name to nowhere": "EFAULT", "name of a stream": "('0.0.0.0', 0)",
        "bind again": "EINVAL", "bind in inet6": "EAFNOSUPPORT", "no core": "0", "and yet": "1",
    }  # fmt: skip


def test_hostile_vectors_are_refused(datagrams: socket.socket) -> None:
    found = Under(allowing("0.0.0.0/0")).run("hostile_vectors", port_of(datagrams))
    assert found.pop("endless") in ("EFAULT", "EINVAL", "EMSGSIZE")  # as it is with what lies behind it
    assert found == {
        "none": "0", "null": "EFAULT", "kernel": "EFAULT", "short name": "EINVAL", "unmapped name": "EFAULT",
        "kernel name": "EFAULT", "many pieces": "EMSGSIZE", "unmapped pieces": "EFAULT", "huge piece": "EMSGSIZE",
        "no socket": "ENOTSOCK", "no descriptor": "EBADF", "other family": "1",  # lost
    }  # fmt: skip
    assert is_silent(datagrams)


def test_an_address_that_changes_while_it_is_judged_does_not_count(
    datagrams: socket.socket, forbidden: socket.socket
) -> None:
    under = Under(allowing(f"127.0.0.1:{port_of(datagrams)}"))
    assert under.run("race", port_of(datagrams), port_of(forbidden), 1500) == {"1": "1500"}
    assert under.guard.refused > 0, "the race never showed the forbidden port"
    assert datagrams.recv(100) == b"x", "the race never showed the allowed port"
    assert is_silent(forbidden)


def test_an_answered_place_is_a_tcp_connection_to_us() -> None:
    under = Under(Egress(answers=(METADATA,)))
    heard = under.run("answered", *METADATA)
    assert heard == {"connect": "None", "known": "104", "send": "4", "heard": "b'answer to GET\\n'"}
    (call,) = under.told
    assert isinstance(call, Call) and (call.address, call.port) == METADATA
    assert Under(Egress(answers=(METADATA,))).run("answered", METADATA[0], 443) == {"connect": "ENETUNREACH"}


def test_a_call_that_nobody_takes_is_closed() -> None:
    under = Under(Egress(answers=(METADATA,)))
    under.takes = False
    assert under.run("answered", *METADATA)["heard"] in ("b''", "ECONNRESET")


def test_who_else_comes_to_the_door_is_not_let_in() -> None:
    with socket.create_server(("127.0.0.1", 0)) as door, socket.socket() as stranger, socket.socket() as caller:
        stranger.connect(door.getsockname())
        caller.connect(door.getsockname())
        with _meet(door, caller.getsockname()) as line:
            assert line.getpeername() == caller.getsockname()
        assert stranger.recv(1) == b""
    with socket.create_server(("127.0.0.1", 0)) as door:
        many = [socket.create_connection(door.getsockname()) for _ in range(9)]
        with pytest.raises(ConnectionRefusedError):
            _meet(door, ("127.0.0.1", 1))
        for one in many:
            one.close()


@pytest.mark.parametrize("most", [200, 4 * HIGH])
def test_datagram_sockets_end_where_numbers_end(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda what: (most, most))
    guard = PasstGuard(Egress(), lambda item: True)
    assert guard.high == (100 if most == 200 else HIGH)
    if most == 200:
        under = Under(Egress())
        assert under.run("exhausting") == {"at the end": "EMFILE", "all high": "True", "then": "True"}


@pytest.mark.parametrize("abi", ["x32", "i386"])
def test_system_calls_by_foreign_numbers_are_the_end(abi: str) -> None:
    under = Under(allowing("0.0.0.0/0"))
    assert under.run("abi", abi) is None
    assert os.WIFSIGNALED(under.status) and os.WTERMSIG(under.status) == signal.SIGSYS


def test_a_guard_that_fails_lets_nothing_out(monkeypatch: pytest.MonkeyPatch, datagrams: socket.socket) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("a mistake of ours")

    monkeypatch.setattr("belljar.network.passt_guard.PasstGuard._judge", fails)
    under = Under(allowing("0.0.0.0/0"))
    found = under.run("race", port_of(datagrams), port_of(datagrams), 2)
    assert found is None or "ENOSYS" in str(found)
    (told,) = under.told
    assert isinstance(told, Refusal) and "a mistake of ours" in told.reason
    assert is_silent(datagrams)


def test_its_threads_and_descriptors_end_with_the_child() -> None:
    before, open_before = set(threading.enumerate()), len(os.listdir("/proc/self/fd"))
    Under(Egress()).run("harmless")
    for thread in set(threading.enumerate()) - before:
        thread.join(10)
        assert not thread.is_alive()
    assert len(os.listdir("/proc/self/fd")) <= open_before  # what earlier tests left may go meanwhile
