"""The control socket: hears its owner, survives everybody."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from belljar.errors import MachineBusy, NoSuchMachine
from belljar.host.processes import peer_uid
from belljar.host.threads import in_thread
from belljar.machine.life import control
from belljar.machine.life.control import Answer, ControlServer


async def echo(question: Answer, connection: socket.socket) -> Answer | None:
    return {"error": "no"} if question == {"do": "refuse"} else {"heard": question}


def with_server(
    folder: Path,
    client: Callable[[], object],
    handler: Callable[[Answer, socket.socket], Awaitable[Answer | None]] = echo,
) -> object:
    async def serve() -> object:
        server = ControlServer(folder, handler)
        await server.open()
        try:
            async with asyncio.timeout(20):
                return await in_thread(client)
        finally:
            await server.close()

    return asyncio.run(serve())


def test_a_question_is_answered(tmp_path: Path) -> None:
    def client() -> Answer:
        with control.connect(tmp_path) as connection:
            return control.ask(connection, "stop", grace=1)

    assert with_server(tmp_path, client) == {"heard": {"do": "stop", "grace": 1}}


def test_a_moment_without_descriptors_costs_a_moment_and_no_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    accept, failed = socket.socket.accept, []

    def fails_once(self: socket.socket) -> object:
        if not failed:
            failed.append(errno.EMFILE)
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return accept(self)

    monkeypatch.setattr(socket.socket, "accept", fails_once)
    monkeypatch.setattr(control, "ACCEPT_AGAIN", 0.0)

    def client() -> Answer:
        with control.connect(tmp_path) as connection:
            return control.ask(connection, "hello")

    assert with_server(tmp_path, client) == {"heard": {"do": "hello"}} and failed
    assert caplog.records == []


def test_a_folder_deep_down_is_no_obstacle(tmp_path: Path) -> None:
    deep = tmp_path / ("x" * 100) / ("y" * 100)
    deep.mkdir(parents=True)

    def client() -> Answer:
        with control.connect(deep) as connection:
            return control.ask(connection, "hello")

    assert with_server(deep, client) == {"heard": {"do": "hello"}}
    assert (deep / "control.sock").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("noise", [b"not json\n", b"[1]\n", b'"x"\n', b"x" * (1 << 17), b'{"do":', b""])
def test_noise_does_not_hurt_the_next_client(tmp_path: Path, noise: bytes) -> None:
    def client() -> Answer:
        with control.connect(tmp_path) as connection:
            try:
                connection.sendall(noise)
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(4096):
                    pass
            except OSError:
                pass
        with control.connect(tmp_path) as connection:
            return control.ask(connection, "still there")

    assert with_server(tmp_path, client) == {"heard": {"do": "still there"}}


def test_a_refusal_is_an_error_for_the_asker(tmp_path: Path) -> None:
    def client() -> None:
        with control.connect(tmp_path) as connection, pytest.raises(MachineBusy, match="no"):
            control.ask(connection, "refuse")

    with_server(tmp_path, client)


def test_a_machine_that_is_gone_is_told_as_such(tmp_path: Path) -> None:
    with pytest.raises(NoSuchMachine):
        control.connect(tmp_path)
    dead = socket.socket(socket.AF_UNIX)
    dead.bind(str(tmp_path / "control.sock"))
    dead.close()
    with pytest.raises(NoSuchMachine):
        control.connect(tmp_path)


def test_somebody_else_is_not_heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "peer_uid", lambda connection: 65534)

    def client() -> None:
        with control.connect(tmp_path) as connection, pytest.raises(NoSuchMachine, match="does not belong"):
            control.ask(connection, "stop")

    with_server(tmp_path, client)


def test_the_kernel_says_who_is_at_the_other_end() -> None:
    one, other = socket.socketpair()
    with one, other:
        assert peer_uid(one) == os.geteuid()


async def test_a_server_that_could_not_be_opened_can_be_closed(tmp_path: Path) -> None:
    server = ControlServer(tmp_path / "gone", echo)
    await server.close()
    with pytest.raises(FileNotFoundError):
        await server.open()
    await server.close()
