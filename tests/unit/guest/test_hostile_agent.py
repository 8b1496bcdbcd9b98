"""What a guest may say is not trusted: whatever comes, the host's side ends with an error of ours, never with less."""

import asyncio
import json
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from belljar.agent.agent import (
    CALL,
    CREDIT,
    DATA,
    EOF,
    ERROR,
    EXIT,
    GREETING_SIZE,
    HEADER,
    HELLO,
    MAX_CREDIT,
    MAX_DATA,
    PROTOCOL,
    REPLY,
    RESET,
    TO_AGENT,
    U32,
    WINDOW,
    Parser,
    credit,
    frame,
)
from belljar.errors import AgentLost, AgentTooOld, GuestError, GuestRefused, NoNineP, ProtocolViolation
from belljar.guest import Identity, Settings, Streams
from belljar.guest.conversation import Conversation
from belljar.guest.fake import Bytes, Collector
from belljar.guest.process import one_line
from belljar.model import Account, Payload

ME = Account("tester", 1000, 1000, "testers")
HELLO_JSON: dict[str, Any] = {
    "version": PROTOCOL,
    "agent": "1",
    "boot_nonce": "0",
    "os": "o",
    "kernel": "k",
    "python": "3",
}


class Agent:
    """The far end, which says what a test wants it to."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.parser = Parser(TO_AGENT)

    async def heard(self) -> bytes:
        return await asyncio.get_running_loop().sock_recv(self.connection, 1 << 20)

    async def say(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self.connection, data)

    async def answer_greeting(self, hello: object = HELLO_JSON) -> None:
        opening = await self.heard()
        assert len(opening) == GREETING_SIZE
        list(self.parser.feed(opening))
        await self.say(opening + frame(HELLO, 0, json.dumps(hello).encode()))

    async def call(self) -> tuple[int, str, Any]:
        """Number, name and arguments of the next call."""
        while True:
            for kind, number, body in self.parser.feed(await self.heard()):
                if kind == CALL:
                    name, _, told = body.partition(b"\0")
                    return number, name.decode(), json.loads(told)


@asynccontextmanager
async def pair(**changes: float) -> AsyncIterator[tuple[Conversation, Agent]]:
    ours, its = socket.socketpair()
    with ours, its:
        its.setblocking(False)
        guest = Conversation(ours, Settings(**changes))
        try:
            yield guest, Agent(its)
        finally:
            guest.close()


@asynccontextmanager
async def greeted(**changes: float) -> AsyncIterator[tuple[Conversation, Agent]]:
    async with pair(**changes) as (guest, agent):
        await asyncio.gather(guest.greet(), agent.answer_greeting())
        yield guest, agent


async def started(guest: Conversation, agent: Agent, streams: Streams) -> tuple[Any, int]:
    starting = asyncio.ensure_future(guest.start(Payload((b"true",), ME), streams))
    number, name, _ = await agent.call()
    assert name == "start"
    await agent.say(frame(REPLY, number, b"{}"))
    return await starting, number


# -- greetings -----------------------------------------------------------------------------------------------------------


async def test_an_agent_of_another_protocol_is_too_old() -> None:
    async with pair() as (guest, agent):
        answering = asyncio.ensure_future(agent.answer_greeting({**HELLO_JSON, "version": PROTOCOL + 1}))
        with pytest.raises(AgentTooOld):
            await guest.greet()
        await answering
        with pytest.raises(AgentTooOld):
            await guest.add_account(ME)


@pytest.mark.parametrize("hello", [[], "hi", {}, {"version": "1"}, {"version": None}, 5])
async def test_a_hello_that_says_nothing_is_a_violation(hello: object) -> None:
    async with pair() as (guest, agent):
        answering = asyncio.ensure_future(agent.answer_greeting(hello))
        with pytest.raises(ProtocolViolation):
            await guest.greet()
        await answering


async def test_names_in_a_hello_cannot_write_on_a_terminal() -> None:
    async with pair() as (guest, agent):
        answering = asyncio.ensure_future(
            agent.answer_greeting({**HELLO_JSON, "os": "\x1b[2J" + "x" * 5000, "kernel": 7})
        )
        hello = await guest.greet()
        await answering
    assert hello.os.startswith("?[2Jxxx") and len(hello.os) == 1000 and hello.kernel == ""


async def test_what_was_said_before_the_greeting_is_not_heard() -> None:
    async with pair() as (guest, agent):
        await agent.say(os.urandom(5000) + frame(EXIT, 1, b"{}"))
        greeting = asyncio.gather(guest.greet(), agent.answer_greeting())
        hello, _ = await greeting
    assert hello.version == PROTOCOL


async def test_a_greeting_can_be_broken_off() -> None:
    async with pair() as (guest, agent):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await guest.greet()
        await agent.heard()
        hello, _ = await asyncio.gather(guest.greet(), agent.answer_greeting())
    assert hello.version == PROTOCOL


# -- calls ---------------------------------------------------------------------------------------------------------------


async def test_a_refused_call_says_why_in_one_line() -> None:
    async with greeted() as (guest, agent):
        for kind, error in (
            ("refused", GuestRefused),
            ("no-9p", NoNineP),
            ("bad-call", GuestRefused),
            (7, GuestRefused),
        ):
            asking = asyncio.ensure_future(guest.mount("share0", "/mnt", readonly=True))
            number, _, _ = await agent.call()
            await agent.say(frame(ERROR, number, json.dumps({"kind": kind, "message": "be\ncause"}).encode()))
            with pytest.raises(error, match=r"be.cause"):
                await asking


async def test_an_agent_that_does_not_answer_is_lost() -> None:
    async with greeted(call_timeout=0.01) as (guest, _):
        with pytest.raises(AgentLost, match="did not answer `mount`"):
            await guest.mount("share0", "/mnt", readonly=True)


async def test_an_agent_that_goes_away_fails_every_call_and_payload() -> None:
    async with greeted() as (guest, agent):
        process, _ = await started(guest, agent, Streams(None, None, None))
        waiting = [asyncio.ensure_future(process.wait()), asyncio.ensure_future(guest.end_payload())]
        await agent.call()
        agent.connection.close()
        for one in waiting:
            with pytest.raises(AgentLost, match="closed"):
                await one


async def test_a_guest_without_a_sign_of_life_is_lost() -> None:
    loop = asyncio.get_running_loop()
    async with greeted(heartbeat=0.01, lost_after=20.0) as (guest, agent):
        process, _ = await started(guest, agent, Streams(None, None, None))
        true_time = loop.time
        loop.time = lambda: true_time() + 30.0  # type: ignore[method-assign]
        with pytest.raises(AgentLost, match="no sign of life"):
            await process.wait()


async def test_a_skewed_clock_is_stepped_by_what_it_is_off() -> None:
    import time

    async with greeted() as (guest, agent):
        asking = asyncio.ensure_future(guest.identify(Identity("h", "0" * 32, "1" * 32, bytes(64))))
        off, steps = 0.4, []
        number, _, told = await agent.call()
        answer = {"hostname": "h", "machine_id": "0" * 32, "nonce": "1" * 32, "mac": "", "sample": "ab" * 32}
        await agent.say(frame(REPLY, number, json.dumps({**answer, "time": told["time"] + off}).encode()))
        while not asking.done():
            number, name, told = await agent.call()
            assert name == "set_clock"
            steps.append(told.get("delta"))
            off = 0.3 if told.get("delta") is None else 0.0
            await agent.say(frame(REPLY, number, json.dumps({"time": time.time() + off}).encode()))
            await asyncio.sleep(0)
            await asyncio.wait({asking}, timeout=0.05)
        proof = await asking
    assert steps[0] is None and steps[1] == pytest.approx(-0.3, abs=0.05)
    assert abs(proof.clock_skew) < 0.05


# -- payloads ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "told",
    [
        {"status": -1},
        {"status": 1 << 20},
        {"status": 0x137F},  # stopped
        {"status": "0"},
        {"status": 0, "user": -1.0},
        {"status": 0, "peak": 1e300},
        {"status": 0, "user": True},
        [],
        None,
    ],
)
async def test_an_end_that_makes_no_sense_is_a_violation(told: object) -> None:
    async with greeted() as (guest, agent):
        process, number = await started(guest, agent, Streams(None, None, None))
        await agent.say(frame(EXIT, number, json.dumps(told).encode()))
        with pytest.raises(ProtocolViolation):
            await process.wait()


async def test_more_output_than_credit_is_a_violation_and_not_a_cost() -> None:
    async with greeted() as (guest, agent):
        process, number = await started(guest, agent, Streams(None, Stuck(), None))
        flood = frame(DATA, 4 * number + 1, bytes(MAX_DATA)) * (WINDOW // MAX_DATA + 1)
        with pytest.raises(ProtocolViolation, match="without credit"):
            await asyncio.gather(process.wait(), agent.say(flood))


class Stuck:
    async def write(self, data: bytes) -> None:
        await asyncio.get_running_loop().create_future()

    async def close(self) -> None:
        pass


async def test_credit_is_given_back_only_for_what_was_taken() -> None:
    async with greeted() as (guest, agent):
        sink = Collector()
        process, number = await started(guest, agent, Streams(None, sink, None))
        out = 4 * number + 1
        for _ in range(3):
            await agent.say(frame(DATA, out, bytes(MAX_DATA)))
            assert await agent.heard() == credit(out, MAX_DATA)
        await agent.say(frame(EOF, out) + frame(EXIT, number, b'{"status": 0}'))
        assert (await process.wait()).exit_code == 0
    assert len(sink.data) == 3 * MAX_DATA


async def test_data_after_the_end_of_a_stream_and_a_second_end_are_violations() -> None:
    for ugly in ((DATA, 1, b"x"), (EXIT, 0, b'{"status": 0}')):
        async with greeted() as (guest, agent):
            process, number = await started(guest, agent, Streams(None, Stuck(), Stuck()))
            again = asyncio.ensure_future(guest.end_payload())
            kind, stream, body = ugly
            await agent.say(frame(EOF, 4 * number + 1))
            await agent.say(frame(kind, number if kind == EXIT else 4 * number + stream, body))
            if kind == EXIT:
                await agent.say(frame(DATA, 4 * number + 2, b"late"))  # nobody is there for it: not heard
                await agent.say(frame(ERROR, 0, b'{"message": "bye"}'))
            with pytest.raises(GuestError):
                await again
            process.fail(AgentLost("over"))


async def test_too_much_credit_is_a_violation() -> None:
    async with greeted() as (guest, agent):
        rest: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        process, number = await started(guest, agent, Streams(Bytes(b"", rest), None, None))
        with pytest.raises(ProtocolViolation, match="too much credit"):
            await asyncio.gather(process.wait(), agent.say(frame(CREDIT, 4 * number, U32.pack(MAX_CREDIT))))


async def test_stdin_waits_for_credit_and_stops_when_the_payload_closes_it() -> None:
    async with greeted() as (guest, agent):
        process, number = await started(guest, agent, Streams(Bytes(bytes(10 * WINDOW)), None, None))
        received = 0
        while received < WINDOW:
            received += sum(len(body) for kind, _, body in agent.parser.feed(await agent.heard()) if kind == DATA)
        await agent.say(frame(RESET, 4 * number) + frame(EXIT, number, b'{"status": 256}'))
        assert (await process.wait()).exit_code == 1
        assert received == WINDOW


@given(st.lists(st.one_of(st.binary(max_size=40), st.sampled_from([
    frame(REPLY, 1, b"{}"), frame(EXIT, 1, b'{"status": 0}'), frame(DATA, 5, b"out"), frame(DATA, 6, b"err"), frame(EOF, 5),
    frame(CREDIT, 4, U32.pack(5)), frame(RESET, 4), frame(RESET, 5), frame(ERROR, 1, b"{}"), frame(ERROR, 1, b"["),
    frame(REPLY, 1, b"[" * 100_000), frame(EXIT, 1, b"x"), frame(DATA, 4, b"wrong way"), frame(CREDIT, 5, bytes(4)),
    HEADER.pack(DATA, 0, 5, 1 << 31),
])), max_size=12))  # fmt: skip
@settings(max_examples=80, deadline=None)
def test_whatever_an_agent_says_the_payload_ends_or_an_error_of_ours_is_raised(says: list[bytes]) -> None:
    async def story() -> None:
        async with greeted() as (guest, agent):
            streams = Streams(Bytes(b"in"), Collector(), Collector())
            starting = asyncio.ensure_future(guest.start(Payload((b"true",), ME), streams))
            assert (await agent.call())[:2] == (1, "start")
            await agent.say(b"".join(says))
            agent.connection.close()
            with suppress(GuestError):
                await (await starting).wait()

    asyncio.run(asyncio.wait_for(story(), 20))


async def test_a_host_file_that_cannot_be_written_is_told_after_the_payloads_end() -> None:
    from belljar.errors import NoSpace

    async with greeted() as (guest, agent):
        process, number = await started(guest, agent, Streams(None, Full(), None))
        out = 4 * number + 1
        await agent.say(frame(DATA, out, b"x"))
        assert await agent.heard() == frame(RESET, out)
        await agent.say(frame(EXIT, number, b'{"status": 13}'))
        with pytest.raises(NoSpace, match="stdout"):
            await process.wait()


class Full:
    async def write(self, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    async def close(self) -> None:
        pass


@given(st.text(max_size=50))
@settings(max_examples=40)
def test_a_message_of_the_guest_is_one_printable_line(text: str) -> None:
    line = one_line(text)
    assert line.isprintable() and len(line) <= 1000
