"""What an installation wrote down about itself, beside the files it changed: what is ours is known by this alone."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path

from belljar.host.files import read_json, write_whole
from belljar.reading import from_json
from belljar.records import dataclass, field

LARGEST = 1 << 20


@dataclass(frozen=True)
class Edited:
    """A file of the site's in which lines of ours stand."""

    existed: bool = True
    lacked_newline: bool = False  # at its end, before ours


@dataclass
class Record:
    """One installation of one system in one folder."""

    prefix: str = ""
    options: dict[str, str] = field(default_factory=dict)  # as they were given; `check` and `uninstall` need them
    files: dict[str, str] = field(default_factory=dict)  # path -> sha256 of what we wrote
    edited: dict[str, Edited] = field(default_factory=dict)
    changes: tuple[str, ...] = ()  # purposes of the settings that we made, and not the site before


def path_of(folder: Path, system: str) -> Path:
    return folder / f".belljar-{system}.json"


def load(path: Path) -> Record:
    """The record; an empty one where nothing was installed. Raises ValueError for what is no record of ours."""
    try:
        record: Record = from_json(Record, read_json(path, LARGEST))
    except (FileNotFoundError, NotADirectoryError):
        return Record()
    except ValueError as exc:
        raise ValueError(f"{path}: not a record of an installation: {exc}") from exc
    return record


def save(path: Path, record: Record) -> None:
    """Write it whole; nothing is left of an empty one."""
    if record.files or record.edited or record.changes:
        write_whole(path, json.dumps(asdict(record), indent=1).encode() + b"\n", mode=0o644)
    else:
        path.unlink(missing_ok=True)


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
