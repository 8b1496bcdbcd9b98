"""What a bait wrote down: one line of JSON for each change, on disk before the act that follows: the entries that change together.

The last line of a job counts. A line that was cut off by a crash is ignored: its act was not done. A start writes the file anew, with the
jobs that are not closed.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path

from belljar.bait.decisions.step import Entry, State
from belljar.errors import BelljarError
from belljar.host.files import no_space_as_error, read_capped, write_all, write_whole
from belljar.model import dumps
from belljar.reading import from_json

FILE = "jobs.jsonl"
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
        self._descriptor = -1
        self.roll()

    def write(self, *entries: Entry) -> None:
        """All of them, or none. On disk when it returns. Raises NoSpace: then nothing may be done."""
        before = os.fstat(self._descriptor).st_size
        with no_space_as_error(self._path):
            try:
                write_all(self._descriptor, dumps(entries) + b"\n")
                os.fdatasync(self._descriptor)
            except OSError:  # a part of it would spoil the next line
                os.ftruncate(self._descriptor, before)
                raise
        for entry in entries:
            if entry.state is State.CLOSED:
                self.entries.pop(entry.job, None)
            else:
                self.entries[entry.job] = entry
        if os.fstat(self._descriptor).st_size > ROLL + 4096 * len(self.entries):
            self.roll()

    def roll(self) -> None:
        """Write the file anew, whole, without what is closed."""
        write_whole(self._path, b"".join(dumps((entry,)) + b"\n" for entry in self.entries.values()), durable=True)
        self.close()
        self._descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
