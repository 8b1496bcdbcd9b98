"""Work of the agent that may block: in a child, answered in time, never in the agent's way."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from tests.contracts.payloads import fed
from tests.rehearsal import Rehearsal

from belljar.agent import wire
from belljar.agent.guest.system import Refused
from belljar.agent.loop.loop import Agent
from belljar.errors import GuestError, GuestRefused
from belljar.guest.process import refusal


@pytest.mark.parametrize(("kind", "error"), [("no-filesystem", GuestRefused), ("other", GuestRefused)])
def test_each_kind_of_refusal_is_an_error_of_its_own(kind: str, error: type[GuestError]) -> None:
    assert type(refusal(f"{kind}\0why".encode())) is error


class World(Rehearsal):
    """Has an errand that does what it is given."""

    def __init__(self, work: Callable[[], None]) -> None:
        super().__init__()
        self.calls[b"toil"] = lambda words: (words.number(), work)


@contextmanager
def host_of(work: Callable[[], None]) -> Iterator[Callable[..., list[bytes]]]:
    """An agent in a process of its own, and a function: call it, and get what it answers."""
    here, there = socket.socketpair()
    pid = os.fork()
    if not pid:
        here.close()
        Agent(there.fileno(), World(work), is_port=False).run()
        os._exit(0)
    there.close()
    here.settimeout(30)
    parser = wire.Parser(wire.TO_HOST, wire.greeting(b"n" * 16))
    here.sendall(wire.greeting(b"n" * 16))

    def answers(count: int, *frames: bytes) -> list[bytes]:
        here.sendall(b"".join(frames))
        found: list[tuple[int, int, bytes]] = []
        while len(found) < count:
            found += [one for one in fed(parser, here.recv(65536)) if one[0] not in (wire.GREETING, wire.HELLO)]
        return [b"%d %d " % (kind, number) + body for kind, number, body in found]

    try:
        yield answers
    finally:
        here.close()
        os.waitpid(pid, 0)


def call(number: int, *words: bytes) -> bytes:
    return wire.frame(wire.CALL, number, wire.join(*words))


PING = wire.frame(wire.PING, 0, bytes(8))


def test_while_an_errand_blocks_the_agent_answers_and_at_its_deadline_the_errand_is_refused() -> None:
    began = time.monotonic()
    with host_of(threading.Event().wait) as answers:  # type: ignore[arg-type]
        pong, refused = answers(2, call(7, b"toil", b"1"), PING)
    assert pong == b"%d 0 " % wire.PONG + bytes(8)
    assert refused == b"%d 7 refused\0toil: not done in the guest within 1 s" % wire.ERROR
    assert 1 <= time.monotonic() - began < 10


def test_each_errand_has_a_deadline_of_its_own() -> None:
    began = time.monotonic()
    with host_of(threading.Event().wait) as answers:  # type: ignore[arg-type]
        (refused,) = answers(1, call(7, b"toil", b"1"), call(8, b"toil", b"20"))
    assert refused == b"%d 7 refused\0toil: not done in the guest within 1 s" % wire.ERROR
    assert time.monotonic() - began < 10


def test_what_the_work_says_is_the_answer() -> None:
    def fails() -> None:
        raise Refused("no-filesystem", "no space")

    for work, answer in ((fails, b"%d 8 no-filesystem\0no space" % wire.ERROR), (lambda: None, b"%d 8 " % wire.REPLY)):
        with host_of(work) as answers:
            assert answers(1, call(8, b"toil", b"5")) == [answer]


def test_a_child_that_is_killed_is_an_answer_too() -> None:
    with host_of(lambda: os.kill(os.getpid(), 9)) as answers:
        (refused,) = answers(1, call(9, b"toil", b"20"))
    assert refused.startswith(b"%d 9 refused\0" % wire.ERROR)
