"""The journal: on disk before the act, readable after any accident."""

from __future__ import annotations

import errno
import os
import resource
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from belljar.errors import NoSpace, PositionLost
from belljar.journal import JOURNAL, Ledger, Record, follow, read
from belljar.model import State


def test_events_come_back_in_order_with_their_facts(tmp_path: Path) -> None:
    record = Record(tmp_path)
    record.state(State.PREPARING, note="a\nb")
    record.intend("overlay", Path("/x/y"))
    record.close()
    first, second = read(tmp_path)
    assert (first["event"], first["state"], first["note"]) == ("state", "preparing", "a\nb")
    assert (second["event"], second["what"], second["path"]) == ("make", "overlay", "/x/y")


def test_each_event_is_on_disk_when_the_call_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record, synced = Record(tmp_path), []
    sync = os.fdatasync

    def spy(descriptor: int) -> None:
        sync(descriptor)
        synced.append(len(read(tmp_path)))

    monkeypatch.setattr(os, "fdatasync", spy)
    record.state(State.PREPARING)
    record.state(State.STARTING)
    record.close()
    assert synced == [1, 2]


def test_each_event_outlives_a_writer_that_is_killed(tmp_path: Path) -> None:
    if (child := os.fork()) == 0:
        record = Record(tmp_path)
        record.state(State.PREPARING)
        record.state(State.STARTING)
        os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert [event["state"] for event in read(tmp_path)] == ["preparing", "starting"]


@pytest.mark.parametrize("torn", [b'{"time":1,"eve', b"\xff\xfe", b"[1,2]", b'{"event":3}', b"null"])
def test_a_torn_or_foreign_line_is_left_out(tmp_path: Path, torn: bytes) -> None:
    record = Record(tmp_path)
    record.state(State.PREPARING)
    record.close()
    with open(tmp_path / JOURNAL, "ab") as file:
        file.write(torn)
    assert [event["state"] for event in read(tmp_path)] == ["preparing"]


def test_a_machine_without_a_journal_has_no_events(tmp_path: Path) -> None:
    assert read(tmp_path / "none") == []


def test_a_full_disk_is_told_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = Record(tmp_path)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(NoSpace):
        record.state(State.PREPARING)


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """The kernel takes what fits and refuses the rest, as on a disk that gets full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_half_a_line_is_a_full_disk_too_and_spoils_no_later_line(tmp_path: Path) -> None:
    record = Record(tmp_path)
    record.state(State.PREPARING)
    with files_of_at_most((tmp_path / JOURNAL).stat().st_size + 20), pytest.raises(NoSpace):
        record.intend("overlay", Path("/x/y"))
    record.state(State.CLEANING)
    record.close()
    assert [event.get("state") for event in read(tmp_path)] == ["preparing", "cleaning"]


def test_half_a_line_of_the_ledger_spoils_no_other(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    ledger.append({"id": "a"}, 0.0)
    (path,) = tmp_path.iterdir()
    with files_of_at_most(path.stat().st_size + 5), pytest.raises(NoSpace):
        ledger.append({"id": "torn"}, 0.0)
    ledger.append({"id": "b"}, 0.0)
    assert [row["id"] for row, _ in ledger.since()] == ["a", "b"]


def test_a_follower_sees_what_was_and_what_comes_and_stops_at_the_end(tmp_path: Path) -> None:
    record, seen = Record(tmp_path), []
    record.state(State.PREPARING)
    first = threading.Event()

    def look() -> None:
        for event in follow(tmp_path):
            seen.append(event["state"])
            first.set()

    thread = threading.Thread(target=look)
    thread.start()
    assert first.wait(10)
    record.state(State.STARTING)
    record.state(State.DONE)
    thread.join(10)
    assert seen == ["preparing", "starting", "done"] and not thread.is_alive()


def test_a_follower_of_a_folder_that_goes_stops_too(tmp_path: Path) -> None:
    folder = tmp_path / "machine"
    folder.mkdir()
    record = Record(folder)
    record.state(State.PREPARING)
    events = follow(folder)
    assert next(events)["state"] == "preparing"
    folder.rename(tmp_path / "ended")
    assert list(events) == []


def test_the_ledger_keeps_one_line_per_machine_and_survives_a_torn_one(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    ledger.append({"id": "a"}, 0.0)
    with open(tmp_path / "ledger-1970-01.jsonl", "ab") as file:
        file.write(b'{"id": "to\n')
    ledger.append({"id": "b"}, 86400.0 * 40)
    assert [row["id"] for row, _ in ledger.since()] == ["a", "b"]
    assert len(list(tmp_path.iterdir())) == 2


def test_a_row_is_found_from_the_month_its_machine_began_in(tmp_path: Path) -> None:
    ledger, day = Ledger(tmp_path), 86400.0
    november, january = 1_795_000_000.0, 1_800_000_000.0 + 2 * day
    assert ledger.row("0123456789ab", since=november) is None
    ledger.append({"id": "ffffffffffff", "reason": "not of 0123456789ab"}, november)
    ledger.append({"id": "0123456789ab", "exit_code": 3}, january)
    assert ledger.row("0123456789ab", since=november) == {"id": "0123456789ab", "exit_code": 3}
    assert ledger.row("0123456789ab", since=january + 40 * day) is None
    assert ledger.row("ffffffffffff", since=0.0) is not None


# -- the ledger, read on from where one stopped -------------------------------------------------------------------------

OCTOBER, NOVEMBER, DECEMBER = 1_792_000_000.0, 1_794_000_000.0, 1_796_600_000.0


def taken(ledger: Ledger, position: str = "") -> tuple[list[str], str]:
    """The ids of the rows behind this position, and the one behind them all."""
    pairs = list(ledger.since(position))
    return [row["id"] for row, _ in pairs], pairs[-1][1] if pairs else position


def test_reading_goes_on_where_it_stopped(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    assert taken(ledger) == ([], "")
    for id in "ab":
        ledger.append({"id": id}, NOVEMBER)
    first, position = taken(ledger)
    assert (first, position) == (["a", "b"], ledger.end())
    assert taken(ledger, position) == ([], position)
    ledger.append({"id": "c"}, NOVEMBER)
    assert taken(Ledger(tmp_path), position)[0] == ["c"]


def test_each_row_has_its_own_position(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    for id, moment in (("a", OCTOBER), ("b", NOVEMBER), ("c", NOVEMBER), ("d", DECEMBER)):
        ledger.append({"id": id}, moment)
    positions = ["", *(position for _, position in ledger.since())]
    assert [taken(ledger, position)[0] for position in positions] == [list("abcd"), list("bcd"), list("cd"), ["d"], []]


def test_a_new_months_file_loses_no_row_of_the_last_one(tmp_path: Path) -> None:
    """Who wrote before midnight may be later than who wrote after."""
    ledger = Ledger(tmp_path)
    ledger.append({"id": "a"}, NOVEMBER)
    ledger.append({"id": "b"}, DECEMBER)
    _, position = taken(ledger)
    ledger.append({"id": "late"}, NOVEMBER)
    ledger.append({"id": "c"}, DECEMBER)
    assert taken(ledger, position)[0] == ["late", "c"]


def test_half_a_row_is_left_until_it_is_whole(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    ledger.append({"id": "a"}, NOVEMBER)
    (file,) = tmp_path.iterdir()
    with open(file, "ab") as torn:
        torn.write(b'{"id": "b')
    ids, position = taken(ledger)
    assert ids == ["a"] and ledger.end() == position
    ledger.append({"id": "c"}, NOVEMBER)  # which puts the torn one on a line of its own
    assert taken(ledger, position)[0] == ["c"]


@pytest.mark.parametrize("accident", ["removed", "cut"])
def test_a_ledger_that_was_taken_away_is_told(tmp_path: Path, accident: str) -> None:
    ledger = Ledger(tmp_path)
    ledger.append({"id": "a"}, NOVEMBER)
    position = ledger.end()
    (file,) = tmp_path.iterdir()
    file.unlink() if accident == "removed" else os.truncate(file, 3)
    with pytest.raises(PositionLost, match=r"ledger-2026-11\.jsonl"):
        taken(ledger, position)


@pytest.mark.parametrize("position", ["x", "2026-11", "2026-11:x", "2026-11:-1", "2026-11:1:2"])
def test_what_is_no_position_is_refused(tmp_path: Path, position: str) -> None:
    with pytest.raises(PositionLost, match=position):
        taken(Ledger(tmp_path), position)
