"""The reader of ledgers: the machines that ended, on one node or on many, so far and as they end.

Metrics, spans, reports and the page all read by it. Rows come one by one: memory does not grow with a ledger. A row of an
older or newer version is read as far as it is understood; a row that does not tell which machine ended, and how, is left
out and counted."""

from __future__ import annotations

import asyncio
import itertools
import math
import os
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from belljar.errors import BadOption, CommandFailed, PositionLost
from belljar.host.privileges import User
from belljar.host.watch import IN_CREATE, IN_MODIFY, IN_MOVED_TO, Watch
from belljar.journal import Ledger
from belljar.model import Cause
from belljar.monitor.users import rows_as
from belljar.records import dataclass, field, replace

LARGEST = 1e15  # of a number in a row; more is not one
LEDGERS, COMES = "ledger-*.jsonl", IN_MODIFY | IN_CREATE | IN_MOVED_TO
LOOK_AGAIN = (
    15.0  # seconds; only for what the kernel does not report: what other hosts write, and users where root reads
)
# In the order in which a machine goes through them, of which the payload's own time is `run`.
BEFORE = ("prepare", "start", "boot", "identify", "grow", "ready", "setup")
PHASES = (*BEFORE, "run", "fetch", "collect", "stop", "clean")
PATHS = ("clone", "template", "cold")
WITHIN = {"template": "prepare", "pack": "prepare"}  # these are a part of another one

Users = Callable[[], list[tuple[User, Callable[[], Path]]]]


@dataclass(frozen=True)
class Source:
    """One ledger: the records of a node, or those of one of its users, who alone may read them."""

    node: str
    key: str
    folder: Callable[[], Path]  # called as the user
    user: User | None = None


@dataclass(frozen=True)
class Ended:
    """A machine that ended, as its row tells it. What the row does not tell is empty, or 0. Times are in seconds, moments in
    seconds since the epoch, sizes in bytes."""

    node: str
    id: str
    cause: str
    klass: str
    reason: str = ""
    hint: str = ""
    error: str = ""
    name: str = ""
    image: str = ""
    start: str = ""  # "clone", "cold", or "": it was never started
    context: str = ""
    accelerator: str = ""
    user: str = ""  # the account's name, else the uid
    requester: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    phases: Mapping[str, float] = field(default_factory=dict)
    started: float = 0.0
    ended: float = 0.0
    cpus: int = 0
    memory: int = 0
    guest_cpu: float = 0.0  # processor time, user and system
    host_cpu: float = 0.0  # of the host's processes, the guest included

    @property
    def path(self) -> str:
        """How it came up: `clone`, `cold`, or `template` where a template was made for it first; "" where it never did."""
        return "template" if self.start == "clone" and self.phases.get("template") else self.start

    @property
    def has_failed(self) -> bool:
        """Did anything end it but its payload, with whatever exit code, or somebody who cancelled it?"""
        return self.cause not in (Cause.FINISHED.value, Cause.CANCELLED.value)

    @property
    def wall(self) -> float:
        return max(self.ended - self.started, 0.0)

    @property
    def run(self) -> float:
        """The payload's own time."""
        return min(self.phases.get("run", 0.0), self.wall)

    @property
    def overhead(self) -> float:
        """What the machine took beside the payload's own time."""
        return self.wall - self.run

    @property
    def until_ready(self) -> float:
        """From the request to the payload's first moment."""
        return sum(self.phases.get(name, 0.0) for name in BEFORE)


class Outcomes:
    """The rows of all ledgers at these places: folders, each with the name of its node. A folder without a ledger in it stands for
    the folders below it that have one, each named as its node; those that come later are found, too. *users*: of this host, for
    root, each with the folder of the records. *positions*: what was read before, as `positions` of an earlier reader."""

    def __init__(self, places: Mapping[Path, str], positions: Mapping[str, str] = {}, users: Users = list) -> None:
        self._places, self._users = dict(places), users
        self.positions = dict(positions)  # plain JSON, to be kept together with what was made of the rows
        self.unreadable = 0  # rows that were left out
        self.troubles: list[str] = []  # ledgers of users that could not be read, and why

    def between(self, since: float = 0.0, until: float = math.inf) -> Iterator[Ended]:
        """The machines that ended from *since* to before *until*; of each node about in the order of their ends. Positions
        stay where they are."""
        for source in self.sources():
            for row in self._read(source, lambda ledger: ledger.rows(since)):
                if (ended := self._ended(row, source)) is not None and since <= ended.ended < until:
                    yield ended

    def new(self) -> Iterator[Ended]:
        """The machines behind the positions; the next call goes on behind them. Raises PositionLost where a ledger was cut."""
        for source in self.sources():
            before = self.positions.get(source.key, "")
            for row, position in self._read(
                source, partial(_of_user if source.user else Ledger.since, position=before)
            ):
                self.positions[source.key] = position
                if (ended := self._ended(row, source)) is not None:
                    yield ended

    def skip(self) -> None:
        """Leave out what there is: `new` and `follow` begin with the next machine that ends."""
        for source in self.sources():
            for position in self._read(source, lambda ledger: iter([ledger.end()])):
                self.positions[source.key] = position

    async def follow(self) -> AsyncIterator[Ended]:
        """`new`, then each machine as it ends, for ever: woken by the kernel, and by the clock only for ledgers of other nodes
        and of users. Raises PositionLost."""
        loop, woken, watch = asyncio.get_running_loop(), asyncio.Event(), Watch()
        loop.add_reader(watch.fileno(), woken.set)
        is_all_ours = {source.node for source in self.sources()} == {os.uname().nodename} and not self._users()
        try:
            while True:
                for folder in (*self._places, *itertools.chain(*map(_below, self._places))):
                    _ = watch.add(folder, COMES) or watch.add(folder.parent, COMES)  # again: what is watched stays so
                woken.clear()
                watch.read()
                for ended in self.new():
                    yield ended
                with suppress(TimeoutError):
                    async with asyncio.timeout(None if is_all_ours else LOOK_AGAIN):
                        await woken.wait()
        finally:
            loop.remove_reader(watch.fileno())
            watch.close()

    def sources(self) -> list[Source]:
        """The ledgers that there are now."""
        here, sources = os.uname().nodename, list[Source]()
        for place, node in self._places.items():
            below = [(_plain(folder.name), folder) for folder in _below(place) if _has_ledger(folder)]
            sources += [Source(name, str(folder), partial(Path, folder)) for name, folder in below or [(node, place)]]
        return sources + [Source(here, f"user {user.uid}", folder, user) for user, folder in self._users()]

    def _read(self, source: Source, read: Callable[[Ledger], Iterator[Any]]) -> Iterator[Any]:
        """What *read* yields; of a user whose ledger cannot be read, nothing more."""
        if source.user is None:
            yield from read(Ledger(source.folder()))
            return
        try:
            yield from rows_as(source.user, lambda: read(Ledger(source.folder())))
        except CommandFailed as exc:
            self.troubles.append(exc.message)

    def _ended(self, row: Mapping[str, Any], source: Source) -> Ended | None:
        ended = ended_of(row, source.node)
        self.unreadable += ended is None and bool(row)
        return ended if ended is None or source.user is None else replace(ended, user=source.user.name)


def _of_user(ledger: Ledger, position: str) -> Iterator[tuple[dict[str, Any], str]]:
    """A ledger that its user cut or removed goes on at its end."""
    try:
        yield from ledger.since(position)
    except PositionLost:
        yield {}, ledger.end()


def places(names: Iterable[str], own: Path, own_node: str) -> dict[Path, str]:
    """Folders by which `Outcomes` reads: those *names* give, as DIR or NODE=DIR; without any, this host's own. Raises BadOption."""
    chosen = {}
    for name in names:
        node, _, folder = ("", "", name) if Path(name).is_dir() else name.rpartition("=")
        path = Path(folder)
        if not (path.is_dir() and os.access(path, os.R_OK | os.X_OK)):
            hint = "Give DIR or NODE=DIR: the folder `paths.logs` of a node, or one with those of many nodes."
            raise BadOption(f"--ledger {name}: {folder!r} is not a folder that can be read", hint=hint)
        chosen[path.absolute()] = _plain(node or path.name)
    return chosen or {own: own_node}


def ended_of(row: Mapping[str, Any], node: str) -> Ended | None:
    """What a row tells; None where it is not of a machine that ended."""
    id, cause, klass = row.get("id"), row.get("cause"), row.get("class")
    if not (isinstance(id, str) and isinstance(cause, str) and isinstance(klass, str)):
        return None
    texts = {name: _plain(value) for name in TEXTS if isinstance(value := row.get(name), str)}
    numbers = {name: number_of(row.get(name)) for name in ("started", "ended", "cpus", "memory")}
    uid, pairs, phases = row.get("uid"), row.get("labels"), row.get("phases")
    both = [pair for pair in pairs if isinstance(pair, list) and len(pair) == 2] if isinstance(pairs, list) else []
    return Ended(
        node, id, cause, klass, user=texts.pop("account", "") or (str(uid) if isinstance(uid, int) else ""), **texts,
        labels={_plain(name): _plain(text) for name, text in both if isinstance(name, str) and isinstance(text, str)},
        phases={_plain(name): number_of(value) for name, value in phases.items()} if isinstance(phases, dict) else {},
        guest_cpu=_cpu(row.get("guest")), host_cpu=_cpu(row.get("host")), started=numbers["started"], ended=numbers["ended"],
        cpus=int(numbers["cpus"]), memory=int(numbers["memory"]),
    )  # fmt: skip


TEXTS = ("reason", "hint", "error", "name", "image", "start", "context", "accelerator", "requester", "account")


def _cpu(usage: object) -> float:
    """Processor time of guest or host."""
    return number_of(usage.get("user")) + number_of(usage.get("system")) if isinstance(usage, dict) else 0.0


def _plain(text: str) -> str:
    """Without halves of characters, which JSON may have and no other form takes."""
    return text if text.isascii() else text.encode(errors="replace").decode()


def number_of(value: object) -> float:
    """0 for what is not a sensible number."""
    return value if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < LARGEST else 0.0


def _has_ledger(folder: Path) -> bool:
    return any(folder.glob(LEDGERS))


def _below(place: Path) -> list[Path]:
    """The folders that may have a ledger, where this one has none."""
    with suppress(OSError):
        return [] if _has_ledger(place) else sorted(path for path in place.iterdir() if path.is_dir())
    return []
