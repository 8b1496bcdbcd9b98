"""A payload's small files, its program apart from its name, signals for its leader alone, and copies of changes only."""

import asyncio
import os
import select
import signal
import stat
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from socket import socket

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.contracts.payloads import ME, begin, payload, said, talking
from tests.rehearsal import rehearse

from belljar.agent.wire import with_nul, without_nul
from belljar.errors import GuestRefused
from belljar.model import PlainFile, StdinKind, Transfer


@pytest.fixture(scope="module")
def channel() -> Iterator[socket]:
    with rehearse() as connection:
        yield connection


@given(st.lists(st.sampled_from([b"\0", b"\1", b"\2", b"x", b"\1\1", b"\1\2"])).map(b"".join))
@settings(max_examples=300)
def test_any_content_is_a_word_without_nul_and_comes_back(data: bytes) -> None:
    assert b"\0" not in without_nul(data) and with_nul(without_nul(data)) == data


@pytest.mark.parametrize(
    "file",
    [
        PlainFile(b"/proc/no/such", b"x"),
        PlainFile(b"/proc/version/below", None),
        PlainFile(b"/dev", b"a folder is there"),
    ],
    ids=repr,
)
async def test_a_file_that_cannot_be_made_keeps_the_payload_from_starting(
    channel: socket, tmp_path: Path, file: PlainFile
) -> None:
    async with talking(channel) as guest:
        with pytest.raises(GuestRefused):
            await begin(guest, payload(b"touch", os.fsencode(tmp_path / "ran"), files=(file,)))
        with pytest.raises(GuestRefused):
            await guest.place((file,), ME)
    assert not (tmp_path / "ran").exists()


async def test_files_are_there_byte_for_byte_before_the_payload_is(channel: socket, tmp_path: Path) -> None:
    content = bytes(range(256)) * 40 + b"\1\1\0\1\2\xff\xff"
    path = tmp_path / "a/b/data"
    files = (
        PlainFile(os.fsencode(path), content, 0o640),
        PlainFile(os.fsencode(tmp_path / "own"), None, 0o700),
        PlainFile(os.fsencode(tmp_path / "nothing"), b"", 0o444, is_users=False),
    )
    async with talking(channel) as guest:
        ran = await begin(guest, payload(b"cat", os.fsencode(path), files=files))
        ran.status = await ran.process.wait()
    assert (ran.code, ran.out) == (0, content)
    assert [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("a/b/data", "own", "nothing")] == [
        0o640,
        0o700,
        0o444,
    ]
    assert (tmp_path / "own").is_dir() and (tmp_path / "nothing").read_bytes() == b""


async def test_a_program_runs_under_another_name(channel: socket) -> None:
    async with talking(channel) as guest:
        ran = await begin(guest, payload(b"-sh", b"-c", b'echo "$0"', program=b"/bin/sh"))
        ran.status = await ran.process.wait()
        missing = await begin(guest, payload(b"sh", program=b"/no/such/program"))
        missing.status = await missing.process.wait()
    assert ran.out == b"-sh\n"
    assert missing.code == 127


async def test_a_program_that_is_a_script_finds_itself_at_its_own_path(channel: socket, tmp_path: Path) -> None:
    path = os.fsencode(tmp_path / "spool/slurm_script")
    script = PlainFile(path, b'#!/bin/sh\necho "$0" "$#" "$2"\n', 0o700)
    async with talking(channel) as guest:
        ran = await begin(guest, payload(path, b"a b", b"\xff'", program=path, files=(script,)))
        ran.status = await ran.process.wait()
    assert ran.out == path + b" 2 \xff'\n"


TWO = b"""
import os, signal, sys
reader, writer = os.pipe()
child = os.fork()
if not child:
    signal.signal(signal.SIGUSR1, lambda *_: os._exit(7))
    os.write(writer, b"x")
    while True:
        signal.pause()
got = []
signal.signal(signal.SIGUSR1, lambda *_: got.append(1))
os.read(reader, 1)
print("up", flush=True)
while not got:
    signal.pause()
os.kill(child, 0)
signal.alarm(20)
if sys.argv[1] == "alone":
    os.kill(child, signal.SIGKILL)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.parametrize(("alone", "end"), [(True, b"-9"), (False, b"7")])
async def test_a_signal_is_for_the_leader_alone_or_for_all(channel: socket, alone: bool, end: bytes) -> None:
    words = (b"python3", b"-c", TWO, b"alone" if alone else b"all")
    async with talking(channel) as guest:
        ran = await begin(guest, payload(*words))
        await said(ran, b"up")
        await ran.process.signal(signal.SIGUSR1, alone=alone)
        ran.status = await ran.process.wait()
    assert ran.out.split() == [b"up", end]


async def test_only_what_changed_comes_back_and_what_is_skipped_stays(channel: socket, tmp_path: Path) -> None:
    outside, inside, back = tmp_path / "outside", tmp_path / "inside", tmp_path / "back"
    (outside / "deep").mkdir(parents=True)
    for name in ("same", "changed", "job.out", "deep/same"):
        (outside / name).write_text("as it was")
    async with talking(channel) as guest:
        await guest.put(Transfer(str(outside), str(inside), ("job.out",)), ME, None)
        assert not (inside / "job.out").exists() and (inside / "deep/same").exists()
        script = b"cd $1; echo new > changed; echo new > made; mkdir -p deep/er; echo x > deep/er/x; echo no > job.out"
        ran = await begin(guest, payload(b"sh", b"-c", script, b"sh", os.fsencode(inside), stdin=StdinKind.NULL))
        ran.status = await ran.process.wait()
        assert ran.code == 0
        await guest.get(Transfer(str(back), str(inside), ("job.out",), changed_only=True), ME, None)
        await guest.get(Transfer(str(tmp_path / "all"), str(inside)), ME, None)
    found = {str(path.relative_to(back)) for path in back.rglob("*") if path.is_file()}
    assert found == {"changed", "made", "deep/er/x"}
    assert (tmp_path / "all/same").exists() and (tmp_path / "all/job.out").exists()


TURNS = b"for n in 1 2 3; do echo out $n; echo err $n >&2; done"


@pytest.mark.parametrize("closed", [False, True])
async def test_errors_that_go_where_the_output_goes_keep_their_place_in_it(channel: socket, closed: bool) -> None:
    asked = payload(b"sh", b"-c", TURNS, stderr=StdinKind.STDOUT)
    if closed:
        asked = replace(asked, stdout=StdinKind.CLOSED)
    async with talking(channel) as guest:
        ran = await begin(guest, asked)
        ran.status = await ran.process.wait()
    if closed:
        assert ran.out == ran.err == b"" and ran.code != 0
    else:
        assert ran.out == b"".join(b"out %d\nerr %d\n" % (n, n) for n in (1, 2, 3)) and ran.err == b""


LEFT_BEHIND = b"""
sh -c 'trap "sleep 0.3; echo saved; exit 0" TERM; echo up; while :; do sleep 0.05; done' &
wait
"""


@pytest.mark.parametrize(("lingers", "out"), [(True, b"up\nsaved\n"), (False, b"up\n")])
async def test_after_term_what_the_leader_left_may_end_by_itself(channel: socket, lingers: bool, out: bytes) -> None:
    async with talking(channel) as guest:
        ran = await begin(guest, payload(b"sh", b"-c", LEFT_BEHIND, lingers=lingers))
        await said(ran, b"up")
        await ran.process.signal(signal.SIGTERM)
        ran.status = await ran.process.wait()
    assert ran.out == out and ran.status.signal == signal.SIGTERM


@pytest.mark.parametrize("how", ["kill", "end"])
async def test_what_lingers_can_still_be_ended(channel: socket, how: str) -> None:
    stubborn = b"trap 'exit 5' TERM; setsid sh -c 'trap \"\" TERM; echo up; while :; do sleep 0.05; done' & wait"
    async with talking(channel) as guest:
        ran = await begin(guest, payload(b"sh", b"-c", stubborn, lingers=True))
        await said(ran, b"up")
        await ran.process.signal(signal.SIGTERM)
        await asyncio.sleep(0.2)  # until the leader is gone, which nobody is told
        if how == "kill":
            await ran.process.signal(signal.SIGKILL)
            ran.status = await ran.process.wait()
            assert ran.code == 5  # its own end, though others outlived it
        else:
            await guest.end_payload()


async def test_without_term_nothing_lingers(channel: socket) -> None:
    async with talking(channel) as guest:
        ran = await begin(guest, payload(b"sh", b"-c", b"sleep 1000 & exit 3", lingers=True))
        ran.status = await ran.process.wait()
    assert ran.code == 3


@pytest.fixture
def sign_of_life(tmp_path: Path) -> Iterator[tuple[bytes, int]]:
    """A pipe's name, and its reading end, which is readable once all that had it open are gone."""
    path = os.fsencode(tmp_path / "alive")
    os.mkfifo(path)
    reading = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    yield path, reading
    os.close(reading)


def is_gone(reading: int, within: float) -> bool:
    return bool(select.select([reading], [], [], within)[0])


async def test_what_a_payload_leaves_goes_on_until_the_end(channel: socket, sign_of_life: tuple[bytes, int]) -> None:
    path, reading = sign_of_life
    async with talking(channel) as guest:
        script = b'setsid sleep 1000 >"$1" & sleep 1000 >"$1" & : >"$1"; exit 3'  # both have its stderr, too
        ran = await begin(guest, payload(b"sh", b"-c", script, b"sh", path, leaves=True))
        ran.status = await ran.process.wait()
        assert ran.code == 3
        second = await begin(guest, payload(b"true"))
        second.status = await second.process.wait()
        assert not is_gone(reading, 0)
        await guest.end_payload()
        assert is_gone(reading, 20)


async def test_one_that_is_killed_leaves_nothing(channel: socket, sign_of_life: tuple[bytes, int]) -> None:
    path, reading = sign_of_life
    async with talking(channel) as guest:
        script = b'setsid sleep 1000 >"$1" & : >"$1"; echo up; wait'
        ran = await begin(guest, payload(b"sh", b"-c", script, b"sh", path, leaves=True))
        await said(ran, b"up")
        await ran.process.signal(signal.SIGKILL)
        ran.status = await ran.process.wait()
        assert ran.status.signal == signal.SIGKILL and is_gone(reading, 20)
