"""The output files of a job that goes on from a checkpoint hold each byte once, whatever its system did to them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from belljar.guest import Standstill
from belljar.jobs.batch import output as module
from belljar.jobs.batch.output import Output
from belljar.machine.extras import Equipment
from belljar.model import Account, Payload, RunPayload, StdinKind

APPEND, TRUNCATE = os.O_WRONLY | os.O_CREAT | os.O_APPEND, os.O_TRUNC
WORK = RunPayload(Payload((b"x",), Account("a", 1, 1, "a"), stderr=StdinKind.STDOUT))


class Start:
    """One start of the job, in which it goes on from a checkpoint, and writes."""

    def __init__(self, folder: Path, descriptor: int) -> None:
        self.folder, self._descriptor, self._output = folder, descriptor, Output()

    async def begin(self, checkpoint: int, position: int) -> None:
        folder = self.folder / str(checkpoint)
        origin = SimpleNamespace(folder=folder, standstill=Standstill(1, stdout=position)) if checkpoint else None
        life = SimpleNamespace(request=SimpleNamespace(work=WORK, restore=str(self.folder)), checkpoint=origin)
        await self._output.prepare(life, Equipment())  # type: ignore[arg-type]

    def write(self, data: bytes) -> None:
        os.write(self._descriptor, data)

    async def freeze(self, checkpoint: int) -> None:
        (self.folder / str(checkpoint)).mkdir()
        await self._output.freeze(self.folder / str(checkpoint))


@contextmanager
def started(folder: Path, monkeypatch: pytest.MonkeyPatch, flags: int = 0) -> Iterator[Start]:
    """Its file is opened as a batch system does, and put where belljar looks."""
    descriptor = os.open(folder / "job.out", flags | APPEND, 0o600)
    monkeypatch.setattr(module, "DESCRIPTORS", {"stdout": descriptor})
    try:
        yield Start(folder, descriptor)
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("flags", [0, TRUNCATE], ids=["append", "truncate"])
async def test_what_was_written_after_the_checkpoint_is_not_there_twice(
    flags: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with started(tmp_path, monkeypatch, flags) as start:
        await start.begin(0, 0)
        start.write(b"1\n2\n")
        await start.freeze(1)
        start.write(b"3\n4\n")
        await start.freeze(2)
        start.write(b"5\n")  # then the node fails
    for checkpoint, text in ((2, b"1\n2\n3\n4\n"), (1, b"1\n2\n")):  # the newest, or the one before if that is damaged
        with started(tmp_path, monkeypatch, flags) as start:
            await start.begin(checkpoint, len(text))
            assert (tmp_path / "job.out").read_bytes() == text
            start.write(b"...")
            await start.freeze(checkpoint + 10)
        assert (tmp_path / "job.out").read_bytes() == (tmp_path / "stdout").read_bytes() == text + b"..."


async def test_of_a_life_without_a_checkpoint_that_is_whole_nothing_is_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with started(tmp_path, monkeypatch) as start:
        await start.begin(0, 0)
        start.write(b"of a life that is over\n")
        await start.freeze(1)
    for checkpoint, position in ((0, 0), (2, 2)):  # it begins anew, and goes on from there
        with started(tmp_path, monkeypatch, TRUNCATE) as start:
            await start.begin(checkpoint, position)
            if not checkpoint:
                start.write(b"1\n")
                await start.freeze(2)
    assert (tmp_path / "job.out").read_bytes() == b"1\n"


async def test_a_file_that_others_write_to_keeps_their_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One file for many jobs; or slurmstepd's word that a job is preempted."""
    with started(tmp_path, monkeypatch) as start:
        await start.begin(0, 0)
        start.write(b"1\n")
        with (tmp_path / "job.out").open("ab") as file:
            file.write(b"theirs\n")
        await start.freeze(1)
    with started(tmp_path, monkeypatch) as start:
        await start.begin(1, 2)
        start.write(b"2\n")
        await start.freeze(2)
        start.write(b"3\n")
    for number in (3, 4):
        with started(tmp_path, monkeypatch) as start:
            await start.begin(2, 4)
            await start.freeze(number)
        assert (tmp_path / "job.out").read_bytes() == b"1\ntheirs\n2\n3\n"


async def test_output_of_which_no_copy_is_left_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with started(tmp_path, monkeypatch) as start:
        await start.begin(0, 0)
        start.write(b"1\n2\n")
        await start.freeze(1)
    os.truncate(tmp_path / "stdout", 1)
    with started(tmp_path, monkeypatch, TRUNCATE) as start:
        await start.begin(1, 4)
        assert (tmp_path / "job.out").read_bytes() == b"1"
    assert "3 bytes of the job's earlier output are lost" in capsys.readouterr().err
    (tmp_path / "stdout").unlink()
    with started(tmp_path, monkeypatch, TRUNCATE) as start:
        await start.begin(1, 4)
        assert (tmp_path / "job.out").read_bytes() == b""
    assert "the job's earlier output cannot be put back" in capsys.readouterr().err


async def test_what_is_not_a_file_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    monkeypatch.setattr(module, "DESCRIPTORS", {"stdout": writer})
    start = Start(tmp_path, writer)
    await start.begin(0, 0)
    await start.freeze(1)
    await start.begin(1, 0)
    assert sorted(os.listdir(tmp_path)) == ["1"]
    os.close(reader)
    os.close(writer)
