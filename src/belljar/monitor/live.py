"""This host, watched: machines by their folders while they live, those that ended by ledgers, and its vacuum, bait and leases by what
they write down or answer. Woken by the kernel; no machine and no keeper is asked, and nothing is finished."""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from belljar.errors import BelljarError, PositionLost
from belljar.host.files import read_json
from belljar.host.threads import in_thread
from belljar.host.watch import IN_CLOSE_WRITE, IN_CREATE, IN_DELETE, IN_MODIFY, IN_MOVED_FROM, IN_MOVED_TO, Watch
from belljar.jobs import plain
from belljar.journal import DAY, JOURNAL, read
from belljar.machine import CONSOLE_LOG, LOCK, OUTCOME, REQUEST, Folders, MachineView
from belljar.model import State
from belljar.monitor import Machine, Outcomes
from belljar.monitor.view import HOUR, Counted, Mode, Node, Values
from belljar.records import replace
from belljar.service.streams import at_most, first_of

PAUSE = 0.5  # seconds between two looks
LOOK_AGAIN = 15.0  # seconds, for ledgers of other hosts, of which the kernel reports nothing
ASK_AGAIN = 20.0  # seconds until a lease service that is down is asked again
IN_FOLDER, IN_FILE = IN_CREATE | IN_DELETE | IN_MOVED_FROM | IN_MOVED_TO, IN_MODIFY | IN_CLOSE_WRITE
ID = re.compile(r"[0-9a-f]{12}")
TAIL, EVENTS = 32 << 10, 500  # of a console, bytes; of a journal, events
ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|.)")
SECRET = ("argv", "env", "user_data", "told", "script", "files")  # of requests and events


class Host:
    """*look*: at the machines that live here and at the vacuum and the bait, with the paths by which a change of them shows. *outcomes*:
    makes a reader of what ended since a moment. *leased*: leases, blocking until there may be news."""

    def __init__(
        self, name: str, look: Callable[[], tuple[list[Machine], list[Mode], set[Path]]], outcomes: Callable[[float], Outcomes],
        leased: Callable[[], Iterator[Mode]],
    ) -> None:  # fmt: skip
        self.name, self._look, self._outcomes, self._leased = name, look, outcomes, leased
        # Whoever looks in a thread: a child forked meanwhile would wait for ever for locks that another thread had.
        self.turn = asyncio.Lock()
        self._machines: list[Machine] | None = None
        self._ended: dict[str, Node] | None = None  # by node
        self._modes, self._leases = list[Mode](), list[Mode]()
        self._begin()

    async def watch(self, changed: Callable[[], None]) -> None:
        """Without end. *changed* is called whenever `nodes` may be another."""
        are_all_here = {*self._reader.places.values()} <= {self.name}
        machines = self._look_whenever(self._look_around, changed, None)
        ledgers = self._look_whenever(self._count, changed, HOUR if are_all_here else LOOK_AGAIN)
        await first_of(machines, ledgers, self._watch_leases(changed))

    def nodes(self) -> list[Node]:
        """This host first, then the other nodes whose ledgers are read here."""
        others, why = dict(self._ended or {}), "" if self._ended is not None else "its ledger is being read"
        own, modes = others.pop(self.name, Node(self.name)), (*self._modes, *self._leases)
        return [replace(own, living=tuple(self._machines or ()), modes=modes, why=why), *others.values()]

    @property
    def is_read(self) -> bool:
        """Was everything looked at once?"""
        return self._ended is not None and self._machines is not None

    async def _look_whenever(
        self, look: Callable[[], set[Path]], changed: Callable[[], None], longest: float | None
    ) -> None:
        """Have *look* look in a thread, now and whenever something happens to one of the paths that it returned."""
        loop, woken, watch, watched = asyncio.get_running_loop(), asyncio.Event(), Watch(), set[Path]()

        def wake() -> None:
            watch.read()
            woken.set()

        loop.add_reader(watch.fileno(), wake)
        try:
            while True:
                woken.clear()
                async with self.turn:
                    paths = await in_thread(look)
                changed()
                # What is not there yet is seen in the folder in which it, or a folder on the way to it, will be made.
                there = {next(place for place in (path, *path.parents) if place.exists()) for path in paths}
                before, watched = watched, there
                for path in watched:
                    watch.add(path, IN_FOLDER if path.is_dir() else IN_FILE)
                if watched <= before:  # else something may have happened before it was watched
                    await at_most(longest, woken.wait())
                await asyncio.sleep(PAUSE)
        finally:
            loop.remove_reader(watch.fileno())
            watch.close()

    def _look_around(self) -> set[Path]:
        self._machines, self._modes, paths = self._look()
        return paths

    def _begin(self) -> None:
        self._reader, self._counted = self._outcomes(time.time() - DAY), defaultdict[str, Counted](Counted)
        self._anew = time.monotonic() + HOUR

    def _count(self) -> set[Path]:
        """What is new in the ledgers; every hour all anew, without what ended a day ago, and where a ledger was cut or removed."""
        if time.monotonic() > self._anew:
            self._begin()
        try:
            for ended in self._reader.new():
                self._counted[ended.node].count(ended)
        except PositionLost:
            self._begin()
            return self._count()
        self._ended = {name: counted.node(name) for name, counted in self._counted.items()}
        return self._reader.paths()

    async def _watch_leases(self, changed: Callable[[], None]) -> None:
        while True:
            answers = self._leased()
            with suppress(BelljarError, OSError, ValueError):
                while mode := await in_thread(partial(next, answers, None)):
                    self._leases = [mode]
                    changed()
            self._leases = []
            await asyncio.sleep(ASK_AGAIN)


# -- machines ----------------------------------------------------------------------------------------------------------


def living(views: Iterable[MachineView]) -> list[Machine]:
    """Those that have not ended. One whose keeper is dead is *abandoned*."""
    return [_machine(view) for view in views if view.state != State.DONE.value]


def _machine(view: MachineView) -> Machine:
    account = view.payload.get("account")
    return Machine(
        "", view.id, name=view.name, image=view.image, start=view.start, account=str(account.get("name", "")) if isinstance(account, dict) else "",
        uid=view.owner, requester=view.requester, cpus=view.cpus, memory=view.memory, state=view.state if view.alive else "abandoned",
        states=tuple((event["state"], event["time"]) for event in read(view.folder) if event["event"] == "state"),
    )  # fmt: skip


def paths_of(folders: Folders, machines: Iterable[Machine]) -> set[Path]:
    """Where the kernel reports that machines come and go, what they write, that a keeper has died, and what modes write."""
    each = (folders.machine(machine.id) / name for machine in machines for name in ("", JOURNAL, LOCK))
    return {folders.machines, folders.store / "vacuum", folders.store / "bait", *each}


# -- one machine -------------------------------------------------------------------------------------------------------


def story(folders: Folders, id: str) -> Values | None:
    """What was asked, what happened when, how it ended, the end of its console; None where nothing is known of it."""
    for folder in (folders.machine(id), folders.ended(id)) if ID.fullmatch(id) else ():
        if folder.is_dir():
            return {
                "id": id, "request": _open(_json(folder / REQUEST)), "outcome": _json(folder / OUTCOME),
                "events": _open(read(folder)[-EVENTS:]), "console": console_tail(folder / CONSOLE_LOG),
            }  # fmt: skip
    return None


def console_tail(path: Path) -> str:
    """The end of what a guest wrote, as plain text: a guest may write anything."""
    return plain(ESCAPES.sub("", tail(path, TAIL).decode(errors="replace").replace("\r\n", "\n")), "\n\t")


def tail(path: Path, size: int) -> bytes:
    """So much of the end; nothing where that cannot be read."""
    with suppress(OSError), open(path, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as file:
        file.seek(max(file.seek(0, os.SEEK_END) - size, 0))
        return file.read(size)
    return b""


def _open(value: Any) -> Any:
    """Without what may be secret."""
    if isinstance(value, dict):
        return {key: _open(inner) for key, inner in value.items() if key not in SECRET}
    return [_open(inner) for inner in value] if isinstance(value, list) else value


def _json(path: Path) -> Values:
    with suppress(OSError, ValueError, BelljarError):
        return read_json(path, 16 << 20)
    return {}
