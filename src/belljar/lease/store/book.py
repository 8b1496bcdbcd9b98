"""One transaction's view of what is written down."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from belljar.errors import BadSetting
from belljar.lease import Event, Instance, Lease, Report, Slot, Token
from belljar.lease.case import Case
from belljar.lease.policy import Sums
from belljar.lease.states import INSTANCE_MOVES, LEASE_MOVES, SLOT_MOVES
from belljar.lease.store.tables import TABLES, decoded
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

    def run(self, statement: str) -> None:
        """One without values, such as makes a table."""
        self._execute(statement, ())

    def check_version(self, ours: int, place: str) -> None:
        """Of the tables: written where it is missing. Raises BadSetting for another one."""
        self._execute("INSERT INTO facts VALUES ('version', ?) ON CONFLICT (name) DO NOTHING", (str(ours),))
        found = self._execute("SELECT value FROM facts WHERE name = ?", ("version",))[0][0]
        if found != str(ours):
            raise BadSetting(
                f"{place}: written by another version of belljar (tables {found}, this one has {ours})",
                hint="Run the version that wrote it, or give another `lease.database`.",
            )

    # -- values --------------------------------------------------------------------------------------------------------

    def get(self, kind: type[V], id: str) -> V | None:
        rows = self._execute(f"SELECT value FROM {TABLES[kind].name} WHERE id = ?", (id,))
        return decoded(kind, rows[0][0]) if rows else None

    def find(self, kind: type[V], **where: str | int) -> list[V]:
        """All of this kind in whose columns this stands, by id."""
        asked = " AND ".join(f"{name} = ?" for name in where) or "1 = 1"
        rows = self._execute(f"SELECT value FROM {TABLES[kind].name} WHERE {asked} ORDER BY id", (*where.values(),))
        return [decoded(kind, text) for (text,) in rows]

    def put(self, *values: Any) -> None:
        """Each new, or in place of the one with its id."""
        for value in values:
            table = TABLES[type(value)]
            facts = {"id": value.id, "value": dumps(value).decode()}
            facts |= {name: of(value) for name, (_, of) in table.columns.items()}
            changed = ", ".join(f"{name} = excluded.{name}" for name in facts if name != "id")
            self._execute(
                f"INSERT INTO {table.name} ({', '.join(facts)}) VALUES ({', '.join('?' * len(facts))})"
                f" ON CONFLICT (id) DO UPDATE SET {changed}",
                (*facts.values(),),
            )

    def drop(self, kind: type[Any], id: str) -> None:
        self._execute(f"DELETE FROM {TABLES[kind].name} WHERE id = ?", (id,))

    def lock(self, *names: str) -> None:
        """Until the transaction's end nobody else has one of these: owners as `owner ID`, leases as `lease ID`."""
        for name in sorted(names) if self._locks else ():
            self._execute(
                "INSERT INTO locks (name) VALUES (?) ON CONFLICT (name) DO UPDATE SET name = excluded.name", (name,)
            )

    # -- leases --------------------------------------------------------------------------------------------------------

    def case(self, lease_id: str) -> Case | None:
        """All of one lease, which is locked. Machines are in the order of their indexes, slots in that of ranks."""
        found = self.get(Lease, lease_id)
        if found is None:
            return None
        self.lock(f"lease {lease_id}", *([f"lease {found.carrier}"] if found.carrier else []))
        lease = self.get(Lease, lease_id) or found
        instances = sorted(self.find(Instance, lease=lease_id), key=lambda one: one.index)
        slots = sorted(self.find(Slot, lease=lease.carrier or lease_id), key=lambda one: (one.attempt, one.rank))
        guests = [
            one for rider in self.find(Lease, carrier=lease_id, live=1) for one in self.find(Instance, lease=rider.id, live=1)
        ]  # fmt: skip
        return Case(lease, tuple(instances), tuple(slots), tuple(guests))

    def case_of(self, report: Report) -> Case | None:
        """Of the lease whose machine it tells of, which may be a guest on another's node; else of its pilot's."""
        machine = self.get(Instance, report.instance) if report.instance else None
        if machine is not None and machine.slot == report.slot:
            return self.case(machine.lease)
        return self.case(report.lease)

    def save(self, before: Case | None, after: Case, now: float, report: Report | None = None) -> None:
        """What is new or has changed, with an event for each move. Raises ValueError for a move that no table allows."""
        known = {one.id: one for one in _parts(before)} if before is not None else {}
        for one in _parts(after):
            old = known.get(one.id)
            if old == one:
                continue
            if len(one_why := getattr(one, "why", "")) > LONGEST_WHY:
                one = replace(one, why=one_why[:LONGEST_WHY])
            self.put(one)
            if old is None or old.state is not one.state:
                self._add(_move(old, one, after.lease, now, report))

    # -- events --------------------------------------------------------------------------------------------------------

    def _add(self, event: Event) -> None:
        self._execute("INSERT INTO events (lease, value) VALUES (?, ?)", (event.lease, dumps(event).decode()))

    def events(self, after: int = 0, *, lease: str = "", limit: int = 1000) -> list[tuple[int, Event]]:
        """With their positions, oldest first: those behind *after*; of one lease where it is named."""
        asked, of = (" AND lease = ?", (lease,)) if lease else ("", ())
        rows = self._execute(
            f"SELECT position, value FROM events WHERE position > ?{asked} ORDER BY position LIMIT ?",
            (after, *of, limit),
        )
        return [(position, decoded(Event, text)) for position, text in rows]

    # -- what owners have, and had -------------------------------------------------------------------------------------

    def sums(self, owner: str, since: float = 0.0) -> Sums:
        """Of machines that live, and of those that ended *since* then."""
        live = self._execute(
            "SELECT COUNT(*), COALESCE(SUM(cores), 0), COALESCE(SUM(reserved), 0) FROM instances WHERE owner = ? AND live = 1",
            (owner,),
        )[0]
        used = self._execute(
            "SELECT COALESCE(SUM(used), 0) FROM instances WHERE owner = ? AND live = 0 AND ended >= ?", (owner, since)
        )[0]
        return Sums(*(int(one) for one in (*live, *used)))

    def machines(self, owner: str, since: float) -> list[Instance]:
        """Of an owner: those that live, and those that ended *since* then, by creation."""
        rows = self._execute("SELECT value FROM instances WHERE owner = ? AND (live = 1 OR ended >= ?)", (owner, since))
        return sorted(
            (decoded(Instance, text) for (text,) in rows), key=lambda one: (one.created, one.lease, one.index)
        )

    def forget_tokens(self, ended_before: float) -> int:
        """Drop those whose leases ended before then."""
        old = [
            one
            for one in self.find(Token)
            if (lease := self.get(Lease, one.lease)) is None or (not lease.is_live and lease.since < ended_before)
        ]
        for one in old:
            self.drop(Token, one.id)
        return len(old)


def _parts(case: Case) -> Iterable[Any]:
    return (case.lease, *case.slots, *case.instances)


def _move(old: Any, new: Any, lease: Lease, now: float, report: Report | None) -> Event:
    if old is not None and new.state not in MOVES[type(new)][old.state]:
        raise ValueError(f"{new.id}: {new.state.value} cannot follow {old.state.value}")
    slot = new.id if isinstance(new, Slot) else getattr(new, "slot", "")
    return Event(
        lease.id, new.id, old.state.value if old is not None else "", new.state.value, now, slot=slot,
        seq=report.seq if report else 0, mono=report.mono if report else 0.0,
        cause=getattr(new, "cause", None), why=getattr(new, "why", "")[:LONGEST_WHY],
    )  # fmt: skip
