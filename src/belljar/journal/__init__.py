"""The journal: what happened to a machine, one JSON line an event, on disk before the act it announces.

`Record` writes, `read` replays, `follow` waits for more. `Ledger` keeps one line for each machine that ended.
A line that was being written when the power failed is left out on reading: its act was never begun. A disk that turns read-only
keeps what was forced onto it, and nothing else (docs/develop/decisions/0003-a-quick-start.md).
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from belljar.errors import BelljarError, PositionLost
from belljar.hints import Any
from belljar.host.files import append_line, no_space_as_error, write_all
from belljar.model import State, dumps, to_json

JOURNAL = "journal.jsonl"
JOB_KILLED = "job-killed"  # told by the batch system, after its machine was killed with it
LONGEST_JOURNAL, LONGEST_ROW = 16 << 20, 1 << 20  # bytes
DAY, MONTH = 86400.0, r"\d{4}-\d\d"

Event = dict[str, Any]


class Record:
    """The journal of one machine, open for writing by its supervisor. *copy*: a folder with another one, written where it can be."""

    def __init__(self, folder: Path, copy: Path | None = None) -> None:
        self.folder = folder
        self._path = folder / JOURNAL
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._descriptor, self._copy = os.open(self._path, flags, 0o600), -1
        self._size = os.lseek(self._descriptor, 0, os.SEEK_END)
        with suppress(OSError):
            self._copy = -1 if copy is None else os.open(copy / JOURNAL, flags, 0o600)

    def write(self, event: str, **details: Any) -> None:
        """What must be known before the next act: on disk when it returns. Raises NoSpace when the disk is full."""
        line = json.dumps({"time": time.time(), "event": event, **to_json(details)}, separators=(",", ":")) + "\n"
        with no_space_as_error(self._path):
            try:
                write_all(self._descriptor, line.encode("ascii"))
            except OSError:
                with suppress(OSError):  # a disk that gets full takes half a line; the next one begins where that began
                    os.ftruncate(self._descriptor, self._size)
                raise
            self._size += len(line)
            os.fdatasync(self._descriptor)
        with suppress(OSError):
            write_all(self._copy, line.encode("ascii"))

    def state(self, state: State, **details: Any) -> None:
        self.write("state", state=state, **details)

    def intend(self, what: str, path: Path) -> None:
        """Say that this file or folder is about to be made, so that whoever reads this can unmake it."""
        self.write("make", what=what, path=str(path))

    def tell(self, event: str, **details: Any) -> None:
        """What happened, and nobody has to undo: where it cannot be written a line is missing, and nothing else."""
        with suppress(OSError, BelljarError):
            self.write(event, **details)

    def close(self) -> None:
        for descriptor in {self._descriptor, self._copy} - {-1}:
            os.close(descriptor)
        self._descriptor = self._copy = -1


def read(folder: Path) -> list[Event]:
    """All events of a machine, oldest first. Missing journal: none. Torn or foreign lines are left out."""
    try:
        descriptor = os.open(folder / JOURNAL, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # it may be a pipe
        with open(descriptor, "rb") as file:
            return parse(file.read(LONGEST_JOURNAL) or b"")
    except FileNotFoundError:
        return []


def follow(folder: Path) -> Iterator[Event]:
    """The events so far, then those to come, as they are written; ends when the machine is done or its folder gone."""
    from belljar.host.watch import changes

    for data in changes(folder / JOURNAL):
        for event in parse(data):
            yield event
            if event.get("state") == State.DONE.value:
                return


def parse(data: bytes) -> list[Event]:
    """The events in these lines of a journal. Torn or foreign ones are left out."""
    return [event for event in _objects(data.splitlines()) if isinstance(event.get("event"), str)]


def _objects(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """The lines that are an object in JSON, read. Torn or foreign ones are left out."""
    for line in lines:
        with suppress(ValueError, RecursionError):
            if isinstance(value := json.loads(line), dict):
                yield value


class Ledger:
    """One line per machine that ended, in a file per month. The only input of accounting."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def append(self, row: dict[str, Any], now: float) -> None:
        """Add a row, on a line of its own, on disk when this returns. Others may do so at the same time. Raises NoSpace if not whole."""
        append_line(self.folder / _file_of(now), dumps(row), durable=True)

    def rows(self, since: float = 0.0, text: bytes = b"") -> Iterator[dict[str, Any]]:
        """Every row, oldest first; or those with this text, of the months in which machines ended *since*."""
        for path in self._files(_file_of(since - DAY)):  # the clock may have been set back a little
            with open(path, "rb") as file:
                yield from _objects(line for line in _lines(file) if text in line)

    def row(self, id: str, since: float) -> dict[str, Any] | None:
        """The row of a machine that began at *since*; None where there is none."""
        return next((row for row in self.rows(since - DAY, f'"{id}"'.encode()) if row.get("id") == id), None)

    def since(self, position: str = "") -> Iterator[tuple[dict[str, Any], str]]:
        """The rows after *position*, oldest first, each with the position after it; without one, all. Raises
        PositionLost where the ledger was cut or a file of it removed."""
        read = _position(position)
        self._check(read)
        for path in self._files(f"ledger-{min(read, default='')}"):
            month = path.stem.removeprefix("ledger-")
            with open(path, "rb") as file:
                file.seek(read.get(month, 0))
                for line in _lines(file):
                    if not line.endswith(b"\n") and len(line) < LONGEST_ROW:
                        break  # it is being written
                    read[month] = read.get(month, 0) + len(line)
                    yield from ((row, _text(read)) for row in _objects([line]))

    def end(self) -> str:
        """The position behind the last whole row."""
        return _text({path.stem.removeprefix("ledger-"): _whole(path) for path in self._files()[-2:]})

    def _files(self, first: str = "") -> list[Path]:
        """From this name on, oldest first."""
        return sorted(path for path in self.folder.glob("ledger-*.jsonl") if path.name >= first)

    def _check(self, read: dict[str, int]) -> None:
        for month, offset in read.items():
            path = self.folder / f"ledger-{month}.jsonl"
            size = path.stat().st_size if path.exists() else 0
            if size < offset:
                raise PositionLost(f"{path}: had been read up to byte {offset}, and has {size} bytes now")


def _lines(file: Any) -> Iterator[bytes]:
    """Each line of a ledger; one that is too long for a row comes in parts."""
    return iter(lambda: file.readline(LONGEST_ROW), b"")


def _whole(path: Path) -> int:
    """Bytes of this file up to the end of its last whole line."""
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        while size:
            file.seek(begin := max(size - 4096, 0))
            if (last := file.read(size - begin).rfind(b"\n")) >= 0:
                return begin + last + 1
            size = begin
    return 0


def _position(text: str) -> dict[str, int]:
    """Bytes that were read, by month."""
    pairs = [month.split(":") for month in text.split(",") if month]
    if not all(len(pair) == 2 and re.fullmatch(MONTH, pair[0]) and pair[1].isdecimal() for pair in pairs):
        raise PositionLost(f"{text[:80]!r}: no position in a ledger", hint="Leave it out to begin with the first row.")
    return {month: int(offset) for month, offset in pairs}


def _text(read: dict[str, int]) -> str:
    """For the last two months: a row that was written before midnight may come after one that was written later."""
    return ",".join(f"{month}:{offset}" for month, offset in sorted(read.items())[-2:])


def _file_of(moment: float) -> str:
    return time.strftime("ledger-%Y-%m.jsonl", time.gmtime(max(moment, 0.0)))
