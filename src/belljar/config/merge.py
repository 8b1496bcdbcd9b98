"""Settings files and variables laid over the defaults. Collects every mistake with its place; raises nothing."""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress

from belljar.config import ETC, SECTIONS, File, Loaded, Settings
from belljar.hints import Any
from belljar.host.toml import Mistake, meant
from belljar.records import dataclass, replace
from belljar.service.tables import Key, Value, keys_of, read_file

ALWAYS_LOCKED = ("batch.*", "site.*")


@dataclass(frozen=True)
class Given:
    """One value somebody gave."""

    origin: str
    section: str
    key: str
    raw: object
    is_users: bool  # it stands in a place that is the user's own, not the site's
    is_text: bool = False

    @property
    def name(self) -> str:
        return f"{self.section}.{self.key}"

    def value(self) -> Any:
        """Raises ValueError."""
        return keys()[self.section][self.key].read(self.raw, is_text=self.is_text)

    def mistake(self, what: str, hint: str) -> Mistake:
        return Mistake(self.origin, self.name, what, hint, self.is_users)


@functools.cache
def keys() -> dict[str, dict[str, Key]]:
    """The keys of every section."""
    return {section: keys_of((kind,), section) for section, kind in SECTIONS.items()}


def merge(
    defaults: Settings, files: Iterable[File], variables: Mapping[str, str], *, is_root: bool, in_job: bool
) -> Loaded:
    """Lay *files*, weakest first, then *variables* over *defaults*; what the site has locked, an ordinary user cannot
    change."""
    mistakes: list[Mistake] = []
    given = [*_in_files(files, mistakes), *_in_variables(variables, not is_root, mistakes)]
    patterns, where = _lock_of(given, defaults, mistakes, in_job)
    values: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    origins: dict[str, str] = {}
    for item in given:
        if item.is_users and is_locked(item.name, patterns):
            only = "" if is_locked(item.name, ALWAYS_LOCKED) else where
            remedy = f"unset it{only and ' in the job'}" if item.is_text else "take it away"
            mistakes.append(item.mistake(f"is for the site to set{only}, in {ETC}", remedy))
            continue
        try:
            values[item.section][item.key] = item.value()
            origins[item.name] = item.origin
        except ValueError as exc:
            mistakes.append(item.mistake(str(exc), keys()[item.section][item.key].hint))
    sections = {section: replace(getattr(defaults, section), **given) for section, given in values.items() if given}
    return Loaded(replace(defaults, **sections), origins, tuple(mistakes))


def _lock_of(
    given: Iterable[Given], defaults: Settings, mistakes: list[Mistake], in_job: bool
) -> tuple[tuple[str, ...], str]:
    """The locked patterns, and where they hold. A pattern that fits no setting is a mistake; then the default list
    holds too."""
    lists = [item for item in given if item.name == "site.lock" and not item.is_users]
    with suppress(ValueError, IndexError):  # a mistake is reported where all values are read
        own: tuple[str, ...] = lists[-1].value()
        names = [f"{section}.{key}" for section, known in keys().items() for key in known]
        if unknown := [pattern for pattern in own if not fnmatch.filter(names, pattern)]:
            known = ", ".join(f"{section}.*" for section in SECTIONS)
            mistakes.append(lists[-1].mistake(f"{unknown[0]!r} fits no setting", f"as in {known}"))
            own = (*own, *defaults.site.lock)
        return (*ALWAYS_LOCKED, *own), ""
    return ((*ALWAYS_LOCKED, *defaults.site.lock), " in a batch job") if in_job or lists else (ALWAYS_LOCKED, "")


def is_locked(name: str, patterns: Iterable[str]) -> bool:
    """Does one of the patterns fit this SECTION.KEY?"""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _in_files(files: Iterable[File], mistakes: list[Mistake]) -> Iterator[Given]:
    """What files give. One that cannot be read or parsed, or is the site's and can be written by others, is one mistake and
    gives nothing."""
    for file in files:
        tables: dict[str, dict[str, Value]] = {}
        wrong: list[Mistake] = []
        read_file(file.path, keys(), (), tables, wrong, is_sites=not file.is_users)
        mistakes += [replace(mistake, is_users=file.is_users) for mistake in wrong]
        for section, table in tables.items():
            yield from (Given(value.origin, section, key, value.raw, file.is_users) for key, value in table.items())


def _in_variables(variables: Mapping[str, str], is_users: bool, mistakes: list[Mistake]) -> Iterator[Given]:
    """BELLJAR_MACHINE_MEMORY=2G is machine.memory. Names that do not begin with a section of ours are somebody else's."""
    for name in sorted(variables):
        section, _, key = name.removeprefix("BELLJAR_").lower().partition("_")
        if section not in SECTIONS or not key:
            continue
        given = Given(f"environment {name}", section, key, variables[name], is_users, is_text=True)
        if key in keys()[section]:
            yield given
        else:
            mistakes.append(given.mistake("no such key", meant(key, keys()[section])))
