"""What happens to all machines of a set of folders, as it happens: by inotify, so nothing runs while nothing happens.

What counts is what is on disk. So an event that the kernel had no room for only costs a second look at everything.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path

from belljar.errors import HostError
from belljar.host.files import private_folder
from belljar.host.locks import is_locked
from belljar.host.threads import in_thread
from belljar.host.watch import IN_CREATE, IN_DELETE, IN_MODIFY, IN_MOVED_FROM, IN_MOVED_TO, IN_Q_OVERFLOW, Watch
from belljar.journal import JOURNAL, Event, Ledger, parse
from belljar.machine import LOCK, Folders
from belljar.machine.life.claim import claimed_by
from belljar.model import MachineId

ENDED = "ended"  # the event of a machine's row in the ledger
TOLD = (  # of that row
    "cause", "class", "exit_code", "signal", "reason", "labels", "shutdown_code", "shutdown_message", "started",
)  # fmt: skip
GONE = IN_DELETE | IN_MOVED_FROM


class Ends:
    """Waits for the ends of many machines in one event loop: one inotify descriptor, and one pidfd for each."""

    def __init__(self, folders: Folders, finish: Callable[[MachineId], None]) -> None:
        self._folders, self._finish = folders, finish
        self._waiting: dict[MachineId, set[asyncio.Event]] = {}
        self._watch: Watch | None = None

    async def wait(self, id: MachineId) -> None:
        """Return when it has ended; what a dead keeper left is finished first. Raises what is in the way of that."""
        folder = self._folders.machine(id)
        with self._told(id) as changed:
            while folder.exists():
                changed.clear()
                if is_locked(folder / LOCK):
                    await self._until_something_happens(folder, changed)
                    continue
                await in_thread(lambda: self._finish(id))
                if folder.exists() and not is_locked(folder / LOCK):
                    raise HostError(f"{id}: its keeper is dead, and it cannot be finished", hint="See `belljar reap`.")

    async def _until_something_happens(self, folder: Path, changed: asyncio.Event) -> None:
        """The folder went, or who claimed it is dead."""
        loop, pid = asyncio.get_running_loop(), claimed_by(folder)
        try:
            process = os.pidfd_open(pid or -1)
        except OSError:  # somebody else holds the lock for a moment: who finishes it, or looks
            return await in_thread(lambda: _until_free(folder / LOCK))
        try:
            loop.add_reader(process, changed.set)
            if is_locked(folder / LOCK):  # it may have gone before we were told of what goes
                await changed.wait()
        finally:
            loop.remove_reader(process)
            os.close(process)

    @contextmanager
    def _told(self, id: MachineId) -> Iterator[asyncio.Event]:
        """An event that is set whenever this machine's folder goes."""
        if self._watch is None:
            self._watch = Watch()
            self._watch.add(_there(self._folders.machines), GONE)
            asyncio.get_running_loop().add_reader(self._watch.fileno(), self._hear, self._watch)
        changed = asyncio.Event()
        self._waiting.setdefault(id, set()).add(changed)
        try:
            yield changed
        finally:
            self._waiting[id].discard(changed)
            if not self._waiting[id]:
                del self._waiting[id]
            if not self._waiting:
                self.close()

    def _hear(self, watch: Watch) -> None:
        for one in watch.read():
            ids = list(self._waiting) if one.mask & IN_Q_OVERFLOW else [one.name]
            for id in ids:
                for changed in self._waiting.get(id, ()):
                    changed.set()

    def close(self) -> None:
        if self._watch is not None:
            asyncio.get_running_loop().remove_reader(self._watch.fileno())
            self._watch.close()
            self._watch = None


def _there(folder: Path) -> Path:
    """The folder, made where it is not there. Root may look at anybody's."""
    return folder if folder.is_dir() else private_folder(folder)


def _until_free(lock: Path) -> None:
    with suppress(FileNotFoundError), open(lock, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)


class Stream:
    """The events of every machine of these folders, or *of* one, as they are journaled, and `ended` for each row of the ledger."""

    def __init__(self, folders: Folders, since: str | None = None, of: MachineId | None = None) -> None:
        self._folders, self._of = folders, of
        self._watch = Watch()
        machines, logs = (_there(folders.machines), _there(folders.logs))  # a missing one cannot be watched
        self._machines = self._watch.add(machines, IN_CREATE | GONE | IN_MOVED_TO)
        self._logs = self._watch.add(logs, IN_MODIFY)
        self._ledger = Ledger(folders.logs)
        self._position = self._ledger.end() if since is None else since
        self._tails: dict[MachineId, Tail] = {}
        self._by_watch: dict[int, MachineId] = {}

    async def __aiter__(self) -> AsyncIterator[Event]:
        """First the journals of the machines that live, and the rows behind `since`; then what comes. Never ends."""
        loop, woken = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._watch.fileno(), woken.set)
        try:
            rows = self._rows()
            events = chain(self._machines_now(), rows)
            while True:
                for event in events:
                    yield event
                await woken.wait()
                woken.clear()
                events = chain(self._changed())
        finally:
            loop.remove_reader(self._watch.fileno())
            self.close()

    def close(self) -> None:
        for id in list(self._tails):
            self._forget(id)
        self._watch.close()

    def _changed(self) -> Iterator[Event]:
        """What the kernel told of since we looked."""
        happened, rows = [], list[Event]()
        while new := self._watch.read():  # again: what a machine did before its row was written is told before its row
            happened += new
            if any(one.watch == self._logs or one.mask & IN_Q_OVERFLOW for one in new):
                rows += self._rows()
        if any(one.mask & IN_Q_OVERFLOW for one in happened):
            yield from self._machines_now()
        for one in dict.fromkeys(happened):
            if one.watch == self._machines:
                yield from self._came_or_went(one.name, bool(one.mask & GONE))
            elif (id := self._by_watch.get(one.watch)) is not None:
                yield from self._more(id)
        yield from rows

    def _machines_now(self) -> Iterator[Event]:
        live = set(os.listdir(self._folders.machines))
        for id in sorted(live | set(self._tails)):
            yield from self._came_or_went(id, id not in live)

    def _came_or_went(self, id: MachineId, is_gone: bool) -> Iterator[Event]:
        if self._of not in (None, id):
            return
        yield from self._more(id)
        if is_gone:
            self._forget(id)

    def _rows(self) -> list[Event]:
        """The ledger's new rows, as events."""
        events = []
        for row, position in self._ledger.since(self._position):
            self._position = position
            facts = {name: row[name] for name in TOLD if row.get(name) not in (None, "", [])}
            facts |= {"machine": str(row.get("id", "")), "position": position}
            events.append({"time": row.get("ended", 0.0), "event": ENDED, **facts})
        return events

    def _more(self, id: MachineId) -> Iterator[Event]:
        """What its journal has that was not told yet."""
        if id not in self._tails:
            self._begin(id)
        if id in self._tails:
            yield from ({**event, "machine": id} for event in self._tails[id].more())

    def _begin(self, id: MachineId) -> None:
        """Read this machine's journal from its beginning; where it has none yet, we are woken when it has."""
        folder = self._folders.machine(id)
        self._note(self._watch.add(folder, IN_CREATE), id)
        for path in (folder / JOURNAL, self._folders.ended(id) / JOURNAL):  # a short life may be over by now
            with suppress(OSError):
                self._tails[id] = Tail(path)
                self._note(self._watch.add(path, IN_MODIFY), id)
                return

    def _note(self, watch: int, id: MachineId) -> None:
        if watch:
            self._by_watch[watch] = id

    def _forget(self, id: MachineId) -> None:
        """Its folder lives on among the records, and nobody writes there."""
        for watch in [one for one, its in self._by_watch.items() if its == id]:
            del self._by_watch[watch]
            self._watch.remove(watch)
        if id in self._tails:
            self._tails.pop(id).close()


class Tail:
    """A journal that is being written, read from where we stopped."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115
        self._rest = b""

    def more(self) -> list[Event]:
        """The events that were written since. Half a line is left until it is whole."""
        self._rest += self._file.read() or b""
        lines, _, self._rest = self._rest.rpartition(b"\n")
        return parse(lines)

    def close(self) -> None:
        self._file.close()
