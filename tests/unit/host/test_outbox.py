"""A queue of messages in front of a socket that does not block."""

import asyncio
import socket

import pytest

from belljar.host.outbox import Outbox

MOST = 50


async def test_what_a_full_socket_does_not_take_waits_in_its_order_and_no_more_than_so_many_wait() -> None:
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    near.setblocking(False)
    far.setblocking(False)
    outbox = Outbox(near, near.send, MOST)
    sent = [number for number in range(10_000) if outbox.send(b"%d" % number)]
    assert sent == list(range(len(sent))) and MOST < len(sent) < 10_000
    with far:
        for number in sent:
            assert await asyncio.get_running_loop().sock_recv(far, 100) == b"%d" % number
    outbox.close()


async def test_what_waits_for_an_end_that_is_gone_is_dropped_and_the_next_is_told_so() -> None:
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    near.setblocking(False)
    outbox = Outbox(near, near.send, MOST)
    while outbox.send(b"x"):
        pass
    far.close()
    with pytest.raises(OSError, match=r"ndpoint|refused"):
        while True:
            outbox.send(b"x")
            await asyncio.sleep(0)
    outbox.close()
