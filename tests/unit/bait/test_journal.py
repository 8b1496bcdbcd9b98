"""What a bait wrote down is there after a crash, and nothing else is."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from belljar.bait.decisions.step import Entry, State
from belljar.bait.journal import FILE, Journal, read
from belljar.errors import NoSpace


def test_the_last_line_of_a_job_counts_and_closed_ones_are_forgotten(tmp_path: Path) -> None:
    one = Journal(tmp_path)
    one.write(Entry("1", State.ARRIVED, 1.0))
    one.write(Entry("2_7", State.ARRIVED, 2.0))
    one.write(Entry("1", State.VM_BOOTING, 3.0, machines=("0" * 12,), tries=1, why="a\nb"))
    one.write(Entry("2_7", State.CLOSED, 4.0))
    assert read(tmp_path) == {"1": Entry("1", State.VM_BOOTING, 3.0, machines=("0" * 12,), tries=1, why="a\nb")}
    assert (tmp_path / FILE).stat().st_mode & 0o777 == 0o600


def test_a_line_that_was_cut_off_is_none(tmp_path: Path) -> None:
    one = Journal(tmp_path)
    one.write(Entry("1", State.ARRIVED, 1.0))
    one.write(Entry("1", State.STOPPED, 2.0))
    whole = (tmp_path / FILE).read_bytes()
    for length in range(len(whole)):
        (tmp_path / FILE).write_bytes(whole[:length])
        states = {entry.state for entry in read(tmp_path).values()}
        assert states <= {State.ARRIVED, State.STOPPED} and (length < whole.index(b"\n") or states)
    (tmp_path / FILE).write_bytes(b'{"job": 7}\n[]\n\xff\n' + whole)
    assert read(tmp_path)["1"].state is State.STOPPED


def test_a_line_that_did_not_fit_does_not_spoil_the_next_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write_half(descriptor: int, data: bytes) -> None:
        os.write(descriptor, data[: len(data) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    one = Journal(tmp_path)
    one.write(Entry("1", State.ARRIVED, 1.0))
    with monkeypatch.context() as full, pytest.raises(NoSpace):
        full.setattr("belljar.host.files.write_all", write_half)
        one.write(Entry("1", State.STOPPED, 2.0))
    one.write(Entry("2", State.ARRIVED, 3.0))
    assert read(tmp_path) == one.entries == {one: Entry(one, State.ARRIVED, at) for one, at in (("1", 1.0), ("2", 3.0))}


def test_it_does_not_grow_for_ever(tmp_path: Path) -> None:
    one = Journal(tmp_path)
    one.write(Entry("1", State.STOPPED, 1.0))
    line = (tmp_path / FILE).read_bytes()
    (tmp_path / FILE).write_bytes(line * 12_000)
    one.write(Entry("1", State.RUNNING, 9.0))
    assert (tmp_path / FILE).stat().st_size < 1000 and read(tmp_path)["1"].state is State.RUNNING
