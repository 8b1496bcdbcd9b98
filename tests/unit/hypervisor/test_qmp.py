"""The monitor's client against a QEMU made of a socket: the test is the other end."""

import asyncio
import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from belljar.errors import DomainDied, QmpError, QmpTimeout
from belljar.hypervisor.qemu.process.qmp import LONGEST_LINE, Monitor

GREETING = {"QMP": {"version": {"qemu": {"major": 7, "minor": 2, "micro": 22}}, "capabilities": ["oob"]}}


class Far:
    """QEMU's end."""

    def __init__(self, end: socket.socket) -> None:
        self.end, self._buffer = end, b""

    def say(self, *messages: dict[str, Any]) -> None:
        self.end.sendall(b"".join(json.dumps(message).encode() + b"\r\n" for message in messages))

    def hear(self) -> dict[str, Any]:
        while b"\n" not in self._buffer:
            self._buffer += self.end.recv(1 << 16)
        line, _, self._buffer = self._buffer.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message

    def answer(self, value: Any = None) -> dict[str, Any]:
        asked = self.hear()
        self.say({"return": {} if value is None else value, "id": asked["id"]})
        return asked


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, Far]]:
    ours, theirs = socket.socketpair()
    yield ours, Far(theirs)
    ours.close()
    theirs.close()


def heard() -> tuple[list[tuple[str, dict[str, Any]]], Any]:
    events: list[tuple[str, dict[str, Any]]] = []
    return events, lambda name, details: events.append((name, details))


async def call(monitor: Monitor, command: str, arguments: dict[str, Any] | None = None, *, timeout: float) -> Any:
    return await monitor.answer(monitor.send(command, arguments), command, timeout)


async def test_commands_sent_before_the_greeting_are_answered_in_order(pair: tuple[socket.socket, Far]) -> None:
    ours, far = pair
    monitor = Monitor(ours, lambda *_: None)
    first, second = monitor.send("one", {"x": 1}), monitor.send("two")
    far.say(GREETING)
    assert far.answer()["execute"] == "qmp_capabilities"
    assert far.answer("a") == {"execute": "one", "id": 2, "arguments": {"x": 1}}
    assert far.answer("b") == {"execute": "two", "id": 3}
    assert (await monitor.handshake, await first, await second) == ({}, "a", "b")
    monitor.fail(QmpError("over"))


async def test_a_refusal_is_an_error_with_qemus_words(pair: tuple[socket.socket, Far]) -> None:
    ours, far = pair
    monitor = Monitor(ours, lambda *_: None)
    far.answer()
    asking = asyncio.ensure_future(call(monitor, "migrate", {"uri": "fd:x"}, timeout=5))
    await asyncio.sleep(0)
    far.say({"error": {"class": "GenericError", "desc": "no such fd"}, "id": far.hear()["id"]})
    with pytest.raises(QmpError, match="no such fd"):
        await asking
    monitor.fail(QmpError("over"))


async def test_a_qemu_that_does_not_answer_is_a_timeout_that_names_the_command(pair: tuple[socket.socket, Far]) -> None:
    ours, _ = pair
    monitor = Monitor(ours, lambda *_: None)
    with pytest.raises(QmpTimeout, match="stop within 0"):
        await call(monitor, "stop", timeout=0)
    monitor.fail(QmpError("over"))


async def test_a_qemu_that_does_not_read_never_blocks_us(pair: tuple[socket.socket, Far]) -> None:
    ours, _ = pair
    monitor = Monitor(ours, lambda *_: None)
    with pytest.raises(QmpTimeout, match="does not read"):
        for _ in range(1000):
            answer = monitor.send("something", {"padding": "x" * 4000})
            if answer.done():
                answer.result()
    monitor.fail(QmpError("over"))


async def test_events_are_told_as_they_come_between_answers(pair: tuple[socket.socket, Far]) -> None:
    ours, far = pair
    events, tell = heard()
    monitor = Monitor(ours, tell)
    far.say(
        GREETING,
        {"event": "RESUME", "timestamp": {}},
        {"event": "SHUTDOWN", "data": {"guest": True}},
        {"event": "ODD", "data": 7},
    )
    far.answer()
    await monitor.handshake
    assert events == [("RESUME", {}), ("SHUTDOWN", {"guest": True}), ("ODD", {})]
    monitor.fail(QmpError("over"))


async def test_the_death_of_qemu_answers_everybody_who_waits(pair: tuple[socket.socket, Far]) -> None:
    ours, far = pair
    monitor = Monitor(ours, lambda *_: None)
    waiting = asyncio.ensure_future(call(monitor, "stop", timeout=60))
    await asyncio.sleep(0)
    far.end.close()
    await asyncio.sleep(0)
    monitor.fail(DomainDied("QEMU ended: killed"))
    for asked in (waiting, call(monitor, "cont", timeout=60)):
        with pytest.raises(DomainDied, match="killed"):
            await asked


async def test_what_came_before_the_end_is_heard(pair: tuple[socket.socket, Far]) -> None:
    ours, far = pair
    events, tell = heard()
    monitor = Monitor(ours, tell)
    far.say({"event": "GUEST_PANICKED", "data": {}})
    far.end.close()
    monitor.drain()
    assert events == [("GUEST_PANICKED", {})]
    monitor.fail(QmpError("over"))


@pytest.mark.parametrize(
    "line",
    [b"no json\n", b"[1,2]\n", b'"text"\n', b"{}\n", b'{"return": 1}\n', b'{"return": 1, "id": "x"}\n', b"\xff\xfe\n"],
)
async def test_what_is_not_the_protocol_ends_the_conversation(pair: tuple[socket.socket, Far], line: bytes) -> None:
    ours, far = pair
    monitor = Monitor(ours, lambda *_: None)
    far.end.sendall(line)
    with pytest.raises(QmpError, match="not QMP"):
        await monitor.answer(monitor.handshake, "qmp_capabilities", 5)
    with pytest.raises(QmpError, match="not QMP"):
        await call(monitor, "stop", timeout=5)


async def test_a_line_without_end_is_not_collected_for_ever(pair: tuple[socket.socket, Far]) -> None:
    ours, far = pair
    monitor = Monitor(ours, lambda *_: None)
    far.end.setblocking(False)
    loop = asyncio.get_running_loop()
    with pytest.raises(QmpError, match="line of more than"):
        async with asyncio.timeout(10):
            for _ in range(LONGEST_LINE // (1 << 16) + 2):
                if monitor.handshake.done():
                    break
                await loop.sock_sendall(far.end, b"x" * (1 << 16))
            await monitor.handshake


async def test_an_answer_nobody_asked_for_changes_nothing(pair: tuple[socket.socket, Far]) -> None:
    ours, far = pair
    monitor = Monitor(ours, lambda *_: None)
    far.say({"return": {}, "id": 99}, {"return": {}, "id": 1}, {"return": {}, "id": 1})
    assert await monitor.answer(monitor.handshake, "qmp_capabilities", 5) == {}
    monitor.fail(QmpError("over"))


@given(parts=st.lists(st.integers(1, 40), max_size=12))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_lines_may_arrive_in_any_pieces(parts: list[int]) -> None:
    async def play() -> None:
        ours, theirs = socket.socketpair()
        events, tell = heard()
        monitor = Monitor(ours, tell)
        text = b"".join(
            json.dumps(message).encode() + b"\r\n"
            for message in (GREETING, {"event": "A"}, {"return": {}, "id": 1}, {"event": "B"})
        )
        for size in [*parts, len(text)]:
            theirs.sendall(text[:size])
            text = text[size:]
            monitor.drain()
        assert (await monitor.handshake, events) == ({}, [("A", {}), ("B", {})])
        monitor.fail(QmpError("over"))
        theirs.close()

    asyncio.run(play())
