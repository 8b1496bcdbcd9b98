"""What is held still says nothing after the answer to that, whatever was ready at the same moment."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from belljar.agent.loop.channel import Channel
from belljar.agent.loop.streams import Outflow
from belljar.agent.wire import CALL, DATA, EOF, GREETING, REPLY, TO_HOST, WINDOW, Parser, frame, greeting, welcome

NONCE = b"n" * 16


class Held(Channel):
    """Holds still when it is called, goes on at the next call."""

    def _take(self, kind: int, number: int, body: bytes) -> None:
        if kind == GREETING:
            self.out = [welcome(body)]
            self.out_size = len(self.out[0])
        elif kind == CALL:
            (self.go_on if self.is_still else self.hold_still)()
            self.send(REPLY, number)

    def _end_conversation(self) -> None:
        self.is_over = True


class Pair:
    """An agent's channel with one output, and the host's end of it."""

    def __init__(self, host: socket.socket, guest: socket.socket) -> None:
        self.host, self.parser = host, Parser(TO_HOST, welcome(NONCE))
        self.channel = Held(guest.fileno(), is_port=False)
        reading, self.writing = os.pipe()
        self.output = Outflow(self.channel, 5, reading, lambda: None)
        host.send(greeting(NONCE))
        assert self.seen()[0] == GREETING

    def seen(self) -> list[int]:
        """The types of the frames that come when the agent looks once."""
        self.channel.look()
        self.parser.feed(self.host.recv(1 << 20))
        return [received[0] for received in iter(self.parser.take, None)]

    def call(self) -> None:
        self.host.send(frame(CALL, 1, b"hold_still"))


@pytest.fixture
def pair() -> Iterator[Pair]:
    host, guest = socket.socketpair()
    with host, guest:
        pair = Pair(host, guest)
        yield pair
        os.close(pair.writing)


def test_output_that_is_ready_beside_the_order_waits(pair: Pair) -> None:
    pair.call()
    os.write(pair.writing, b"x" * 65536)
    assert pair.seen() == [REPLY]
    pair.call()
    assert pair.seen() == [REPLY] and pair.seen() == [DATA]


def test_output_of_what_has_ended_waits_though_credit_comes(pair: Pair) -> None:
    pair.output.credit, pair.output.is_last = 0, True
    os.write(pair.writing, b"x" * 1000)
    pair.call()
    assert pair.seen() == [REPLY]
    pair.output.grant(WINDOW)
    pair.call()
    assert pair.seen() == [REPLY] and pair.seen() == [DATA, EOF]
