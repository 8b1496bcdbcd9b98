"""Files of a site, written whole with owner and mode kept, each with a way back; our lines in one, between two
marks."""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from belljar.errors import NotOurs
from belljar.host.files import read_capped, read_json, write_whole
from belljar.reading import from_json
from belljar.records import dataclass, field

LARGEST_FILE, LARGEST_RECORD = 16 << 20, 1 << 20
BACKUP = ".before-belljar"
BEGIN, END = "belljar begin", "belljar end"

Undo = list[Callable[[], object]]


def real(path: Path) -> Path:
    """Where a link leads: the file itself is changed, not the link."""
    return path.resolve() if path.is_symlink() else path


def read(path: Path) -> bytes | None:
    """The file; None where there is none."""
    try:
        return read_capped(path, LARGEST_FILE)
    except (FileNotFoundError, NotADirectoryError):
        return None


def put(path: Path, text: bytes, mode: int, like: os.stat_result | None, undo: Undo) -> None:
    """Write a file whole, with the owner and mode of *like*, and remember how to take that back."""
    missing = [one for one in path.parents if not one.exists()]
    for folder in reversed(missing):
        os.mkdir(folder)
        os.chmod(folder, 0o755)
        undo.append(partial(os.rmdir, folder))
    before = read(path)
    if before is None:
        undo.append(partial(path.unlink, missing_ok=True))
    else:
        facts = os.stat(path)
        undo.append(partial(_write, path, before, stat.S_IMODE(facts.st_mode), facts))
    _write(path, text, stat.S_IMODE(like.st_mode) if like else mode, like)


def keep_copy(path: Path, text: bytes, undo: Undo) -> None:
    """The file as it was, beside it; an older copy stays, for that is the true original."""
    copy = path.with_name(path.name + BACKUP)
    if not copy.exists():
        put(copy, text, 0o600, os.stat(path), undo)


def drop_copy(path: Path) -> None:
    """Remove the copy beside a file that is again what the copy says."""
    copy = path.with_name(path.name + BACKUP)
    if copy.exists() and read(copy) == read(path):
        copy.unlink()


def _write(path: Path, text: bytes, mode: int, like: os.stat_result | None) -> None:
    write_whole(path, text, mode=0o600, durable=True)
    if like is not None:
        os.chown(path, like.st_uid, like.st_gid)
    os.chmod(path, mode)


def block(lines: Sequence[str], comment: str) -> bytes:
    """The lines with their marks."""
    return "".join(f"{line}\n" for line in (f"{comment} {BEGIN}", *lines, f"{comment} {END}")).encode()


def with_lines(text: bytes, lines: Sequence[str], comment: str, where: str) -> bytes:
    """*text* with our lines: where our marks stand already, else at its end. Raises NotOurs for marks that do not pair."""
    begin, end = _span(text, comment, where)
    newline = b"\n" if begin == end and text and not text.endswith(b"\n") else b""
    return text[:begin] + newline + block(lines, comment) + text[end:]


def without_lines(text: bytes, comment: str, where: str) -> bytes:
    """*text* without our lines and marks."""
    begin, end = _span(text, comment, where)
    return text[:begin] + text[end:]


def clashes(text: bytes, patterns: Sequence[str], comment: str, where: str) -> list[str]:
    """`line N: TEXT` for each line outside our marks, comments apart, that begins with one of the patterns."""
    begin, end = _span(text, comment, where)
    found, at = [], 0
    for number, line in enumerate(text.splitlines(keepends=True), 1):
        is_ours = begin <= at < end
        at += len(line)
        plain = line.decode("utf-8", "replace").strip()
        is_read = not (is_ours or plain.startswith(comment))
        if is_read and any(re.match(pattern, plain, re.IGNORECASE) for pattern in patterns):
            found.append(f"line {number}: {plain[:100]}")
    return found


def _span(text: bytes, comment: str, where: str) -> tuple[int, int]:
    """Where our marks begin and end, in bytes; twice the end of the text where there are none."""
    begins, ends, at = [], [], 0
    for line in text.splitlines(keepends=True):
        word = line.strip()
        if word == f"{comment} {BEGIN}".encode():
            begins.append(at)
        at += len(line)
        if word == f"{comment} {END}".encode():
            ends.append(at)
    if not begins and not ends:
        return len(text), len(text)
    if len(begins) != 1 or len(ends) != 1 or ends[0] <= begins[0]:
        raise NotOurs(
            f"{where}: the marks `{comment} {BEGIN}` and `{comment} {END}` do not pair",
            hint="Repair the file by hand: each mark once, the first before the second.",
        )
    return begins[0], ends[0]


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
        record: Record = from_json(Record, read_json(path, LARGEST_RECORD))
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
