"""A host with networks of its own, in network namespaces: the machines under test live in one, servers in the other.

    host   10.77.0.2, 203.0.113.2 ---- veth ---- 10.77.0.1, 203.0.113.1   world

203.0.113.0/24 stands for the Internet (RFC 5737), 10.77.0.0/24 for what a site has inside. A server is a program in a
namespace that answers every connection or datagram with its own name, and ends with the test.
"""

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SERVER = """
import socket, sys, threading
kind, address, port, name = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4].encode()
if kind == "tcp":
    server = socket.create_server((address, port), backlog=100)
    print("ready", flush=True)
    def serve(connection):
        with connection:
            connection.sendall(name)
            while data := connection.recv(1 << 16):
                connection.sendall(data)
    while True:
        threading.Thread(target=serve, args=(server.accept()[0],), daemon=True).start()
server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
server.bind((address, port))
print("ready", flush=True)
while True:
    data, sender = server.recvfrom(1 << 16)
    server.sendto(name + data, sender)
"""


def ip(*words: str) -> str:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"
    return done.stdout


class Lab:
    """Two namespaces and what runs in them."""

    def __init__(self) -> None:
        tag = os.urandom(3).hex()
        self.host, self.world = f"bjh{tag}", f"bjw{tag}"
        self._servers: list[subprocess.Popen[str]] = []
        self._etc = Path("/etc/netns") / self.host
        for name in (self.host, self.world):
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("-n", self.host, "link", "add", "out", "type", "veth", "peer", "name", "in", "netns", self.world)
        for name, card, last in ((self.host, "out", 2), (self.world, "in", 1)):
            for net in ("10.77.0", "203.0.113"):
                ip("-n", name, "addr", "add", f"{net}.{last}/24", "dev", card)
            ip("-n", name, "link", "set", card, "up")
        ip("-n", self.host, "route", "add", "default", "via", "203.0.113.1")

    def resolver(self, address: str) -> None:
        """What /etc/resolv.conf says in the host."""
        self._etc.mkdir(parents=True, exist_ok=True)
        (self._etc / "resolv.conf").write_text(f"nameserver {address}\n")

    def hosts(self, *lines: str) -> Path:
        """What /etc/hosts says in the host, to whatever `ip netns exec` starts there."""
        self._etc.mkdir(parents=True, exist_ok=True)
        file = self._etc / "hosts"
        file.write_text("\n".join(("127.0.0.1 localhost", *lines, "")))
        return file

    def inside(self, name: str, *argv: str) -> list[str]:
        return ["ip", "netns", "exec", name, *argv]

    def serve(self, name: str, kind: str, address: str, port: int, says: str) -> None:
        self.begin(name, SERVER, kind, address, str(port), says)

    def begin(self, name: str, program: str, *words: str) -> None:
        """A server, which says when it is ready."""
        server = subprocess.Popen(
            self.inside(name, sys.executable, "-c", program, *words), stdout=subprocess.PIPE, text=True
        )
        self._servers.append(server)
        assert server.stdout and server.stdout.readline() == "ready\n"

    def run(self, name: str, *argv: str) -> str:
        done = subprocess.run(self.inside(name, *argv), capture_output=True, text=True, timeout=30, check=False)
        assert done.returncode == 0, f"{argv}: {done.stderr}"
        return done.stdout

    def close(self) -> None:
        for server in self._servers:
            server.kill()
            server.wait(10)
            if server.stdout:
                server.stdout.close()
        for name in (self.host, self.world):
            ip("netns", "delete", name)
        shutil.rmtree(self._etc, ignore_errors=True)


@pytest.fixture
def lab() -> Iterator[Lab]:
    if os.geteuid() != 0:
        pytest.skip("network namespaces are made by root")
    one = Lab()
    yield one
    one.close()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as one:
        return int(one.getsockname()[1])
