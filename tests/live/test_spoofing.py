"""The rules of a machine's tap against frames a hostile guest could send: written into a real tap, heard behind its bridge."""

import json
import sys

import pytest
from tests.live.net_lab import Lab, lab
from tests.live.test_networks import make_bridge, tables

__all__ = ["lab"]

SEND = """
import json, os, select, socket, sys
from belljar.network import bridge
ID, MAC, given = "0123456789ab", "52:01:02:03:04:05", sys.argv[1]
tap = bridge.make_tap("bj" + ID, "br0")
bridge.make_table(ID, "bj" + ID, MAC, given)
hear = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
hear.bind(("br0", 0))
mine, other, everyone = bytes.fromhex(MAC.replace(":", "")), bytes.fromhex("525400123456"), bytes([255] * 6)
own = given or "10.99.0.10"
def total(data):
    value = sum(int.from_bytes(data[at:at + 2], "big") for at in range(0, len(data), 2))
    while value >> 16:
        value = (value & 0xffff) + (value >> 16)
    return (~value & 0xffff).to_bytes(2, "big")
def ip(source, body, target="10.99.0.1", fragment=0, options=b""):
    head = bytes([0x45 + len(options) // 4, 0]) + (20 + len(options) + len(body)).to_bytes(2, "big") + bytes([0, 7])
    head += fragment.to_bytes(2, "big") + bytes([64, 17, 0, 0]) + socket.inet_aton(source) + socket.inet_aton(target) + options
    return head[:10] + total(head) + head[12:] + body
def udp(source, target):
    return source.to_bytes(2, "big") + target.to_bytes(2, "big") + bytes([0, 24, 0, 0]) + bytes(16)
def ip6(kind, body):
    return bytes([0x60, 0, 0, 0]) + len(body).to_bytes(2, "big") + bytes([kind, 255]) + here + nodes + body
def icmp6(kind, rest):
    body = bytes([kind, 0, 0, 0]) + rest
    return body[:2] + total(here + nodes + len(body).to_bytes(4, "big") + bytes([0, 0, 0, 58]) + body) + body[4:]
def arp(card, address):
    return bytes([0, 1, 8, 0, 6, 4, 0, 2]) + card + socket.inet_aton(address) + everyone + socket.inet_aton(own)
here, nodes = (socket.inet_pton(socket.AF_INET6, name) for name in ("fe80::1", "ff02::1"))
advert, options = icmp6(134, bytes([64, 0, 7, 8]) + bytes(8)), bytes([1, 4, 0, 0, 0, 0])
IP, ARP, IP6, TAG, OUTER = (value.to_bytes(2, "big") for value in (0x800, 0x806, 0x86dd, 0x8100, 0x88a8))
good, all = ip(own, udp(4000, 5000)), "255.255.255.255"
frames = {
    "honest": IP + good, "honest arp": ARP + arp(mine, own), "fragment": IP + ip(own, bytes(16), fragment=2),
    "asks for an address": IP + ip("0.0.0.0", udp(68, 67), all),
    "other address": IP + ip("10.99.0.77", udp(4000, 5000)), "other address in a fragment": IP + ip("10.99.0.77", bytes(16), fragment=2),
    "other address with options": IP + ip("10.99.0.77", udp(4000, 5000), options=bytes([1, 1, 1, 0])),
    "other address by arp": ARP + arp(mine, "10.99.0.1"), "other card by arp": ARP + arp(other, own),
    "tagged": TAG + bytes([0, 5]) + IP + good, "tagged with a priority": TAG + bytes([0x20, 0]) + IP + good,
    "tagged twice": OUTER + bytes([0, 5]) + TAG + bytes([0, 5]) + IP + good,
    "no ethernet type": bytes([0, 38, 0x42, 0x42, 3]) + bytes(40), "reverse arp": bytes([0x80, 0x35]) + arp(mine, own),
    "dhcp answer": IP + ip(own, udp(67, 68), all), "dhcp answer from another port": IP + ip(own, udp(1067, 68), all),
    "dhcp answer with options": IP + ip(own, udp(67, 68), all, options=bytes([1, 1, 1, 0])),
    "dhcp answer in a fragment": IP + ip(own, udp(1067, 68)[:16], all, fragment=0x2000),
    "dhcp6 answer": IP6 + ip6(17, udp(547, 546)), "dhcp6 answer from another port": IP6 + ip6(17, udp(1547, 546)),
    "router": IP6 + ip6(58, advert), "router behind options": IP6 + ip6(0, bytes([60, 0]) + options + bytes([58, 0]) + options + advert),
    "router in a fragment": IP6 + ip6(44, bytes([58, 0, 0, 0, 0, 0, 0, 1]) + advert),
    "router in a second fragment": IP6 + ip6(44, bytes([60, 0, 0, 8, 0, 0, 0, 1]) + advert),
    "router's redirect": IP6 + ip6(58, icmp6(137, bytes(36))), "ipv6 neighbour": IP6 + ip6(58, icmp6(136, bytes(4) + here)),
    "ipv6 fragment": IP6 + ip6(44, bytes([17, 0, 0, 8, 0, 0, 0, 1]) + bytes(16)),
}
# The last of all is honest again: what has not been heard before it is not on its way any more.
passed, number = [], 0
for name, rest in frames.items():
    for frame in (everyone + mine + rest, everyone + mine + IP + ip(own, (9).to_bytes(2, "big") * 2 + bytes([0, 24, 0, 0]) + bytes(16))):
        os.write(tap, frame.ljust(60, bytes(1)))
    heard = []
    while not heard or heard[-1][34:36] != bytes([0, 9]):
        assert select.select([hear], [], [], 10)[0], name
        data, about = hear.recvfrom(4000)
        if about[2] != socket.PACKET_OUTGOING and data[6:12] == mine:
            heard.append(data)
    passed += [name] * (len(heard) - 1)
os.write(tap, (everyone + other + IP + good).ljust(60, bytes(1)))
while select.select([hear], [], [], 0.2)[0]:
    passed += ["other card"] * (hear.recv(4000)[6:12] == other)
bridge.remove_table(ID)
print(json.dumps(passed))
"""
ALWAYS = ["honest", "honest arp", "fragment"]
FREE = [*ALWAYS, "asks for an address", "other address", "other address in a fragment", "other address with options", "other address by arp"]  # fmt: skip


@pytest.mark.parametrize(
    ("address", "passing"), [("10.99.0.10", ALWAYS), ("", [*FREE, "ipv6 neighbour", "ipv6 fragment"])]
)
def test_only_a_machines_own_frames_reach_its_bridge(lab: Lab, address: str, passing: list[str]) -> None:
    """A machine whose address is not ours to know may use any, and IPv6; it is no router and no DHCP server either."""
    make_bridge(lab)
    assert json.loads(lab.run(lab.host, sys.executable, "-c", SEND, address)) == passing
    assert tables(lab) == ""
