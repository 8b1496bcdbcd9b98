"""Descriptors on their way into QEMU: files we open so that QEMU need not be able to reach them.

QEMU runs as a user who may not walk our folders. What it inherits it can use; a path of the form /proc/self/fd/N
reopens an inherited file by its own mode alone. Removing such a file after it was opened harms nobody.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from belljar.errors import HostError, ImageCorrupt


class Wiring:
    """The descriptors one QEMU is to inherit. Ours are closed by `close`, whatever became of it."""

    def __init__(self, owner: tuple[int, int]) -> None:
        self.fds: list[int] = []
        self._own: list[int] = []
        self._owner = owner

    def lend(self, fd: int) -> int:
        """QEMU inherits *fd*, which somebody else closes here."""
        self.fds.append(fd)
        return fd

    def open(self, path: Path, flags: int) -> int:
        """QEMU inherits *path*, opened by us. Raises ImageCorrupt when it is missing, HostError when we may not."""
        try:
            fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError as exc:
            raise ImageCorrupt(f"{path}: missing") from exc
        except OSError as exc:
            raise HostError(f"{path}: cannot be opened: {exc.strerror}") from exc
        self._own.append(fd)
        return self.lend(fd)

    def folder(self, path: Path) -> Path:
        """A name for a folder that stays this folder's, though another takes its place; ours alone, until `close`. Raises
        ImageCorrupt when it is missing."""
        try:
            fd = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError as exc:
            raise ImageCorrupt(f"{path}: missing") from exc
        self._own.append(fd)
        return Path(f"/proc/self/fd/{fd}")

    def readable(self, path: Path) -> str:
        """A path under which QEMU can open the file for reading, whoever it is."""
        fd = self.open(path, os.O_RDONLY)
        facts = os.fstat(fd)
        if self._owner[0] not in (facts.st_uid, os.geteuid()) and not facts.st_mode & 0o004:
            fd = self._copy(fd)
        return f"/proc/self/fd/{fd}"

    def adopt(self, fd: int) -> int:
        """QEMU inherits *fd*, which is closed here with the others."""
        self._own.append(fd)
        return self.lend(fd)

    def _copy(self, fd: int) -> int:
        """The same bytes in memory, where the mode of the original does not count."""
        copy = self.adopt(os.memfd_create("belljar", os.MFD_CLOEXEC))
        while os.sendfile(copy, fd, None, 1 << 24):
            pass
        return copy

    def close(self) -> None:
        while self._own:
            os.close(self._own.pop())


@contextmanager
def wiring(owner: tuple[int, int]) -> Iterator[Wiring]:
    """Descriptors that are ours until QEMU has them."""
    wires = Wiring(owner)
    try:
        yield wires
    finally:
        wires.close()
