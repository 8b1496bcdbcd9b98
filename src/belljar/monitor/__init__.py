"""The door of monitoring: what happened to machines, read from ledgers, on one node or on many. Readers only: nothing here asks a machine,
its keeper or a daemon for anything, and nothing here is on the way of a job.

Metrics, spans, reports and the page all read ledgers by `Outcomes`. Rows come one by one: memory does not grow with a ledger. A row of an
older or newer version is read as far as it is understood; a row that does not tell which machine ended, and how, is left out and counted."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from belljar.errors import BadOption, BelljarError, PositionLost
from belljar.journal import DAY, Ledger
from belljar.model import Cause, Outcome
from belljar.records import RESERVED, dataclass, field, replace

FILES = "ledger-*.jsonl"
LARGEST = 1e15  # of a number in a row; more is not one
PART = 100  # rows that are asked for at once as another user
# In the order in which a machine goes through them, of which the payload's own time is `run`.
BEFORE = ("prepare", "start", "boot", "identify", "grow", "ready", "setup")
PHASES = (*BEFORE, "run", "fetch", "collect", "stop", "clean")
PATHS = ("clone", "template", "cold")
PARTS = ("template", "pack", "freeze")  # of `prepare` or `run`


@dataclass(frozen=True)
class Machine:
    """One that ended, by the fields of its row (`belljar.model.Outcome`), or one that lives. What is not known is empty, or 0. Times are
    in seconds, moments in seconds since the epoch, sizes in bytes."""

    node: str
    id: str
    cause: str = ""
    klass: str = ""
    reason: str = ""
    hint: str = ""
    error: str = ""
    name: str = ""
    image: str = ""
    start: str = ""  # "clone", "cold", or "": not started yet, or never
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
    state: str = ""  # while it lives: that of its journal, or "abandoned"
    states: tuple[tuple[str, float], ...] = ()  # while it lives: each with its beginning

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
        """Did anything end it but its payload, with whatever exit code, or a user's request?"""
        return self.cause not in (Cause.FINISHED.value, Cause.CANCELLED.value, Cause.CHECKPOINTED.value)

    @property
    def failure(self) -> str:
        """Its cause, with the class of the error where there was one."""
        return f"{self.cause}: {self.error}" if self.error else self.cause

    @property
    def until_ready(self) -> float:
        """From the request to the payload's first moment."""
        return sum(self.phases.get(name, 0.0) for name in BEFORE)

    def sums(self) -> dict[str, float]:
        """What it adds to the figures of its user, its day, its node: seconds, and whole numbers of machines."""
        wall, has_begun = float(max(self.ended - self.started, 0.0)), "run" in self.phases
        payload = float(min(self.phases.get("run", 0.0), wall))
        return {
            "machines": 1, "failed": int(self.has_failed), "started": int(has_begun), "wall": wall, "payload": payload,
            "overhead": wall - payload, "payload_cpu": _cpu(self.guest), "host_cpu": _cpu(self.host),
            "ready": self.until_ready if has_begun else 0.0,
        }  # fmt: skip

    def timeline(self) -> Iterator[tuple[str, float, float]]:
        """Each phase with the moments of its begin and its end. The row has how long each took, not when it began: they are laid end to
        end from the machine's start."""
        moment, last = self.started, max(self.ended, self.started)
        for name in PHASES:
            if name in self.phases:
                begin, moment = moment, min(moment + self.phases[name], last)
                yield name, begin, moment


def _cpu(usage: Mapping[str, float]) -> float:
    return float(usage.get("user", 0.0) + usage.get("system", 0.0))


def plain(value: object) -> str:
    """A text without halves of characters, which JSON may have and no other form takes; "" for what is no text."""
    return value.encode(errors="replace").decode() if isinstance(value, str) else ""


def _number(value: object) -> float:
    """0 for what is not a sensible number."""
    return value if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < LARGEST else 0


def _numbers(value: object) -> dict[str, float]:
    return {plain(key): _number(number) for key, number in value.items()} if isinstance(value, dict) else {}


def _pairs(value: object) -> tuple[tuple[str, str], ...]:
    pairs = value if isinstance(value, list) else []
    return tuple((plain(pair[0]), plain(pair[1])) for pair in pairs if isinstance(pair, list) and len(pair) == 2)


READ: Mapping[str, Callable[[Any], Any]] = {  # by the types of fields
    "str": plain, "int": lambda value: int(_number(value)), "float": _number, "dict[str, float]": _numbers,
    "int | None": lambda value: value if isinstance(value, int) else None, "tuple[tuple[str, str], ...]": _pairs,
}  # fmt: skip
FIELDS = {  # of a row
    name: (RESERVED.get(name, name), READ[kind]) for name, kind in Machine.__annotations__.items() if name in Outcome.__dataclass_fields__
}  # fmt: skip


def ended_of(row: Mapping[str, Any], node: str) -> Machine | None:
    """What a row tells; None where it is not of a machine that ended."""
    machine = Machine(node, **{name: read(row.get(key)) for name, (key, read) in FIELDS.items()})
    return machine if machine.id and machine.cause and machine.klass else None


class AskedLedger(Ledger):
    """A user's, which may have anything in it. *ask* has it looked at as that user, and hands over JSON; it raises BelljarError."""

    def __init__(self, folder: Path, ask: Callable[[Callable[[Ledger], Any]], Any]) -> None:
        super().__init__(folder)
        self._ask = ask

    def since(self, position: str = "") -> Iterator[tuple[dict[str, Any], str]]:
        """As of any ledger; one that was cut or removed goes on at its end. Raises BelljarError, TypeError or ValueError."""
        while rows := self._ask(partial(_part, position=position)):
            for row, behind in rows:
                yield {**row}, (position := str(behind))

    def end(self) -> str:
        return str(self._ask(Ledger.end))


def _part(ledger: Ledger, position: str) -> list[tuple[dict[str, Any], str]]:
    """The next rows, and no more than fit into a report."""
    try:
        return [*islice(ledger.since(position), PART)]
    except PositionLost:
        return [({}, ledger.end())]


class Outcomes:
    """The machines that ended from the moment *since* on, by all ledgers at these places: folders, each with the name of its node. A
    folder without a ledger in it stands for the folders below it that have one, each named as its node; those that come later are
    found, too. *users*: the ledgers of this host's users by their names, for root. *positions*: what was read before, as `positions` of an earlier
    reader."""

    def __init__(
        self, places: Mapping[Path, str], positions: Mapping[str, str] = {}, users: Callable[[], Mapping[str, Ledger]] = dict, since: float = 0.0
    ) -> None:  # fmt: skip
        self.places, self._users, self._since = dict(places), users, since
        self.positions = dict(positions)  # plain JSON, to be kept together with what was made of the rows
        # The clock may have been set back a little.
        self._begin = time.strftime("%Y-%m:0", time.gmtime(max(since - DAY, 0.0)))
        self.unreadable = 0  # rows that were left out
        self.troubles = dict[str, str]()  # ledgers of users that could not be read, and why

    def new(self) -> Iterator[Machine]:
        """Those behind the positions, of each node about in the order of their ends; the next call goes on behind them. Raises
        PositionLost where a ledger was cut."""
        for node, user, ledger in self._ledgers():
            key = str(ledger.folder)
            with self._troubles(user):
                for row, behind in ledger.since(self.positions.get(key, self._begin)):
                    self.positions[key] = behind
                    ended = ended_of(row, node)
                    self.unreadable += ended is None and bool(row)
                    if ended is not None and ended.ended >= self._since:
                        yield replace(ended, account=user) if user else ended

    def skip(self) -> None:
        """Leave out what there is: `new` begins with the next machine that ends."""
        for _, user, ledger in self._ledgers():
            with self._troubles(user):
                self.positions[str(ledger.folder)] = ledger.end()

    def _ledgers(self) -> Iterator[tuple[str, str, Ledger]]:
        """Those that there are now, each with its node and its user."""
        for place, node in self.places.items():
            shared = [] if any(place.glob(FILES)) else sorted({path.parent for path in place.glob(f"*/{FILES}")})
            for folder in shared or [place]:
                yield plain(folder.name) if shared else node, "", Ledger(folder)
        yield from ((os.uname().nodename, user, ledger) for user, ledger in self._users().items())

    def paths(self) -> set[Path]:
        """Where the kernel reports that a machine of this host has ended."""
        folders = [ledger.folder for _, _, ledger in self._ledgers()]
        return {path for folder in folders for path in (folder, *folder.glob(FILES))}

    @contextmanager
    def _troubles(self, user: str) -> Iterator[None]:
        """What goes wrong with a user's ledger, which may have anything in it, stops no other."""
        try:
            yield
        except (BelljarError, OSError, TypeError, ValueError) as exc:
            if not user:
                raise
            self.troubles[f"the ledger of {user}"] = str(exc)


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
