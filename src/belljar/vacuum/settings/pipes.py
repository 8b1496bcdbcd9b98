"""Vacuum pipes: machinetypes that an experiment describes in JSON at an address. What comes from there is a stranger's word.

Each has a copy (copies.py). For the values, the site's [machinetype.PIPE-SUFFIX] stand before its [pipe.NAME], those before the
document, and that before the defaults. A document names no files of this host but those in the folder `files`, and no addresses of
this host or of private networks, unless the site said that it comes from there itself (`is_public`)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from belljar.host.toml import Mistake
from belljar.host.values import amount, is_url
from belljar.records import replace
from belljar.service.tables import Value, converted
from belljar.vacuum import MachineType, Pipe, Space
from belljar.vacuum.settings.copies import Copy, is_public, may_name
from belljar.vacuum.settings.settings import keys, machinetype, overlaid, wrong_type
from belljar.vacuum.settings.vocabulary import WORDS, SetsNothing, translate

FOLDER = "vacuum/pipes"  # of the copies, in the store
SUFFIX = re.compile(r"[a-z0-9]([a-z0-9-]{0,39}[a-z0-9])?")


def with_pipes(space: Space, copies: Mapping[str, Copy]) -> tuple[Space, tuple[Mistake, ...]]:
    """The space with the machinetypes of its pipes, by their names, and what of the documents was not taken."""
    types, notes = {kind.name: kind for kind in space.types}, list[Mistake]()
    for pipe in space.pipes:
        copy = copies.get(pipe.name, Copy())
        types |= {kind.name: kind for kind in machinetypes(pipe, copy.document or {}, space, notes)}
    return replace(space, types=tuple(types.values())), tuple(notes)


def machinetypes(pipe: Pipe, document: Mapping[str, Any], space: Space, notes: list[Mistake]) -> list[MachineType]:
    """Those that can be made of a document. One with a wrong value is left out: half understood it is not started."""
    entries = dict(_entries(pipe, document.get("machinetypes", ()), notes))
    shares = {name: amount(str(entry.get("target_share", 0))) for name, entry in entries.items()}
    total = sum(shares.values())
    made = []
    for name, entry in entries.items():
        given = _given(pipe, name, entry, notes)
        if given is None:
            continue
        given["share"] = pipe.share * shares[name] / total if total else 0.0
        for stronger in (pipe.given, dict(pipe.own).get(name, ())):
            given = overlaid(given, dict(stronger))
        kind = machinetype(name, given, space, pipe.name)
        wrong = [Mistake(pipe.url, f"{name}.{key}", what, "it is left out") for key, what, _ in wrong_type(kind)]
        notes += wrong
        made += [] if wrong else [kind]
    return made


def _entries(pipe: Pipe, entries: Iterable[Any], notes: list[Mistake]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    seen = set()
    for count, entry in enumerate(entries):
        at = f"machinetypes[{count}]"
        suffix = entry.get("suffix") if isinstance(entry, dict) else None
        if not (isinstance(suffix, str) and SUFFIX.fullmatch(suffix)) or len(f"{pipe.name}-{suffix}") > 63:
            notes.append(Mistake(pipe.url, at, "has no suffix that could be a name", "small letters, digits and -"))
        elif suffix in seen:
            notes.append(Mistake(pipe.url, at, f"{suffix} is there twice", "the first one counts"))
        else:
            seen.add(suffix)
            yield f"{pipe.name}-{suffix}", entry


def _given(pipe: Pipe, name: str, entry: Mapping[str, Any], notes: list[Mistake]) -> dict[str, Any] | None:
    """The fields a document's entry sets, but for those the site sets; None where one of its values is wrong."""
    sites = dict(pipe.given).keys() | dict(dict(pipe.own).get(name, ())).keys()
    wrong, raw = list[tuple[str, str]](), dict[str, Any]()
    for option, value in entry.items():
        if option == "suffix" or (option in WORDS and WORDS[option][0] in sites):
            continue
        try:
            key, inner, word = translate(option, value, pipe.files)
        except SetsNothing as exc:
            notes.append(Mistake(pipe.url, f"{name}.{option[:60]}", str(exc), "ignored"))
        except ValueError as exc:
            wrong.append((option, str(exc)))
        else:
            if inner:
                raw.setdefault(key, {})[inner] = word
            elif is_url(str(word)) and not may_name(word, pipe.url):
                wrong.append((option, "is an address of this host or of a private network"))
            else:
                raw[key] = word
    mistakes: list[Mistake] = []
    values = {key: Value(value, pipe.url) for key, value in raw.items()}
    given = converted(f"machinetype.{name}", values, keys("machinetype"), mistakes)
    mistakes += (Mistake(pipe.url, f"{name}.{option[:60]}", why) for option, why in wrong)
    notes += (replace(note, key=note.key.removeprefix("machinetype."), hint="it is left out") for note in mistakes)
    return None if mistakes else given


def strange_addresses(kind: MachineType, space: Space) -> set[str]:
    """The addresses of this type that a document gave, not the site: what is there is fetched from public hosts only."""
    addresses = set[str]()
    for pipe in (pipe for pipe in space.pipes if pipe.name == kind.pipe):
        ours = [value for given in (pipe.given, dict(pipe.own).get(kind.name, ())) for _, value in given]
        for url in (url for url in (kind.image, kind.user_data) if is_url(url) and url not in ours):
            if is_public(pipe) or urlsplit(url).hostname != urlsplit(pipe.url).hostname:
                addresses.add(url)
    return addresses
