"""Files that a guest uploads: each is kept whole or not at all, and all together are limited.

    <folder>/NAME      a file, 0600, whole
    <folder>/.part-N   a file that is being uploaded

The folder is made with the first file. One process writes to it.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from belljar.host.files import write_all
from belljar.host.http import Rejected

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,127}")
MOST_AT_ONCE = 8
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)


class Outputs:
    """The files of one machine."""

    def __init__(self, folder: Path, *, most_bytes: int, most_files: int) -> None:
        self.folder, self.most_bytes, self._most_files = folder, most_bytes, most_files
        self.sizes: dict[str, int] = {}  # of what is there
        self.coming: set[Draft] = set()
        self._count = 0

    def begin(self, name: str, size: int | None) -> Draft:
        """Begin a file of *size* bytes, where that is known. Raises Rejected."""
        if not NAME.fullmatch(name):
            raise Rejected(403, "a name has letters, digits and _.+- only, at most 128, and begins with no dot")
        if size is not None and size > self.most_bytes:
            raise Rejected(413, f"more than the {self.most_bytes} bytes this machine may leave")
        if len(self.coming) >= MOST_AT_ONCE:
            raise Rejected(503, f"{MOST_AT_ONCE} files are being uploaded already")
        names = {*self.sizes, *(draft.name for draft in self.coming)}
        if name not in names and len(names) >= self._most_files:
            raise Rejected(507, f"there are {self._most_files} files already")
        self.check(size or 0)
        self._count += 1
        with _as_answer():
            self.folder.mkdir(mode=0o700, exist_ok=True)
            draft = Draft(self, name, self.folder / f".part-{self._count}")
        self.coming.add(draft)
        return draft

    def check(self, more: int) -> None:
        """Raises Rejected when there is no room for so many bytes more."""
        used = sum(self.sizes.values()) + sum(draft.size for draft in self.coming)
        if used + more > self.most_bytes:
            raise Rejected(507, f"more than the {self.most_bytes} bytes this machine may leave in all")


class Draft:
    """A file that is being uploaded: `write` until `keep` or `drop`."""

    def __init__(self, outputs: Outputs, name: str, path: Path) -> None:
        self.name, self.size = name, 0
        self._outputs, self._path = outputs, path
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        self._file = os.fdopen(os.open(path, flags, 0o600), "wb", buffering=0)

    def write(self, data: bytes) -> None:
        """Raises Rejected."""
        self._outputs.check(len(data))
        self.size += len(data)
        with _as_answer():
            write_all(self._file.fileno(), data)

    def keep(self) -> None:
        """Keep the file; it replaces an older one of its name. Raises Rejected."""
        with _as_answer():
            self._file.close()
            os.rename(self._path, self._outputs.folder / self.name)
        self._outputs.coming.discard(self)
        self._outputs.sizes[self.name] = self.size

    def drop(self) -> None:
        """Remove it. Nothing happens to a file that is kept."""
        self._outputs.coming.discard(self)
        self._file.close()
        with suppress(OSError):
            os.unlink(self._path)


@contextmanager
def _as_answer() -> Iterator[None]:
    """Turn an error of the host's file system into an answer for the guest, without details of the host."""
    try:
        yield
    except OSError as exc:
        if exc.errno in NO_ROOM:
            raise Rejected(507, "no room on the host") from exc
        raise Rejected(500, "the host failed") from exc
