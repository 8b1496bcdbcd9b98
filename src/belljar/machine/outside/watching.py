"""What happens to all machines of a set of folders, as it happens: by inotify, so nothing runs while nothing happens.

What counts is what is on disk. So an event that the kernel had no room for only costs a second look at everything.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from io import FileIO
from itertools import chain
from pathlib import Path

from belljar.host import watch as inotify
from belljar.host.files import private_folder
from belljar.host.locks import is_locked
from belljar.host.threads import in_thread
from belljar.journal import JOURNAL, Event, Ledger, parse
from belljar.machine import Folders
from belljar.model import MachineId

ENDED = "ended"  # the event of a machine's row in the ledger
TOLD = (  # of that row
    "cause", "class", "exit_code", "signal", "reason", "labels", "shutdown_code", "shutdown_message", "started",
)  # fmt: skip
GONE = inotify.IN_DELETE | inotify.IN_MOVED_FROM


class Ends:
    """Waits until locks are free, many in one event loop: by one inotify descriptor, for the last process that has a lock
    open closes it, however it ends."""

    def __init__(self) -> None:
        self._watch: inotify.Watch | None = None
        self._waiting: dict[int, set[asyncio.Event]] = {}

    async def wait(self, lock: Path) -> None:
        """Return when nobody holds this lock."""
        loop, closed = asyncio.get_running_loop(), asyncio.Event()
        if self._watch is None:
            self._watch = inotify.Watch()
            loop.add_reader(self._watch.fileno(), self._wake, self._watch)
        watch = self._watch.add(lock, inotify.IN_CLOSE_WRITE)
        waiting = self._waiting.setdefault(watch, set())
        waiting.add(closed)
        try:
            if is_locked(lock):
                await closed.wait()
        finally:
            waiting.discard(closed)
            if not waiting:
                self._watch.remove(watch)
                self._waiting.pop(watch, None)
            if not self._waiting:
                loop.remove_reader(self._watch.fileno())
                self._watch.close()
                self._watch = None
        await in_thread(lambda: _until_free(lock))  # it is closed a moment before it is free

    def _wake(self, watch: inotify.Watch) -> None:
        for change in watch.read():
            watches = list(self._waiting) if change.mask & inotify.IN_Q_OVERFLOW else [change.watch]
            for closed in chain.from_iterable(self._waiting.get(watch, ()) for watch in watches):
                closed.set()


def _until_free(lock: Path) -> None:
    with suppress(FileNotFoundError), open(lock, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)


def _there(folder: Path) -> Path:
    """The folder, made where it is not there. Root may look at anybody's."""
    return folder if folder.is_dir() else private_folder(folder)


class Stream:
    """The events of every machine of these folders, or *of* one, as they are journaled, and `ended` for each row of the ledger."""

    def __init__(self, folders: Folders, since: str | None = None, of: MachineId | None = None) -> None:
        self._folders, self._of = folders, of
        self._watch = inotify.Watch()
        machines, logs = (_there(folders.machines), _there(folders.logs))  # a missing one cannot be watched
        self._machines = self._watch.add(machines, inotify.IN_CREATE | GONE | inotify.IN_MOVED_TO)
        self._watch.add(logs, inotify.IN_MODIFY)
        self._ledger = Ledger(folders.logs)
        self._position = self._ledger.end() if since is None else since
        self._tails: dict[MachineId, Tail] = {}

    async def __aiter__(self) -> AsyncIterator[Event]:
        """First the journals of the machines that live, and the rows behind `since`; then what comes. Never ends."""
        loop, woken = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._watch.fileno(), woken.set)
        try:
            while True:
                for event in self._news():
                    yield event
                await woken.wait()
                woken.clear()
        finally:
            loop.remove_reader(self._watch.fileno())
            self.close()

    def close(self) -> None:
        for tail in self._tails.values():
            tail.close()
        self._watch.close()

    def _news(self) -> Iterator[Event]:
        """What has happened since the last look."""
        came, rows = set[MachineId](), self._rows()
        # Again and again: what a machine did before its row was written comes before its row.
        while changes := self._watch.read():
            came |= {change.name for change in changes if change.watch == self._machines and not change.mask & GONE}
            rows += self._rows()
        yield from self._of_machines(came)
        yield from rows

    def _of_machines(self, came: set[MachineId]) -> Iterator[Event]:
        """What is new in the journals of those that live, of those that *came*, which may be gone again, and of those that went."""
        live, folders = set(os.listdir(self._folders.machines)), self._folders
        for id in sorted(live | came | self._tails.keys()):
            if self._of in (None, id):
                if id not in self._tails:
                    self._tails[id] = Tail(self._watch, folders.machine(id), folders.ended(id))
                yield from ({**event, "machine": id} for event in self._tails[id].more())
                if id not in live:
                    self._tails.pop(id).close()

    def _rows(self) -> list[Event]:
        """The ledger's new rows, as events."""
        events = []
        for row, position in self._ledger.since(self._position):
            self._position = position
            event = {name: row[name] for name in TOLD if row.get(name) not in (None, "", [])}
            event |= {"machine": str(row.get("id", "")), "position": position}
            events.append({"time": row.get("ended", 0.0), "event": ENDED, **event})
        return events


class Tail:
    """A machine's journal that is being written, read from where we stopped; where it has none yet, we are woken when it has."""

    def __init__(self, watch: inotify.Watch, folder: Path, ended: Path) -> None:
        self._watch, self._watches = watch, {watch.add(folder, inotify.IN_CREATE)}
        self._paths = [folder / JOURNAL, ended / JOURNAL]  # a short life may be over by now
        self._file: FileIO | None = None
        self._rest = b""

    def more(self) -> list[Event]:
        """The events that were written since. Half a line is left until it is whole."""
        for path in self._paths if self._file is None else ():
            with suppress(OSError):
                self._file = open(path, "rb", buffering=0)  # noqa: SIM115
                self._watches.add(self._watch.add(path, inotify.IN_MODIFY))
                break
        self._rest += (self._file.read() if self._file else None) or b""
        lines, _, self._rest = self._rest.rpartition(b"\n")
        return parse(lines)

    def close(self) -> None:
        """Its folder lives on among the records, and nobody writes there."""
        for watch in self._watches:
            self._watch.remove(watch)
        if self._file is not None:
            self._file.close()
