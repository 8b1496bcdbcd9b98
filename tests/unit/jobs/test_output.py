"""The output files of a job that goes on from a checkpoint hold each byte once, whatever its system did to them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from belljar.guest import Sink, Standstill, Streams
from belljar.guest.stdio import FdSink
from belljar.jobs.batch import output as module
from belljar.jobs.batch.output import Output

APPEND, TRUNCATE = os.O_WRONLY | os.O_CREAT | os.O_APPEND, os.O_TRUNC


def at(position: int) -> Standstill:
    return Standstill(1, stdout=position)


@contextmanager
def start(
    folder: Path, monkeypatch: pytest.MonkeyPatch, checkpoint: int = 0, position: int = 0, flags: int = 0
) -> Iterator[tuple[Output, Sink]]:
    """One start of the job: its file is opened as a batch system does, and put where belljar looks."""
    descriptor = os.open(folder / "job.out", flags | APPEND, 0o600)
    monkeypatch.setattr(module, "DESCRIPTORS", {"stdout": descriptor, "stderr": 99})
    output = Output(folder)
    try:
        sink = output.streams(Streams(None, FdSink(descriptor), None)).stdout
        assert sink is not None
        if checkpoint:
            output.go_on(checkpoint, at(position))
        yield output, sink
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("flags", [0, TRUNCATE], ids=["append", "truncate"])
async def test_what_was_written_after_the_checkpoint_is_not_there_twice(
    flags: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with start(tmp_path, monkeypatch, flags=flags) as (output, sink):
        await sink.write(b"1\n2\n")
        await output.note(1)
        await sink.write(b"3\n4\n")
        await output.note(2)  # the machine went on before this was asked
        await sink.write(b"5\n")  # then the node fails
    for checkpoint, text in ((2, b"1\n2\n3\n"), (1, b"1\n2\n")):  # the newest, or the one before if that is damaged
        with start(tmp_path, monkeypatch, checkpoint, len(text), flags) as (output, sink):
            assert (tmp_path / "job.out").read_bytes() == text
            await sink.write(b"...")
            await output.note(checkpoint + 10)
        assert (tmp_path / "job.out").read_bytes() == (tmp_path / "stdout").read_bytes() == text + b"..."


async def test_a_file_that_others_write_to_keeps_their_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One file for many jobs; or slurmstepd's word that a job is preempted."""
    with start(tmp_path, monkeypatch) as (output, sink):
        await sink.write(b"1\n")
        with (tmp_path / "job.out").open("ab") as file:
            file.write(b"theirs\n")
        await output.note(1)
    with start(tmp_path, monkeypatch, 1, 2) as (output, sink):
        await sink.write(b"2\n")
        await output.note(2)
        await sink.write(b"3\n")
    for _ in range(2):
        with start(tmp_path, monkeypatch, 2, 4) as (output, _):
            await output.note(2)
        assert (tmp_path / "job.out").read_bytes() == b"1\ntheirs\n2\n3\n"


async def test_output_of_which_no_copy_is_left_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with start(tmp_path, monkeypatch) as (output, sink):
        await sink.write(b"1\n2\n")
        await output.note(1)
    os.truncate(tmp_path / "stdout", 1)
    with start(tmp_path, monkeypatch, 1, 4, TRUNCATE):
        assert (tmp_path / "job.out").read_bytes() == b"1"
    assert "3 bytes of the job's earlier output are lost" in capsys.readouterr().err
    (tmp_path / "stdout").unlink()
    with start(tmp_path, monkeypatch, 1, 4, TRUNCATE):
        assert (tmp_path / "job.out").read_bytes() == b""
    assert "the job's earlier stdout cannot be put back" in capsys.readouterr().err


async def test_what_is_not_a_file_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    monkeypatch.setattr(module, "DESCRIPTORS", {"stdout": writer, "stderr": 99})
    sink, output = FdSink(writer), Output(tmp_path)
    assert output.streams(Streams(None, sink, None)).stdout is sink
    output.go_on(1, at(0))
    await output.note(1)
    os.close(reader)
    os.close(writer)
