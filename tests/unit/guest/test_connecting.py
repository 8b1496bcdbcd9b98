"""Connections to services of a guest, through the real agent in rehearsal: its loopback is this host's."""

from __future__ import annotations

import asyncio
import signal
import socket
import struct
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest
from tests.contracts.payloads import Bytes, Collector
from tests.rehearsal import rehearse
from tests.unit.guest.test_relay import client, house, output

from belljar.agent.wire import WINDOW
from belljar.errors import AgentLost, GuestRefused
from belljar.guest import Streams
from belljar.guest.conversation import Conversation, request

LONGEST = 20.0  # seconds


@pytest.fixture(scope="module")
def channel() -> Iterator[socket.socket]:
    with rehearse() as connection:
        yield connection


class Service:
    """Something that listens. A test has its ends of the connections."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.ends: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Queue()

    async def end(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.wait_for(self.ends.get(), LONGEST)


@asynccontextmanager
async def service(host: str = "127.0.0.1") -> AsyncIterator[Service]:
    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        await made.ends.put((reader, writer))

    writers: list[asyncio.StreamWriter] = []
    server = await asyncio.start_server(take, host, 0, backlog=128)
    made = Service(server.sockets[0].getsockname()[1])
    async with server:
        yield made
        for writer in writers:
            writer.close()


class Silent(Bytes):
    """A source from which nothing comes, until its end."""

    def __init__(self) -> None:
        self.end = asyncio.get_running_loop().create_future()
        super().__init__(b"", self.end)


class Stuck(Collector):
    """A sink that takes the first bytes, and no more until it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.may_go_on = asyncio.Event()

    async def write(self, data: bytes) -> None:
        await super().write(data)
        await self.may_go_on.wait()


def free_port() -> int:
    with socket.socket() as end:
        end.bind(("127.0.0.1", 0))
        return int(end.getsockname()[1])


async def test_a_port_on_which_nothing_listens_is_refused(channel: socket.socket) -> None:
    async with house(channel) as guest:
        with pytest.raises(GuestRefused, match="Connection refused"):
            await guest.connect(free_port(), Streams(Bytes(), Collector(), None))
        assert await output(guest, "exit 3") == (b"", 3)


@pytest.mark.parametrize("word", [b"x", b"70000", b"-1", b""])
async def test_what_is_not_a_port_costs_nothing_else(channel: socket.socket, word: bytes) -> None:
    async with house(channel) as guest:
        with pytest.raises(GuestRefused):
            await guest._call(b"connect", word)
        assert await output(guest, "exit 3") == (b"", 3)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_each_side_may_end_first_and_still_be_spoken_to(channel: socket.socket, host: str) -> None:
    async with house(channel) as guest, service(host) as there:
        sink = Collector()
        process = await guest.connect(there.port, Streams(Bytes(b"question"), sink, None))
        reader, writer = await there.end()
        assert await reader.read() == b"question"  # to its end
        writer.write(b"answer")
        writer.close()
        assert (await asyncio.wait_for(process.wait(), LONGEST)).exit_code == 0
        assert sink.data == b"answer" and sink.is_closed

        source, sink = Silent(), Collector()
        process = await guest.connect(there.port, Streams(source, sink, None))
        reader, writer = await there.end()
        writer.write_eof()
        source._data = memoryview(b"late")
        source.end.set_result(None)
        assert await reader.read() == b"late"
        writer.close()
        await asyncio.wait_for(process.wait(), LONGEST)
        assert sink.data == b""


async def test_a_reader_that_is_slow_stops_the_service_and_nobody_else(channel: socket.socket) -> None:
    async with house(channel) as guest, service() as there:
        source, sink = Silent(), Stuck()
        process = await guest.connect(there.port, Streams(source, sink, None))
        _, writer = await there.end()
        writer.write(bytes(32 << 20))
        assert await output(guest, "head -c 2000000 /dev/zero | wc -c") == (b"2000000\n", 0)
        assert len(sink.data) <= WINDOW and writer.transport.get_write_buffer_size()
        sink.may_go_on.set()
        await asyncio.wait_for(writer.drain(), LONGEST)
        writer.close()
        source.end.set_result(None)
        assert (await asyncio.wait_for(process.wait(), LONGEST)).exit_code == 0
        assert len(sink.data) == 32 << 20


async def test_a_service_that_does_not_read_holds_its_client_up(channel: socket.socket) -> None:
    async with house(channel) as guest, service() as there:
        data = bytes(range(256)) * (1 << 16)
        source, sink = Bytes(data), Collector()
        process = await guest.connect(there.port, Streams(source, sink, None))
        reader, writer = await there.end()
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        assert await output(guest, "exit 4") == (b"", 4)
        assert len(source._data) > 0
        reader._transport.resume_reading()  # type: ignore[attr-defined]
        assert await reader.read() == data
        writer.close()
        await asyncio.wait_for(process.wait(), LONGEST)


async def test_a_hundred_at_once_are_answered_each(channel: socket.socket) -> None:
    async def ask(guest: Conversation, port: int, word: bytes) -> None:
        sink = Collector()
        process = await guest.connect(port, Streams(Bytes(word), sink, None))
        await process.wait()
        assert sink.data == word * 2

    async def answer(there: Service) -> None:
        reader, writer = await there.end()
        writer.write(2 * await reader.read())
        writer.close()

    async with house(channel) as guest, service() as there, asyncio.timeout(LONGEST):
        words = [b"%d " % number * 1000 for number in range(100)]
        answers = [answer(there) for _ in words]
        await asyncio.gather(*answers, *(ask(guest, there.port, word) for word in words))


async def test_what_the_service_breaks_off_is_not_taken_for_its_end(channel: socket.socket) -> None:
    async with house(channel) as guest, service() as there:
        sink = Collector()
        process = await guest.connect(there.port, Streams(Silent(), sink, None))
        _, writer = await there.end()
        end = writer.get_extra_info("socket")
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()
        await asyncio.wait_for(process.wait(), LONGEST)
        assert not sink.is_closed


async def test_a_signal_breaks_it_off(channel: socket.socket) -> None:
    async with house(channel) as guest, service() as there:
        process = await guest.connect(there.port, Streams(Silent(), Collector(), None))
        reader, _ = await there.end()
        await process.signal(signal.SIGKILL)
        await asyncio.wait_for(process.wait(), LONGEST)
        assert await reader.read() == b""


async def test_it_ends_with_its_conversation(channel: socket.socket) -> None:
    async with service() as there:
        async with house(channel) as guest:
            process = await guest.connect(there.port, Streams(Silent(), Collector(), None))
            reader, _ = await there.end()
        with pytest.raises(AgentLost):
            await process.wait()
        async with house(channel):  # whose greeting ends what was before
            assert await reader.read() == b""


async def test_a_second_client_has_connections_of_its_own_which_end_with_it(channel: socket.socket) -> None:
    async with house(channel) as guest, service() as there:
        async with client(guest) as second:
            await second.connect(there.port, Streams(Silent(), Collector(), None))
            reader, _ = await there.end()
        assert await asyncio.wait_for(reader.read(), LONGEST) == b""
        assert await output(guest, "exit 5") == (b"", 5)


async def test_two_of_one_number_end_the_conversation(channel: socket.socket) -> None:
    async with house(channel) as guest, service() as there:
        process = await guest.connect(there.port, Streams(Silent(), Collector(), None))
        guest.open_channel().send(request(guest._number, b"connect", b"%d" % there.port))
        with pytest.raises(AgentLost, match="is there already"):
            await process.wait()
