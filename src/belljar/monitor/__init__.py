"""The door of monitoring: what happened to machines, read from ledgers, on one node or on many. Readers only: nothing here asks a machine,
its keeper or a daemon for anything, and nothing here is on the way of a job.

Metrics, spans, reports and the page all read ledgers by `Outcomes`. Rows come one by one: memory does not grow with a ledger. A row of an
older or newer version is read as far as it is understood; a row that does not tell which machine ended, and how, is left out and counted."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from belljar.errors import BadOption, BelljarError, PositionLost
from belljar.journal import DAY, Ledger
from belljar.model import Cause
from belljar.records import dataclass, field, replace

LARGEST = 1e15  # of a number in a row; more is not one
PART = 1 << 18  # bytes of rows that are asked for at once as another user
# In the order in which a machine goes through them, of which the payload's own time is `run`.
BEFORE = ("prepare", "start", "boot", "identify", "grow", "ready", "setup")
PHASES = (*BEFORE, "run", "fetch", "collect", "stop", "clean")
PATHS = ("clone", "template", "cold")
WITHIN = {"template": "prepare", "pack": "prepare", "freeze": "run"}  # these are a part of another one


@dataclass(frozen=True)
class Ended:
    """A machine that ended, by the fields of its row (`belljar.model.Outcome`). What the row does not tell is empty, or 0. Times are
    in seconds, moments in seconds since the epoch, sizes in bytes."""

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
    account: str = ""
    uid: int | None = None
    requester: str = ""
    labels: tuple[tuple[str, str], ...] = ()
    phases: dict[str, float] = field(default_factory=dict)
    guest: dict[str, float] = field(default_factory=dict)
    host: dict[str, float] = field(default_factory=dict)
    started: float = 0.0
    ended: float = 0.0
    cpus: int = 0
    memory: int = 0

    @property
    def user(self) -> str:
        """The account's name, else the uid."""
        return self.account or ("" if self.uid is None else str(self.uid))

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


TEXTS = (
    "id", "cause", "class", "reason", "hint", "error", "name", "image", "start", "context", "accelerator", "account", "requester",
)  # fmt: skip


def ended_of(row: Mapping[str, Any], node: str) -> Ended | None:
    """What a row tells; None where it is not of a machine that ended."""
    values: dict[str, Any] = {name: plain(text) for name in TEXTS if isinstance(text := row.get(name), str)}
    if not {"id", "cause", "class"} <= values.keys():
        return None
    values |= {name: _number(row.get(name)) for name in ("started", "ended")}
    values |= {name: int(_number(row.get(name))) for name in ("cpus", "memory")}
    for name in ("phases", "guest", "host"):
        if isinstance(numbers := row.get(name), dict):
            values[name] = {plain(key): _number(number) for key, number in numbers.items()}
    if isinstance(pairs := row.get("labels"), list):
        labels = [pair for pair in pairs if isinstance(pair, list) and [type(word) for word in pair] == [str, str]]
        values["labels"] = tuple((plain(name), plain(text)) for name, text in labels)
    uid = uid if isinstance(uid := row.get("uid"), int) else None
    return Ended(node=node, uid=uid, klass=values.pop("class"), **values)


def plain(text: str) -> str:
    """Without halves of characters, which JSON may have and no other form takes."""
    return text if text.isascii() else text.encode(errors="replace").decode()


def _number(value: object) -> float:
    """0 for what is not a sensible number."""
    return value if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < LARGEST else 0


@dataclass(frozen=True)
class Source:
    """One ledger: that of a node, or of one of its users: it is read as that user."""

    node: str
    key: str
    folder: Path
    user: str = ""
    # What is found in the ledger, as JSON that the user may have forged. Raises BelljarError.
    as_user: Callable[[Callable[[Ledger], Any]], Any] | None = None

    def rows(self, position: str) -> Iterator[tuple[dict[str, Any], str]]:
        """Those behind a position, each with the position behind it. Raises PositionLost, and for a user's also BelljarError,
        TypeError or ValueError."""
        if self.as_user is None:
            yield from Ledger(self.folder).since(position)
            return
        while rows := self.as_user(partial(_part, position=position)):
            for row, behind in rows:
                yield {**row}, (position := str(behind))

    def end(self) -> str:
        """The position behind the last row."""
        return Ledger(self.folder).end() if self.as_user is None else str(self.as_user(Ledger.end))


def _part(ledger: Ledger, position: str) -> list[tuple[dict[str, Any], str]]:
    """The next rows, and no more than fit into a report. A ledger that its user cut or removed goes on at its end."""
    rows, size = list[tuple[dict[str, Any], str]](), 0
    try:
        for row, behind in ledger.since(position):
            rows.append((row, behind))
            if (size := size + len(json.dumps(row))) > PART:
                break
    except PositionLost:
        return [({}, ledger.end())]
    return rows


class Outcomes:
    """The rows of all ledgers at these places: folders, each with the name of its node. A folder without a ledger in it stands for
    the folders below it that have one, each named as its node; those that come later are found, too. *users*: the ledgers of this
    host's users, for root. *positions*: what was read before, as `positions` of an earlier reader."""

    def __init__(
        self, places: Mapping[Path, str], positions: Mapping[str, str] = {}, users: Callable[[], list[Source]] = list
    ) -> None:
        self.places, self._users = dict(places), users
        self.positions = dict(positions)  # plain JSON, to be kept together with what was made of the rows
        self.unreadable = 0  # rows that were left out
        self.troubles = dict[str, str]()  # ledgers of users that could not be read, and why

    def since(self, moment: float) -> Iterator[Ended]:
        """As `new`, but the first time with the machines that ended from *moment* on; of each node about in the order of their ends."""
        begin = time.gmtime(max(moment - DAY, 0.0))  # the clock may have been set back a little
        month = time.strftime("%Y-%m:0", begin)
        self.positions = {source.key: month for source in self.sources()} | self.positions
        return (ended for ended in self.new() if ended.ended >= moment)

    def new(self) -> Iterator[Ended]:
        """The machines behind the positions; the next call goes on behind them. Raises PositionLost where a ledger was cut."""
        for source in self.sources():
            for ended, position in self._read(source, self.positions.get(source.key, "")):
                self.positions[source.key] = position
                if ended is not None:
                    yield ended

    def skip(self) -> None:
        """Leave out what there is: `new` begins with the next machine that ends."""
        for source in self.sources():
            with self._troubles(source):
                self.positions[source.key] = source.end()

    def sources(self) -> list[Source]:
        """The ledgers that there are now."""
        sources = list[Source]()
        for place, node in self.places.items():
            shared = [] if _has_ledger(place) else sorted(filter(_has_ledger, place.glob("*/")))
            nodes = {folder: plain(folder.name) for folder in shared} or {place: node}
            sources += [Source(name, str(folder), folder) for folder, name in nodes.items()]
        return sources + self._users()

    def _read(self, source: Source, position: str) -> Iterator[tuple[Ended | None, str]]:
        """Each row's machine, where it is of one, and the position behind it; of a user whose ledger cannot be read, nothing more."""
        with self._troubles(source):
            for row, behind in source.rows(position):
                ended = ended_of(row, source.node)
                self.unreadable += ended is None and bool(row)
                yield replace(ended, account=source.user) if ended and source.user else ended, behind

    @contextmanager
    def _troubles(self, source: Source) -> Iterator[None]:
        """Of a ledger that a user may write into as it pleases."""
        try:
            yield
        except (BelljarError, OSError, TypeError, ValueError) as exc:
            if not source.user:
                raise
            self.troubles[f"the ledger of {source.user}"] = str(exc)


def places(names: Iterable[str], own: Path, own_node: str) -> dict[Path, str]:
    """Folders by which `Outcomes` reads: those *names* give, as DIR or NODE=DIR; without any, this host's own. Raises BadOption."""
    chosen = {}
    for name in names:
        node, _, folder = ("", "", name) if Path(name).is_dir() else name.rpartition("=")
        path = Path(folder)
        if not (path.is_dir() and os.access(path, os.R_OK | os.X_OK)):
            hint = "Give DIR or NODE=DIR: the folder `paths.logs` of a node, or one with those of many nodes."
            raise BadOption(f"--ledger {name}: {folder!r} is not a folder that can be read", hint=hint)
        chosen[path.absolute()] = plain(node or path.name)
    return chosen or {own: own_node}


def _has_ledger(folder: Path) -> bool:
    return any(folder.glob("ledger-*.jsonl"))
