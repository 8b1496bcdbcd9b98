"""What a payload without a listener writes: the latest part of it, whole and in order, and followed across a change of file."""

import os
import threading
from pathlib import Path

import pytest

from belljar.machine.life.output import FileSink, RollingFile, kept


async def test_a_stream_is_kept_byte_by_byte(tmp_path: Path) -> None:
    sink = FileSink(tmp_path / "stdout.log", 1 << 20)
    data = [os.urandom(5000) for _ in range(20)]
    for one in data:
        await sink.write(one)
    await sink.close()
    assert b"".join(kept(tmp_path / "stdout.log")) == b"".join(data)
    assert (tmp_path / "stdout.log").stat().st_mode & 0o777 == 0o600


async def test_nothing_written_is_no_file(tmp_path: Path) -> None:
    sink = FileSink(tmp_path / "stderr.log", 100)
    await sink.close()
    assert os.listdir(tmp_path) == [] and list(kept(tmp_path / "stderr.log")) == []


async def test_a_flood_leaves_its_latest_part(tmp_path: Path) -> None:
    sink = FileSink(tmp_path / "stdout.log", 10_000)
    words = b"".join(b"%7d\n" % number for number in range(100_000))
    for begin in range(0, len(words), 800):
        await sink.write(words[begin : begin + 800])
    await sink.close()
    rest = b"".join(kept(tmp_path / "stdout.log"))
    assert words.endswith(rest) and 5_000 <= len(rest) <= 12_000
    assert sorted(os.listdir(tmp_path)) == ["stdout.log", "stdout.log.1"]


async def test_a_link_in_its_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "stdout.log").symlink_to("/dev/null")
    with pytest.raises(OSError):
        await FileSink(tmp_path / "stdout.log", 100).write(b"x")


def test_who_follows_sees_every_byte_across_a_change_of_file(tmp_path: Path) -> None:
    folder = tmp_path / "machine"
    folder.mkdir()
    file = RollingFile(folder / "stdout.log", 1000)
    file.write(b"begin\n")
    words = [b"%d\n" % number for number in range(300)]
    read: list[bytes] = []
    got = threading.Semaphore(0)

    def follow() -> None:
        for chunk in kept(folder / "stdout.log", follow=True):
            read.append(chunk)
            got.release()

    thread = threading.Thread(target=follow)
    thread.start()
    for word in words:
        assert got.acquire(timeout=20)
        while got.acquire(blocking=False):
            pass
        file.write(word)
    file.close()
    os.rename(folder, tmp_path / "ended")
    thread.join(20)
    assert not thread.is_alive() and b"".join(read) == b"begin\n" + b"".join(words)
    assert (tmp_path / "ended/stdout.log.1").exists()
