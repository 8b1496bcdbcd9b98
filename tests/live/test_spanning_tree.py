"""A guest that speaks the spanning tree protocol, on a real bridge that does: it must not become the bridge's root."""

import json
import shlex
import sys

import pytest
from tests.live.conftest import Belljar
from tests.live.net_lab import Lab, lab
from tests.live.test_networks import BRIDGE, InLab, make_bridge, tables

__all__ = ["lab"]

# A bridge of the highest priority there is, in words of IEEE 802.1D; and a change of the topology. With the MAC address
# the sender has, or another, and with a tag that has a priority alone, which the kernel takes off.
BPDU = """
def bpdus(mine):
    liar = bytes.fromhex("0000525400000001")
    times = bytes.fromhex("0000140002000f00")
    config = bytes.fromhex("0000000000") + liar + bytes(4) + liar + bytes.fromhex("8001") + times
    found = []
    for body in (config, bytes.fromhex("00000080")):
        data = bytes.fromhex("424203") + body
        frame = len(data).to_bytes(2, "big") + data
        for last in (0x00, 0x0e):
            group = bytes.fromhex("0180c20000") + bytes([last])
            found += [group + card + tag + frame for card in (mine, liar[2:]) for tag in (b"", bytes.fromhex("8100e000"))]
    return [one.ljust(60, bytes(1)) for one in found]
"""
SEND = (
    BPDU
    + """
import json, os, select, socket, sys, time
from belljar.network import bridge
ID, MAC, kept_by = "0123456789ab", "52:01:02:03:04:05", sys.argv[1]
name = "bj" + ID
tap = bridge.make_tap(name, "br0", is_guarded="port" in kept_by)
if "rules" in kept_by:
    bridge.make_table(ID, name, MAC, "")
def read(path):
    with open("/sys/class/net/" + path) as file:
        return file.read().strip()
deadline = time.monotonic() + 20
while read(name + "/brport/state") == "0":  # it is down until the bridge has seen its carrier
    assert time.monotonic() < deadline
    time.sleep(0.05)
for _ in range(3):
    for frame in bpdus(bytes.fromhex(MAC.replace(":", ""))):
        os.write(tap, frame)  # the bridge has seen it when this returns
print(json.dumps({"root": read("br0/bridge/root_id") == read("br0/bridge/bridge_id"),
    "port": read("br0/bridge/root_port"), "closed": read(name + "/brport/state") == "0",
    "topology": read("br0/bridge/topology_change_detected")}))
bridge.remove_table(ID)
"""
)
IN_GUEST = (
    BPDU
    + """
import socket, sys, time
card = [name for _, name in socket.if_nameindex() if name != "lo"][0]
with open("/sys/class/net/%s/address" % card) as file:
    mine = bytes.fromhex(file.read().strip().replace(":", ""))
raw = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
raw.bind((card, 0))
for _ in range(3):
    for frame in bpdus(mine):
        raw.send(frame)
deadline = time.monotonic() + 60
while True:  # the bridge lets its port in after twice its delay; until then an address is asked for three seconds long
    try:
        one = socket.create_connection(("10.99.0.1", 8080), timeout=60)
        break
    except OSError:
        if time.monotonic() > deadline:
            raise
with one:
    print(one.recv(100).decode(), flush=True)
sys.stdin.read()
"""
)


def speak(lab: Lab) -> None:
    """br0 speaks the protocol from now on, and lets a new port in as soon as the standard allows."""
    lab.run(lab.host, "ip", "link", "set", "br0", "type", "bridge", "stp_state", "1", "forward_delay", "200")


def seen(lab: Lab, name: str) -> str:
    return lab.run(lab.host, "cat", f"/sys/class/net/br0/bridge/{name}").strip()


@pytest.mark.parametrize(("kept_by", "closed"), [("rules", False), ("port", True), ("rules and port", False)])
def test_no_bpdu_of_a_guest_makes_it_the_root(lab: Lab, kept_by: str, closed: bool) -> None:
    """Rules drop them, and the guest keeps its network. Without rules the port is closed at the first one."""
    make_bridge(lab)
    speak(lab)
    told = json.loads(lab.run(lab.host, sys.executable, "-c", SEND, kept_by))
    assert told == {"root": True, "port": "0", "closed": closed, "topology": "0"}
    assert tables(lab) == ""


def test_a_guest_that_says_it_is_the_root_is_not_heard(belljar: Belljar, lab: Lab) -> None:
    make_bridge(lab)
    speak(lab)
    lab.serve(lab.host, "tcp", "10.99.0.1", 8080, "gateway")
    command = "exec python3 -c " + shlex.quote(IN_GUEST)
    required = {**BRIDGE, "BELLJAR_NETWORK_ANTI_SPOOFING": "required"}
    with InLab(belljar, lab).guest("bridge", command, **required) as guest:
        said = guest.stdout.readline() if guest.stdout else b""
        assert said == b"gateway\n", said or guest.communicate(timeout=60)
        assert (seen(lab, "root_id"), seen(lab, "root_port")) == (seen(lab, "bridge_id"), "0")
