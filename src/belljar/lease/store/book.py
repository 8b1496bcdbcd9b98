"""One transaction's view of what is written down."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from typing import Any, TypeVar

from belljar.errors import BadSetting
from belljar.lease import Event, Instance, Lease, Report, Slot
from belljar.lease.decisions.case import Case
from belljar.lease.decisions.policy import Sums
from belljar.lease.states import INSTANCE_MOVES, LEASE_MOVES, SLOT_MOVES
from belljar.lease.store.tables import TABLES, VERSION, decoded, schema
from belljar.model import dumps
from belljar.records import replace

V = TypeVar("V")
Execute = Callable[[str, Sequence[Any]], list[tuple[Any, ...]]]
LONGEST_WHY = 1000
MOVES: dict[type, Any] = {Lease: LEASE_MOVES, Slot: SLOT_MOVES, Instance: INSTANCE_MOVES}


class Book:
    """Made by a store, for one transaction. *execute*: runs a statement with `?` for its values, gives its rows. *locks*: other
    transactions that write may run beside this one."""

    def __init__(self, execute: Execute, *, locks: bool) -> None:
        self._execute, self._locks = execute, locks

    def prepare(self, place: str, *first: str, number: str) -> None:
        """Make the tables that are missing, after these statements. *number*: see `schema`. Raises BadSetting for another version's."""
        for statement in (*first, *schema(number)):
            self._execute(statement, ())
        self._execute("INSERT INTO facts VALUES ('version', ?) ON CONFLICT (name) DO NOTHING", (str(VERSION),))
        version = self._execute("SELECT value FROM facts WHERE name = ?", ("version",))[0][0]
        if version != str(VERSION):
            what = f"{place}: written by another version of belljar (tables {version}, this one has {VERSION})"
            raise BadSetting(what, hint="Run the version that wrote it, or give another `lease.database`.")

    # -- values --------------------------------------------------------------------------------------------------------

    def get(self, kind: type[V], id: str) -> V | None:
        return next(iter(self.find(kind, id=id)), None)

    def find(self, kind: type[V], **where: str | int) -> list[V]:
        """All of this kind in whose columns this stands, by id."""
        return self._values(kind, f"FROM {TABLES[kind].name} WHERE {_and(where)} ORDER BY id", *where.values())

    def _values(self, kind: Any, rest: str, *values: str | float) -> list[Any]:
        return [decoded(kind, text) for (text,) in self._execute(f"SELECT value {rest}", values)]

    def put(self, *values: Any) -> None:
        """Each new, or in place of the one with its id."""
        for value in values:
            columns = (of(value) for _, of in TABLES[type(value)].columns.values())
            self._execute(TABLES[type(value)].put, (value.id, dumps(value).decode(), *columns))

    def drop(self, kind: type[Any], id: str = "", **where: str | int) -> None:
        where = where or {"id": id}
        self._execute(f"DELETE FROM {TABLES[kind].name} WHERE {_and(where)}", (*where.values(),))

    def lock(self, *names: str) -> None:
        """Until the transaction's end nobody else has one of these: owners as `owner ID`, leases as `lease ID`."""
        taken = "INSERT INTO locks (name) VALUES (?) ON CONFLICT (name) DO UPDATE SET name = excluded.name"
        for name in sorted(names) if self._locks else ():
            self._execute(taken, (name,))

    # -- leases --------------------------------------------------------------------------------------------------------

    def case(self, lease_id: str) -> Case | None:
        """All of one lease, which is locked. Machines are in the order of their indexes, slots in that of ranks."""
        lease = self.get(Lease, lease_id)
        if lease is None:
            return None
        self.lock(f"lease {lease_id}")
        lease = self.get(Lease, lease_id) or lease
        instances = sorted(self.find(Instance, lease=lease_id), key=lambda machine: machine.index)
        slots = sorted(self.find(Slot, lease=lease_id), key=lambda slot: (slot.attempt, slot.rank))
        return Case(lease, tuple(instances), tuple(slots))

    def save(self, before: Case | None, after: Case, now: float, report: Report | None = None) -> None:
        """What is new or has changed, with an event for each move. Raises ValueError for a move that no table allows."""
        for old, new in _changed(before, after):
            if old == new:
                continue
            if old is not None and old.id != new.id:
                raise ValueError(f"{new.id} stands where {old.id} was")
            if len(why := getattr(new, "why", "")) > LONGEST_WHY:
                new = replace(new, why=why[:LONGEST_WHY])
            self.put(new)
            if old is None or old.state is not new.state:
                self.add(_move(old, new, after.lease, now, report))

    # -- events --------------------------------------------------------------------------------------------------------

    def add(self, event: Event) -> None:
        self._execute("INSERT INTO events (lease, value) VALUES (?, ?)", (event.lease, dumps(event).decode()))

    def events(self, after: int = 0, *, lease: str = "", limit: int = 1000) -> list[tuple[int, Event]]:
        """With their positions, oldest first: those behind *after*; of one lease where it is named."""
        asked, of = (" AND lease = ?", (lease,)) if lease else ("", ())
        query = f"SELECT position, value FROM events WHERE position > ?{asked} ORDER BY position LIMIT ?"
        rows = self._execute(query, (after, *of, limit))
        return [(position, decoded(Event, text)) for position, text in rows]

    # -- what owners have, and had -------------------------------------------------------------------------------------

    def sums(self, owner: str, since: float = 0.0) -> Sums:
        """Of machines that live, and of those that ended *since* then."""
        live = "SELECT COUNT(*), COALESCE(SUM(reserved), 0) FROM instances WHERE owner = ? AND live = 1"
        used = "SELECT COALESCE(SUM(used), 0) FROM instances WHERE owner = ? AND live = 0 AND ended >= ?"
        sums = (*self._execute(live, (owner,))[0], *self._execute(used, (owner, since))[0])
        return Sums(*map(int, sums))

    def machines(self, owner: str, since: float) -> list[Instance]:
        """For an owner, or everybody: those that live, and those that ended *since* then, by creation."""
        where = "(owner = ? OR ? = '') AND (live = 1 OR ended >= ?)"
        machines = self._values(Instance, f"FROM instances WHERE {where}", owner, owner, since)
        return sorted(machines, key=lambda machine: (machine.created, machine.lease, machine.index))

    def forget_consoles(self, ended_before: float) -> None:
        """Drop those of machines that ended before then, and are not shown any more."""
        old = "SELECT 1 FROM instances WHERE instances.id = consoles.id AND live = 0 AND ended < ?"
        self._execute(f"DELETE FROM consoles WHERE EXISTS ({old})", (ended_before,))


def _and(where: dict[str, str | int]) -> str:
    return " AND ".join(f"{name} = ?" for name in where) or "1 = 1"


def _changed(before: Case | None, after: Case) -> Iterator[tuple[Any, Any]]:
    """What each part was, None where it is new, and what it is: of those that are not the same. Most of a large lease is; new ones
    come last."""
    old = ((before.lease,), before.slots, before.instances) if before else ((), (), ())
    for was, now in zip(old, ((after.lease,), after.slots, after.instances), strict=True):
        yield from [pair for pair in zip_longest(was, now) if pair[0] is not pair[1]] if was is not now else ()


def _move(old: Any, new: Any, lease: Lease, now: float, report: Report | None) -> Event:
    if old is not None and new.state not in MOVES[type(new)][old.state]:
        raise ValueError(f"{new.id}: {new.state.value} cannot follow {old.state.value}")
    slot = new.id if isinstance(new, Slot) else getattr(new, "slot", "")
    return Event(lease.id, new.id, old.state.value if old is not None else "", new.state.value, now, slot=slot,
                 seq=report.seq if report else 0, mono=report.mono if report else 0.0, cause=getattr(new, "cause", None),
                 why=getattr(new, "why", "")[:LONGEST_WHY], charged=getattr(new, "charged", 0))  # fmt: skip
