"""What is planned and made for a machine's network, without a machine."""

import asyncio
import os
import socket
from pathlib import Path

import pytest

from belljar.errors import BadOption, BadSetting, NetworkFailed
from belljar.host.guard.egress import Only
from belljar.host.guard.names import Name
from belljar.model import NetworkMode
from belljar.network import (
    AntiSpoofing,
    EgressMode,
    Joined,
    Networks,
    Settings,
    bridge,
    discard,
    mac_address,
    part_of,
    plan,
    sweep,
)
from belljar.network.bridge import addresses, bridge_of, claim, guards_addresses, macs, rules
from belljar.network.egress import PROXY, egress_of, resolvers_of
from belljar.network.isolated import HEAD, LARGEST, Port

ID = "0123456789ab"


async def join(
    networks: Networks, mode: NetworkMode, name: str = "", made: list[Path] | None = None, **options: object
) -> Joined:
    made = [] if made is None else made
    return await networks.join(mode, name, ID, uid=1000, intend=lambda what, path: made.append(path), **options)  # type: ignore[arg-type]


# -- user --------------------------------------------------------------------------------------------------------------


async def test_a_user_network_is_guarded_unless_the_site_says_open(tmp_path: Path) -> None:
    guarded = await join(Networks(Settings(), tmp_path), NetworkMode.USER, answers=[("169.254.169.254", 80)])
    assert guarded.link.egress is not None and guarded.link.egress.answers == (("169.254.169.254", 80),)
    opened = await join(Networks(Settings(egress=EgressMode.OPEN), tmp_path), NetworkMode.USER)
    assert opened.link.egress is None
    assert os.listdir(tmp_path) == []


def test_a_rule_that_cannot_be_read_names_its_setting() -> None:
    for settings in (Settings(allow=("10.0.0.0/99",)), Settings(deny=("nowhere",))):
        with pytest.raises(BadSetting, match=r"network\.(allow|deny)"):
            egress_of(settings, ())


def test_a_name_among_what_is_allowed_makes_it_all_there_is() -> None:
    plain = egress_of(Settings(allow=("10.0.0.1:3128/tcp",)), ())
    assert plain is not None and plain.only == () and plain.answers == ()
    named = egress_of(Settings(allow=("10.0.0.1:3128/tcp", "*.cern.ch")), ())
    assert named is not None and named.allow == plain.allow and named.answers == (PROXY,)
    assert [(len(it.rules), it.names) for it in named.only] == [(1, (Name("*.cern.ch"),))]
    closed = egress_of(Settings(allow=("none",)), ())
    assert closed is not None and closed.only == (Only(),) and closed.answers == ()


def test_a_machine_narrows_what_its_site_allows_and_never_widens_it() -> None:
    both = egress_of(Settings(allow=("*.cern.ch",)), (), ("data.cern.ch", "10.0.0.1"), ("api.example.org",))
    assert (
        both is not None
        and len(both.only) == 2
        and both.allow == ()
        and both.secret.names == (Name("api.example.org"),)
    )
    assert both.reaches("data.cern.ch", 443) and not both.reaches("api.example.org", 443)  # the site does not have it
    own = egress_of(Settings(egress=EgressMode.OPEN), (), ("none",), ("api.example.org",))
    assert own is not None and own.allow == () and own.reaches("api.example.org", 443)
    with pytest.raises(BadOption, match="--allow: 'a b'"):
        egress_of(Settings(), (), ("a b",))


def test_resolvers_are_read_as_the_resolver_does() -> None:
    text = "# nameserver 1.1.1.1\nsearch x\nnameserver 10.0.0.53\nnameserver fe80::1%eth0\n nameserver 10.0.0.54 # second\nnameserver\n"
    assert resolvers_of(text) == ("10.0.0.53", "10.0.0.54")


# -- bridge ------------------------------------------------------------------------------------------------------------


def test_only_bridges_the_site_named() -> None:
    assert bridge_of(Settings(bridges=("br0", "br1")), "") == "br0"
    assert bridge_of(Settings(bridges=("br0", "br1")), "br1") == "br1"
    for settings, name in (
        (Settings(), "br0"),
        (Settings(bridges=("br0",)), "../br0"),
        (Settings(bridges=("br0",)), "eth0"),
    ):
        with pytest.raises(BadOption):
            bridge_of(settings, name)
    with pytest.raises(BadSetting):
        bridge_of(Settings(bridges=("../etc",)), "")


def test_a_template_of_a_bridge_needs_no_bridge(tmp_path: Path) -> None:
    link = plan(NetworkMode.BRIDGE, ID)
    assert link.has_line and link.fd == -1 and link.mac == mac_address(ID)


def test_a_mac_address_begins_as_the_site_wants_and_follows_from_the_id() -> None:
    assert mac_address(ID).startswith("52:")
    assert mac_address(ID) == mac_address(ID) != mac_address("0" * 12)
    assert len(mac_address(ID).split(":")) == 6


def test_addresses_of_a_range_are_given_to_one_at_a_time() -> None:
    pool = [f"10.255.255.1-10.255.255.2/{prefix}" for prefix in (24,)]
    first, second = claim("test-addresses", addresses(pool)), claim("test-addresses", addresses(pool))
    assert [first[0], second[0]] == ["10.255.255.1/24", "10.255.255.2/24"]
    with pytest.raises(NetworkFailed, match="all 2"):
        claim("test-addresses", addresses(pool))
    first[1].close()
    value, again = claim("test-addresses", addresses(pool))
    assert value == "10.255.255.1/24"
    again.close()
    second[1].close()


def test_an_address_comes_back_when_its_holder_is_killed() -> None:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        value, _holder = claim("test-killed", ["10.255.255.9/24"])
        os.write(writer, value[:1].encode())
        os.kill(os.getpid(), 9)
    os.waitpid(child, 0)
    assert os.read(reader, 1) == b"1"
    claim("test-killed", ["10.255.255.9/24"])[1].close()
    os.close(reader), os.close(writer)


@pytest.mark.parametrize(
    "text",
    [
        "10.0.0.1",
        "10.0.0.2-10.0.0.1/24",
        "10.0.0.1-10.0.1.1/24",
        "x/24",
        "10.0.0.1/99",
        "10.0.0.0-10.255.0.0/8",
        "::1/64",
    ],
)
def test_a_range_of_addresses_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(BadSetting, match="bridge_addresses"):
        list(addresses([text]))


def test_a_pool_of_cards() -> None:
    assert list(macs(["02:00:00:00:00:fe-02:00:00:00:01:00"])) == [
        "02:00:00:00:00:fe",
        "02:00:00:00:00:ff",
        "02:00:00:00:01:00",
    ]
    for text in ("01:00:00:00:00:00", "02:00", "02:00:00:00:00:02-02:00:00:00:00:01", "zz:00:00:00:00:00"):
        with pytest.raises(BadSetting, match="mac_pool"):
            list(macs([text]))


def test_rules_name_the_machine_and_hold_no_foreign_text() -> None:
    text = rules(ID, "bjx", "52:00:00:00:00:01", "10.0.0.9")
    assert text.startswith(f"table bridge belljar_{ID} {{")
    assert text.count('iifname "bjx"') == 10 and text.count('device "bjx"') == 1
    assert "ip saddr" not in rules(ID, "bjx", "52:00:00:00:00:01", "")
    for words in (("x; flush ruleset", "bjx", "52:00:00:00:00:01", ""), (ID, 'a"', "52:00:00:00:00:01", "")):
        with pytest.raises(AssertionError):
            rules(*words)


def test_whether_spoofing_is_kept_off_is_the_sites_to_say(monkeypatch: pytest.MonkeyPatch) -> None:
    auto, required, off = (
        Settings(anti_spoofing=kind) for kind in (AntiSpoofing.AUTO, AntiSpoofing.REQUIRED, AntiSpoofing.OFF)
    )
    monkeypatch.setattr(bridge, "which", lambda name: "/usr/sbin/nft")
    assert guards_addresses(auto, is_root=True) and guards_addresses(required, is_root=True)
    assert not guards_addresses(auto, is_root=False) and not guards_addresses(off, is_root=True)
    with pytest.raises(BadSetting, match=r"anti_spoofing.*only root"):
        guards_addresses(required, is_root=False)
    monkeypatch.setattr(bridge, "which", lambda name: None)
    assert not guards_addresses(auto, is_root=True)
    with pytest.raises(BadSetting, match=r"anti_spoofing.*nft is not installed"):
        guards_addresses(required, is_root=True)


# -- isolated ----------------------------------------------------------------------------------------------------------


class Card:
    """The guest's end of a port, as QEMU would hold it."""

    def __init__(self, port: Port) -> None:
        self.port, self.mac = port, bytes.fromhex(port.link.mac.replace(":", ""))
        self.line = socket.socket(fileno=os.dup(port.link.fd))

    def send(self, to: bytes, text: bytes, source: bytes | None = None) -> None:
        self.line.send(to + (self.mac if source is None else source) + b"\x08\x00" + text)

    async def hear(self) -> bytes:
        async with asyncio.timeout(10):
            return (await asyncio.get_running_loop().sock_recv(self.line, 1 << 16))[14:]

    async def heard_nothing(self) -> bool:
        """True when nothing came in what every port has had its turns to bring it in."""
        for _ in range(20):
            await asyncio.sleep(0)
        try:
            self.line.recv(1 << 16)
        except BlockingIOError:
            return True
        return False

    def close(self) -> None:
        self.line.close()
        self.port.close()


async def cards(folder: Path, *groups: str) -> list[Card]:
    networks = Networks(Settings(), folder)
    ports = [await join(networks, NetworkMode.ISOLATED, group) for group in groups]
    return [Card(port) for port in ports if isinstance(port, Port)]


def bind_and_die(folder: Path, name: str) -> None:
    """Leave a socket that nobody has open any more."""
    child = os.fork()
    if child == 0:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as dead:
            os.chdir(folder)
            dead.bind(name)
            os.kill(os.getpid(), 9)
    os.waitpid(child, 0)


EVERYONE = b"\xff" * 6


async def test_a_frame_finds_its_machine_and_a_broadcast_all_of_the_group(tmp_path: Path) -> None:
    one, two, three, other = await cards(tmp_path, "blue", "blue", "blue", "red")
    assert [card.port.link.address for card in (one, two, three, other)] == [
        "10.98.0.1/24", "10.98.0.2/24", "10.98.0.3/24", "10.98.0.1/24",
    ]  # fmt: skip
    one.send(two.mac, b"for two")
    assert await two.hear() == b"for two"
    assert await three.heard_nothing()
    one.send(EVERYONE, b"for all")
    assert (await two.hear(), await three.hear()) == (b"for all", b"for all")
    assert await one.heard_nothing() and await other.heard_nothing()
    one.send(other.mac, b"over the fence")
    assert await other.heard_nothing()
    for card in (one, two, three, other):
        card.close()
    assert os.listdir(tmp_path / "networks") == []


async def test_a_machine_speaks_for_itself_alone_and_in_whole_frames(tmp_path: Path) -> None:
    one, two = await cards(tmp_path, "blue", "blue")
    one.send(two.mac, b"as another", source=two.mac[:5] + b"\x09")
    one.send(two.mac, bytes(LARGEST))
    one.line.send(b"short")
    one.line.send(b"")
    one.send(two.mac[:5] + b"\xee", b"to nobody")
    one.send(one.mac, b"to itself")
    assert await two.heard_nothing()
    one.send(two.mac, b"then")
    assert await two.hear() == b"then"
    for card in (one, two):
        card.close()


async def test_a_guest_that_does_not_read_stops_nobody(tmp_path: Path) -> None:
    one, two, three = await cards(tmp_path, "blue", "blue", "blue")
    for number in range(3000):
        try:
            one.send(two.mac, b"%d" % number)
        except BlockingIOError:
            await asyncio.sleep(0)
    one.send(three.mac, b"still here")
    assert await three.hear() == b"still here"
    for card in (one, two, three):
        card.close()


async def test_numbers_of_the_dead_are_free_again_and_those_of_the_living_are_not(tmp_path: Path) -> None:
    made: list[Path] = []
    networks = Networks(Settings(), tmp_path)
    living = await join(networks, NetworkMode.ISOLATED, "blue", made)
    bind_and_die(tmp_path / "networks/1000-blue", "2")
    discard(tmp_path, ID, "port", made[0])  # a reaper with a wrong idea
    assert made[0].exists() and not made[0].with_name("2").exists()
    second = await join(networks, NetworkMode.ISOLATED, "blue", made)
    assert second.link.address == "10.98.0.2/24"
    second.close()
    living.close()
    discard(tmp_path, ID, "port", made[0])
    discard(tmp_path, ID, "port", Path("/nowhere/at/all"))


async def test_other_users_groups_are_others(tmp_path: Path) -> None:
    networks = Networks(Settings(), tmp_path)
    mine = await networks.join(NetworkMode.ISOLATED, "blue", ID, uid=1, intend=lambda what, path: None)
    theirs = await networks.join(NetworkMode.ISOLATED, "blue", ID, uid=2, intend=lambda what, path: None)
    assert mine.link.address == theirs.link.address and mine.link.mac != theirs.link.mac
    mine.close(), theirs.close()


async def test_a_deep_folder_does_not_matter(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 100) / ("e" * 100)
    deep.mkdir(parents=True)
    one, two = await cards(deep, "blue", "blue")
    one.send(two.mac, b"hello")
    assert await two.hear() == b"hello"
    for card in (one, two):
        card.close()


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../x", "x" * 33, "é", "a b", "-x"])
async def test_a_name_that_cannot_be_a_group(tmp_path: Path, name: str) -> None:
    with pytest.raises(BadOption):
        await join(Networks(Settings(), tmp_path), NetworkMode.ISOLATED, name)
    assert os.listdir(tmp_path) == []


async def test_a_net_without_room_is_a_mistake_in_the_settings(tmp_path: Path) -> None:
    for net in ("10.0.0.0/25", "nonsense", "10.0.0.1/24"):
        with pytest.raises(BadSetting, match="isolated_net"):
            await join(Networks(Settings(isolated_net=net), tmp_path), NetworkMode.ISOLATED, "blue")


async def test_whoever_has_the_number_now_is_found(tmp_path: Path) -> None:
    one, two = await cards(tmp_path, "blue", "blue")
    one.send(two.mac, b"to the first")
    assert await two.hear() == b"to the first"
    two.close()
    one.send(two.mac, b"to nobody")
    assert await one.heard_nothing()
    (three,) = await cards(tmp_path, "blue")
    assert three.mac == two.mac
    one.send(three.mac, b"to the second")
    assert await three.hear() == b"to the second"
    for card in (one, three):
        card.close()


async def test_a_machine_may_ask_for_its_address(tmp_path: Path) -> None:
    fifth, own_net = await cards(tmp_path, "blue@10.98.0.5", "lease@172.16.4.9/24")
    assert (fifth.port.link.address, own_net.port.link.address) == ("10.98.0.5/24", "172.16.4.9/24")
    (first,) = await cards(tmp_path, "blue")
    assert first.port.link.address == "10.98.0.1/24"
    first.send(fifth.mac, b"hello")
    assert await fifth.hear() == b"hello"
    with pytest.raises(NetworkFailed, match=r"group blue: a machine has the address 10\.98\.0\.5"):
        await cards(tmp_path, "blue@10.98.0.5")
    for wrong in ("10.98.1.5", "10.98.0.0", "10.98.0.255", "x", "", "10.98.0.5/30", "10.98.0.5/x", "::1"):
        with pytest.raises(BadOption, match="no address of an isolated group"):
            await cards(tmp_path, f"blue@{wrong}")
    for card in (first, fifth, own_net):
        card.close()


async def test_a_part_of_a_group_reaches_the_machines_of_another_over_a_connection(tmp_path: Path) -> None:
    """What is sent to them is carried; what comes from them arrives when it is from one of theirs, and for one that is here."""
    networks = Networks(Settings(), tmp_path)
    port = await networks.join(
        NetworkMode.ISOLATED, "blue+0@10.98.0.1", ID, uid=os.geteuid(), intend=lambda what, path: None
    )
    assert isinstance(port, Port)
    here, part = Card(port), part_of(tmp_path, "blue+0", (1, 2, 3))
    part.listen()
    ours, theirs = socket.socketpair()
    reader, writer = await asyncio.open_connection(sock=ours)
    there, to_us = await asyncio.open_connection(sock=theirs)
    carrying = asyncio.ensure_future(part.carry({2, 3}, reader, writer))
    await asyncio.sleep(0)
    second, third = here.mac[:5] + b"\x02", here.mac[:5] + b"\x03"

    async def carried() -> tuple[int, bytes]:
        async with asyncio.timeout(10):
            number, length = HEAD.unpack(await there.readexactly(HEAD.size))
            return number, (await there.readexactly(length))[14:]

    here.send(third, b"for three")
    here.send(EVERYONE, b"for all")
    assert sorted([await carried(), await carried(), await carried()]) == [
        (2, b"for all"),
        (3, b"for all"),
        (3, b"for three"),
    ]
    for number, source, text in (
        (1, here.mac, b"as one that is here"), (1, here.mac[:5] + b"\x09", b"as one of another host's"),
        (2, second, b"to one that is elsewhere"), (0, second, b"to nobody"), (255, second, b"to nobody"),
        (1, b"\x52\0\0\0\0\x02", b"from another group"), (1, second, bytes(LARGEST)), (1, second, b"from two"),
    ):  # fmt: skip
        frame = here.mac + source + b"\x08\x00" + text
        to_us.write(HEAD.pack(number, len(frame)) + frame)
    assert await here.hear() == b"from two" and await here.heard_nothing()
    to_us.close()
    with pytest.raises(EOFError):
        await carrying
    writer.close()
    part.close()
    part.close()
    here.send(third, b"to nobody")
    assert await here.heard_nothing() and os.listdir(tmp_path / "networks") != []
    here.close()
    assert os.listdir(tmp_path / "networks") == []


async def test_what_a_killed_carrier_left_is_swept(tmp_path: Path) -> None:
    (tmp_path / "networks/0-blue+1").mkdir(parents=True)
    bind_and_die(tmp_path / "networks/0-blue+1", "7")
    (living,) = await cards(tmp_path, "blue+2")
    sweep(tmp_path)
    assert os.listdir(tmp_path / "networks") == ["1000-blue+2"]
    living.close()
    sweep(tmp_path)
    sweep(tmp_path / "nowhere")
    assert os.listdir(tmp_path / "networks") == []
