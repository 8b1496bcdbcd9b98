"""This host, watched: machines by their folders while they live, those that ended by ledgers, and its vacuum, bait and leases by what
they write down or answer. Woken by the kernel; no machine and no keeper is asked, and nothing is finished."""

from __future__ import annotations

import asyncio
import json
import os
import pwd
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from belljar.errors import BelljarError, PositionLost
from belljar.host.files import read_json
from belljar.host.threads import in_thread
from belljar.host.watch import IN_CLOSE_WRITE, IN_CREATE, IN_DELETE, IN_MODIFY, IN_MOVED_FROM, IN_MOVED_TO, Watch
from belljar.journal import JOURNAL, read
from belljar.machine import CONSOLE_LOG, LOCK, OUTCOME, REQUEST, Folders, MachineView
from belljar.model import State
from belljar.monitor import Ended, Outcomes
from belljar.monitor.view import HOUR, Counted, Machine, Mode, Node, Values
from belljar.service.streams import at_most, first_of

T = TypeVar("T")
DAY = 86400.0  # machines that ended are counted for so long
PAUSE = 0.5  # seconds between two looks
LOOK_AGAIN = 15.0  # seconds, for ledgers of other hosts, of which the kernel reports nothing
ASK_AGAIN = 20.0  # seconds until a lease service that is down is asked again
IN_FOLDER, IN_FILE = IN_CREATE | IN_DELETE | IN_MOVED_FROM | IN_MOVED_TO, IN_MODIFY | IN_CLOSE_WRITE
STATUS, DECISIONS, LAST = "status.json", "decisions.jsonl", 1 << 18  # LAST: bytes in which the last decision is
ID = re.compile(r"[0-9a-f]{12}")
TAIL, EVENTS = 32 << 10, 500  # of a console, bytes; of a journal, events
ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|.)")
SECRET = ("argv", "env", "user_data", "told", "script", "files")  # of requests and events


class Host:
    """*look*: at the machines that live here, and the paths by which a change of them or of modes shows. *outcomes*: makes a reader
    of ledgers. *leased*: machines that the lease service here accounts for, blocking until there may be news."""

    def __init__(
        self, name: str, store: Path, look: Callable[[], tuple[list[Machine], set[Path]]], outcomes: Callable[[], Outcomes],
        leased: Callable[[], Iterator[list[Values]]] = lambda: iter(()), window: float = DAY,
    ) -> None:  # fmt: skip
        self.name, self._store, self._look, self._outcomes = name, store, look, outcomes
        self._leased, self._window = leased, window
        # Whoever looks in a thread: a child forked meanwhile would wait for ever for locks that another thread had.
        self.turn = asyncio.Lock()
        self._machines: list[Machine] | None = None
        self._by_node: dict[str, Counted] | None = None  # by node
        self._modes, self._leases = list[Mode](), list[Mode]()

    async def watch(self, changed: Callable[[], None]) -> None:
        """Without end. *changed* is called whenever `nodes` may be another."""

        def take(machines: list[Machine]) -> None:
            self._machines, self._modes = machines, modes(self._store)
            changed()

        machines = look_whenever(self._look, take, self.turn)
        await first_of(machines, self._watch_ledgers(changed), self._watch_leases(changed))

    def nodes(self) -> list[Node]:
        """This host first, then the other nodes whose ledgers are read here."""
        by_node, why = dict(self._by_node or {}), "" if self._by_node is not None else "its ledger is being read"
        own, modes = by_node.pop(self.name, Counted()), (*self._modes, *self._leases)
        here = Node(self.name, tuple(self._machines or ()), own, modes, why=why)
        return [here, *(Node(name, counted=counted) for name, counted in by_node.items())]

    @property
    def is_read(self) -> bool:
        """Was everything looked at once?"""
        return self._by_node is not None and self._machines is not None

    async def _watch_ledgers(self, changed: Callable[[], None]) -> None:
        """Counted anew every hour, without those that ended before the window, and whenever a ledger was cut or removed."""
        while True:
            with suppress(PositionLost, TimeoutError):
                async with asyncio.timeout(HOUR):
                    await self._count(self._outcomes(), changed)

    async def _count(self, outcomes: Outcomes, changed: Callable[[], None]) -> None:
        def begin() -> dict[str, Counted]:
            return count_by_node(outcomes.since(time.time() - self._window), {})

        def take(new: list[Ended]) -> None:
            self._by_node = count_by_node(new, by_node)
            changed()

        async with self.turn:
            by_node = await in_thread(begin)
        await read_whenever(outcomes, lambda: [*outcomes.new()], take, self.turn)

    async def _watch_leases(self, changed: Callable[[], None]) -> None:
        while True:
            answers = self._leased()
            with suppress(BelljarError, OSError, ValueError):
                while (machines := await in_thread(partial(next, answers, None))) is not None:
                    self._leases = leases(machines)
                    changed()
            self._leases = []
            await asyncio.sleep(ASK_AGAIN)


async def read_whenever(
    outcomes: Outcomes, read: Callable[[], T], take: Callable[[T], object], turn: asyncio.Lock
) -> None:
    """Hand over what *read* makes of these ledgers in a thread, now and whenever they grow."""

    def look() -> tuple[T, set[Path]]:
        folders = [source.folder for source in outcomes.sources()]
        paths = {path for folder in folders for path in (folder, *folder.glob("ledger-*.jsonl"))}
        return read(), paths

    are_all_here = {*outcomes.places.values()} <= {os.uname().nodename}
    await look_whenever(look, take, turn, None if are_all_here else LOOK_AGAIN)


async def look_whenever(
    look: Callable[[], tuple[T, set[Path]]],
    take: Callable[[T], object],
    turn: asyncio.Lock,
    longest: float | None = None,
) -> None:
    """Hand over what *look* finds in a thread, now and whenever something happens to one of the paths that it names."""
    loop, woken, watch, watched = asyncio.get_running_loop(), asyncio.Event(), Watch(), set[Path]()

    def wake() -> None:
        watch.read()
        woken.set()

    loop.add_reader(watch.fileno(), wake)
    try:
        while True:
            woken.clear()
            async with turn:
                value, paths = await in_thread(look)
            take(value)
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


# -- machines ----------------------------------------------------------------------------------------------------------


def living(views: Iterable[MachineView]) -> list[Machine]:
    """Of these, those that have not ended. One whose keeper is dead is *abandoned*."""
    machines = []
    for view in views:
        if view.state == State.DONE.value:
            continue
        account, user = view.payload.get("account"), str(view.owner)
        with suppress(KeyError):
            user = str(account["name"] if isinstance(account, dict) else pwd.getpwuid(view.owner).pw_name)
        about = view.id, view.name, user, view.image, view.requester, view.cpus, view.memory, view.start
        states = ((event["state"], event["time"]) for event in read(view.folder) if event["event"] == "state")
        machines.append(Machine(*about, view.state if view.alive else "abandoned", tuple(states)))
    return machines


def paths_of(folders: Folders, machines: Iterable[Machine]) -> set[Path]:
    """Where the kernel reports that machines come and go, what they write, that a keeper has died, and what modes write."""
    each = (folders.machine(machine.id) / name for machine in machines for name in ("", JOURNAL, LOCK))
    return {folders.machines, folders.store / "vacuum", folders.store / "bait", *each}


def count_by_node(machines: Iterable[Ended], by_node: dict[str, Counted]) -> dict[str, Counted]:
    """With these machines, by node."""
    for ended in machines:
        by_node.setdefault(ended.node, Counted()).count(ended)
    return by_node


# -- vacuum, bait, leases ----------------------------------------------------------------------------------------------


def modes(store: Path) -> list[Mode]:
    """The vacuum, with the shares of its last decision, and the bait, with its jobs by state, that keep their files here."""
    vacuum, bait, decision = _json(store / "vacuum" / STATUS), _json(store / "bait" / STATUS), Values()
    with suppress(ValueError, IndexError):
        decision = json.loads(_tail(store / "vacuum" / DECISIONS, LAST).splitlines()[-1])
    shares = [(of["machinetype"], of["hs06"], of["target"], of["why"]) for of in decision.get("verdicts", ())]
    jobs = [(state, count, None, "") for state, count in bait.get("jobs", {}).items()]
    rows = (
        (vacuum, "vacuum", "{factory} in {space}", ("error", "settings_error"), "HS06", "cycled", shares),
        (bait, "bait", "{name} of {system}", ("error", "why", "waits"), "jobs", "looked", jobs),
    )
    return [
        Mode(
            kind, name.format_map(status), status.get("state") or ("draining" if status.get("draining") else "running"),
            next((status[key] for key in whys if status.get(key)), ""), unit, status[at], tuple(bars),
        )
        for status, kind, name, whys, unit, at, bars in rows if status.get(at)
    ]  # fmt: skip


def leases(machines: Iterable[Values]) -> list[Mode]:
    """Of the machines that a lease service accounts for, the processors of those that run, by lease."""
    cpus = Counter[str]()
    for machine in machines:
        if machine["ended"] is None:
            cpus[f"{machine['lease']}: {machine['owner']}, {machine['image']}"] += machine["cpus"]
    bars = tuple((name, number, None, "") for name, number in cpus.items())
    return [Mode("lease", "", "running", "", "cpus", time.time(), bars)]


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
    text = ESCAPES.sub("", _tail(path, TAIL).decode(errors="replace").replace("\r\n", "\n"))
    return "".join(char if char.isprintable() or char in "\n\t" else "\N{REPLACEMENT CHARACTER}" for char in text)


def _tail(path: Path, size: int) -> bytes:
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
