"""What a service keeps in a folder of its own: values in files that are written whole, and lines in a file that does not grow without end."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from belljar.errors import BelljarError, HostError
from belljar.host.files import append_line, private_folder, read_json, write_whole
from belljar.host.locks import Lock, try_lock
from belljar.model import dumps
from belljar.reading import from_json

LARGEST = 1 << 24  # bytes of a value
LOCK = "lock"


def alone(folder: Path, kind: str, *, mode: int = 0o700) -> Lock:
    """The folder is made, and is this service's alone while it has the lock. Raises HostError."""
    if (lock := try_lock(private_folder(folder, mode=mode) / LOCK)) is None:
        raise HostError(f"{folder}: another {kind} works here", hint="One on a host, or each with its own --state.")
    return lock


def read(path: Path, kind: Any) -> Any:
    """The value of this class in that file; None where there is none, or it is not one."""
    with suppress(OSError, ValueError, BelljarError):
        return from_json(kind, read_json(path, LARGEST))
    return None


def keep(path: Path, value: Any, *, durable: bool = False) -> None:
    """Everybody may read it. Raises NoSpace."""
    write_whole(path, dumps(value) + b"\n", mode=0o644, durable=durable)


class Lines:
    """NAME.jsonl in a folder and, of those before it, NAME.1.jsonl."""

    def __init__(self, folder: Path, name: str, largest: int) -> None:
        self._path, self._before = folder / f"{name}.jsonl", folder / f"{name}.1.jsonl"
        self._largest = largest

    def add(self, value: Any) -> None:
        """A value as a line. Raises NoSpace."""
        if self._path.exists() and self._path.stat().st_size > self._largest:
            os.replace(self._path, self._before)
        append_line(self._path, dumps(value), mode=0o644)

    def __iter__(self) -> Iterator[bytes]:
        """All there are, oldest first."""
        for path in (self._before, self._path):
            with suppress(FileNotFoundError), open(path, "rb") as file:
                yield from file
