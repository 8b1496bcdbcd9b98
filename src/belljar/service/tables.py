"""Tables of a settings file, read by the fields of dataclasses: a field with a help text is a key, and its type and metadata say how
to read it. Every mistake has its place."""

from __future__ import annotations

import re
import sys
from collections.abc import Container, Iterable, Mapping
from functools import cache
from pathlib import Path

from belljar.hints import Any
from belljar.host.toml import Mistake, meant, place, read
from belljar.host.values import convert
from belljar.records import Field, dataclass, fields

NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")  # of a table
Wrong = tuple[str, str, str]  # a key, what is wrong with it, a hint
OPTION = re.compile(r"[a-z0-9_]+")  # a name in an inner table


@dataclass(frozen=True)
class Key:
    """A key of a table: the field it sets. Pairs of names and values are an inner table."""

    field: Field[Any]
    owner: Any  # the class of this field

    @property
    def kind(self) -> Any:
        """Its type. `typing.get_type_hints` would cost more than all else here."""
        owner = next(kind for kind in self.owner.__mro__ if self.field.name in kind.__annotations__)
        return eval(owner.__annotations__[self.field.name], vars(sys.modules[owner.__module__]))

    @property
    def is_table(self) -> bool:
        return getattr(getattr(self.kind, "__args__", (None,))[0], "__origin__", None) is tuple

    def read(self, raw: Any, *, is_text: bool = False) -> Any:
        """The value that is meant. Raises ValueError."""
        if self.is_table:
            return _pairs(raw, self.kind, self.field.metadata)
        return convert(raw, self.kind, self.field.metadata, is_text=is_text)

    @property
    def hint(self) -> str:
        form = self.field.metadata.get("form")
        return str(form.as_in if form else self.field.metadata["help"])


@dataclass(frozen=True)
class Value:
    """What a key was given, and where."""

    raw: Any
    origin: str


Keys = Mapping[str, Key]
Known = Mapping[str, Keys]  # the kinds of tables, with their keys
Table = dict[str, Value]
Tables = dict[str, Table]  # by their whole names


@cache
def keys_of(kinds: tuple[Any, ...], table: str) -> dict[str, Key]:
    """The keys of a table: fields of these classes, but for those that are another `table`'s; the first of a name counts."""
    keys: dict[str, Key] = {}
    for kind in kinds:
        for field in fields(kind):
            if "help" in field.metadata and field.metadata.get("table", table) == table:
                keys.setdefault(str(field.metadata.get("key", field.name)), Key(field, kind))
    return keys


def read_file(
    path: Path, known: Known, named: Container[str], tables: Tables, mistakes: list[Mistake], *, is_sites: bool = False
) -> None:
    """Put what a file gives into *tables*, by their whole names. A kind that is *named* may have several tables, [KIND.NAME].
    *is_sites*: a file that others may write is not read."""
    text, content = read(path, mistakes, is_sites=is_sites)
    for kind, table in content.items():
        if kind not in known:
            mistakes.append(Mistake(place(path, text, kind), kind, "no such table", meant(kind, known)))
            continue
        inner = table if kind in named and isinstance(table, dict) else {"": table}
        for name, values in inner.items():
            full = f"{kind}.{name}" if name else kind
            origin = place(path, text, full)
            if not isinstance(values, dict):
                shape = f"[{kind}.NAME]" if kind in named else f"[{kind}]"
                origin = place(path, text, *(kind, name) if name else ("", kind))
                mistakes.append(Mistake(origin, full, "is a table", f"write {shape} on a line of its own"))
            elif name and not NAME.fullmatch(name):
                hint = "small letters, digits and - inside, at most 63"
                mistakes.append(Mistake(origin, full, "cannot be a name", hint))
            else:
                _read_table(path, text, full, values, known[kind], tables.setdefault(full, {}), mistakes)


def read_values(
    files: Iterable[Path], known: Known, named: Container[str], mistakes: list[Mistake]
) -> tuple[Tables, dict[str, dict[str, Any]]]:
    """The tables of these files as they stand, and as values; those of which there is one are there in any case."""
    tables: Tables = {kind: {} for kind in known if kind not in named}
    for file in files:
        read_file(file, known, named, tables, mistakes)
    return tables, {
        name: converted(name, table, known[name.partition(".")[0]], mistakes) for name, table in tables.items()
    }


def blame(path: Path, tables: Tables, wrongs: Iterable[tuple[str, Wrong]], mistakes: list[Mistake]) -> None:
    """Add what is wrong with keys of which nothing is said yet: at the line of a key, or, where it was not given, in the file of its
    table."""
    blamed = {known.key for known in mistakes}
    for name, (key, what, hint) in wrongs:
        table = tables.get(name, {})
        given = [table[key].origin] if key in table else [value.origin.rpartition(":")[0] for value in table.values()]
        if f"{name}.{key}" not in blamed:
            mistakes.append(Mistake(next(filter(None, given), str(path)), f"{name}.{key}", what, hint))


def _read_table(
    path: Path, text: str, name: str, values: Mapping[str, Any], known: Keys, table: Table, mistakes: list[Mistake]
) -> None:
    """Put what a file gives over what was given before, key by key, and inner tables name by name."""
    for key, raw in values.items():
        at_key, at_table = place(path, text, name, key), place(path, text, f"{name}.{key}")
        origin = at_table if at_key == str(path) else at_key
        if key not in known:
            mistakes.append(Mistake(origin, f"{name}.{key}", "no such key", meant(key, known)))
            continue
        before = table[key].raw if key in table else None
        if known[key].is_table and isinstance(before, dict) and isinstance(raw, dict):
            raw = before | raw
        table[key] = Value(raw, origin)


def converted(name: str, table: Table, known: Keys, mistakes: list[Mistake]) -> dict[str, Any]:
    """Fields and their values; of a wrong one, the mistake."""
    values = {}
    for key, value in table.items():
        try:
            values[known[key].field.name] = known[key].read(value.raw)
        except ValueError as exc:
            mistakes.append(Mistake(value.origin, f"{name}.{key}", str(exc), known[key].hint))
    return values


def _pairs(raw: Any, kind: Any, metadata: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    if not isinstance(raw, dict):
        raise ValueError("is a table of names and values")
    for name in raw:
        if not OPTION.fullmatch(name):
            raise ValueError(f"{name[:60]!r} cannot be a name: small letters, digits and _ only")
    inner = kind.__args__[0].__args__[1]
    return tuple((name, convert(value, inner, metadata, is_text=False)) for name, value in raw.items())
