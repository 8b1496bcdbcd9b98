"""Files of a site, written whole with their owner and mode kept, and each write with the way to take it back."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from belljar.host.files import read_capped, write_whole

LARGEST_FILE = 16 << 20
BACKUP = ".before-belljar"

Undo = list[Callable[[], None]]


def real(path: Path) -> Path:
    """Where a link leads: the file itself is changed, not the link."""
    return path.resolve() if path.is_symlink() else path


def read(path: Path) -> bytes | None:
    """The file; None where there is none."""
    try:
        return read_capped(path, LARGEST_FILE)
    except (FileNotFoundError, NotADirectoryError):
        return None


def keep_copy(path: Path, text: bytes, undo: Undo) -> None:
    """The file as it was, beside it; an older copy stays, for that is the true original."""
    copy = path.with_name(path.name + BACKUP)
    if not copy.exists():
        undo.append(lambda: copy.unlink(missing_ok=True))
        facts = os.stat(path)
        write_whole(copy, text, mode=0o600)
        os.chown(copy, facts.st_uid, facts.st_gid)
        os.chmod(copy, stat.S_IMODE(facts.st_mode))


def drop_copy(path: Path, undo: Undo) -> None:
    """Remove the copy beside a file that is again what the copy says."""
    copy = path.with_name(path.name + BACKUP)
    if copy.exists() and read(copy) == read(path):
        remove(copy, undo)


def remove(path: Path, undo: Undo) -> None:
    """Remove a file, and remember how to take that back. Raises FileNotFoundError where there is none."""
    text, facts = read_capped(path, LARGEST_FILE), os.stat(path)
    undo.append(lambda: _write(path, text, stat.S_IMODE(facts.st_mode), facts))
    path.unlink()


def put(path: Path, text: bytes, mode: int, like: os.stat_result | None, undo: Undo) -> None:
    """Write a file whole, with the owner and mode of *like*, and remember how to take that back."""
    before, facts = read(path), os.stat(path) if path.exists() else None
    made = _make_folders(path.parent)

    def back() -> None:
        if before is None or facts is None:
            path.unlink(missing_ok=True)
        else:
            _write(path, before, stat.S_IMODE(facts.st_mode), facts)
        for folder in made:
            with suppress(OSError):
                os.rmdir(folder)

    undo.append(back)
    _write(path, text, stat.S_IMODE(like.st_mode) if like else mode, like)


def _write(path: Path, text: bytes, mode: int, like: os.stat_result | None) -> None:
    write_whole(path, text, mode=0o600, durable=True)
    if like is not None:
        os.chown(path, like.st_uid, like.st_gid)
    os.chmod(path, mode)


def _make_folders(folder: Path) -> list[Path]:
    """Make it with its parents, readable by all. Returns those that were made, innermost first."""
    missing = []
    while not folder.exists():
        missing.append(folder)
        folder = folder.parent
    for one in reversed(missing):
        os.mkdir(one)
        os.chmod(one, 0o755)
    return missing
