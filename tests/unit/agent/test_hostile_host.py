"""Whatever a host says, the agent lives on and answers the next greeting."""

import os
import select
from collections.abc import Iterator
from pathlib import Path
from socket import socket
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.contracts.payloads import fed
from tests.rehearsal import rehearse

from belljar.agent.wire import (
    CALL,
    CREDIT,
    DATA,
    EOF,
    ERROR,
    EXIT,
    HEADER,
    MAX_CREDIT,
    MAX_DATA,
    PAD,
    PING,
    PONG,
    REPLY,
    RESET,
    RESIZE,
    SIGNAL,
    TO_HOST,
    U32,
    WINDOW,
    WINDOW_SIZE,
    Parser,
    frame,
    greeting,
)

ACCOUNT = {
    "name": "me",
    "uid": os.getuid(),
    "gid": os.getgid(),
    "group": "me",
    "home": "/",
    "shell": "/bin/sh",
    "groups": 0,
}
ORDER: dict[str, Any] = {
    "files": [], "script": "", "text": "", "stdio": "ssn", "window": "", "builtin": "", "program": "", "lingers": "", "umask": 18, "cwd": "/", **ACCOUNT,
    "limits": [], "argv": ["/bin/sleep", "1000"], "env": [],
}  # fmt: skip


@pytest.fixture(scope="module")
def channel() -> Iterator[socket]:
    with rehearse() as connection:
        connection.settimeout(20)
        yield connection


class Host:
    """Speaks frames, without manners."""

    def __init__(self, connection: socket) -> None:
        self.connection = connection
        nonce = os.urandom(16)
        self.parser = Parser(TO_HOST, greeting(nonce))
        self.frames: list[tuple[int, int, bytes]] = []
        connection.sendall(PAD + greeting(nonce))
        self.next()
        self.next()  # the hello

    def say(self, *frames: bytes) -> None:
        self.connection.sendall(b"".join(frames))

    def next(self) -> tuple[int, int, bytes]:
        while not self.frames:
            self.frames += fed(self.parser, self.connection.recv(1 << 16))
        return self.frames.pop(0)

    def until(self, kind: int) -> tuple[int, int, bytes]:
        while (found := self.next())[0] != kind:
            pass
        return found


def call(number: int, name: str, *told: object) -> bytes:
    words = [name]
    for one in told:
        words += [str(len(one)), *map(str, one)] if isinstance(one, list) else [str(one)]
    return frame(CALL, number, b"\0".join(word.encode("utf-8", "surrogateescape") for word in words))


def start(number: int, **changes: object) -> bytes:
    return call(number, "start", *{**ORDER, **changes}.values())


pieces = st.one_of(
    st.binary(max_size=60),
    st.sampled_from(
        [
            start(1), start(2, window="24 80", stdio="sss"), start(0), start(1 << 31), start(3, script="x"), start(3, script="/"),
            start(4, argv=[]), start(5, argv=["/bin/true"], cwd="/no"), start(7, stdio="?"), start(8, env=5), start(8, env=["A"]),
            start(9, uid="x"), start(10, argv="-1"), start(12, limits=["NOFILE", -5, "x"]), start(12, groups=1 << 40), start(2, window="x"),
            start(13, builtin="?", argv=["x"]), start(14, builtin="get", argv=["/no/such"]), start(15, builtin="put", argv=["/proc/x", "y"]),
            start(15, builtin="put"), start(15, builtin="get", argv=[]), start(16, umask=-1), start(16, window="99999999999 -1"),
            call(20, "identify"), call(21, "mount", 1), call(22, "no-such-call"), call(23, "set_clock", "x"), call(24, "add_account", "x"),
            frame(CALL, 25, b""), frame(CALL, 26, b"\xff\xff"), frame(CALL, 27, b"start\0["), frame(CALL, 28, b"start" + b"\0" * 100_000),
            call(29, "end_payload"), start(30, files=["/no/such\x01", "x", "u", "f"]), start(31, files=["relative", "420", "u", "f"]),
            start(32, files=["/proc/1/x", "420", "u", "fx"]), start(33, files=7), call(34, "place", "x"), call(35, "place", 1, "/proc", "420", "u", "f"),
            frame(DATA, 4, b"in"), frame(DATA, 4, bytes(MAX_DATA)) * 5, frame(EOF, 4), frame(DATA, 5, b"wrong way"), frame(RESET, 5),
            frame(CREDIT, 5, U32.pack(WINDOW)), frame(CREDIT, 5, U32.pack(MAX_CREDIT)), frame(CREDIT, 4, U32.pack(1)),
            frame(DATA, 8, b"\3\4\x1a"), frame(RESIZE, 2, WINDOW_SIZE.pack(65535, 0)), frame(SIGNAL, 1, b"\x0f"), frame(SIGNAL, 1, b"\xff"),
            frame(SIGNAL, 1, b"\0"), frame(SIGNAL, 99, b"\x09"), frame(DATA, 15, b"script"), frame(EOF, 15), frame(RESET, 15),
            frame(PING, 0, bytes(8)), HEADER.pack(DATA, 0, 4, 1 << 31), HEADER.pack(CALL, 0, 1, 500),
        ]
    ),
)  # fmt: skip


@given(st.lists(pieces, max_size=10))
@settings(max_examples=120, deadline=None)
def test_the_agent_survives_whatever_it_is_told(channel: socket, says: list[bytes]) -> None:
    host = Host(channel)
    host.say(*says)
    host = Host(channel)
    host.say(frame(PING, 7, b"12345678"))
    assert host.next() == (PONG, 7, b"12345678")


@pytest.mark.parametrize(
    "ugly",
    [
        frame(DATA, 4, bytes(MAX_DATA)) * (WINDOW // MAX_DATA + 2),
        frame(EOF, 4) + frame(DATA, 4, b"x"),
        frame(CREDIT, 5, U32.pack(MAX_CREDIT)),
        start(1),
        start(0),
        frame(99, 0),
    ],
)
def test_a_violation_ends_the_conversation_says_why_and_kills_the_payload(channel: socket, ugly: bytes) -> None:
    host = Host(channel)
    host.say(start(1, argv=["/bin/sh", "-c", "echo $$; exec sleep 1000"]))
    pid = int(host.until(DATA)[2])
    host.say(ugly)
    _, number, body = host.until(ERROR)
    assert (number, body.split(b"\0")[0]) == (0, b"protocol")
    again = Host(channel)
    again.say(call(2, "end_payload"))
    again.until(REPLY)
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize(
    "bad",
    [
        call(5, "no-such-call"), call(5, "start"), start(5, uid="x"), start(5, window="x"), start(5, umask="y"),
        frame(CALL, 5, b"start\0nonsense"), frame(CALL, 5, b""), start(5, groups=-1), start(5, groups=5000),
    ],
)  # fmt: skip
def test_a_call_that_makes_no_sense_is_refused_and_the_conversation_goes_on(channel: socket, bad: bytes) -> None:
    host = Host(channel)
    host.say(bad, frame(PING, 7, bytes(8)))
    kind, number, _ = host.next()
    assert (kind, number) == (ERROR, 5)
    assert host.next()[0] == PONG


def test_frames_for_what_has_ended_are_ignored(channel: socket) -> None:
    host = Host(channel)
    host.say(start(1, argv=["/bin/true"]))
    host.until(EXIT)
    for late in (
        frame(DATA, 4, b"x"),
        frame(EOF, 4),
        frame(CREDIT, 5, U32.pack(1)),
        frame(RESET, 5),
        frame(SIGNAL, 1, b"\x09"),
    ):
        host.say(late)
    host.say(frame(RESIZE, 1, WINDOW_SIZE.pack(1, 1)), frame(PING, 0, bytes(8)))
    assert host.next()[0] == PONG


def test_a_host_that_asks_and_never_listens_costs_the_agent_no_memory(channel: socket) -> None:
    host = Host(channel)
    channel.settimeout(0.2)
    asked = 0
    try:
        with pytest.raises(TimeoutError):  # in the end the agent stops listening too
            while asked < 64 << 20:
                host.say(frame(CALL, 5, b"no-such-call\0") * 5000)
                asked += 5000 * (HEADER.size + 13)
    finally:
        channel.settimeout(20)
    # Listen again, until there is room to speak and no more to hear.
    while select.select([channel], [channel], [], 20)[0]:
        channel.recv(1 << 20)
    assert asked < 64 << 20
    assert Host(channel).parser.greeted
