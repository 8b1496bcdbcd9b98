"""Copies to and from a guest: what goes wrong is told by the right error, and nobody is left waiting."""

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from socket import socket

import pytest
from tests.rehearsal import rehearse

from belljar.errors import AgentLost, BadOption, GuestRefused, InputMissing, OutputMissing
from belljar.guest import Settings
from belljar.guest.conversation import Conversation
from belljar.model import Account, Transfer

ME = Account("tester", os.getuid(), os.getgid(), "testers", home="/")


@pytest.fixture(scope="module")
def channel() -> Iterator[socket]:
    with rehearse() as connection:
        yield connection


@asynccontextmanager
async def talking(channel: socket) -> AsyncIterator[Conversation]:
    guest = Conversation(channel, Settings())
    await guest.greet()
    try:
        yield guest
    finally:
        guest.close()


def names(folder: Path) -> list[str]:
    return os.listdir(folder)


async def begun(folder: Path) -> None:
    """Until a copy is under way."""
    while "copy" not in names(folder):  # noqa: ASYNC110 - the thread that writes it sets no event
        await asyncio.sleep(0)


async def test_an_input_that_is_missing_is_told_without_asking_the_guest(channel: socket, tmp_path: Path) -> None:
    async with talking(channel) as guest:
        with pytest.raises(InputMissing, match="no-such-file"):
            await guest.put(Transfer(str(tmp_path / "no-such-file"), "/tmp/x"), ME, None)


async def test_an_input_that_is_no_file_is_refused(channel: socket, tmp_path: Path) -> None:
    async with talking(channel) as guest:
        with pytest.raises(InputMissing, match="neither a file nor a folder"):
            await guest.put(Transfer("/dev/zero", str(tmp_path / "x")), ME, None)
    assert names(tmp_path) == []


async def test_an_output_that_is_missing_is_told_as_such(channel: socket, tmp_path: Path) -> None:
    async with talking(channel) as guest:
        with pytest.raises(OutputMissing, match="no-such-file"):
            await guest.get(Transfer(str(tmp_path / "x"), "no-such-file"), ME, os.fsencode(tmp_path))
    assert names(tmp_path) == []


async def test_a_place_in_the_guest_that_cannot_be_written_is_refused(channel: socket, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(os.urandom(5_000_000))
    async with talking(channel) as guest:
        for target in ("/proc/no/such", "/dev/full", str(tmp_path / "file/below")):
            with pytest.raises(GuestRefused):
                await guest.put(Transfer(str(tmp_path / "file"), target), ME, None)


async def test_a_missing_working_directory_is_named(channel: socket, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    async with talking(channel) as guest:
        with pytest.raises(GuestRefused, match="working directory"):
            await guest.put(Transfer(str(tmp_path / "file"), "x"), ME, b"/no/such/folder")


async def test_a_place_on_the_host_that_cannot_be_written_is_named(channel: socket, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(os.urandom(5_000_000))
    os.mkfifo(tmp_path / "pipe")
    async with talking(channel) as guest:
        for target in (tmp_path / "file/below", tmp_path / "pipe"):
            with pytest.raises(BadOption, match=target.name if target.name == "pipe" else "file"):
                await guest.get(Transfer(str(target), str(tmp_path / "file")), ME, None)


async def test_a_broken_conversation_ends_a_copy_that_runs(channel: socket, tmp_path: Path) -> None:
    with (tmp_path / "large").open("wb") as file:
        for _ in range(64):
            file.write(os.urandom(1 << 20))
    async with talking(channel) as guest:
        for copy in (
            guest.put(Transfer(str(tmp_path / "large"), str(tmp_path / "copy")), ME, None),
            guest.get(Transfer(str(tmp_path / "copy"), str(tmp_path / "large")), ME, None),
        ):
            copying = asyncio.ensure_future(copy)
            await begun(tmp_path)
            guest.close()
            with pytest.raises(AgentLost):
                await copying
            (tmp_path / "copy").unlink(missing_ok=True)
            await guest.greet()


async def test_a_copy_can_be_cancelled(channel: socket, tmp_path: Path) -> None:
    with (tmp_path / "large").open("wb") as file:
        for _ in range(64):
            file.write(os.urandom(1 << 20))
    async with talking(channel) as guest:
        for copy in (
            guest.put(Transfer(str(tmp_path / "large"), str(tmp_path / "copy")), ME, None),
            guest.get(Transfer(str(tmp_path / "copy"), str(tmp_path / "large")), ME, None),
        ):
            copying = asyncio.ensure_future(copy)
            await begun(tmp_path)
            copying.cancel()
            with pytest.raises(asyncio.CancelledError):
                await copying
            (tmp_path / "copy").unlink(missing_ok=True)
            await guest.end_payload()


async def test_many_small_files_go_both_ways(channel: socket, tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    for number in range(300):
        (tmp_path / f"tree/{number}").write_bytes(b"%d" % number)
    async with talking(channel) as guest:
        await guest.put(Transfer(str(tmp_path / "tree"), "inside"), ME, os.fsencode(tmp_path))
        await guest.get(Transfer(str(tmp_path / "back"), "inside/"), ME, os.fsencode(tmp_path))
    assert {path.name: path.read_bytes() for path in (tmp_path / "back").iterdir()} == {
        str(number): b"%d" % number for number in range(300)
    }
