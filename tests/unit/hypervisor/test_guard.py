"""The guard of a user network, with a tiny child in QEMU's place that tries every way out it knows."""

import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tests.unit.host.test_names import asked

from belljar.errors import CommandMissing, NetworkFailed
from belljar.host.guard.egress import Egress, Only, is_own, rule
from belljar.host.guard.names import Name, query
from belljar.host.guard.traffic import Call, Refusal
from belljar.hypervisor.qemu.guard import QemuGuard, prove

PROGRAM = str(Path(__file__).with_name("guarded.py"))
METADATA = ("169.254.169.254", 80)


class Under:
    """Runs children under a guard and hears what they and it say."""

    def __init__(self, egress: Egress) -> None:
        self.told: list[Call | Refusal] = []
        self.takes = True
        self.guard = QemuGuard(egress, self._tell)
        self.status = 0

    def _tell(self, item: Call | Refusal) -> bool:
        self.told.append(item)
        if isinstance(item, Call) and self.takes:
            threading.Thread(target=_serve, args=(item.connection,)).start()
        return self.takes

    def run(self, *words: object, fds: tuple[int, ...] = ()) -> Any:
        """What the child found out; None when it died of it."""
        said, theirs = os.pipe2(os.O_CLOEXEC)
        try:
            argv = [sys.executable, "-I", PROGRAM, *map(str, words)]
            pid = self.guard.spawn(argv, fds, theirs)
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
        yield one


@pytest.fixture
def datagrams() -> Iterator[socket.socket]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        one.bind(("127.0.0.1", 0))
        one.settimeout(10)
        yield one


def port_of(one: socket.socket) -> int:
    return int(one.getsockname()[1])


def allowing(*texts: str) -> Egress:
    return Egress(allow=tuple(rule(text) for text in texts))


def test_what_is_allowed_is_reached(server: socket.socket, datagrams: socket.socket) -> None:
    egress = allowing("127.0.0.1")
    assert Under(egress).run("connect", "127.0.0.1", port_of(server)) == {"connect": "EINPROGRESS"}
    server.settimeout(10)
    server.accept()[0].close()
    assert Under(egress).run("udp", "127.0.0.1", port_of(datagrams)) == {"udp": "5"}
    assert datagrams.recv(100) == b"hello"


@pytest.mark.parametrize("address", ["127.0.0.1", "127.9.9.9", "0.0.0.0", "10.1.2.3", "169.254.169.254", "224.0.0.1"])
def test_what_is_not_is_refused_and_told(address: str, server: socket.socket) -> None:
    under = Under(Egress())
    assert under.run("connect", address, port_of(server)) == {"connect": "ENETUNREACH"}
    (told,) = under.told
    assert isinstance(told, Refusal) and (told.address, told.port, told.transport) == (address, port_of(server), "tcp")
    assert told.count == 1
    server.setblocking(False)
    with pytest.raises(BlockingIOError):
        server.accept()


@pytest.mark.parametrize(
    ("allowed", "told"),
    [
        ("127.0.0.0/8", "ENETUNREACH"),
        ("127.0.0.0/31:{port}/tcp", "ENETUNREACH"),
        ("127.0.0.1/32", "EINPROGRESS"),
        ("0.0.0.0/0", "EINPROGRESS"),
    ],
)
def test_a_network_that_is_allowed_is_not_the_host_that_is_in_it(
    allowed: str, told: str, server: socket.socket
) -> None:
    egress = allowing(allowed.format(port=port_of(server)))
    assert Under(egress).run("connect", "127.0.0.1", port_of(server)) == {"connect": told}


def test_datagrams_are_refused_too(datagrams: socket.socket) -> None:
    assert Under(Egress()).run("udp", "127.0.0.1", port_of(datagrams)) == {"udp": "ENETUNREACH"}
    assert Under(allowing("127.0.0.1:1/udp")).run("udp", "127.0.0.1", port_of(datagrams)) == {"udp": "ENETUNREACH"}
    datagrams.setblocking(False)
    with pytest.raises(BlockingIOError):
        datagrams.recv(100)


def test_a_name_server_hears_of_names_that_are_reached_and_of_nothing_else() -> None:
    resolver = "127.0.0.153"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        try:
            server.bind((resolver, 53))
        except PermissionError:
            pytest.skip("a port below 1024 is for root")
        server.settimeout(10)
        egress = Egress(resolvers=(resolver,), only=(Only(names=(Name("*.example.org"),)),))
        wanted = asked("data.example.org", tail=b"secret")
        assert Under(egress).run("query", resolver, wanted.hex()) == {"plain": str(len(wanted)), "connected": "EPERM"}
        assert server.recv(1000) == query(wanted).wire
        for data in (b"", b"anything"):
            under = Under(egress)
            assert under.run("query", resolver, data.hex())["plain"] == "ENETUNREACH"
            assert all("a DNS query: " in told.reason for told in under.told if isinstance(told, Refusal))
        assert Under(egress).run("connect", resolver, 53) == {"connect": "ENETUNREACH"}
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.recv(1000)


def test_a_query_that_is_not_asked_is_answered_at_once_and_its_socket_is_good_for_others() -> None:
    resolver = "127.0.0.153"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        try:
            server.bind((resolver, 53))
        except PermissionError:
            pytest.skip("a port below 1024 is for root")
        server.settimeout(10)
        under = Under(Egress(resolvers=(resolver,), only=(Only(names=(Name("*.example.org"),)),)))
        wanted, other, odd = asked("data.example.org"), asked("data.example.net"), asked("data.example.org", 65)
        threading.Thread(target=lambda: server.sendto(*[b"its answer", server.recvfrom(1000)[1]])).start()
        found = under.run("ask_again", resolver, *(data.hex() for data in (other, odd, wanted, other)))
        nothing = [data[:2] + bytes((0x81, 0x80 | code)) + data[4:] for data, code in ((other, 3), (odd, 0))]
        answers = [
            ("10.0.2.3", nothing[0]),
            ("10.0.2.3", nothing[1]),
            (resolver, b"its answer"),
            ("10.0.2.3", nothing[0]),
        ]
        assert list(found.values()) == [f"{len(wanted)} {place}:53 {answer.hex()}" for place, answer in answers]
        told = [(told.address, told.reason) for told in under.told if isinstance(told, Refusal)]
        assert told[0] == ("data.example.net", "not allowed") and "another type" in told[1][1]


def test_a_port_of_names_is_answered_at_every_address() -> None:
    egress = Egress(only=(Only(names=(Name("data.example.org"),)),))
    assert Under(egress).run("answered", "203.0.113.9", 443)["connect"] == "None"
    assert Under(egress).run("answered", "10.0.0.1", 443) == {"connect": "ENETUNREACH"}
    assert Under(egress).run("connect", "203.0.113.9", 8443) == {"connect": "ENETUNREACH"}
    assert Under(egress).run("udp", "203.0.113.9", 443) == {"udp": "ENETUNREACH"}  # QUIC


def test_an_answered_place_is_a_stream_to_us() -> None:
    under = Under(Egress(answers=(METADATA,)))
    heard = under.run("answered", *METADATA)
    assert heard == {"connect": "None", "blocking": "False", "send": "4", "heard": "b'answer to GET\\n'"}
    (call,) = under.told
    assert isinstance(call, Call) and (call.address, call.port) == METADATA
    other = Under(Egress(answers=(METADATA,)))
    assert other.run("answered", METADATA[0], 443) == {"connect": "ENETUNREACH"}


def test_a_call_that_nobody_takes_is_closed() -> None:
    under = Under(Egress(answers=(METADATA,)))
    under.takes = False
    assert under.run("answered", *METADATA)["heard"] in ("b''", "ECONNRESET")


def test_hostile_addresses_are_refused(server: socket.socket) -> None:
    found = Under(allowing("0.0.0.0/0")).run("hostile_addresses", port_of(server))
    assert found == {
        "short": "EINVAL", "empty": "EINVAL", "negative": "EINVAL", "huge": "EINVAL",
        "high bits": "EINPROGRESS",  # the kernel takes the low half of a length, and so do we
        "null": "EFAULT", "kernel": "EFAULT", "unmapped": "EFAULT", "no socket": "ENOTSOCK", "no descriptor": "EBADF",
        "unspecified": "EAFNOSUPPORT", "unspecified datagram": "EAFNOSUPPORT", "ipv6": "EAFNOSUPPORT",
        "unix": "EAFNOSUPPORT",
    }  # fmt: skip


def test_other_ways_out_are_closed(server: socket.socket) -> None:
    found = Under(allowing("0.0.0.0/0")).run("hostile_calls", port_of(server))
    assert found == {
        "sendmsg": "EACCES", "sendmmsg": "EACCES", "fast open": "ENOTSUP", "unspecified sendto": "EAFNOSUPPORT",
        "jumbo": "EMSGSIZE", "bind": "EACCES", "listen": "EACCES", "source route": "EPERM", "blocking": "EPERM",
        "inet6 socket": "EAFNOSUPPORT", "sctp": "EPROTONOSUPPORT", "mptcp": "EPROTONOSUPPORT",
        "netlink": "EAFNOSUPPORT", "packet": "EAFNOSUPPORT", "seqpacket": "EPROTONOSUPPORT",
        "udplite": "EPROTONOSUPPORT", "io_uring": "ENOSYS", "ptrace": "EPERM", "pidfd_getfd": "EPERM",
        "close_range": "ENOSYS",
    }  # fmt: skip


def test_the_number_of_an_inherited_socket_cannot_be_taken() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        found = Under(Egress()).run("seals", theirs.fileno(), 1, fds=(theirs.fileno(),))
        assert found == {
            "speaks": "EACCES",  # a copy under another number may not
            "speaks by its number": "1", "close": "0", "still there": "True", "dup2": "EPERM", "dup3": "EPERM",
            "dup2 with high bits": "EPERM",
        }  # fmt: skip
        assert ours.recv(100) == b"y"


def test_an_address_that_changes_while_it_is_judged_does_not_count(server: socket.socket) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=1000) as forbidden:
        egress = allowing(f"127.0.0.1:{port_of(server)}")
        under = Under(egress)
        found = under.run("race", port_of(server), port_of(forbidden), 500)
        assert int(found.get("ENETUNREACH", 0)) > 0, "the race never showed the forbidden port"
        assert int(found.get("EINPROGRESS", 0)) > 0, "the race never showed the allowed port"
        forbidden.setblocking(False)
        with pytest.raises(BlockingIOError):
            forbidden.accept()


def test_a_guard_that_fails_lets_nothing_out(monkeypatch: pytest.MonkeyPatch, server: socket.socket) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("a mistake of ours")

    monkeypatch.setattr("belljar.hypervisor.qemu.guard.QemuGuard._judge", fails)
    under = Under(allowing("0.0.0.0/0"))
    assert "ENOSYS" in str(under.run("connect", "127.0.0.1", port_of(server)))
    (told,) = under.told
    assert isinstance(told, Refusal) and "a mistake of ours" in told.reason


@pytest.mark.parametrize("abi", ["x32", "i386"])
def test_system_calls_by_foreign_numbers_are_the_end(abi: str) -> None:
    under = Under(allowing("0.0.0.0/0"))
    assert under.run("abi", abi) is None
    assert os.WIFSIGNALED(under.status) and os.WTERMSIG(under.status) == signal.SIGSYS


def test_a_program_that_does_not_exist_leaves_no_thread_behind() -> None:
    before = threading.active_count()
    with pytest.raises(CommandMissing):
        QemuGuard(Egress(), lambda item: True).spawn(["/nowhere/qemu"], [], 2)
    assert threading.active_count() <= before  # those of earlier tests may end meanwhile


def test_its_threads_and_descriptors_end_with_the_child() -> None:
    before, open_before = set(threading.enumerate()), len(os.listdir("/proc/self/fd"))
    Under(Egress()).run("connect", "127.0.0.1", 1)
    for thread in set(threading.enumerate()) - before:
        thread.join(10)
        assert not thread.is_alive()
    assert len(os.listdir("/proc/self/fd")) <= open_before  # what earlier tests left may go meanwhile


def test_a_kernel_without_listeners_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("belljar.host.guard.seccomp.SYS_SECCOMP", 9999)
    with pytest.raises(NetworkFailed, match="no listener"):
        QemuGuard(Egress(), lambda item: True).spawn([sys.executable], [], 2)


def test_our_own_addresses_are_known_to_the_kernel() -> None:
    assert is_own("127.0.0.1")
    assert not is_own("192.0.2.1")


def test_the_child_dies_with_the_process_that_guards_it() -> None:
    reader, writer = os.pipe()
    guardian = os.fork()
    if guardian == 0:
        with suppress(BaseException):
            argv = ["/usr/bin/setpriv", "--pdeathsig=KILL", "--", "/bin/sleep", "600"]
            pid = QemuGuard(Egress(), lambda item: True).spawn(argv, [], 2)
            while b"sleep" not in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0]:
                time.sleep(0.01)
            os.write(writer, b"%d\n" % pid)
            signal.pause()
        os._exit(1)
    os.close(writer)
    child = int(os.read(reader, 20))
    os.close(reader)
    end = os.pidfd_open(child)
    os.kill(guardian, signal.SIGKILL)
    os.waitpid(guardian, 0)
    import select

    poller = select.poll()
    poller.register(end, select.POLLIN)
    assert poller.poll(10000)
    os.close(end)


def test_a_guard_that_may_not_look_refuses_everything_and_says_so(
    monkeypatch: pytest.MonkeyPatch, server: socket.socket
) -> None:
    def may_not(*_: object) -> bytes:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("belljar.host.guard.seccomp.read_memory", may_not)
    under = Under(allowing("0.0.0.0/0"))
    assert under.run("connect", "127.0.0.1", port_of(server)) == {"connect": "EPERM"}
    (told,) = under.told
    assert isinstance(told, Refusal) and "not allowed to trace" in told.reason


def test_it_can_be_proved_beforehand(monkeypatch: pytest.MonkeyPatch) -> None:
    assert prove(lambda argv: argv) == ""
    assert "cannot be looked at" in prove(lambda argv: ["/bin/true"])
    monkeypatch.setattr("belljar.host.guard.seccomp.SYS_SECCOMP", 9999)
    assert "no listener" in prove(lambda argv: argv)
