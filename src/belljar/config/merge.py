"""Settings files and variables laid over the defaults. Collects every mistake with its place; raises nothing."""

from __future__ import annotations

import fnmatch
import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from belljar.config import ETC, SECTIONS, File, Loaded, Settings
from belljar.hints import Any
from belljar.host.toml import Mistake, meant, place, read
from belljar.host.values import convert
from belljar.records import dataclass, fields, replace

ALWAYS_LOCKED = ("batch.*", "site.*")


@dataclass(frozen=True)
class Given:
    """One value somebody gave."""

    origin: str
    section: str
    key: str
    raw: object
    is_text: bool
    is_users: bool = False

    @property
    def name(self) -> str:
        return f"{self.section}.{self.key}"


def merge(
    defaults: Settings, files: Sequence[File], variables: Mapping[str, str], *, is_root: bool, in_job: bool
) -> Loaded:
    """Lay *files*, weakest first, then *variables* over *defaults*; what the site has locked, an ordinary user cannot
    change."""
    mistakes: list[Mistake] = []
    given: list[Given] = []
    for file in files:
        given += _from(file.is_users, mistakes, functools.partial(_read_file, file))
    given += _from(not is_root, mistakes, functools.partial(_read_variables, variables))
    given = list(_without_locked(given, _lock_of(given, defaults, mistakes, in_job), mistakes))
    values: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    origins: dict[str, str] = {}
    for one in given:
        try:
            values[one.section][one.key] = _value_of(one)
        except ValueError as exc:
            mistakes.append(Mistake(one.origin, one.name, str(exc), _help(one.section, one.key), one.is_users))
            continue
        origins[one.name] = one.origin
    sections = {section: replace(getattr(defaults, section), **given) for section, given in values.items() if given}
    return Loaded(replace(defaults, **sections), origins, tuple(mistakes))


def _from(is_users: bool, mistakes: list[Mistake], read: Callable[[list[Mistake]], Iterable[Given]]) -> list[Given]:
    """What one place gives; what is given and what is wrong there know whose place it is."""
    found: list[Mistake] = []
    given = [replace(one, is_users=is_users) for one in read(found)]
    mistakes += [replace(one, is_users=is_users) for one in found]
    return given


def _lock_of(
    given: Iterable[Given], defaults: Settings, mistakes: list[Mistake], in_job: bool
) -> tuple[tuple[str, ...], str]:
    """The locked patterns, and where they hold. A pattern that fits no setting is a mistake; then the default list
    holds too."""
    lists = [one for one in given if one.name == "site.lock" and not one.is_users]
    with suppress(ValueError, IndexError):  # told where all values are understood
        own: tuple[str, ...] = _value_of(lists[-1])
        if unknown := [pattern for pattern in own if not fnmatch.filter(_every_name(), pattern)]:
            known = ", ".join(f"{section}.*" for section in SECTIONS)
            mistakes.append(Mistake(lists[-1].origin, "site.lock", f"{unknown[0]!r} fits no setting", f"as in {known}"))
            own = (*own, *defaults.site.lock)
        return (*ALWAYS_LOCKED, *own), ""
    return ((*ALWAYS_LOCKED, *defaults.site.lock), " in a batch job") if in_job or lists else (ALWAYS_LOCKED, "")


def _without_locked(
    given: Iterable[Given], lock: tuple[tuple[str, ...], str], mistakes: list[Mistake]
) -> Iterator[Given]:
    patterns, where = lock
    for one in given:
        if one.is_users and is_locked(one.name, patterns):
            where_else = "" if is_locked(one.name, ALWAYS_LOCKED) else where
            what = f"is for the site to set{where_else}, in {ETC}"
            remedy = f"unset it{where_else and ' in the job'}" if one.is_text else "take it away"
            mistakes.append(Mistake(one.origin, one.name, what, remedy, is_users=True))
        else:
            yield one


def is_locked(name: str, patterns: Iterable[str]) -> bool:
    """Does one of the patterns fit this SECTION.KEY?"""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _every_name() -> list[str]:
    return [f"{section}.{one.name}" for section, kind in SECTIONS.items() for one in fields(kind)]


def _value_of(one: Given) -> Any:
    """Raises ValueError."""
    kind = SECTIONS[one.section]
    (facts,) = (field.metadata for field in fields(kind) if field.name == one.key)
    return convert(one.raw, type_of(one.section, one.key), facts, is_text=one.is_text)


def type_of(section: str, key: str) -> Any:
    """Its type. `typing.get_type_hints` would cost more than all else here."""
    kind = next(one for one in SECTIONS[section].__mro__ if key in one.__annotations__)
    return eval(kind.__annotations__[key], vars(sys.modules[kind.__module__]))


def _help(section: str, key: str) -> str:
    return next(str(one.metadata["help"]) for one in fields(SECTIONS[section]) if one.name == key)


def _read_file(file: File, mistakes: list[Mistake]) -> Iterable[Given]:
    """What a file gives. One that cannot be read or parsed, or is the site's and can be written by others, is one mistake and
    gives nothing."""
    path = file.path
    text, content = read(path, mistakes, is_sites=not file.is_users)
    for section, table in content.items():
        if section not in SECTIONS:
            mistakes.append(Mistake(place(path, text, section), section, "no such section", meant(section, SECTIONS)))
        elif not isinstance(table, dict):
            mistakes.append(
                Mistake(
                    place(path, text, "", section), section, "is a section", f"write [{section}] on a line of its own"
                )
            )
        else:
            yield from _read_table(path, text, section, table, mistakes)


def _read_table(
    path: Path, text: str, section: str, table: Mapping[str, object], mistakes: list[Mistake]
) -> Iterable[Given]:
    known = [one.name for one in fields(SECTIONS[section])]
    for key, raw in table.items():
        origin = place(path, text, section, key)
        if key in known:
            yield Given(origin, section, key, raw, is_text=False)
        else:
            mistakes.append(_unknown(origin, section, key, known))


def _read_variables(variables: Mapping[str, str], mistakes: list[Mistake]) -> Iterable[Given]:
    """BELLJAR_MACHINE_MEMORY=2G is machine.memory. Names that begin with no section of ours are somebody else's."""
    for name in sorted(variables):
        section, _, key = name.removeprefix("BELLJAR_").lower().partition("_")
        if section not in SECTIONS or not key:
            continue
        known = [one.name for one in fields(SECTIONS[section])]
        if key in known:
            yield Given(f"environment {name}", section, key, variables[name], is_text=True)
        else:
            mistakes.append(_unknown(f"environment {name}", section, key, known))


def _unknown(origin: str, section: str, key: str, known: Iterable[str]) -> Mistake:
    return Mistake(origin, f"{section}.{key}", "no such setting", meant(key, known))
