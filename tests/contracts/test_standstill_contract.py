"""A payload that is held still, for a guest that is frozen: it goes on at the exact byte, in this conversation or in another one."""

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from socket import socket

import pytest
from tests.contracts.payloads import Bytes, Collector, Ran, begin, is_running, python, ran, said, shell, talking
from tests.rehearsal import rehearse

from belljar.agent import wire
from belljar.errors import GuestRefused
from belljar.guest import Guest, Standstill, Streams
from belljar.model import Payload

COUNTS = "seq 1 200000; echo ended >&2; exit 7"
COUNTED = b"".join(b"%d\n" % number for number in range(1, 200001))
WAITS = "echo ready; read line; echo $line"


class Slow(Collector):
    """Takes a little at a time, so that the payload waits for its reader."""

    async def write(self, data: bytes) -> None:
        await asyncio.sleep(0)
        await super().write(data)


async def taken_up(guest: Guest, standstill: Standstill, stdin: bytes | None = None) -> Ran:
    stdout, stderr = Collector(), Collector()
    streams = Streams(None if stdin is None else Bytes(stdin), stdout, stderr)
    return Ran(await guest.take_up(standstill, streams), stdout, stderr)


@asynccontextmanager
async def held(
    connection: socket, asked: Payload, *, until: bytes, stdin: bytes | None = None
) -> AsyncIterator[tuple[Ran, Standstill]]:
    async with talking(connection) as guest:
        done = await begin(guest, asked, stdin)
        await said(done, until)
        yield done, await guest.hold_still(done.process)


@pytest.mark.parametrize("until", [b"1\n", b"\n777\n", b"\n90000\n"])
async def test_output_goes_on_in_another_conversation_at_the_exact_byte(until: bytes) -> None:
    with rehearse() as connection:
        async with held(connection, shell(COUNTS), until=until) as (before, standstill):
            assert standstill.stdout == len(before.out)
        async with talking(connection) as guest:
            after = await taken_up(guest, standstill)
            after.status = await after.process.wait()
    assert before.out + after.out == COUNTED
    assert (before.err + after.err, after.code) == (b"ended\n", 7)


async def test_it_is_held_again_and_again_and_no_byte_is_lost_or_doubled() -> None:
    with rehearse() as connection:
        async with held(connection, shell(COUNTS), until=b"\n10\n") as (before, standstill):
            whole = before.out
        for _ in range(3):
            further = len(whole) + 100_000  # bytes: of what comes now, wherever it was held
            async with talking(connection) as guest:
                part = await taken_up(guest, standstill)
                await said(part, COUNTED[further : further + 20])
                standstill = await guest.hold_still(part.process)
                whole += part.out
                assert standstill.stdout == len(whole)
        async with talking(connection) as guest:
            part = await taken_up(guest, standstill)
            part.status = await part.process.wait()
    assert whole + part.out == COUNTED and part.code == 7


async def test_in_the_same_conversation_all_go_on_as_if_nothing_had_been() -> None:
    with rehearse() as connection:
        async with talking(connection) as guest:
            done, other = await begin(guest, shell(COUNTS)), await begin(guest, shell("cat"), Bytes(b"typed"))
            await said(done, b"\n5\n")
            for _ in range(3):
                standstill = await guest.hold_still(done.process)
                assert standstill.stdout == len(done.out)
                await asyncio.sleep(0)
                assert standstill.stdout == len(done.out)
                await guest.go_on(done.process)
            done.status, other.status = await done.process.wait(), await other.process.wait()
    assert (done.out, done.code, other.out) == (COUNTED, 7, b"typed")


@pytest.mark.parametrize("size", [0, 1, 1000, wire.WINDOW + 5, 3 * wire.WINDOW])
async def test_input_goes_on_at_the_exact_byte(size: int) -> None:
    typed = bytes(range(256)) * (size // 256) + bytes(range(size % 256))
    with rehearse() as connection:
        async with held(connection, shell("echo ready; sleep 0.2; cat"), until=b"ready", stdin=typed) as (
            before,
            standstill,
        ):
            assert standstill.stdin <= size
        async with talking(connection) as guest:
            after = await taken_up(guest, standstill, typed)
            after.status = await after.process.wait()
    assert before.out + after.out == b"ready\n" + typed and after.code == 0


async def test_what_ends_while_it_is_held_has_ended_so_for_whoever_takes_it_up() -> None:
    with rehearse() as connection:
        async with held(connection, shell("echo ready; sleep 0.1; echo last; kill -TERM $$"), until=b"ready") as (
            _,
            standstill,
        ):
            await asyncio.sleep(0.3)
        async with talking(connection) as guest:
            after = await taken_up(guest, standstill)
            after.status = await after.process.wait()
    assert (after.out, after.status.signal) == (b"last\n", signal.SIGTERM)


async def test_signals_reach_it_afterwards() -> None:
    trap = "import signal, sys\nsignal.signal(signal.SIGUSR1, lambda *_: sys.exit(9))\nprint('ready', flush=True)\nsignal.pause()"
    with rehearse() as connection:
        async with held(connection, python(trap), until=b"ready") as (_, standstill):
            pass
        async with talking(connection) as guest:
            after = await taken_up(guest, standstill)
            await after.process.signal(signal.SIGUSR1)
            assert (await after.process.wait()).exit_code == 9


async def test_other_programs_of_the_old_conversation_are_cut_off() -> None:
    with rehearse() as connection:
        async with talking(connection) as guest:
            more = asyncio.get_running_loop().create_future()
            done, other = (
                await begin(guest, shell(WAITS), Bytes(b"", more)),
                await begin(guest, shell("echo $$; exec sleep 600")),
            )
            await said(done, b"ready")
            await said(other, b"\n")
            standstill = await guest.hold_still(done.process)
        async with talking(connection) as guest:
            after = await taken_up(guest, standstill, b"word\n")
            await after.process.wait()
            await guest.end_payload()
    assert after.out == b"word\n" and not is_running(int(other.out))


async def test_nothing_is_taken_up_that_is_not_held() -> None:
    with rehearse() as connection:
        async with talking(connection) as guest:
            done = await begin(guest, shell("echo ready; cat"), Bytes(b"", asyncio.get_running_loop().create_future()))
            await said(done, b"ready")
            with pytest.raises(GuestRefused, match="nothing that is held has the number 9"):
                await taken_up(guest, Standstill(9))
        async with talking(connection) as guest:
            with pytest.raises(GuestRefused):
                await taken_up(guest, Standstill(1))


async def test_a_conversation_that_breaks_off_at_any_byte_leaves_it_to_be_taken_up() -> None:
    """What comes before a greeting means nothing: a half order, a half frame, a half greeting."""
    orders = (
        wire.PAD
        + wire.greeting(bytes(16))
        + wire.frame(wire.CALL, 5, b"add_account\0x")
        + wire.frame(wire.CALL, 6, b"set_clock")
    )
    with rehearse() as connection:
        async with held(connection, shell(COUNTS), until=b"\n50\n") as (before, standstill):
            pass
        for cut in range(len(orders)):
            await asyncio.get_running_loop().sock_sendall(connection, orders[:cut])
        async with talking(connection) as guest:
            after = await taken_up(guest, standstill)
            after.status = await after.process.wait()
    assert before.out + after.out == COUNTED and after.code == 7


async def test_what_has_ended_is_not_held() -> None:
    with rehearse() as connection:
        async with talking(connection) as guest:
            done = await ran(guest, shell("exit 3"))
            with pytest.raises(GuestRefused, match="the payload has ended"):
                await guest.hold_still(done.process)
            await guest.go_on(done.process)
            assert (await ran(guest, shell("exit 4"))).code == 4
