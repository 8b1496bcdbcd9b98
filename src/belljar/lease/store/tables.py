"""Which values are kept, and by what they are found: pure. Every database has these tables."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cached_property, lru_cache
from operator import attrgetter
from typing import Any

from belljar.lease import AccessKey, Console, Instance, KeyPair, Lease, Slot, Tag
from belljar.lease.broker import Context, Member
from belljar.reading import from_json
from belljar.records import dataclass

VERSION = 1
TEXT, WHOLE, REAL = "TEXT", "BIGINT", "DOUBLE PRECISION"


@dataclass(frozen=True)
class Table:
    """Of one kind of values. Columns: name -> (its type, what of a value stands in it)."""

    name: str
    columns: Mapping[str, tuple[str, Callable[[Any], Any]]]
    indexes: tuple[str, ...] = ()

    @cached_property
    def put(self) -> str:
        """The statement that writes one: new, or in place of the one with its id."""
        names = ("id", "value", *self.columns)
        changed = ", ".join(f"{name} = excluded.{name}" for name in names[1:])
        marks = ", ".join("?" * len(names))
        return f"INSERT INTO {self.name} ({', '.join(names)}) VALUES ({marks}) ON CONFLICT (id) DO UPDATE SET {changed}"


def _plain(*names: str) -> dict[str, tuple[str, Callable[[Any], Any]]]:
    return {name: (TEXT, attrgetter(name)) for name in names}


LIVE: dict[str, tuple[str, Callable[[Any], Any]]] = {"live": (WHOLE, lambda value: int(value.is_live))}
TABLES: dict[type, Table] = {
    Lease: Table("leases", _plain("owner") | LIVE, ("live", "owner")),
    Slot: Table("slots", _plain("lease") | LIVE, ("lease",)),
    Instance: Table(
        "instances",
        _plain("lease", "owner", "slot") | LIVE | {
            "ended": (REAL, lambda machine: machine.ended or 0.0),
            "cores": (WHOLE, lambda machine: machine.size.cpus),
            "reserved": (WHOLE, lambda machine: machine.size.cpus * -int(-machine.seconds // 1) if machine.is_live else 0),
            "used": (WHOLE, lambda machine: machine.size.cpus * machine.charged),
        },
        ("lease", "owner", "slot"),
    ),
    KeyPair: Table("keys", _plain("owner", "name"), ("owner",)),
    Tag: Table("tags", _plain("owner", "resource"), ("owner", "resource")),
    AccessKey: Table("access", _plain("owner"), ("owner",)),
    Console: Table("consoles", {}),
    Context: Table("contexts", _plain("owner"), ("owner",)),
    Member: Table("members", _plain("context"), ("context",)),
}  # fmt: skip


def schema(number: str) -> tuple[str, ...]:
    """What makes the tables. *number*: the type of a column that counts its rows by itself."""
    made = [
        "CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT NOT NULL)",
        "CREATE TABLE IF NOT EXISTS locks (name TEXT PRIMARY KEY)",
        f"CREATE TABLE IF NOT EXISTS events (position {number}, lease TEXT NOT NULL, value TEXT NOT NULL)",
        "CREATE INDEX IF NOT EXISTS events_lease ON events (lease)",
    ]
    for table in TABLES.values():
        columns = "".join(f", {name} {kind} NOT NULL" for name, (kind, _) in table.columns.items())
        made.append(f"CREATE TABLE IF NOT EXISTS {table.name} (id TEXT PRIMARY KEY, value TEXT NOT NULL{columns})")
        made += [f"CREATE INDEX IF NOT EXISTS {table.name}_{name} ON {table.name} ({name})" for name in table.indexes]
    return tuple(made)


@lru_cache(maxsize=20_000)
def decoded(kind: Any, text: str) -> Any:
    """The value, which cannot be changed; so one that is read often is made once."""
    return from_json(kind, json.loads(text))
