"""What a guest may say is not trusted: whatever comes, the host's side ends with an error of ours, never with less."""

import asyncio
import math
import os
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.contracts.payloads import Bytes, Collector, fed

from belljar.agent.wire import (
    CALL,
    CREDIT,
    DATA,
    END,
    EOF,
    ERROR,
    EXIT,
    GREETING_SIZE,
    HEADER,
    HELLO,
    MAX_CREDIT,
    MAX_DATA,
    PAD,
    PROTOCOL,
    REPLY,
    RESET,
    TO_AGENT,
    TO_HOST,
    U32,
    WINDOW,
    Parser,
    frame,
    join,
)
from belljar.errors import AgentLost, AgentTooOld, GuestError, GuestRefused, ProtocolViolation
from belljar.guest import Identity, Settings, Streams
from belljar.guest.conversation import Conversation
from belljar.guest.process import read_words
from belljar.machine.states import class_of_error
from belljar.model import Account, Cause, FileSystem, OutcomeClass, Payload, Share

ME = Account("tester", 1000, 1000, "testers")
VERSION = b"%d" % PROTOCOL


class Agent:
    """The far end, which says what a test wants it to."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.parser = Parser(TO_AGENT)

    async def heard(self) -> bytes:
        return await asyncio.get_running_loop().sock_recv(self.connection, 1 << 20)

    async def say(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self.connection, data)

    async def answer_greeting(self, hello: bytes = VERSION) -> None:
        opening = await self.heard()
        assert opening[: len(PAD)] == PAD and len(opening) == len(PAD) + GREETING_SIZE
        list(fed(self.parser, opening))
        await self.say(opening[len(PAD) :] + frame(HELLO, 0, hello))

    async def call(self) -> tuple[int, str, list[bytes]]:
        """Number, name and arguments of the next call."""
        while True:
            for kind, number, body in fed(self.parser, await self.heard()):
                if kind == CALL:
                    name, *words = body.split(b"\0")
                    return number, name.decode(), words


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
    await agent.say(frame(REPLY, number))
    return await starting, number


# -- greetings -----------------------------------------------------------------------------------------------------------


async def test_an_agent_of_another_protocol_is_too_old() -> None:
    async with pair() as (guest, agent):
        answering = asyncio.ensure_future(agent.answer_greeting(b"99"))
        with pytest.raises(AgentTooOld):
            await guest.greet()
        await answering
        with pytest.raises(AgentTooOld):
            await guest.add_account(ME)


@pytest.mark.parametrize("hello", [b"", b"hi", b"\xff", join(VERSION, b"more"), b"\0" * 5])
async def test_a_hello_that_says_nothing_is_a_violation(hello: bytes) -> None:
    async with pair() as (guest, agent):
        answering = asyncio.ensure_future(agent.answer_greeting(hello))
        with pytest.raises(ProtocolViolation):
            await guest.greet()
        await answering


async def test_what_was_said_before_the_greeting_is_not_heard() -> None:
    async with pair() as (guest, agent):
        await agent.say(os.urandom(5000) + frame(EXIT, 1))
        greeting = asyncio.gather(guest.greet(), agent.answer_greeting())
        await greeting


async def test_a_greeting_can_be_broken_off() -> None:
    async with pair() as (guest, agent):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await guest.greet()
        await agent.heard()
        await asyncio.gather(guest.greet(), agent.answer_greeting())


# -- calls ---------------------------------------------------------------------------------------------------------------


REFUSALS: list[tuple[bytes, type[GuestError]]] = [
    (b"refused", GuestRefused),
    (b"no-filesystem", GuestRefused),
    (b"bad-call", GuestRefused),
    (b"", GuestRefused),
]


async def test_a_refused_call_says_why_in_one_line() -> None:
    async with greeted() as (guest, agent):
        for kind, error in REFUSALS:
            asking = asyncio.ensure_future(guest.mount(Share("/data", "/mnt"), "share0", FileSystem("9p", "9p")))
            number, _, _ = await agent.call()
            await agent.say(frame(ERROR, number, join(kind, b"be\ncause")))
            with pytest.raises(error, match=r"be.cause"):
                await asking


async def test_an_agent_that_does_not_answer_is_lost() -> None:
    async with greeted(call_timeout=0.01) as (guest, _):
        with pytest.raises(AgentLost, match="did not answer `mount`"):
            await guest.mount(Share("/data", "/mnt"), "share0", FileSystem("9p", "9p"))


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
    async with greeted() as (guest, agent):
        asking = asyncio.ensure_future(guest.identify(Identity("h", "0" * 32, "1" * 32, bytes(64))))
        number, _, words = await agent.call()
        answer = (b"h", b"0" * 32, b"1" * 32, b"", b"ab" * 32, b"%d" % (int(words[-1]) + 400_000))
        await agent.say(frame(REPLY, number, join(*answer)))
        steps: list[tuple[bytes, float]] = []
        for off in (0.3, 0.0):
            number, name, words = await agent.call()
            assert name == "set_clock"
            steps.append((words[0], int(words[1]) / 1e6))
            await agent.say(frame(REPLY, number, b"%d" % int((time.time() + off) * 1e6)))
        proof = await asking
    assert [how for how, _ in steps] == [b"by", b"by"]
    assert [by for _, by in steps] == [pytest.approx(-0.4, abs=0.05), pytest.approx(-0.3, abs=0.05)]
    assert abs(proof.clock_skew) < 0.05


async def test_a_clock_whose_answer_took_long_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = iter([100.0, 101.0, 101.0, 101.02])  # identify takes a second, the next question does not
    monkeypatch.setattr("belljar.guest.conversation.time.time", lambda: next(ours))
    async with greeted() as (guest, agent):
        asking = asyncio.ensure_future(guest.identify(Identity("h", "0" * 32, "1" * 32, bytes(64))))
        number, _, _ = await agent.call()
        await agent.say(frame(REPLY, number, join(b"h", b"0" * 32, b"1" * 32, b"", b"ab" * 32, b"100500000")))
        number, _, words = await agent.call()
        assert [bytes(word) for word in words] == [b"by", b"0"]  # it may be right: it is not stepped
        await agent.say(frame(REPLY, number, b"101010000"))
        assert abs((await asking).clock_skew) < 0.001


@pytest.mark.parametrize("answer", [b"\0", b"1\0002\0003", b"\0" * 9])
@pytest.mark.parametrize("ask", ["set_clock", "identify", "find_disks"])
async def test_an_answer_with_other_words_than_asked_for_is_a_violation_and_the_end(ask: str, answer: bytes) -> None:
    """A payload that is root can put itself into the agent's place; the clock is asked for when a job is resumed."""
    async with greeted() as (guest, agent):
        process, _ = await started(guest, agent, Streams(None, None, None))
        asked: dict[str, Any] = {
            "set_clock": guest.set_clock,
            "identify": lambda: guest.identify(Identity("h", "0" * 32, "1" * 32, bytes(64))),
            "find_disks": lambda: guest.find_disks(["scratch"]),
        }
        asking = asyncio.ensure_future(asked[ask]())
        number, _, _ = await agent.call()
        await agent.say(frame(REPLY, number, answer))
        with pytest.raises(ProtocolViolation, match="words where"):
            await asking
        with pytest.raises(ProtocolViolation) as lost:
            await process.wait()
        assert (lost.value.cause, class_of_error(lost.value)) == (Cause.GUEST_LOST, OutcomeClass.TRANSIENT)


# -- payloads ------------------------------------------------------------------------------------------------------------


FINE = END.pack(0, 0.0, 0.0, 0, False) + b"\0"


@pytest.mark.parametrize(
    "told",
    [
        b"",
        FINE[:10],
        FINE[:-1],
        FINE + b"\0",
        END.pack(1 << 20, 0.0, 0.0, 0, False) + b"\0",
        END.pack(0x137F, 0.0, 0.0, 0, False) + b"\0",  # stopped
        END.pack(0, -1.0, 0.0, 0, False) + b"\0",
        END.pack(0, 0.0, 1e300, 0, False) + b"\0",
        END.pack(0, math.nan, 0.0, 0, False) + b"\0",
    ],
)
async def test_an_end_that_makes_no_sense_is_a_violation(told: bytes) -> None:
    async with greeted() as (guest, agent):
        process, number = await started(guest, agent, Streams(None, None, None))
        await agent.say(frame(EXIT, number, told))
        with pytest.raises(ProtocolViolation):
            await process.wait()


def ended(status: int) -> bytes:
    return END.pack(status, 0.0, 0.0, 0, False) + b"\0"


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
            assert await agent.heard() == frame(CREDIT, out, U32.pack(MAX_DATA))
        await agent.say(frame(EOF, out) + frame(EXIT, number, ended(0)))
        assert (await process.wait()).exit_code == 0
    assert len(sink.data) == 3 * MAX_DATA


async def test_data_after_the_end_of_a_stream_and_a_second_end_are_violations() -> None:
    for ugly in ((DATA, 1, b"x"), (EXIT, 0, ended(0))):
        async with greeted() as (guest, agent):
            process, number = await started(guest, agent, Streams(None, Stuck(), Stuck()))
            again = asyncio.ensure_future(guest.end_payload())
            kind, stream, body = ugly
            await agent.say(frame(EOF, 4 * number + 1))
            await agent.say(frame(kind, number if kind == EXIT else 4 * number + stream, body))
            if kind == EXIT:
                await agent.say(frame(DATA, 4 * number + 2, b"late"))  # nobody is there for it: not heard
                await agent.say(frame(ERROR, 0, b"gone\0bye"))
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
            received += sum(len(body) for kind, _, body in fed(agent.parser, await agent.heard()) if kind == DATA)
        await agent.say(frame(RESET, 4 * number) + frame(EXIT, number, ended(256)))
        assert (await process.wait()).exit_code == 1
        assert received == WINDOW


@given(st.lists(st.one_of(st.binary(max_size=40), st.sampled_from([
    frame(REPLY, 1), frame(EXIT, 1, ended(0)), frame(DATA, 5, b"out"), frame(DATA, 6, b"err"), frame(EOF, 5),
    frame(CREDIT, 4, U32.pack(5)), frame(RESET, 4), frame(RESET, 5), frame(ERROR, 1, b"x\0y"), frame(ERROR, 1, b"["),
    frame(REPLY, 1, b"[" * 60_000), frame(EXIT, 1, b"x"), frame(DATA, 4, b"wrong way"), frame(CREDIT, 5, bytes(4)),
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
        await agent.say(frame(EXIT, number, ended(13)))
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
    (line,) = read_words(text.replace("\0", "").encode(), 1)
    assert line.isprintable() and len(line) <= 1000


# -- other machines ------------------------------------------------------------------------------------------------------


async def test_a_guest_reaches_no_machine_but_its_own_and_can_ask_for_nothing() -> None:
    """No frame names a machine or a job, and none that a guest may send asks for anything: its channel says who it is."""
    kinds = {HELLO, REPLY, ERROR, EXIT}
    assert CALL not in TO_HOST and kinds < set(TO_HOST)
    async with greeted() as (mine, agent), greeted() as (other, its):
        process, number = await started(other, its, Streams(None, None, None))
        waiting = asyncio.ensure_future(process.wait())
        asking = asyncio.ensure_future(other.mount(Share("/data", "/mnt"), "share0", FileSystem("9p", "9p")))
        await its.call()
        for each in range(1, number + 10):
            for kind in kinds - {HELLO}:
                await agent.say(frame(kind, each, join(b"exited", b"0")))
        with pytest.raises(GuestError):  # all of it was heard, and is its own channel's end at most
            await agent.say(frame(CALL, 1, join(b"start", b"vm0123456789abx")))
            await mine.mount(Share("/data", "/mnt"), "share0", FileSystem("9p", "9p"))
        assert not waiting.done() and not asking.done()
        waiting.cancel()
        asking.cancel()
