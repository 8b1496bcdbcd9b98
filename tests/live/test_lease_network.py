"""The network of a lease over two hosts: real pilots, real guests, real packets."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.live.pilots_lab import TwoHosts

# All that goes over the wire between the hosts, for as long as the test says.
SNIFF = """
import socket, sys, threading
wire = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
wire.bind(("br0", 0))
seen = []
def listen():
    while True:
        seen.append(wire.recv(1 << 16))
threading.Thread(target=listen, daemon=True).start()
print("ready", flush=True)
sys.stdin.readline()
all_of_it = b"".join(seen)
print(len(all_of_it), b"a secret of the guests" in all_of_it, flush=True)
"""
# A server in one guest: it sends back what it gets, in capitals, over TCP and over UDP.
SERVE = """
import socket, threading
tcp, udp = socket.create_server(("0.0.0.0", 7000)), socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
udp.bind(("0.0.0.0", 7000))
def datagrams():
    while True:
        data, sender = udp.recvfrom(1 << 16)
        udp.sendto(data.upper(), sender)
threading.Thread(target=datagrams, daemon=True).start()
while True:
    one = tcp.accept()[0]
    while data := one.recv(1 << 16):
        one.sendall(data.upper())
    one.close()
"""
TRY = """
import socket, sys, time
size = int(sys.argv[1])
for _ in range(100):
    try:
        one = socket.create_connection(("node2", 7000), timeout=20)
        break
    except ConnectionRefusedError:
        time.sleep(0.2)
one.sendall(b"a secret of the guests")
got = one.recv(100)
for _ in range(size >> 16):
    one.sendall(b"x" * (1 << 16))
    left = 1 << 16
    while left:
        left -= len(one.recv(left))
udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
udp.settimeout(20)
udp.sendto(b"y" * 1472, ("node2", 7000))  # the largest that is one frame
whole = udp.recv(1 << 16)
udp.sendto(b"z" * 9000, ("node2", 7000))  # of which there are seven
parts = udp.recv(1 << 16)
print(got.decode(), len(whole), len(parts))
"""
# Somebody in a namespace: what a TCP connection to a pilot's port says, and what TLS does.
KNOCK = """
import socket, ssl, sys
context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
for port in range(8480, 8490):
    try:
        with socket.create_connection((sys.argv[1], port), timeout=5) as one, context.wrap_socket(one) as tls:
            print("a handshake at", port)
            tls.sendall(bytes.fromhex(sys.argv[2]))
            print(tls.recv(100))
    except OSError as exc:
        print(port, type(exc).__name__)
"""


@contextmanager
def hosts(folder: Path, image: str) -> Iterator[TwoHosts]:
    if os.geteuid() != 0:
        pytest.skip("network namespaces are made by root")
    lab = TwoHosts(folder, image)
    try:
        yield lab
    finally:
        lab.close()


@pytest.fixture
def two(tmp_path: Path) -> Iterator[TwoHosts]:
    with hosts(tmp_path, "debian12") as lab:
        yield lab


def until(is_so: Callable[[], object], what: str, limit: float = 60) -> None:
    end = time.monotonic() + limit
    while not is_so():
        assert time.monotonic() < end, what
        time.sleep(0.1)


def knocks(two: TwoHosts, name: str, address: str, data: bytes = b"hello") -> list[str]:
    argv = two.inside(name, sys.executable, "-c", KNOCK, address, data.hex())
    return subprocess.run(argv, capture_output=True, text=True, timeout=120, check=True).stdout.splitlines()


def test_pilots_of_one_lease_connect_and_nobody_else_is_let_in(tmp_path: Path) -> None:
    """Also where no machine can be made. Who is no node of the lease gets no handshake; a node gets one, and nothing without the key."""
    with hosts(tmp_path, "no-such-image") as two:
        two.up("terminated")
        until(lambda: "10.88.0.1:8480" in two.connections(1), "the second has connected to the first")
        ports = [f"{port} ConnectionRefusedError" for port in range(8481, 8490)]
        first, *others = knocks(two, two.desk, "10.88.0.1")
        assert first in (f"8480 {one}" for one in ("ConnectionResetError", "SSLEOFError", "SSLZeroReturnError"))
        assert others == ports
        first, second, *others = knocks(two, two.names[1], "10.88.0.1")
        assert first == "a handshake at 8480" and second in ("b''", "8480 ConnectionResetError") and others == ports
        assert two.groups(0) == ["2", "lock"] and two.groups(1) == ["1", "lock"]
        os.kill(two.pilots[1].pid, signal.SIGKILL)
        two.pilots[1].wait(20)
        two.hosts[1]("reap")
        assert two.groups(1) == [] and two.sockets(1) == "" and two.links(1) == ["lo", "out"]
        assert two.groups(0) == ["2", "lock"]
        two.release()
        assert two.groups(0) == [] and two.sockets(0) == "" and two.hosts[0].leftovers() == []


def test_machines_on_two_hosts_reach_each_other_and_nobody_else_does(two: TwoHosts) -> None:
    two.up()
    sniffing = subprocess.Popen(
        two.inside(two.desk, sys.executable, "-c", SNIFF), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with sniffing:
        assert sniffing.stdout and sniffing.stdout.readline() == "ready\n"
        serving = two.hosts[1].popen("exec", two.machine(1), "--", "python3", "-c", SERVE)
        said = two.exec(0, "python3", "-c", TRY, str(2 << 20))
        assert said == "A SECRET OF THE GUESTS 1472 9000\n"
        length, has_secret = sniffing.communicate("\n", timeout=30)[0].split()
    assert int(length) > 4 << 20 and has_secret == "False"
    serving.kill()
    serving.wait(20)
    two.release()
    for number in (0, 1):
        assert two.hosts[number].leftovers() == [] and two.groups(number) == []
        assert two.sockets(number) == "" and two.links(number) == ["lo", "out"]


def test_what_is_killed_leaves_nothing_and_the_others_stay(two: TwoHosts) -> None:
    two.up()
    assert len(two.groups(0)) == 3  # a lock, its machine, and what stands in for the other
    os.kill(two.pilots[1].pid, signal.SIGKILL)
    two.pilots[1].wait(20)
    until(lambda: not two.hosts[1].domains(), "its machine is gone with it")
    two.hosts[1]("reap")
    assert two.hosts[1].leftovers() == [] and two.groups(1) == []
    assert two.sockets(1) == "" and two.links(1) == ["lo", "out"]
    assert two.exec(0, "cat", "/proc/sys/kernel/hostname") == "node1\n"
    (machine,) = two.hosts[0].domains()
    os.kill(machine, signal.SIGKILL)
    until(lambda: not two.hosts[0].domains() and not two.hosts[0].machines(), "it has ended")
    assert two.groups(0) == ["2", "lock"]
    two.release()
    assert two.hosts[0].leftovers() == [] and two.groups(0) == [] and two.sockets(0) == ""
