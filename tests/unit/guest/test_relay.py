"""A second client at a guest that is spoken to already, through the real agent in rehearsal."""

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.contracts.payloads import Bytes, Collector
from tests.rehearsal import rehearse

from belljar.agent.wire import CALL, CREDIT, DATA, EOF, MAX_DATA, U32, WINDOW, frame, greeting
from belljar.errors import AgentLost, GuestRefused
from belljar.guest import Identity, Settings, Streams, second_client
from belljar.guest.conversation import Conversation, order_of, request
from belljar.model import Account, Payload, StdinKind, Transfer

ME = Account("tester", os.getuid(), os.getgid(), "testers", home="/")
ENV = ((b"PATH", b"/usr/bin:/bin"),)


@pytest.fixture(scope="module")
def channel() -> Iterator[socket.socket]:
    with rehearse() as connection:
        yield connection


def shell(script: str, stdin: StdinKind = StdinKind.NULL) -> Payload:
    return Payload((b"/bin/sh", b"-c", script.encode()), ME, env=ENV, stdin=stdin)


@asynccontextmanager
async def house(channel: socket.socket) -> AsyncIterator[Conversation]:
    """The supervisor's own conversation."""
    guest = Conversation(channel, Settings())
    await guest.greet()
    try:
        yield guest
    finally:
        guest.close()


@asynccontextmanager
async def relayed(guest: Conversation) -> AsyncIterator[tuple[socket.socket, asyncio.Task[None]]]:
    """A connection to a relay of this guest."""
    ours, its = socket.socketpair()
    with ours, its:
        its.setblocking(False)
        ours.setblocking(False)
        serving = asyncio.ensure_future(second_client(guest, its))
        try:
            yield ours, serving
        finally:
            ours.close()
            await serving


@asynccontextmanager
async def client(guest: Conversation) -> AsyncIterator[Conversation]:
    async with relayed(guest) as (connection, _):
        talk = Conversation(connection, Settings())
        await talk.greet()
        try:
            yield talk
        finally:
            talk.close()


async def output(guest: Conversation, script: str, stdin: bytes | None = None) -> tuple[bytes, int | None]:
    sink = Collector()
    source = None if stdin is None else Bytes(stdin)
    kind = StdinKind.NULL if stdin is None else StdinKind.STREAM
    process = await guest.start(shell(script, kind), Streams(source, sink, None))
    status = await process.wait()
    return sink.data, status.exit_code


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except (FileNotFoundError, ProcessLookupError):
        return False


async def test_a_client_runs_its_own_process_beside_the_payload(channel: socket.socket) -> None:
    async with house(channel) as guest, client(guest) as second:
        mine, its = await asyncio.gather(output(guest, "cat; exit 3", b"mine"), output(second, "cat; exit 4", b"its"))
    assert (mine, its) == ((b"mine", 3), (b"its", 4))


async def test_several_clients_do_not_get_each_others_bytes(channel: socket.socket) -> None:
    async def one(guest: Conversation, name: bytes) -> None:
        async with client(guest) as talk:
            for _ in range(3):
                assert await output(talk, "cat; exit 5", name * 50_000) == (name * 50_000, 5)

    async with house(channel) as guest:
        await asyncio.gather(*(one(guest, bytes([number])) for number in range(4)))


async def test_signals_and_sizes_reach_the_right_process(channel: socket.socket) -> None:
    async with house(channel) as guest, client(guest) as second:
        process = await second.start(shell("exec sleep 1000"), Streams(None, None, None))
        other = await guest.start(shell("exec sleep 1000"), Streams(None, None, None))
        await process.resize(1, 1)
        await process.signal(signal.SIGUSR1)
        assert (await process.wait()).signal == signal.SIGUSR1
        await other.signal(signal.SIGUSR2)
        assert (await other.wait()).signal == signal.SIGUSR2


async def test_files_can_be_copied_through_it(channel: socket.socket, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(os.urandom(2_000_000))
    async with house(channel) as guest, client(guest) as second:
        await second.put(Transfer(str(tmp_path / "file"), str(tmp_path / "inside")), ME, None)
        await second.get(Transfer(str(tmp_path / "back"), str(tmp_path / "inside")), ME, None)
    assert (tmp_path / "back").read_bytes() == (tmp_path / "file").read_bytes()


async def test_the_supervisors_own_calls_are_not_for_clients(channel: socket.socket) -> None:
    identity = Identity("x", "0" * 32, "0" * 32, bytes(64))
    async with house(channel) as guest, client(guest) as second:
        for ask in (second.settle, second.end_payload, lambda: second.identify(identity), second.set_clock):
            with pytest.raises(GuestRefused, match="supervisor"):
                await ask()
        assert await output(second, "exit 6") == (b"", 6)


async def test_a_client_that_goes_away_has_its_processes_killed_and_no_other(channel: socket.socket) -> None:
    async with house(channel) as guest:
        kept = await guest.start(shell("exec sleep 1000"), Streams(None, None, None))
        async with relayed(guest) as (connection, serving):
            second, sink, said = Conversation(connection, Settings()), Collector(), asyncio.Event()
            await second.greet()
            sink.arrived = said.set
            await second.start(shell("trap '' HUP TERM; echo $$; yes"), Streams(None, sink, None))
            await said.wait()
            second.close()
            connection.close()
            await serving
        pid = int(sink.data.split()[0])
        assert await output(guest, f"while kill -0 {pid} 2>/dev/null; do sleep 0.01; done; exit 7") == (b"", 7)
        assert not is_running(pid)
        await kept.signal(signal.SIGKILL)
        assert (await kept.wait()).signal == signal.SIGKILL


async def test_a_client_that_does_not_read_stops_nobody_else(channel: socket.socket) -> None:
    async with house(channel) as guest, relayed(guest) as (connection, _):
        second = Conversation(connection, Settings())
        await second.greet()
        process = await second.start(shell("yes"), Streams(None, Stuck(), None))
        assert await output(guest, "head -c 2000000 /dev/zero | wc -c") == (b"2000000\n", 0)
        second.close()
        assert process.is_over


class Stuck:
    async def write(self, data: bytes) -> None:
        await asyncio.get_running_loop().create_future()

    async def close(self) -> None:
        pass


START = request(1, b"start", *order_of(shell("exec sleep 1000", StdinKind.STREAM), Streams(None, None, None)))


@pytest.mark.parametrize(
    "ugly",
    [
        START + START,
        START + frame(DATA, 4, bytes(MAX_DATA)) * (WINDOW // MAX_DATA + 2),
        START + frame(EOF, 4) + frame(DATA, 4, b"x"),
        START + frame(CREDIT, 5, U32.pack(1)),
        frame(99, 0),
        frame(CALL, 1, b"\0" * 10) + frame(DATA, 1, bytes(MAX_DATA))[:5] + b"\xff" * 50,
        b"\xff" * 100,
    ],
)
async def test_a_client_that_breaks_the_rules_is_sent_away_alone(channel: socket.socket, ugly: bytes) -> None:
    loop = asyncio.get_running_loop()
    async with house(channel) as guest:
        async with relayed(guest) as (connection, serving):
            await loop.sock_sendall(connection, greeting(bytes(16)) + ugly)
            await asyncio.wait_for(asyncio.shield(serving), 10)
        assert await output(guest, "exit 8") == (b"", 8)


async def test_a_client_learns_that_the_guest_is_gone(channel: socket.socket) -> None:
    async with house(channel) as guest, relayed(guest) as (connection, serving):
        second = Conversation(connection, Settings())
        await second.greet()
        process = await second.start(shell("exec sleep 1000"), Streams(None, None, None))
        guest.close()
        await serving
        connection.close()
        with pytest.raises(AgentLost):
            second.close()
            await process.wait()
