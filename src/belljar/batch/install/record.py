"""What an installation wrote down about itself, beside the files it changed: what is ours is known by this alone."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from belljar.host.files import read_json, write_whole

LARGEST = 1 << 20


@dataclass
class Edited:
    """A file of the site's in which lines of ours stand."""

    existed: bool = True
    lacked_newline: bool = False  # at its end, before ours


@dataclass(frozen=True)
class Choice:
    """What decides which pieces there are, besides the site's settings."""

    options: Mapping[str, str] = field(default_factory=dict)
    wrapper: str = ""
    belljar: str = ""


@dataclass
class Record:
    """One installation of one system in one folder."""

    options: Mapping[str, str] = field(default_factory=dict)  # as they were given; `check` and `uninstall` need them
    prefix: str = ""
    choices: list[Choice] = field(default_factory=list)  # those of which a piece may stand: one, but amid a change
    files: dict[str, str] = field(default_factory=dict)  # path -> sha256 of what we wrote
    edited: dict[str, Edited] = field(default_factory=dict)
    changes: list[str] = field(default_factory=list)  # purposes of the settings that we made, and not the site before

    @property
    def is_empty(self) -> bool:
        return not (self.files or self.edited or self.changes)


def path_of(folder: Path, system: str) -> Path:
    return folder / f".belljar-{system}.json"


def load(path: Path) -> Record:
    """The record; an empty one where nothing was installed. Raises ValueError for what is no record of ours."""
    try:
        raw = read_json(path, LARGEST)
    except (FileNotFoundError, NotADirectoryError):
        return Record()
    try:
        edited = {
            str(name): Edited(bool(one["existed"]), bool(one["lacked_newline"])) for name, one in raw["edited"].items()
        }
        return Record(
            options={str(key): str(value) for key, value in raw["options"].items()}, prefix=str(raw["prefix"]),
            files={str(key): str(value) for key, value in raw["files"].items()}, edited=edited,
            changes=[str(one) for one in raw["changes"]], choices=[_choice(one) for one in raw.get("choices", ())],
        )  # fmt: skip
    except (KeyError, TypeError, AttributeError) as exc:
        raise ValueError(f"{path}: not a record of an installation") from exc


def _choice(raw: Mapping[str, Any]) -> Choice:
    options = {str(key): str(value) for key, value in raw["options"].items()}
    return Choice(options, str(raw["wrapper"]), str(raw["belljar"]))


def save(path: Path, record: Record) -> None:
    """Write it whole; nothing is left of an empty one."""
    if record.is_empty:
        path.unlink(missing_ok=True)
    else:
        write_whole(path, json.dumps(asdict(record), indent=1).encode() + b"\n", mode=0o644)


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
