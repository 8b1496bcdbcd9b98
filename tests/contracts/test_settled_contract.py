"""What a payload of a clone may rely on: after settling its child is there already, waiting for its order."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from socket import socket

import pytest
from tests.contracts.payloads import ENV, is_running, payload, ran, shell, talking
from tests.rehearsal import rehearse

from belljar.guest.conversation import Conversation
from belljar.model import MIB, StdinKind

ODD = bytes(range(1, 256)).replace(b"=", b"")


@pytest.fixture(scope="module")
def channel() -> Iterator[socket]:
    """One agent for all: each test begins a conversation of its own, which ends what the last one left."""
    with rehearse() as connection:
        yield connection


@asynccontextmanager
async def settled(channel: socket) -> AsyncIterator[Conversation]:
    async with talking(channel) as guest:
        await guest.settle()
    async with talking(channel) as again:
        yield again


async def test_a_settled_guest_runs_a_payload_exactly(channel: socket, tmp_path: Path) -> None:
    asked = shell(
        'cat; pwd; umask; ulimit -n; printf %s "$1" "$ODD" >&2; exit 7',
        cwd=os.fsencode(tmp_path), umask=0o077, rlimits=(("NOFILE", 99, 99),), env=(*ENV, (b"ODD", ODD)),
    )  # fmt: skip
    async with settled(channel) as guest:
        done = await ran(guest, replace(asked, argv=(*asked.argv, b"sh", ODD)), b"stdin\n")
        again = await ran(guest, shell("exit 8"))
    assert (done.code, again.code) == (7, 8)
    assert done.out.decode().split() == ["stdin", str(tmp_path), "0077", "99"]
    assert done.err == ODD + ODD


async def test_a_settled_guest_takes_a_mebibyte_of_arguments_and_large_streams(channel: socket) -> None:
    words = tuple(bytes([128 + number]) * 100_000 for number in range(11))
    async with settled(channel) as guest:
        done = await ran(guest, payload(b"/bin/sh", b"-c", b'printf %s "$@"; cat', b"sh", *words), b"x" * (8 * MIB))
    assert done.out == b"".join(words) + b"x" * (8 * MIB)


@pytest.mark.parametrize("kind", [StdinKind.CLOSED, StdinKind.NULL, StdinKind.STREAM])
async def test_a_settled_guest_gives_its_payload_the_descriptors_it_asks_for(channel: socket, kind: StdinKind) -> None:
    async with settled(channel) as guest:
        done = await ran(guest, payload(b"/bin/ls", b"-l", b"/proc/self/fd", stdin=kind, stderr=kind), None)
    rows = {line.split()[-3]: line.split()[-1] for line in done.out.decode().splitlines() if "->" in line}
    found = {StdinKind.CLOSED: "", StdinKind.NULL: "/dev/null"}.get(kind, "pipe")
    if kind is not StdinKind.CLOSED:
        assert rows["0"].startswith(found) and rows["2"].startswith(found)
        assert set(rows) == {"0", "1", "2", "3"}
    else:
        assert "2" not in rows and set(rows) == {"0", "1"}  # 0 is the folder that ls itself opened


async def test_a_settled_guest_runs_scripts_and_kills_what_they_leave(channel: socket) -> None:
    async with settled(channel) as guest:
        done = await ran(guest, payload(b"job", script=b"#!/bin/sh\nsetsid sleep 1000 & echo $!; exit 3"))
    assert done.code == 3
    assert not is_running(int(done.out))


async def test_a_settled_guest_tells_what_cannot_be_run_and_dies_by_signals(channel: socket) -> None:
    async with settled(channel) as guest:
        missing = await ran(guest, payload(b"/no/such/command"))
    async with settled(channel) as guest:
        killed = await ran(guest, shell("kill -USR1 $$"))
    assert missing.status is not None and killed.status is not None
    assert (missing.code, missing.status.error) == (127, "not-found")
    assert killed.status.signal == signal.SIGUSR1


async def test_a_child_that_waits_for_its_order_may_die_without_harm() -> None:
    with rehearse() as connection:
        async with talking(connection) as guest:
            agent = int((await ran(guest, shell("echo $PPID"))).out)
            await guest.settle()
        (waiting,) = children(agent)
        os.kill(waiting, signal.SIGKILL)
        while is_running(waiting):  # noqa: ASYNC110 - the kernel tells only its parent
            await asyncio.sleep(0)
        async with talking(connection) as guest:
            assert (await ran(guest, shell("exit 9"))).code == 9


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
