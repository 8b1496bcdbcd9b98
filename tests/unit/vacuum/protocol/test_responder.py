"""The responder answers whom it may, within limits, and whatever is sent to it stops nothing."""

import asyncio
import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.vacuum.protocol.peers import SPACE, free_port
from tests.unit.vacuum.protocol.test_query import KEY, LHCB, OWN, RUNNING, SNAPSHOT, packet

from belljar.errors import HostError
from belljar.records import replace
from belljar.service.datagrams import Address
from belljar.service.senders import ALLOWED, REMEMBERED, STRANGER, STRANGERS
from belljar.vacuum import MachineStatus, Space
from belljar.vacuum.protocol.fields import Why
from belljar.vacuum.protocol.poll import Poller
from belljar.vacuum.protocol.query import Kind, Snapshot, query
from belljar.vacuum.protocol.responder import Answering, responding

ONE, TWO, THREE = "127.0.8.1", "127.0.8.2", "127.0.8.3"
QUERY = packet({"message_type": "machines_query", "space": SPACE, "cookie": "c"})
# What the original looks for before it takes an answer, and what its command prints of a factory.
WANTED = {
    Kind.MACHINES: "num_machines machine state uuid created_time started_time heartbeat_time cpu_seconds cpu_percentage hs06 "
    "machinetype shutdown_message shutdown_time",
    Kind.MACHINETYPES: "num_machinetypes machinetype running_hs06 num_before_fizzle shutdown_message shutdown_time shutdown_machine",
    Kind.FACTORIES: "running_cpus total_cpus running_machines total_machines load_average root_disk_avail_kb vac_disk_avail_kb "
    "mem_used_kb mem_total_kb vac_version",
}  # fmt: skip


class Desk:
    """An answering without a socket, at a time that the test sets."""

    def __init__(
        self, snapshot: Snapshot = SNAPSHOT, key: bytes = b"", factories: tuple[str, ...] = (), **settings: Any
    ) -> None:
        self.now, self.snapshot = 0.0, snapshot
        self.sent: list[tuple[bytes, Address]] = []
        self.lines: list[dict[str, Any]] = []
        self.answering = Answering(
            Space(SPACE, ONE, **settings),
            lambda: self.snapshot,
            lambda event, **facts: self.lines.append({"event": event, **facts}),
            key=key,
            factories=factories,
            clock=lambda: 1767268800.0 + self.now,
            ticks=lambda: self.now,
        )

    def take(self, data: bytes, host: str = "192.0.2.1") -> int:
        """How many answers there were."""
        before = len(self.sent)
        self.answering.take(data, (host, 1024), lambda data, address: not self.sent.append((data, address)))
        return len(self.sent) - before

    def bytes_to(self, host: str) -> int:
        return sum(len(data) for data, address in self.sent if address[0] == host)


# -- who is answered, and how often ------------------------------------------------------------------------------------


def test_each_slot_is_an_answer_to_where_the_question_came_from() -> None:
    desk = Desk()
    assert desk.take(QUERY) == 3
    assert {address for _, address in desk.sent} == {("192.0.2.1", 1024)}
    assert desk.answering.counts == {"answered": 1, "sent": 3}


def test_whoever_is_outside_the_networks_is_not_answered() -> None:
    desk = Desk(allow=("192.0.2.0/24", "2001:db8::/32"))
    assert (desk.take(QUERY, "192.0.2.7"), desk.take(QUERY, "2001:db8::7")) == (3, 3)
    assert (desk.take(QUERY, "192.0.3.7"), desk.take(QUERY, "2001:db9::7"), desk.take(QUERY, "::1")) == (0, 0, 0)
    assert desk.answering.counts[Why.NOT_ALLOWED.value] == 3
    assert [line["sender"] for line in desk.lines] == ["192.0.3.7", "2001:db9::7", "::1"]


BIG = replace(SNAPSHOT, machines=(RUNNING,) * 64)


def test_a_forged_sender_is_sent_no_more_than_its_budget() -> None:
    """64 slots are 60 kB for a query of 75 bytes: a minute of questions gets what the budget allows, and an answer more at most."""
    desk, one_answer = Desk(BIG), 64 * 1000
    for _ in range(6000):
        desk.now += 0.01
        desk.take(QUERY)
    assert desk.bytes_to("192.0.2.1") <= STRANGER.burst + 60 * STRANGER.rate + one_answer
    assert desk.bytes_to("192.0.2.1") > 30 * STRANGER.rate
    assert desk.answering.counts[Why.TOO_MANY.value] > 5900


def test_forged_senders_together_are_sent_no_more_than_theirs() -> None:
    desk = Desk(BIG)
    for number in range(20_000):
        desk.now += 0.001
        desk.take(QUERY, f"10.{number % 200}.{number // 200 % 250}.1")
    assert sum(len(data) for data, _ in desk.sent) <= STRANGERS.burst + 20 * STRANGERS.rate + 64_000


def test_made_up_senders_take_nothing_from_the_factories_of_the_space() -> None:
    desk = Desk(BIG, factories=("192.0.2.1", "2001:db8::1"))
    for number in range(20_000):
        desk.now += 0.001
        desk.take(QUERY, f"10.{number % 200}.{number // 200 % 250}.1")
    assert desk.take(QUERY, "192.0.2.9") == 0  # strangers have used up what they share
    assert desk.take(QUERY, "2001:db8:0:1::1") == 0
    assert (desk.take(QUERY, "192.0.2.1"), desk.take(QUERY, "2001:db8::1")) == (64, 64)


def test_who_asks_as_the_original_does_is_always_answered() -> None:
    """Six rounds of two seconds, each minute, and somebody at the command line."""
    desk = Desk(BIG)
    for minute in range(10):
        for second in (0, 2, 4, 6, 8, 10):
            desk.now = minute * 60.0 + second
            assert desk.take(packet({"message_type": "machinetypes_query", "space": SPACE, "cookie": "c"})) == 1
        assert desk.take(QUERY) == 64
    assert not desk.lines


def test_many_factories_at_once_are_answered() -> None:
    desk = Desk(allow=("10.0.0.0/8",))
    asked = packet({"message_type": "machinetypes_query", "space": SPACE, "cookie": "c"})
    assert [desk.take(asked, f"10.0.{n // 250}.{n % 250}") for n in range(5000)] == [1] * 5000


def test_one_who_floods_takes_nothing_from_another() -> None:
    for settings in ({}, {"allow": ("192.0.2.0/24",)}):
        desk = Desk(**settings)  # type: ignore[arg-type]
        for _ in range(20_000):
            desk.now += 0.0001
            desk.take(QUERY, "192.0.2.66")
        assert desk.take(QUERY, "192.0.2.1") == 3


def test_rubbish_from_anywhere_takes_nothing_from_others() -> None:
    desk = Desk()
    for number in range(20_000):
        desk.now += 0.0001
        desk.take(b"rubbish", f"10.{number % 256}.{number // 256}.1")
    assert desk.take(QUERY) == 3


def test_a_network_of_ipv6_is_one_sender() -> None:
    desk = Desk(BIG)
    for number in range(500):
        desk.take(QUERY, f"2001:db8::{number:x}")
    assert len(desk.sent) <= 64 * 4
    assert desk.take(QUERY, "2001:db8:0:1::1") == 64
    assert desk.take(QUERY, "fe80::1%lo") == 64


def test_no_more_senders_are_remembered_than_there_is_room_for() -> None:
    desk = Desk()
    for number in range(REMEMBERED + 1000):
        desk.take(b"", f"10.0.{number // 250}.{number % 250}")
    assert len(desk.answering._senders._known) == REMEMBERED


def test_an_allowed_network_has_a_larger_budget() -> None:
    assert ALLOWED.burst > 64 * 1000 * 6 > STRANGER.burst


# -- what is broken ----------------------------------------------------------------------------------------------------


def test_what_is_refused_is_counted_each_time_and_told_once_a_minute() -> None:
    desk = Desk()
    for second in range(150):
        desk.now = float(second)
        desk.take(b"rubbish")
    assert desk.answering.counts == {Why.NOT_JSON.value: 150}
    assert [(line["sender"], line["why"], line["refused"]) for line in desk.lines] == [
        ("192.0.2.1", Why.NOT_JSON.value, 1),
        ("192.0.2.1", Why.NOT_JSON.value, 60),
        ("192.0.2.1", Why.NOT_JSON.value, 60),
    ]


def test_a_thousand_senders_of_rubbish_fill_no_log() -> None:
    desk = Desk()
    for number in range(1000):
        desk.take(b"rubbish", f"10.0.{number // 250}.{number % 250}")
    assert (len(desk.lines), desk.answering.counts[Why.NOT_JSON.value]) == (20, 1000)


def test_nothing_of_a_packet_is_told() -> None:
    desk = Desk()
    desk.take(packet({"space": "\x1b[31mevil", "cookie": 1, "message_type": "x"}))
    assert "evil" not in repr(desk.lines)


def test_a_snapshot_that_fails_stops_nothing() -> None:
    desk = Desk()
    good, desk.snapshot = desk.snapshot, None  # type: ignore[assignment]
    assert desk.take(QUERY) == 0
    assert (desk.lines[0]["why"], desk.answering.counts) == (Why.FAILED.value, {Why.FAILED.value: 1})
    desk.snapshot = good
    assert desk.take(QUERY) == 3


@given(st.binary(max_size=1100), st.ip_addresses())
def test_whatever_arrives_is_counted_and_raises_nothing(data: bytes, host: Any) -> None:
    desk = Desk()
    assert desk.take(data, str(host)) == 0
    assert sum(desk.answering.counts.values()) == 1


def test_where_only_signed_questions_count_others_are_refused() -> None:
    desk = Desk(key=KEY, signed_only=True)
    assert desk.take(QUERY) == 0
    assert desk.take(query(Kind.FACTORIES, SPACE, "c", 1767268800.0, client="x", key=KEY)) == 1
    assert desk.take(query(Kind.FACTORIES, SPACE, "c", 1767268800.0, client="x", key=KEY + b"!")) == 0
    assert desk.answering.counts[Why.UNSIGNED.value] == desk.answering.counts[Why.FORGED.value] == 1


# -- on loopback -------------------------------------------------------------------------------------------------------


def silent(event: str, **facts: Any) -> None:
    raise AssertionError((event, facts))


def snapshot_of(factory: str) -> Snapshot:
    slots = tuple(replace(RUNNING, machine=f"m-{n:02}", factory=factory) for n in range(8))
    types = tuple(replace(LHCB, machinetype=name, factory=factory) for name in ("atlas", "lhcb", "gridpp"))
    return replace(SNAPSHOT, factory=factory, machines=slots, types=types, own=replace(OWN, factory=factory))


def space(port: int, factory: str, *factories: str, **settings: Any) -> Space:
    return Space(SPACE, factory, factories or (ONE, TWO), port=port, poll_silence=20.0, poll_limit=20.0, **settings)


@pytest.fixture
def asking() -> Iterator[socket.socket]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.setblocking(False)
        yield sock


async def answers(sock: socket.socket, count: int) -> list[dict[str, Any]]:
    loop = asyncio.get_running_loop()
    return [json.loads(await asyncio.wait_for(loop.sock_recv(sock, 10240), 20)) for _ in range(count)]


@pytest.mark.parametrize("kind", list(Kind))
async def test_the_originals_clients_find_what_they_look_for(kind: Kind, asking: socket.socket) -> None:
    port = free_port(ONE)
    async with responding(space(port, ONE), lambda: snapshot_of(ONE), silent):
        cookie = {"an": "object"}
        asking.sendto(packet({"message_type": kind.value[0], "space": SPACE, "cookie": cookie}), (ONE, port))
        found = await answers(asking, {Kind.MACHINES: 8, Kind.MACHINETYPES: 3, Kind.FACTORIES: 1}[kind])
    for one in found:
        assert (one["message_type"], one["cookie"], one["space"], one["factory"]) == (kind.value[2], cookie, SPACE, ONE)
        assert set(WANTED[kind].split()) <= one.keys()


@pytest.mark.parametrize("key", [b"", KEY])
async def test_our_poll_and_our_responders_understand_each_other(key: bytes) -> None:
    port = free_port(ONE, TWO, "::1")
    told = {one: snapshot_of(one) for one in (ONE, TWO, "::1")}
    options = {"signed_only": bool(key)}
    async with (
        responding(space(port, ONE, **options), lambda: told[ONE], silent, key=key) as first,
        responding(space(port, TWO, **options), lambda: told[TWO], silent, key=key),
        responding(space(port, "::1", **options), lambda: told["::1"], silent, key=key),
    ):
        poller = Poller(space(port, ONE, *told, **options), client="factory", key=key)
        for kind in Kind:
            found = await poller.ask(kind)
            assert (set(found.found), found.silent, found.short, found.refused) == (set(told), (), (), {})
            assert found.rounds == 1
        assert len(found.found[ONE]) == 1
    assert first.counts == {"answered": 3, "sent": 12}


async def test_a_factory_without_the_secret_is_no_peer() -> None:
    port = free_port(ONE, TWO)
    told = snapshot_of(ONE)
    async with responding(space(port, ONE), lambda: told, silent, key=b"another secret, of others"):
        asker = replace(space(port, ONE, ONE, signed_only=True), poll_silence=0.05, poll_limit=0.3)
        found = await Poller(asker, client="factory").ask(Kind.FACTORIES)
    assert (found.silent, found.refused[Why.UNSIGNED.value] > 0) == ((ONE,), True)


async def test_it_listens_where_it_is_told_or_where_its_name_is() -> None:
    port = free_port(ONE, TWO, "::1")
    async with responding(space(port, ONE, listen=(TWO, "::1")), lambda: snapshot_of(ONE), silent):
        with pytest.raises(HostError, match=f"UDP port {port} of {TWO}: Address already in use"):
            async with responding(space(port, TWO), lambda: snapshot_of(TWO), silent):
                pass
        async with responding(space(port, ONE), lambda: snapshot_of(ONE), silent):
            pass


async def test_a_name_for_this_host_alone_means_every_address() -> None:
    """Debian gives a host's own name 127.0.1.1, which nobody else could ask."""
    port = free_port("0.0.0.0", "::")
    here = replace(space(port, "localhost", ONE), factory="localhost")
    async with responding(here, lambda: snapshot_of(ONE), silent):
        found = await Poller(space(port, ONE, ONE), client="factory").ask(Kind.FACTORIES)
    assert found.silent == ()


async def test_an_address_of_another_host_is_refused() -> None:
    with pytest.raises(HostError, match=r"192\.0\.2\.1"):
        async with responding(space(9950, ONE, listen=("192.0.2.1",)), lambda: snapshot_of(ONE), silent):
            pass


HOSTILE = {
    b"42": Why.NOT_JSON, b'["machines_query"]': Why.NOT_JSON, QUERY + b" " * 10_000: Why.TOO_LONG,
    QUERY.replace(b'"c"', b'"\xff"'): Why.NOT_JSON, QUERY.replace(b'"c"', b"NaN"): Why.NOT_JSON,
    QUERY[:-1] + b', "space": "x"}': Why.NOT_JSON, QUERY.replace(SPACE.encode(), b"other.example.org"): Why.OTHER_SPACE,
    QUERY[:-1] + b', "hmac": "0"}': Why.FORGED,
}  # fmt: skip


async def test_hostile_packets_are_counted_each_time_told_once_and_harm_nobody() -> None:
    port, lines = free_port(ONE), list[dict[str, Any]]()
    async with responding(
        space(port, ONE), lambda: snapshot_of(ONE), lambda event, **facts: lines.append(facts), key=KEY
    ) as there:
        for number, data in enumerate(HOSTILE):
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
                sock.bind((f"127.0.9.{number + 1}", 0))
                for _ in range(3):
                    sock.sendto(data, (ONE, port))
        found = await Poller(replace(space(port, ONE, ONE), poll_silence=0.5), client="f", key=KEY).ask(Kind.FACTORIES)
    assert found.silent == () and there.counts["answered"] == 1
    assert {line["sender"]: line["why"] for line in lines} == {
        f"127.0.9.{number + 1}": why.value for number, why in enumerate(HOSTILE.values())
    }
    assert len(lines) == len(HOSTILE) and sum(there.counts[why.value] for why in set(HOSTILE.values())) == 3 * len(
        HOSTILE
    )


async def test_while_it_is_flooded_the_rest_of_the_loop_goes_on() -> None:
    """More than the socket takes, for a second: another task has its turns, and a friend is answered when he asks again."""
    port = free_port(ONE)
    lines: list[str] = []
    turns, until = 0, 0.0
    async with responding(
        space(port, ONE, allow=("127.0.0.0/8",)), lambda: snapshot_of(ONE), lambda *a, **f: lines.append("")
    ) as there:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as flooder:
            flooder.bind((THREE, 0))
            until = time.monotonic() + 1.0
            while time.monotonic() < until:
                for _ in range(100):
                    flooder.sendto(b"rubbish", (ONE, port))
                await asyncio.sleep(0)
                turns += 1
        found = await Poller(replace(space(port, ONE, ONE), poll_silence=0.5), client="factory").ask(Kind.FACTORIES)
    assert found.silent == ()
    refused = there.counts[Why.NOT_JSON.value] + there.counts[Why.TOO_MANY.value]
    assert refused > 100
    assert turns > 10
    assert len(lines) == 1


def test_the_reference_values_of_an_empty_slot() -> None:
    desk = Desk(replace(SNAPSHOT, machines=(MachineStatus("", "m"),)))
    desk.take(QUERY)
    assert json.loads(desk.sent[0][0])["state"] == "Shut down"
