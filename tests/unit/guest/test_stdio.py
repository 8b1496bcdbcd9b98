"""This process's own descriptors as sources and sinks."""

import asyncio
import contextlib
import fcntl
import gc
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from belljar.guest.stdio import FdSink, FdSource


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        with contextlib.suppress(OSError):
            os.close(end)


async def everything(source: FdSource) -> bytes:
    parts = []
    while data := await source.read(5):
        parts.append(data)
    return b"".join(parts)


async def test_a_pipe_is_read_to_its_end(pipe: tuple[int, int]) -> None:
    os.write(pipe[1], b"hello, world")
    os.close(pipe[1])
    assert await everything(FdSource(pipe[0])) == b"hello, world"


async def test_a_file_a_socket_and_a_terminal_are_read_to_their_end(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"in a file")
    file = os.open(tmp_path / "file", os.O_RDONLY)
    assert await everything(FdSource(file)) == b"in a file"
    os.close(file)
    here, there = socket.socketpair()
    with here, there:
        there.sendall(b"in a socket")
        there.close()
        assert await everything(FdSource(here.fileno())) == b"in a socket"
    master, slave = os.openpty()
    os.write(master, b"typed\n\4")
    assert await everything(FdSource(slave)) == b"typed\n"
    os.close(master)
    os.close(slave)


async def test_nothing_is_read_that_was_not_asked_for(pipe: tuple[int, int]) -> None:
    os.write(pipe[1], b"mine, and the next one's")
    assert await FdSource(pipe[0]).read(4) == b"mine"
    assert os.read(pipe[0], 100) == b", and the next one's"


async def test_what_a_cancelled_read_took_is_given_to_the_next(pipe: tuple[int, int]) -> None:
    source = FdSource(pipe[0])
    reading = asyncio.ensure_future(source.read(100))
    await asyncio.sleep(0)
    reading.cancel()
    os.write(pipe[1], b"not lost")
    assert await source.read(100) == b"not lost"


async def test_inherited_descriptors_stay_blocking(pipe: tuple[int, int]) -> None:
    before = [fcntl.fcntl(end, fcntl.F_GETFL) for end in pipe]
    await FdSink(pipe[1]).write(b"x")
    await FdSource(pipe[0]).read(1)
    assert [fcntl.fcntl(end, fcntl.F_GETFL) for end in pipe] == before


async def test_descriptors_that_somebody_made_non_blocking_work_too(pipe: tuple[int, int]) -> None:
    for end in pipe:
        os.set_blocking(end, False)
    source, sink, size = FdSource(pipe[0]), FdSink(pipe[1]), 1 << 20

    async def write() -> None:
        await sink.write(bytes(size))
        os.close(pipe[1])

    received = 0

    async def read() -> None:
        nonlocal received
        while data := await source.read(1 << 16):
            received += len(data)

    await asyncio.gather(write(), read())
    assert received == size


async def test_a_reader_that_is_gone_is_a_broken_pipe(pipe: tuple[int, int]) -> None:
    os.close(pipe[0])
    with pytest.raises(BrokenPipeError):
        await FdSink(pipe[1]).write(b"x")


async def test_a_full_disk_is_an_error_of_the_write() -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    with pytest.raises(OSError, match="No space"):
        await FdSink(full).write(b"x")
    os.close(full)


async def test_a_stream_keeps_no_thread(pipe: tuple[int, int]) -> None:
    before = set(threading.enumerate())
    sink, source = FdSink(pipe[1]), FdSource(pipe[0])
    await sink.write(b"one")
    assert await source.read(3) == b"one"
    for thread in set(threading.enumerate()) - before:
        thread.join(10)
        assert not thread.is_alive()


async def test_a_cancelled_read_that_fails_is_no_complaint(
    pipe: tuple[int, int], caplog: pytest.LogCaptureFixture
) -> None:
    source = FdSource(os.open("/", os.O_RDONLY))
    reading = asyncio.ensure_future(source.read(1))
    await asyncio.sleep(0)
    reading.cancel()
    with pytest.raises(IsADirectoryError):
        await source.read(1)
    del source, reading
    gc.collect()
    assert caplog.records == []


async def test_closing_a_sink_leaves_the_descriptor_open(pipe: tuple[int, int]) -> None:
    sink = FdSink(pipe[1])
    await sink.write(b"one")
    await sink.close()
    os.write(pipe[1], b"two")
    assert os.read(pipe[0], 10) == b"onetwo"


def test_a_read_that_never_comes_back_keeps_no_process_from_ending(pipe: tuple[int, int]) -> None:
    async def story() -> None:
        reading = asyncio.ensure_future(FdSource(pipe[0]).read(1))
        await asyncio.sleep(0)
        reading.cancel()

    asyncio.run(story())  # returns although the thread still waits
