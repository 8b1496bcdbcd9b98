"""What a bait wrote down: one line of JSON for each change, on disk before the act that follows: the entries that change together.

The last line of a job counts. A line that was cut off by a crash is ignored: its act was not done. A start writes the file anew, with the
jobs that are not closed. Beside it, what an operator says to a bait, and what it shows: two small files.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

from belljar.bait import Order
from belljar.bait.decisions.step import BaitState, Entry, State
from belljar.errors import BelljarError
from belljar.host.files import append_line, private_folder, read_capped, write_whole
from belljar.model import dumps
from belljar.reading import from_json
from belljar.records import dataclass, field
from belljar.service import kept

FILE, ORDER, STATUS = "jobs.jsonl", "order.json", "status.json"
LARGEST = 1 << 28
ROLL = 1 << 20  # bytes after which it is written anew


def read(folder: Path) -> dict[str, Entry]:
    """The jobs that are not closed, by their ids, in the order in which they came."""
    try:
        lines = read_capped(folder / FILE, LARGEST).split(b"\n")
    except FileNotFoundError:
        return {}
    entries_by_job: dict[str, Entry] = {}
    for line in lines:
        with suppress(ValueError, BelljarError):
            entries: tuple[Entry, ...] = from_json(tuple[Entry, ...], json.loads(line))
            entries_by_job.update((entry.job, entry) for entry in entries)
    return {job: entry for job, entry in entries_by_job.items() if entry.state is not State.CLOSED}


class Journal:
    """Append-only, but for `roll`. `entries`: as they were written last."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE
        self.entries = read(folder)
        self.roll()

    def write(self, *entries: Entry) -> None:
        """All of them, or none. On disk when it returns. Raises NoSpace: then nothing may be done."""
        append_line(self._path, dumps(entries), durable=True)
        for entry in entries:
            if entry.state is State.CLOSED:
                self.entries.pop(entry.job, None)
            else:
                self.entries[entry.job] = entry
        if self._path.stat().st_size > ROLL + 4096 * len(self.entries):
            self.roll()

    def roll(self) -> None:
        """Write the file anew, whole, without what is closed."""
        write_whole(self._path, b"".join(dumps((entry,)) + b"\n" for entry in self.entries.values()), durable=True)


@dataclass(frozen=True)
class Status:
    """A bait at its last look. Moments are seconds since the epoch."""

    name: str = ""
    system: str = ""
    pid: int = 0
    started: float = 0.0
    looked: float = 0.0
    state: str = BaitState.OPEN.value
    why: str = ""
    waits: str = ""  # what the next job waits for
    error: str = ""  # why the batch system, or the journal, could not be asked
    faults: int = 0  # failed starts in a row
    failed: float = 0.0  # when the last one was
    jobs: dict[str, int] = field(default_factory=dict)  # how many in each state
    nodes: dict[str, tuple[str, str]] = field(default_factory=dict)  # machine -> its node, and the state of that


def read_status(folder: Path) -> Status | None:
    status: Status | None = kept.read(folder / STATUS, Status)
    return status


def order(folder: Path) -> Order:
    return kept.read(folder / ORDER, Order) or Order()


def give_order(folder: Path, order: Order) -> None:
    """The bait that works in this folder obeys it at its next look, and after a restart too."""
    kept.keep(private_folder(folder) / ORDER, order, durable=True)


def show_status(folder: Path, status: Status) -> None:
    with suppress(OSError, BelljarError):
        kept.keep(folder / STATUS, status)
