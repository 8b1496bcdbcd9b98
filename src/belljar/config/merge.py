"""Settings files and variables laid over the defaults. Collects every mistake with its place; raises nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, get_type_hints

from belljar.config import SECTIONS, Loaded, Settings
from belljar.config.convert import convert
from belljar.errors import HostError
from belljar.host.files import read_capped

LARGEST_FILE = 1 << 20
THE_SITES = ("batch",)  # sections


@dataclass(frozen=True)
class Mistake:
    """`origin, key: what; hint`."""

    origin: str  # file with line, or variable
    key: str  # "section.key", or "" where the whole file is meant
    what: str
    hint: str = ""
    is_users: bool = False  # it stands in a place that is the user's own, not the site's

    def __str__(self) -> str:
        place = f"{self.origin}, {self.key}" if self.key else self.origin
        return f"{place}: {self.what}{f' ({self.hint})' if self.hint else ''}"


@dataclass(frozen=True)
class Given:
    """One value somebody gave."""

    origin: str
    section: str
    key: str
    raw: object
    is_text: bool


def merge(
    defaults: Settings, files: Sequence[Path], variables: Mapping[str, str], users_own: Path | None = None
) -> Loaded:
    """Lay *files*, weakest first, and then *variables* over *defaults*. With *users_own*, that file and the variables are an
    ordinary user's, who cannot change what is for the site to say."""
    mistakes: list[Mistake] = []
    given: list[Given] = []
    for path in files:
        found = list(_read_file(path, mistakes))
        given += _without_the_sites(found, mistakes) if path == users_own else found
    found = list(_read_variables(variables, mistakes))
    given += _without_the_sites(found, mistakes) if users_own else found
    values: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    origins: dict[str, str] = {}
    hints = {section: get_type_hints(kind) for section, kind in SECTIONS.items()}
    facts = {section: {one.name: one.metadata for one in fields(kind)} for section, kind in SECTIONS.items()}
    for one in given:
        try:
            value = convert(one.raw, hints[one.section][one.key], facts[one.section][one.key], is_text=one.is_text)
        except ValueError as exc:
            mistakes.append(
                Mistake(one.origin, f"{one.section}.{one.key}", str(exc), str(facts[one.section][one.key]["help"]))
            )
            continue
        values[one.section][one.key] = value
        origins[f"{one.section}.{one.key}"] = one.origin
    sections = {section: replace(getattr(defaults, section), **given) for section, given in values.items() if given}
    return Loaded(replace(defaults, **sections), origins, tuple(_with_owner(one, users_own) for one in mistakes))


def _with_owner(mistake: Mistake, users_own: Path | None) -> Mistake:
    place = mistake.origin.rpartition(":")[0] or mistake.origin
    is_users = users_own is not None and (
        mistake.origin.startswith("environment ") or str(users_own) in (place, mistake.origin)
    )
    return replace(mistake, is_users=is_users)


def _without_the_sites(given: Sequence[Given], mistakes: list[Mistake]) -> Iterable[Given]:
    for one in given:
        if one.section in THE_SITES:
            what, hint = "is for the site to set, in /etc/belljar", "take it away"
            mistakes.append(Mistake(one.origin, f"{one.section}.{one.key}", what, hint))
        else:
            yield one


def _read_file(path: Path, mistakes: list[Mistake]) -> Iterable[Given]:
    """What a file gives. A file that cannot be read or parsed is one mistake and gives nothing."""
    import tomllib

    try:
        text = read_capped(path, LARGEST_FILE).decode()
        content = tomllib.loads(text)
    except FileNotFoundError:
        what = "a link that leads nowhere" if path.is_symlink() else "no such file"
        mistakes.append(Mistake(str(path), "", what, "correct --config, or take the link away"))
        return
    except OSError as exc:
        mistakes.append(Mistake(str(path), "", f"cannot be read: {exc.strerror}", "correct its owner and mode"))
        return
    except HostError as exc:
        mistakes.append(Mistake(str(path), "", exc.message.removeprefix(f"{path}: "), "settings are a small file"))
        return
    except UnicodeDecodeError as exc:
        mistakes.append(Mistake(str(path), "", f"not UTF-8 at byte {exc.start}", "save it as UTF-8"))
        return
    except (tomllib.TOMLDecodeError, RecursionError) as exc:
        mistakes.append(Mistake(str(path), "", f"not TOML: {exc}", "text wants quotes; sections are [in brackets]"))
        return
    for section, table in content.items():
        if section not in SECTIONS:
            mistakes.append(Mistake(_place(path, text, section), section, "no such section", _meant(section, SECTIONS)))
        elif not isinstance(table, dict):
            mistakes.append(
                Mistake(
                    _place(path, text, "", section), section, "is a section", f"write [{section}] on a line of its own"
                )
            )
        else:
            yield from _read_table(path, text, section, table, mistakes)


def _read_table(
    path: Path, text: str, section: str, table: Mapping[str, object], mistakes: list[Mistake]
) -> Iterable[Given]:
    known = [one.name for one in fields(SECTIONS[section])]
    for key, raw in table.items():
        place = _place(path, text, section, key)
        if key in known:
            yield Given(place, section, key, raw, is_text=False)
        else:
            mistakes.append(Mistake(place, f"{section}.{key}", "no such setting", _meant(key, known)))


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
            mistakes.append(Mistake(f"environment {name}", f"{section}.{key}", "no such setting", _meant(key, known)))


def _meant(word: str, known: Iterable[str]) -> str:
    """A hint for a word that is not known."""
    import difflib

    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}"


def _place(path: Path, text: str, section: str, key: str = "") -> str:
    """`file:line` where the section, or the key in it, is written plainly; else the file alone.

    tomllib tells no lines, and for a person's settings file a look at the line's beginning finds nearly all of them.
    """
    current = ""
    for number, line in enumerate(text.splitlines(), 1):
        bare = line.strip()
        if bare.startswith("["):
            current = bare.strip("[]").partition("]")[0].strip().strip("\"'")
            if not key and current.partition(".")[0] == section:
                return f"{path}:{number}"
        name = bare.partition("=")[0].strip().strip("\"'")
        if key and ((current == section and name == key) or (current == "" and name == f"{section}.{key}")):
            return f"{path}:{number}"
    return str(path)
