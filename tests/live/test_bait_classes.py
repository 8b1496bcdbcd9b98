"""Network classes of a bait, with real packets: nodes of two classes on two bridges of a host, which routes for them and has a card of
its own on one of the bridges."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.live.conftest import Belljar
from tests.live.net_lab import Lab, ip, lab

__all__ = ["lab"]

CLASSES = (("br0", "10.99.0"), ("br1", "10.98.0"))
FILE = """[bait]
images = ["worker"]
networks = { open = "br0", closed = "br1" }
closed = ["closed"]
services = ["10.99.0.1:6817/tcp", "10.98.0.1:6817/tcp", "10.77.0.1:6817/tcp", "10.98.0.99:6817/tcp"]
"""
NETWORK = {
    "BELLJAR_NETWORK_BRIDGES": "br0,br1",
    "BELLJAR_NETWORK_BRIDGE_ADDRESSES": "10.99.0.10-10.99.0.40/24,br1:10.98.0.10-10.98.0.40/24",
}
ASK = """
import json, socket, sys
def reached(place):
    address, port = place.split(":")
    try:
        with socket.create_connection((address, int(port)), 1.0) as one:
            return one.recv(100).decode()
    except OSError:
        return ""
print(json.dumps([reached(place) for place in sys.argv[1:]]))
"""


class Nodes:
    """Guests as namespaces, each behind a port that is named as a machine's tap; one card of the host's is on br1, behind it a router."""

    def __init__(self, lab: Lab, folder: Path) -> None:
        self.lab, self.names = lab, list[str]()
        for bridge, net in CLASSES:
            ip("-n", lab.host, "link", "add", bridge, "type", "bridge")
            ip("-n", lab.host, "addr", "add", f"{net}.1/24", "dev", bridge)
            ip("-n", lab.host, "link", "set", bridge, "up")
        lab.run(lab.host, "sysctl", "-qw", "net.ipv4.ip_forward=1")
        for name, bridge, net, number in (
            ("a", "br0", "10.99.0", 10), ("b", "br0", "10.99.0", 11), ("c", "br1", "10.98.0", 10), ("d", "br1", "10.98.0", 11),
            ("router", "br1", "10.98.0", 99),
        ):  # fmt: skip
            self._add(
                name, bridge, f"{net}.{number}", "eth9" if name == "router" else f"bj{name * 12}"[:14], f"{net}.1"
            )
        ip("-n", lab.world, "route", "add", "10.96.0.0/13", "via", "10.77.0.2")
        self.belljar = Belljar(folder, settings=NETWORK)
        (folder / "bait.toml").write_text(FILE)
        self.file = folder / "bait.toml"

    def _add(self, name: str, bridge: str, address: str, port: str, gateway: str) -> None:
        space = f"{self.lab.host}{name}"
        ip("netns", "add", space)
        self.names.append(space)
        ip("-n", self.lab.host, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", space)
        ip("-n", self.lab.host, "link", "set", port, "master", bridge, "up")
        for words in (
            ("addr", "add", f"{address}/24", "dev", "eth0"),
            ("link", "set", "eth0", "up"),
            ("link", "set", "lo", "up"),
        ):
            ip("-n", space, *words)
        ip("-n", space, "route", "add", "default", "via", gateway)

    def space(self, name: str) -> str:
        return f"{self.lab.host}{name}"

    def reaches(self, name: str, *places: str) -> list[str]:
        space = self.space(name) if name not in (self.lab.host, self.lab.world) else name
        found: list[str] = json.loads(self.lab.run(space, sys.executable, "-c", ASK, *places))
        return found

    def guard(self) -> None:
        done = self.belljar("bait", "rules", str(self.file))
        assert done.returncode == 0, done.stderr
        argv = self.lab.inside(self.lab.host, "nft", "-f", "-")
        subprocess.run(argv, input=done.stdout, check=True, timeout=30)

    def checked(self) -> str:
        """What `belljar bait check` says of the classes."""
        argv = self.lab.inside(self.lab.host, *map(str, self.belljar.argv("bait", "check", str(self.file))))
        done = subprocess.run(argv, env=self.belljar.env, capture_output=True, text=True, timeout=60, check=False)
        return next((line for line in done.stdout.splitlines() if "network classes" in line), done.stderr)

    def close(self) -> None:
        for name in self.names:
            ip("netns", "delete", name)
        self.belljar.close()


@pytest.fixture
def nodes(lab: Lab, tmp_path: Path) -> Iterator[Nodes]:
    if os.geteuid() != 0:
        pytest.skip("network namespaces are made by root")
    made = Nodes(lab, tmp_path)
    try:
        yield made
    finally:
        made.close()


@pytest.mark.slow
def test_nodes_reach_their_own_class_and_the_services_and_a_closed_one_nothing_else(nodes: Nodes) -> None:
    lab = nodes.lab
    for name in ("a", "b", "c", "d"):
        net = "10.99.0" if name in "ab" else "10.98.0"
        lab.serve(nodes.space(name), "tcp", f"{net}.{10 + 'abcd'.index(name) % 2}", 6818, name)
    for port in (22, 6817):
        lab.serve(lab.host, "tcp", "0.0.0.0", port, f"host {port}")
        lab.serve(lab.world, "tcp", "0.0.0.0", port, f"world {port}")
        lab.serve(nodes.space("router"), "tcp", "0.0.0.0", port, f"router {port}")
    own, other = (
        {"open": "10.99.0.11:6818", "closed": "10.98.0.11:6818"},
        {"open": "10.98.0.10:6818", "closed": "10.99.0.10:6818"},
    )
    outside = ("203.0.113.1:22", "10.77.0.1:22", "10.77.0.1:6817")
    here = ("10.99.0.1:22", "10.98.0.1:22", "10.77.0.2:22", "10.99.0.1:6817", "10.98.0.1:6817")
    router = ("10.98.0.99:22", "10.98.0.99:6817")
    before = {one: nodes.reaches(one, other["open" if one == "a" else "closed"], *outside, *here) for one in "ac"}
    assert all(all(found) for found in before.values()), before  # nothing was in the way
    assert nodes.checked() == "fail  network classes: no rules keep them apart: there is no table inet belljar_bait"
    for _ in range(2):  # again and again
        nodes.guard()
    assert nodes.checked() == "ok    network classes"
    service = ["host 6817", "host 6817"]
    assert nodes.reaches("a", own["open"], other["open"]) == ["b", ""]
    assert nodes.reaches("a", *outside) == ["world 22", "world 22", "world 6817"]
    assert nodes.reaches("a", *here) == ["", "", "", *service]
    assert nodes.reaches("a", *router) == ["", ""]
    assert nodes.reaches("c", own["closed"], other["closed"]) == ["d", ""]
    assert nodes.reaches("c", *outside) == ["", "", "world 6817"]
    assert nodes.reaches("c", *here) == ["", "", "", *service]
    assert nodes.reaches("c", *router) == ["", "router 6817"]  # by a card on the bridge, past this host's routing
    # The batch system reaches its nodes, from this host and from another.
    for place in ("10.99.0.10:6818", "10.98.0.10:6818"):
        assert nodes.reaches(lab.host, place) == nodes.reaches(lab.world, place) == ["a" if "99" in place else "c"]
    assert nodes.reaches("router", "10.98.0.10:6818") == ["c"]


def test_a_node_that_takes_an_address_of_the_other_class_is_heard_nowhere(nodes: Nodes) -> None:
    lab = nodes.lab
    lab.serve(lab.world, "tcp", "0.0.0.0", 6817, "world")
    ip("-n", nodes.space("c"), "addr", "add", "10.99.0.30/24", "dev", "lo")
    ip("-n", nodes.space("c"), "route", "replace", "default", "via", "10.98.0.1", "src", "10.99.0.30")
    lab.run(lab.host, "sysctl", "-qw", "net.ipv4.conf.br1.rp_filter=0", "net.ipv4.conf.all.rp_filter=0")
    ip("-n", lab.host, "route", "add", "10.99.0.30", "via", "10.98.0.10")  # so that answers find it
    assert nodes.reaches("c", "10.77.0.1:6817") == ["world"]
    nodes.guard()
    assert nodes.reaches("c", "10.77.0.1:6817") == [""]
