"""What every `Guest` promises, fake or real; and conversations with the real agent in rehearsal."""

import asyncio
import os
import select
import signal
import stat
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from socket import socket

import pytest
from tests.contracts.payloads import IDENTITY, ME, begin, is_running, ran, said, shell, talking
from tests.fakes.guest import FakeGuest, Script
from tests.rehearsal import rehearse

from belljar.errors import AgentLost, GuestRefused
from belljar.guest import Guest
from belljar.model import MIB, FileSystem, Share, Transfer


@pytest.fixture(scope="module")
def channel() -> Iterator[socket]:
    """One agent for all: each test begins a conversation of its own, which ends what the last one left."""
    with rehearse() as connection:
        yield connection


# -- every Guest, fake or real -------------------------------------------------------------------------------------------


@asynccontextmanager
async def a_guest(kind: str) -> AsyncIterator[Guest]:
    if kind == "fake":
        guest = FakeGuest(Script(boots_in=0.0, exit_code=3, stdout=b"said\n", refuses={"mount": GuestRefused("no 9p")}))
        await guest.greet()
        yield guest
    else:
        with rehearse() as connection:
            async with talking(connection) as real:
                yield real


each_guest = pytest.mark.parametrize("kind", ["fake", "rehearsed"])
SAYS = "echo said; exit 3"


@each_guest
async def test_a_guest_proves_the_identity_it_was_told(kind: str) -> None:
    async with a_guest(kind) as guest:
        proof = await guest.identify(IDENTITY)
    assert (proof.hostname, proof.machine_id, proof.nonce) == (IDENTITY.hostname, IDENTITY.machine_id, IDENTITY.nonce)
    assert len(bytes.fromhex(proof.sample)) == 32 and abs(proof.clock_skew) < 0.1


@each_guest
async def test_a_guest_without_ssh_keys_of_its_template_has_none_to_renew(kind: str) -> None:
    async with a_guest(kind) as guest:
        await guest.identify(IDENTITY)
        await guest.renew_keys()
        await guest.renew_keys()
        assert (await ran(guest, shell(SAYS))).code == 3


@each_guest
async def test_a_payload_says_its_piece_and_ends(kind: str) -> None:
    async with a_guest(kind) as guest:
        await guest.add_account(ME)
        done = await ran(guest, shell(SAYS))
        await guest.end_payload()
    assert (done.out, done.code, done.stdout.is_closed) == (b"said\n", 3, True)


@each_guest
async def test_waiting_can_be_broken_off_and_taken_up_again(kind: str) -> None:
    async with a_guest(kind) as guest:
        done = await begin(guest, shell(SAYS))
        waiting = asyncio.ensure_future(done.process.wait())
        await asyncio.sleep(0)
        waiting.cancel()
        with suppress(asyncio.CancelledError):
            await waiting
        assert (await done.process.wait()).exit_code == 3
        assert (await done.process.wait()).exit_code == 3


@each_guest
async def test_signalling_what_has_ended_is_success(kind: str) -> None:
    async with a_guest(kind) as guest:
        done = await ran(guest, shell(SAYS))
        await done.process.signal(signal.SIGTERM)
        await done.process.resize(24, 80)
        assert (await done.process.wait()).exit_code == 3


@each_guest
async def test_a_kernel_without_9p_is_an_error_of_its_own(kind: str) -> None:
    async with a_guest(kind) as guest:
        with pytest.raises(GuestRefused):
            await guest.mount(Share("/data", "/mnt"), "share0", FileSystem("9p", "9p"))


@each_guest
async def test_everyone_who_waits_learns_that_the_guest_is_lost(kind: str) -> None:
    async with a_guest(kind) as guest:
        if kind == "fake":
            guest.script.runs_for = None  # type: ignore[attr-defined]
        done = await begin(guest, shell("sleep 1000"))
        waiting = asyncio.ensure_future(done.process.wait())
        await asyncio.sleep(0)
        guest.close()
        with pytest.raises(AgentLost):
            await waiting
        with pytest.raises(AgentLost):
            await guest.add_account(ME)


# -- conversations -------------------------------------------------------------------------------------------------------


async def test_a_new_conversation_ends_the_old_ones_payloads(channel: socket) -> None:
    async with talking(channel) as guest:
        done = await begin(guest, shell("echo $$; sleep 1000"))
        await said(done, b"\n")
        waiting = asyncio.ensure_future(done.process.wait())
        await guest.greet()
        with pytest.raises(AgentLost):
            await waiting
        await guest.end_payload()  # answers when the last process is gone
        assert not is_running(int(done.out))
        assert (await ran(guest, shell("exit 2"))).code == 2


async def test_end_payload_kills_what_runs(channel: socket) -> None:
    async with talking(channel) as guest:
        done = await begin(guest, shell("trap '' TERM; echo $$; while :; do sleep 1; done"))
        await said(done, b"\n")
        await guest.end_payload()
        assert not is_running(int(done.out))


async def test_an_agent_whose_host_is_gone_kills_the_payload_and_ends() -> None:
    with rehearse() as connection:
        async with talking(connection) as guest:
            done = await begin(guest, shell("echo $$; sleep 1000"))
            await said(done, b"\n")
            payload = os.pidfd_open(int(done.out))
    try:  # at its end the agent kills them, and does not wait
        assert select.select([payload], [], [], 20)[0]
    finally:
        os.close(payload)


# -- files ---------------------------------------------------------------------------------------------------------------


async def test_a_tree_goes_in_and_comes_out_as_it_was(channel: socket, tmp_path: Path) -> None:
    (tmp_path / "tree/below").mkdir(parents=True)
    (tmp_path / "tree/file").write_bytes(os.urandom(3 * MIB))
    (tmp_path / "tree/below/link").symlink_to("../file")
    (tmp_path / "tree/below").chmod(0o750)
    async with talking(channel) as guest:
        await guest.put(Transfer(str(tmp_path / "tree"), "inside"), ME, os.fsencode(tmp_path))
        await guest.get(Transfer(str(tmp_path / "back"), "inside"), ME, os.fsencode(tmp_path))
    assert (tmp_path / "back/file").read_bytes() == (tmp_path / "tree/file").read_bytes()
    assert (tmp_path / "back/below/link").readlink() == Path("../file")
    assert stat.S_IMODE((tmp_path / "back/below").stat().st_mode) == 0o750
