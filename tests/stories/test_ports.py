"""Published ports: what is refused before there is a machine, and what becomes of connections while one lives and ends."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.guest import FakeGuest, Script
from tests.rehearsal import rehearse
from tests.stories.conftest import Runtime
from tests.unit.guest.test_connecting import LONGEST, free_port, service
from tests.unit.guest.test_relay import house

from belljar.errors import BadOption
from belljar.guest.conversation import Conversation
from belljar.machine.life.claim import claim
from belljar.machine.life.control import published
from belljar.machine.life.ports import Ports
from belljar.machine.life.work import Running
from belljar.model import Cause, Outcome, OwnWork, Port
from belljar.network import Publish
from belljar.records import replace


@pytest.fixture(scope="module")
def channel() -> Iterator[socket.socket]:
    with rehearse() as connection:
        yield connection


@asynccontextmanager
async def ports_of(runtime: Runtime, guest: Conversation | FakeGuest | None) -> AsyncIterator[tuple[Ports, Running]]:
    """Of a machine whose guest this is; None: it has not come so far."""
    life = claim(runtime.request(), runtime.folders, lambda point: None)
    running = Running()
    if guest is not None:
        running.guest = guest
        running.is_up.set()
    made = Ports(life, running, Publish.ANY)
    try:
        yield made, running
    finally:
        if guest is not None:
            guest.close()
        await asyncio.wait_for(made.close(), LONGEST)
        life.release()


def refused(outcome: Outcome, runtime: Runtime) -> str:
    assert outcome.cause is Cause.REFUSED and outcome.error == "BadOption" and outcome.hint
    assert runtime.hypervisor.domains == [] and runtime.leftovers() == [] and "\n" not in outcome.reason
    return outcome.reason


# -- before there is a machine -----------------------------------------------------------------------------------------


def test_a_port_that_is_taken_is_refused_before_the_machine_starts(runtime: Runtime) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        outcome = runtime.run(runtime.request(machine={"ports": (Port(80), Port(80, taken))}))
    assert refused(outcome, runtime) == f"--publish 127.0.0.1:{taken}:80: Address already in use"


def test_the_same_port_twice_is_refused(runtime: Runtime) -> None:
    port = Port(80, free_port())
    assert "Address already in use" in refused(runtime.run(runtime.request(machine={"ports": (port, port)})), runtime)


def test_a_port_of_roots_is_refused_to_others(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    def bind(self: socket.socket, place: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(socket.socket, "bind", bind)
    reason = refused(runtime.run(runtime.request(machine={"ports": (Port(80, 80),)})), runtime)
    assert reason == "--publish 127.0.0.1:80:80: Permission denied"


@pytest.mark.parametrize(
    "port", [Port(80, 80, "192.0.2.1"), Port(0), Port(70000), Port(80, -1), Port(80, 70000), Port(80, 0, "localhost")]
)
def test_what_no_host_has_is_refused(runtime: Runtime, port: Port) -> None:
    refused(runtime.run(runtime.request(machine={"ports": (port,)})), runtime)


def test_a_guest_without_an_agent_cannot_be_reached(runtime: Runtime) -> None:
    request = runtime.request(machine={"ports": (Port(80),)}, work=OwnWork())
    assert "no agent" in refused(runtime.run(request), runtime)


@pytest.mark.parametrize(
    ("allowed", "address", "may"),
    [
        (Publish.NONE, "127.0.0.1", False), (Publish.LOOPBACK, "127.0.0.1", True), (Publish.LOOPBACK, "::1", True),
        (Publish.LOOPBACK, "0.0.0.0", False), (Publish.ANY, "0.0.0.0", True),
    ],
)  # fmt: skip
async def test_the_site_says_where(runtime: Runtime, allowed: Publish, address: str, may: bool) -> None:
    async with ports_of(runtime, None) as (ports, _):
        ports._allowed = allowed
        if may:
            assert (await ports.open(Port(80, 0, address))).host
        else:
            with pytest.raises(BadOption, match=r"network\.publish"):
                await ports.open(Port(80, 0, address))


def test_what_is_published_is_in_the_journal_and_gone_at_the_end(runtime: Runtime) -> None:
    runtime.plan(Script(runs_for=60.0))
    seen: list[Port] = []
    runtime.at["payload-started"] = lambda: seen.extend(published(runtime.folders.machine("0123456789ab")))
    assert runtime.run(runtime.request(machine={"ports": (Port(80),)})).exit_code == 0
    (port,) = seen
    assert (port.guest, port.address) == (80, "127.0.0.1") and port.host
    with socket.socket() as again:
        again.bind(("127.0.0.1", port.host))
    told = [event.get("state", event["event"]) for event in runtime.journal()]
    assert told[1:6] == ["requested", "placement", "publish", "published", "preparing"] and runtime.leftovers() == []


# -- connections -------------------------------------------------------------------------------------------------------


async def test_both_sides_are_carried_and_each_may_end_first(runtime: Runtime, channel: socket.socket) -> None:
    async with house(channel) as guest, service() as there, ports_of(runtime, guest) as (ports, _):
        place = await ports.open(Port(there.port))
        reader, writer = await asyncio.open_connection(place.address, place.host)
        writer.write(b"question")
        writer.write_eof()
        its_reader, its_writer = await there.end()
        assert await its_reader.read() == b"question"
        its_writer.write(b"answer" * 100_000)
        its_writer.close()
        assert await reader.read() == b"answer" * 100_000
        writer.close()


async def test_a_hundred_clients_at_once_have_their_answers(runtime: Runtime, channel: socket.socket) -> None:
    async def ask(place: Port, word: bytes) -> None:
        reader, writer = await asyncio.open_connection(place.address, place.host)
        writer.write(word)
        writer.write_eof()
        assert await reader.read() == word * 2
        writer.close()

    async with house(channel) as guest, service() as there, ports_of(runtime, guest) as (ports, _):
        place, words = await ports.open(Port(there.port)), [b"%d " % number * 1000 for number in range(100)]

        async def answer() -> None:
            reader, writer = await there.end()
            writer.write(2 * await reader.read())
            writer.close()

        async with asyncio.timeout(LONGEST):
            await asyncio.gather(*(answer() for _ in words), *(ask(place, word) for word in words))


async def test_a_client_to_a_port_on_which_nothing_listens_is_reset(runtime: Runtime, channel: socket.socket) -> None:
    async with house(channel) as guest, ports_of(runtime, guest) as (ports, _):
        place = await ports.open(Port(free_port()))
        for _ in range(2):
            reader, writer = await asyncio.open_connection(place.address, place.host)
            with pytest.raises(ConnectionResetError):
                await asyncio.wait_for(reader.read(), LONGEST)
            writer.close()
        told = [event for event in runtime.journal_of_the_living() if event["event"] == "connection-refused"]
        assert [event["reason"] for event in told] == ["connect: Connection refused"]  # once


async def test_a_client_that_is_killed_ends_its_connection_in_the_guest(
    runtime: Runtime, channel: socket.socket
) -> None:
    async with house(channel) as guest, service() as there, ports_of(runtime, guest) as (ports, _):
        place = await ports.open(Port(there.port))
        _, writer = await asyncio.open_connection(place.address, place.host)
        its_reader, its_writer = await there.end()
        writer.write(b"words")
        assert await its_reader.readexactly(5) == b"words"
        abort(writer)
        assert await asyncio.wait_for(its_reader.read(), LONGEST) == b""
        its_writer.write(bytes(1 << 20))
        with pytest.raises((ConnectionError, BrokenPipeError)):
            while True:
                its_writer.write(bytes(1 << 20))
                await asyncio.wait_for(its_writer.drain(), LONGEST)


async def test_what_the_service_breaks_off_is_reset_and_not_ended(runtime: Runtime, channel: socket.socket) -> None:
    async with house(channel) as guest, service() as there, ports_of(runtime, guest) as (ports, _):
        place = await ports.open(Port(there.port))
        reader, writer = await asyncio.open_connection(place.address, place.host)
        _, its_writer = await there.end()
        abort(its_writer)
        with pytest.raises(ConnectionResetError):
            await asyncio.wait_for(reader.read(), LONGEST)
        writer.close()


def abort(writer: asyncio.StreamWriter) -> None:
    """As the kernel does for a process that is killed with bytes unread."""
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    writer.transport.abort()


async def test_a_client_that_comes_before_the_machine_runs_waits_for_it(
    runtime: Runtime, channel: socket.socket
) -> None:
    async with house(channel) as guest, service() as there, ports_of(runtime, None) as (ports, running):
        place = await ports.open(Port(there.port))
        reader, writer = await asyncio.open_connection(place.address, place.host)
        running.guest = guest
        running.is_up.set()
        _, its_writer = await there.end()
        its_writer.write(b"hello")
        assert await reader.readexactly(5) == b"hello"
        writer.close()
        its_writer.close()
        guest.close()


@pytest.mark.parametrize("is_up", [True, False])
async def test_a_machine_that_ends_meanwhile_resets_its_clients(
    runtime: Runtime, channel: socket.socket, is_up: bool
) -> None:
    async with house(channel) as guest, service() as there:
        async with ports_of(runtime, guest if is_up else None) as (ports, _):
            place = await ports.open(Port(there.port))
            reader, writer = await asyncio.open_connection(place.address, place.host)
            if is_up:
                await there.end()
        with pytest.raises(ConnectionResetError):
            await asyncio.wait_for(reader.read(), LONGEST)
        writer.close()
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(place.address, place.host)


async def test_more_clients_than_it_takes_wait_their_turn(
    runtime: Runtime, channel: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("belljar.machine.life.ports.MOST", 1)
    async with house(channel) as guest, service() as there, ports_of(runtime, guest) as (ports, _):
        place = await ports.open(Port(there.port))
        clients = [await asyncio.open_connection(place.address, place.host) for _ in range(3)]
        for reader, writer in clients:
            writer.write_eof()
            _, its_writer = await there.end()
            assert there.ends.empty()
            its_writer.close()
            assert await reader.read() == b""
            writer.close()


async def test_more_clients_than_may_wait_are_reset(
    runtime: Runtime, channel: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("belljar.machine.life.ports.MOST", 1)
    monkeypatch.setattr("belljar.machine.life.ports.BACKLOG", 0)
    async with house(channel) as guest, service() as there, ports_of(runtime, guest) as (ports, _):
        place = await ports.open(Port(there.port))
        _, first = await asyncio.open_connection(place.address, place.host)
        await there.end()
        reader, second = await asyncio.open_connection(place.address, place.host)
        with pytest.raises(ConnectionResetError):
            await asyncio.wait_for(reader.read(), LONGEST)
        second.close()
        first.close()


def test_it_is_asked_for_on_the_control_socket(runtime: Runtime) -> None:
    from belljar.machine.life.commands import Commands
    from belljar.machine.orders import Orders

    async def ask(**question: Any) -> Any:
        life, services = claim(runtime.request(), runtime.folders, lambda point: None), runtime.services()
        services = replace(services, rules=replace(services.rules, publish=Publish.LOOPBACK))
        commands = Commands(life, Orders(), Running(), None, services)  # type: ignore[arg-type]
        try:
            return await commands.answer({"do": "publish", **question}, None)  # type: ignore[arg-type]
        finally:
            await commands.close_ports()
            life.release()
            os.rename(life.folder, Path(f"{life.folder}.{os.urandom(4).hex()}"))
            for path in runtime.folders.begun.iterdir():
                os.rename(path, f"{path}.{os.urandom(4).hex()}")

    made = asyncio.run(ask(port={"guest": 80}))
    assert made["port"]["guest"] == 80 and made["port"]["host"] > 0
    with pytest.raises(ValueError, match="guest: 'x'"):
        asyncio.run(ask(port={"guest": "x"}))
    assert asyncio.run(ask(port={"guest": 80, "address": "0.0.0.0"}))["hint"].startswith("Leave")
