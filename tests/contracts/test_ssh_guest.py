"""A guest behind an ssh server: how one gets in, how the agent is brought, what becomes of a session that breaks."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tests.contracts.payloads import begin, ran, said, shell
from tests.contracts.ssh_server import CAN_RUN, Server, new_key, no_interpreter, server

from belljar.errors import AgentLost, GuestRefused, SshRefused
from belljar.guest import Settings, SshKeys
from belljar.guest.ssh import Parcel, SshGuest, unit_for
from belljar.guest.ssh_link import Patience
from belljar.image import agent_unit
from belljar.model import Account, Transfer

needs_sshd = pytest.mark.skipif(not CAN_RUN, reason="root starts an sshd in namespaces of its own")
QUICK = Patience(banner=0.2, knock=0.0, login=5.0, refusing=0.3)
USER = Account("jobber", 4711, 4712, "jobbers", groups=((4713, "more"),), home="/run/jobber")


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with server(tmp_path_factory.mktemp("sshd")) as one:
        yield one


# -- servers that are none, or not yet -----------------------------------------------------------------------------------

NO_CHANNEL: Any = None  # these get no so far as to need one
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
Dial = Callable[[], Awaitable[socket.socket]]


def a_guest(dial: Dial, told: list[str], patience: Patience = QUICK) -> SshGuest:
    parcel = Parcel("", no_interpreter)
    return SshGuest(NO_CHANNEL, dial, SshKeys(new_key()[0]), parcel, Settings(), told.append, patience=patience)


@asynccontextmanager
async def behind(serve: Serve, told: list[str], patience: Patience = QUICK) -> AsyncIterator[SshGuest]:
    """A guest whose port is answered by *serve*."""
    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    place = listening.sockets[0].getsockname()

    async def dial() -> socket.socket:
        line = socket.socket()
        line.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(line, place)
        except BaseException:
            line.close()
            raise
        return line

    guest = a_guest(dial, told, patience)
    try:
        yield guest
    finally:
        guest.close()
        listening.close()


async def closes(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.close()


async def resets(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    writer.transport.abort()


async def hangs(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()
    writer.close()


async def says_half(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"SSH-2.0-Half\r\n")
    writer.close()


@pytest.mark.parametrize("serve", [closes, resets, hangs, says_half])
async def test_a_server_that_is_not_there_yet_is_waited_for_until_the_callers_deadline(serve: Serve) -> None:
    told: list[str] = []
    async with behind(serve, told) as guest:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.0):
                await guest.greet()
    assert told and all(line.startswith("not yet: ") for line in told)


async def test_what_is_no_ssh_server_is_refused_and_named() -> None:
    async def talks(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    async with behind(talks, told := []) as guest:
        with pytest.raises(SshRefused, match="no ssh server"):
            await guest.greet()
    assert told[0].startswith("refused: ")


async def test_a_port_nobody_listens_on_is_not_yet() -> None:
    async def dial() -> socket.socket:
        raise ConnectionRefusedError(111, "Connection refused")

    guest = a_guest(dial, told := [])
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await guest.greet()
    assert told == ["not yet: cannot connect: Connection refused"]


@needs_sshd
async def test_a_server_that_does_not_know_our_key_is_refused_after_some_time(there: Server) -> None:
    stranger = replace(there, keys=replace(there.keys, private=new_key()[0]), told=[])
    with pytest.raises(SshRefused, match="does not accept"):
        async with stranger.guest(QUICK):
            pass
    assert stranger.told[-1] == "refused: it does not accept belljar's key"


@needs_sshd
async def test_a_server_with_another_host_key_is_not_the_guest(there: Server) -> None:
    other = replace(there, keys=replace(there.keys, host_public=new_key()[1]), told=[])
    with pytest.raises(SshRefused, match="another host key"):
        async with other.guest(QUICK):
            pass


@needs_sshd
async def test_a_user_who_may_not_become_root_is_refused_and_named(there: Server) -> None:
    visitor = replace(there, keys=replace(there.keys, user="visitor"), told=[])
    with pytest.raises(SshRefused, match=r"visitor may not do `sudo -n`: .*sudo: "):
        async with visitor.guest(QUICK):
            pass
    assert visitor.told[-1].startswith("refused: visitor may not do")


@needs_sshd
async def test_a_server_that_gets_our_key_late_lets_us_in(there: Server) -> None:
    authorized = there.folder / "authorized"
    known = authorized.read_text()
    authorized.write_text("")
    refused = asyncio.Event()
    late = replace(there, told=Heard("refused: it does not accept belljar's key", refused))
    try:
        greeting = asyncio.ensure_future(asyncio.wait_for(enter(late), 60))
        await asyncio.wait_for(refused.wait(), 30)
    finally:
        authorized.write_text(known)
    await greeting
    assert "let in" in late.told


class Heard(list[str]):
    """Sets an event when it gets a certain line."""

    def __init__(self, line: str, heard: asyncio.Event) -> None:
        super().__init__()
        self._line, self._heard = line, heard

    def append(self, line: str) -> None:
        super().append(line)
        if line == self._line:
            self._heard.set()


async def enter(there: Server) -> None:
    async with there.guest():
        pass


async def test_a_server_whose_connections_close_is_not_knocked_at_again_at_once() -> None:
    knocks: list[float] = []

    async def knocked(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        knocks.append(asyncio.get_running_loop().time())
        writer.close()

    async with behind(knocked, [], replace(QUICK, knock=0.4)) as guest:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.1):
                await guest.greet()
    assert 2 <= len(knocks) <= 3
    assert all(later - one >= 0.4 for one, later in pairwise(knocks))


# -- what is brought -----------------------------------------------------------------------------------------------------


def test_the_unit_starts_what_was_brought_after_the_rest_is_up() -> None:
    lines = unit_for(agent_unit(), "/usr/lib/belljar/python/loader x /usr/lib/belljar/agent.pyc").decode().splitlines()
    assert lines.count("ExecStart=/usr/lib/belljar/python/loader x /usr/lib/belljar/agent.pyc") == 1
    assert "After=cloud-final.service multi-user.target" in lines and "Restart=always" in lines
    assert sum(line.startswith("ExecStart=") for line in lines) == 1
    assert "Slice=-.slice" in lines and "CPUWeight=1000" in lines  # beside the guest's services, and before them


# -- frames over a session, where the guest has no port --------------------------------------------------------------------


def cut(there: Server) -> None:
    for line in there.lines:
        with suppress(OSError):
            line.shutdown(socket.SHUT_RDWR)
    there.lines.clear()


@needs_sshd
async def test_a_guest_without_the_port_is_spoken_to_over_the_session_and_says_so(there: Server) -> None:
    quiet = replace(there, told=[])
    async with quiet.guest() as guest:
        assert guest.hello is not None and guest.hello.python and guest.hello.boot_nonce
        done = await ran(guest, shell("id -u; echo err >&2; exit 3"), stdin=b"")
        assert (done.out, done.err, done.code) == (b"0\n", b"err\n", 3)
    assert quiet.told[-1] == "no driver for the port: the conversation goes over ssh"
    assert "agent delivered, with /usr/bin/python3 3." in quiet.told[-2]


@needs_sshd
async def test_such_a_guest_becomes_no_template_and_names_the_driver(there: Server) -> None:
    with pytest.raises(GuestRefused, match="virtio_console") as caught:
        async with there.guest(is_draft=True):
            pass
    assert "--start cold" in str(caught.value.hint)


@needs_sshd
async def test_a_payload_is_its_account(there: Server) -> None:
    async with there.guest() as guest:
        asked = replace(shell("id -un; id -u; id -g; id -G; pwd; umask"), account=USER, cwd=None, umask=0o027)
        done = await ran(guest, asked)
    assert done.out.split() == [b"jobber", b"4711", b"4712", b"4712", b"4713", b"/run/jobber", b"0027"]


@needs_sshd
async def test_a_session_that_breaks_is_a_lost_guest_and_its_payload_is_killed(there: Server, tmp_path: Path) -> None:
    async with there.guest() as guest:
        done = await begin(guest, shell("echo $$; echo begun; sleep 1000"))
        await said(done, b"begun")
        cut(there)
        with pytest.raises(AgentLost):
            await asyncio.wait_for(done.process.wait(), 30)
    async with there.guest() as guest:
        gone = shell(f"for i in $(seq 100); do kill -0 {int(done.out.split()[0])} || exit 0; sleep 0.1; done; exit 1")
        assert (await ran(guest, gone)).code == 0


@needs_sshd
async def test_files_go_in_and_come_out(there: Server, tmp_path: Path) -> None:
    (tmp_path / "tree/below").mkdir(parents=True)
    (tmp_path / "tree/below/data").write_bytes(os.urandom(3 << 20))
    async with there.guest() as guest:
        await guest.put(Transfer(str(tmp_path / "tree"), "inside"), USER, None)
        await guest.get(Transfer(str(tmp_path / "back"), "inside"), USER, None)
    assert (tmp_path / "back/below/data").read_bytes() == (tmp_path / "tree/below/data").read_bytes()
