"""UDP beside other work in the loop: batches, a share of the time, a short queue of what waits to be sent."""

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest

from belljar.service.datagrams import BATCH, WAITING, Datagrams, addresses_of, bound, is_numeric


@pytest.mark.parametrize("host", ["127.0.7.1", "::1"])
async def test_what_is_sent_arrives_cut_after_the_longest(host: str) -> None:
    got: asyncio.Queue[tuple[bytes, Any]] = asyncio.Queue()
    there = Datagrams(bound(host, 0), lambda data, address: got.put_nowait((data, address)), longest=5)
    here = Datagrams(bound(host, 0), lambda data, address: None, longest=5)
    assert here.send(b"123456789", there.address)
    assert await got.get() == (b"12345", here.address)
    for one in (here, there, here):
        one.close()


async def test_others_have_their_turn_after_a_batch_and_the_rest_comes_later() -> None:
    got: list[bytes] = []
    there = Datagrams(bound("127.0.7.1", 0), lambda data, _: got.append(data), longest=9)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        for number in range(3 * BATCH):
            sender.sendto(b"%d" % number, there.address)
    most, before = 0, 0
    while len(got) < 3 * BATCH:
        await asyncio.sleep(0)
        most, before = max(most, len(got) - before), len(got)
    assert 0 < most <= BATCH
    assert got == [b"%d" % number for number in range(3 * BATCH)]
    there.close()


async def test_nothing_comes_after_it_was_closed_by_who_takes() -> None:
    got: list[bytes] = []
    there = Datagrams(bound("127.0.7.1", 0), lambda data, _: (got.append(data), there.close()), longest=9)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        for _ in range(5):
            sender.sendto(b"x", there.address)
    for _ in range(20):
        await asyncio.sleep(0)
    assert got == [b"x"]


async def test_what_cannot_be_sent_at_once_waits_and_no_more_than_there_is_room_for(tmp_path: Path) -> None:
    """A local socket stands in: it says that it is full."""
    path = str(tmp_path / "socket")
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock,
    ):
        receiver.bind(path)
        receiver.setblocking(False)
        sock.setblocking(False)
        sender = Datagrams(sock, lambda data, address: None, longest=9)
        taken = sum(sender.send(b"%d" % number, path) for number in range(2 * WAITING))  # type: ignore[arg-type]
        assert WAITING < taken < 2 * WAITING
        got = []
        while len(got) < taken:
            got.append(await asyncio.wait_for(asyncio.get_running_loop().sock_recv(receiver, 9), 20))
        assert got == [b"%d" % number for number in range(taken)]
        assert sender.send(b"again", path)  # type: ignore[arg-type]
        sender.close()


async def test_what_has_no_way_is_not_sent() -> None:
    sender = Datagrams(bound("127.0.7.1", 0), lambda data, address: None, longest=9)
    assert not sender.send(b"x" * 70_000, sender.address)
    sender.close()


async def test_addresses_are_numbers_or_names() -> None:
    assert await addresses_of("127.0.7.1", 995) == [("127.0.7.1", 995)]
    assert (await addresses_of("::1", 995))[0][:2] == ("::1", 995)
    assert ("127.0.0.1", 995) in await addresses_of("localhost", 995)
    assert await addresses_of("x" * 64 + ".example.org", 995) == []
    assert [is_numeric(one) for one in ("127.0.0.1", "::1", "fe80::1%lo", "vf01", "1.2.3", "a\0b")] == [True] * 3 + [
        False
    ] * 3
