"""A root file system this host does not read itself (xfs, btrfs), as a machine that mounted it has told of it: an archive with the
files a direct boot is made of, and `survey.json`: names and links of some folders, where the root lies.

The machine had a hostile disk, so what it tells is not trusted either: nothing is unpacked, everything has a size.
"""

from __future__ import annotations

import json
import re
import tarfile
from pathlib import Path
from typing import Any

from belljar.errors import ImageCorrupt
from belljar.image.intake.look import LARGEST_FILE

FILE = "survey.json"
LARGEST_SURVEY = 16 << 20
MOST_MEMBERS = 20_000
KINDS = ("ext4", "xfs", "btrfs")
PLAIN = re.compile(r"[A-Za-z0-9@._-]{0,60}")


class Survey:
    """Read once, then files by path, as a `Tree`."""

    def __init__(self, archive: Path) -> None:
        self._archive = archive
        try:
            with tarfile.open(archive, "r:") as tar:
                self._members = self._listed(tar)
                told = json.loads(self._file(tar, FILE, LARGEST_SURVEY))
            number, self.fstype, self.subvolume = int(told["number"]), str(told["fstype"]), str(told["subvolume"])
            self._names: dict[str, list[str]] = {
                str(k): [str(one) for one in v] for k, v in dict(told["names"]).items()
            }
            self._links: dict[str, str] = {str(path): str(target) for path, target in dict(told["links"]).items()}
        except (
            tarfile.TarError,
            OSError,
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
            ArithmeticError,
            RecursionError,
        ) as exc:
            raise ImageCorrupt(f"the machine that looked into the disk gave no usable answer: {exc}") from exc
        if not 0 <= number <= 128 or self.fstype not in KINDS or not PLAIN.fullmatch(self.subvolume):
            raise ImageCorrupt("the machine that looked into the disk gave no usable answer")
        self.device = f"/dev/vda{number or ''}"

    @property
    def words(self) -> str:
        """Of the command line: where the root is and how it is mounted."""
        mount = f" belljar.mount=rw,noatime,subvol={self.subvolume}" if self.subvolume else ""
        return f"belljar.root={self.device} belljar.fstype={self.fstype}{mount}"

    def names(self, path: str) -> list[str]:
        return self._names.get(path, [])

    def link(self, path: str) -> str:
        return self._links.get(path, "")

    def read(self, path: str) -> bytes:
        """Raises ImageCorrupt when it was not told of, or is too large."""
        try:
            with tarfile.open(self._archive, "r:") as tar:
                return self._file(tar, path.lstrip("/"), LARGEST_FILE)
        except (tarfile.TarError, OSError, KeyError) as exc:
            raise ImageCorrupt(f"{path}: not found in the disk") from exc

    def _listed(self, tar: tarfile.TarFile) -> dict[str, tarfile.TarInfo]:
        found: dict[str, tarfile.TarInfo] = {}
        while (member := tar.next()) is not None:
            if len(found) > MOST_MEMBERS:
                raise ImageCorrupt("the machine that looked into the disk told of too many files")
            if member.isreg():
                found[member.name] = member
        return found

    def _file(self, tar: tarfile.TarFile, name: str, largest: int) -> bytes:
        member = self._members[name]
        if member.size > largest:
            raise ImageCorrupt(f"/{name}: {member.size} bytes, at most {largest} are read")
        file: Any = tar.extractfile(member)
        data: bytes = file.read(largest)
        return data
