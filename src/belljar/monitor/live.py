"""This host, watched: machines by their journals while they live, those that ended by ledgers, and its vacuum, bait and leases by what
they write down or tell. Woken by the kernel; no machine and no keeper is asked."""

from __future__ import annotations

import asyncio
import json
import os
import pwd
import re
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from belljar.errors import BelljarError, PositionLost
from belljar.host.files import read_json
from belljar.host.locks import is_locked
from belljar.host.threads import in_thread
from belljar.host.watch import IN_CREATE, IN_DELETE, IN_MODIFY, IN_MOVED_FROM, IN_MOVED_TO, Watch, watching
from belljar.journal import Event, read
from belljar.machine import CONSOLE_LOG, LOCK, OUTCOME, REQUEST, Folders
from belljar.model import State
from belljar.monitor.outcomes import Ended, Outcomes
from belljar.monitor.view import BLANK, SHOWN, Node, Values, add, machine_of, tally_of
from belljar.service.streams import first_of

if TYPE_CHECKING:
    from belljar.machine.outside.watching import Stream

HOUR = 3600
PAUSED = {"paused": "paused", "resumed": State.RUNNING.value}
STATUS, DECISIONS, LAST = "status.json", "decisions.jsonl", 1 << 18  # LAST: bytes in which the last decision is
ID = re.compile(r"[0-9a-f]{12}")
TAIL, EVENTS = 32 << 10, 500  # of a console, bytes; of a journal, events
ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|.)")
SECRET = ("argv", "env", "user_data", "told", "script", "files")  # of requests and events
PAUSE = 1.0  # seconds between two looks at the machines of other users
CHANGES = IN_CREATE | IN_DELETE | IN_MODIFY | IN_MOVED_FROM | IN_MOVED_TO
SETTLED = 5.0  # seconds until a machine without a keeper is said to have none
AGAIN = 20.0  # seconds until a lease service that is down is asked again


class Counted:
    """The machines of one node that ended within the window."""

    def __init__(self) -> None:
        self.recent, self._hours = deque[Values](maxlen=SHOWN), dict[int, Values]()

    def take(self, ended: Ended) -> None:
        add(self._hours.setdefault(int(ended.ended // HOUR * HOUR), {}), tally_of(ended))
        self.recent.append(machine_of(ended))

    def part(self, node: str, since: float) -> Values:
        """Hours before *since* are forgotten."""
        self._hours = {hour: tally for hour, tally in self._hours.items() if hour > since - HOUR}
        tally, hours = Values(), Values()
        for hour, counts in self._hours.items():
            add(tally, counts)
            hours[str(hour)] = {"machines": counts["machines"], "failed": counts["failed"]}
        return {"node": node, "machines": [*self.recent], "tally": tally, "hours": hours, "modes": []}


class Living:
    """The machines of these folders that live, as their journals tell."""

    def __init__(self, node: str, folders: Folders) -> None:
        self._node, self._folders, self.machines = node, folders, dict[str, Values]()

    def read(self) -> list[Values]:
        """All of them as they are now, from the files alone."""
        with suppress(OSError):
            for id in sorted(os.listdir(self._folders.machines)):
                for event in read(self._folders.machine(id)):
                    self.take({**event, "machine": id})
        return self.now()

    def take(self, event: Event) -> None:
        """One event of a machine here."""
        id, what = str(event["machine"]), event["event"]
        state = str(event.get("state")) if what == "state" else PAUSED.get(what, "")
        if what == "ended" or state == State.DONE.value:
            self.machines.pop(id, None)
        elif state:
            machine = self.machines.setdefault(id, self.machines.get(id) or self._asked(id))
            machine["phases"].append((state, float(event.get("time", 0.0))))
            machine |= {"state": state, "start": str(event.get("start") or machine["start"])}

    def now(self) -> list[Values]:
        """Those whose folder is there. One that nobody keeps any more is *abandoned*."""
        self.machines = {id: machine for id, machine in self.machines.items() if self._folders.machine(id).exists()}
        return [{**machine, "state": self._state(machine)} for machine in self.machines.values()]

    def _state(self, machine: Values) -> str:
        is_settled = machine["phases"][-1][1] < time.time() - SETTLED
        is_kept = not is_settled or is_locked(self._folders.machine(machine["id"]) / LOCK)
        return str(machine["state"]) if is_kept else "abandoned"

    def _asked(self, id: str) -> Values:
        """A machine as it was asked for."""
        folder = self._folders.machine(id)
        request = _json(folder / REQUEST)
        asked, work = request.get("machine") or {}, request.get("work") or {}
        account, user = (work.get("payload") or {}).get("account") or {}, ""
        with suppress(OSError, KeyError):
            user = account.get("name") or pwd.getpwuid(os.stat(folder).st_uid).pw_name
        names = {key: str(request.get(key) or "") for key in ("name", "requester")}
        sizes = {key: asked[key] for key in ("image", "cpus", "memory") if key in asked}
        return {**BLANK, "id": id, "node": self._node, "user": user, **names, **sizes, "phases": []}


class Host:
    """*events*: of the machines here, as `machine.outside` streams them. *outcomes*: makes a reader of the ledgers. *leased*: machines
    that the lease service here accounts for, blocking until there may be news. *others*: machines of this node's other users, and
    folders and files whose change is news of them."""

    def __init__(
        self, node: str, folders: Folders, events: Callable[[], Stream], outcomes: Callable[[], Outcomes], window: float,
        leased: Callable[[], Iterator[list[Values]]] = lambda: iter(()),
        others: Callable[[], tuple[list[Values], set[Path]]] = lambda: ([], set()),
    ) -> None:  # fmt: skip
        self.node, self._folders, self._events, self._outcomes = node, folders, events, outcomes
        self._window, self._leased, self._others, self._why = window, leased, others, "its ledger is being read"
        self._living, self._counted = Living(node, folders), dict[str, Counted]()
        self._leases, self._theirs = list[Values](), cast("list[Values] | None", None)

    async def watch(self, changed: Callable[[], None]) -> None:
        """Without end. *changed* is called whenever `nodes` may be another."""
        works = (self._machines, self._users, self._ledgers, self._modes, self._lease)
        await first_of(*(self._again(work, changed) for work in works))

    def nodes(self) -> list[Node]:
        """This host first, then the other nodes whose ledgers are read here."""
        since, store = time.time() - self._window, self._folders.store
        counted = {self.node: Counted()} | self._counted
        nodes = [Node(name, ended.part(name, since), why=self._why) for name, ended in counted.items()]
        nodes[0].part["machines"][:0] = [*self._living.now(), *(self._theirs or ())]
        nodes[0].part["modes"] = [*vacuum(store / "vacuum"), *bait(store / "bait"), *self._leases]
        return nodes

    @property
    def is_read(self) -> bool:
        """Is what there was before counted by now?"""
        return not self._why and self._theirs is not None

    async def _again(self, work: Callable[[Callable[[], None]], Any], changed: Callable[[], None]) -> None:
        """From the beginning whenever a ledger was cut or removed."""
        while True:
            with suppress(PositionLost):
                await work(changed)

    async def _machines(self, changed: Callable[[], None]) -> None:
        self._living = Living(self.node, self._folders)
        async for event in self._events():
            self._living.take(event)
            changed()

    async def _users(self, changed: Callable[[], None]) -> None:
        loop, woken, watch, known = asyncio.get_running_loop(), asyncio.Event(), Watch(), set[Path]()
        loop.add_reader(watch.fileno(), woken.set)
        try:
            while True:
                woken.clear()
                watch.read()
                self._theirs, paths = await in_thread(self._others)
                for path in paths - known:
                    watch.add(path, CHANGES)
                    woken.set()  # something may have happened before it was watched
                known = paths
                changed()
                await woken.wait()
                await asyncio.sleep(PAUSE)
        finally:
            loop.remove_reader(watch.fileno())
            watch.close()

    async def _ledgers(self, changed: Callable[[], None]) -> None:
        """In a thread: a ledger may be large, and one of a user slow. Raises PositionLost."""
        loop, works = asyncio.get_running_loop(), list[tuple[asyncio.AbstractEventLoop, asyncio.Task[None]]]()

        def begin(counted: dict[str, Counted]) -> None:
            self._counted, self._why = counted, ""
            changed()

        def take(ended: Ended) -> None:
            counted = self._counted.setdefault(ended.node, Counted())
            if all(machine["id"] != ended.id for machine in counted.recent):
                counted.take(ended)
                changed()

        async def follow() -> None:
            works.append((asyncio.get_running_loop(), cast("asyncio.Task[None]", asyncio.current_task())))
            outcomes = self._outcomes()
            outcomes.skip()  # before the rows so far are read: what comes meanwhile is met twice, and counted once
            loop.call_soon_threadsafe(begin, _count(outcomes.between(time.time() - self._window)))
            async for ended in outcomes.follow():
                loop.call_soon_threadsafe(take, ended)

        try:
            await in_thread(lambda: asyncio.run(follow()))
        finally:
            for inner, work in works:
                with suppress(RuntimeError):  # it has ended by itself
                    inner.call_soon_threadsafe(work.cancel)

    async def _modes(self, changed: Callable[[], None]) -> None:
        with ExitStack() as watches:
            for name in ("vacuum", "bait"):
                watches.enter_context(watching(self._folders.store / name, STATUS, changed))
            await asyncio.Event().wait()

    async def _lease(self, changed: Callable[[], None]) -> None:
        answers = self._leased()
        with suppress(BelljarError, OSError, ValueError):
            while (machines := await in_thread(lambda: next(answers, None))) is not None:
                self._leases = leases(machines)
                changed()
        self._leases = []
        await asyncio.sleep(AGAIN)


def _count(all_ended: Iterable[Ended]) -> dict[str, Counted]:
    counted = dict[str, Counted]()
    for ended in all_ended:
        counted.setdefault(ended.node, Counted()).take(ended)
    return counted


# -- vacuum, bait, leases: a mode has bars, each with a value and, where there is one, a target -----------------------


def vacuum(folder: Path) -> list[Values]:
    """The factory that keeps its state here, with the shares of its last decision."""
    status, last = _json(folder / STATUS), Values()
    with suppress(OSError), open(folder / DECISIONS, "rb") as file:
        file.seek(max(file.seek(0, os.SEEK_END) - LAST, 0))
        with suppress(ValueError, IndexError):
            last = json.loads(file.read().rstrip(b"\n").splitlines()[-1])
    bars = [
        {"name": verdict["machinetype"], "value": verdict["hs06"], "target": verdict["target"], "why": verdict["why"]}
        for verdict in last.get("verdicts", ())
    ]
    why, state = (
        status.get("error") or status.get("settings_error"),
        "draining" if status.get("draining") else "running",
    )
    return _mode(
        "vacuum", f"{status.get('factory')} in {status.get('space')}", state, why, "HS06", status.get("cycled"), bars
    )


def bait(folder: Path) -> list[Values]:
    """The bait that keeps its state here, with its jobs by their states."""
    status = _json(folder / STATUS)
    bars = [{"name": state, "value": count} for state, count in status.get("jobs", {}).items()]
    why, name = (
        status.get("error") or status.get("why") or status.get("waits"),
        f"{status.get('name')} of {status.get('system')}",
    )
    return _mode("bait", name, status.get("state"), why, "jobs", status.get("looked"), bars)


def leases(machines: Iterable[Values]) -> list[Values]:
    """Of the machines that a lease service accounts for, the processors of those that run, by lease."""
    cpus = Counter[str]()
    for machine in machines:
        if machine["ended"] is None:
            cpus[f"{machine['lease']}: {machine['owner']}, {machine['image']}"] += machine["cpus"]
    return _mode(
        "lease", "", "running", "", "cpus", time.time(), [{"name": name, "value": of} for name, of in cpus.items()]
    )


def _mode(kind: str, name: str, state: object, why: object, unit: str, at: object, bars: list[Values]) -> list[Values]:
    """None where nothing was written."""
    return (
        [{"kind": kind, "name": name, "state": state, "why": why or "", "unit": unit, "at": at, "bars": bars}]
        if at
        else []
    )


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
    with suppress(OSError), open(path, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as file:
        file.seek(max(file.seek(0, os.SEEK_END) - TAIL, 0))
        text = ESCAPES.sub("", file.read(TAIL).decode(errors="replace").replace("\r\n", "\n"))
        return "".join(char if char.isprintable() or char in "\n\t" else "\N{REPLACEMENT CHARACTER}" for char in text)
    return ""


def _open(value: Any) -> Any:
    """Without what may be secret."""
    if isinstance(value, dict):
        return {key: _open(inner) for key, inner in value.items() if key not in SECRET}
    return [_open(inner) for inner in value] if isinstance(value, list) else value


def _json(path: Path) -> Values:
    with suppress(OSError, ValueError, BelljarError):
        return read_json(path, 16 << 20)
    return {}
