"""Look into a raw disk without mounting it: its partitions, and the files of its ext2/3/4 file systems.

Mounting would need root, and would let the host's kernel parse bytes nobody trusts. `debugfs` reads as an ordinary
process, in a sandbox. Other file systems (xfs, btrfs) are not looked into here: see `survey`.
"""

from __future__ import annotations

import math
import re
import struct
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from belljar.errors import ImageCorrupt
from belljar.image.intake.sandbox import Limits, run
from belljar.records import dataclass, field

SECTOR = 512
MBR_TABLE, MBR_ENTRY, MBR_MARK = 446, 16, b"\x55\xaa"
GPT_MARK = b"EFI PART"
PROTECTIVE = 0xEE
EXTENDED = {0x05, 0x0F, 0x85}
EXT_MAGIC_AT, EXT_MAGIC = 1024 + 56, b"\x53\xef"
OTHERS = ((0, b"XFSB"), (0x10040, b"_BHRfS_M"))
MOST_PARTITIONS = 128
LARGEST_FILE = 256 << 20
SECONDS = 60
PATIENCE = 600.0  # seconds for all that is asked of one disk: whoever made it may have made it slow to read
PLAIN_PATH = re.compile(r"/[A-Za-z0-9._+~/-]*")
LINK = re.compile(rb'Fast link dest: "([^"\n]*)"')


@dataclass(frozen=True)
class Partition:
    """Where a file system may begin. Number 0: the whole disk has no partition table."""

    number: int
    offset: int
    kind: str = ""  # of a GPT the type's GUID, of an MBR two hexadecimal digits; lower case


def partitions(disk: Path) -> list[Partition]:
    """The partitions of a disk with MBR or GPT; one of number 0 when it has neither."""
    with open(disk, "rb") as file:
        first, second = file.read(SECTOR), file.read(SECTOR)
        if first[MBR_TABLE + 64 : SECTOR] != MBR_MARK:
            return [Partition(0, 0)]
        entries = [first[at : at + MBR_ENTRY] for at in range(MBR_TABLE, MBR_TABLE + 64, MBR_ENTRY)]
        if second.startswith(GPT_MARK) and any(entry[4] == PROTECTIVE for entry in entries):
            (at,) = struct.unpack_from("<Q", second, 72)
            count, size = struct.unpack_from("<II", second, 80)
            if not 128 <= size <= 4096:
                raise ImageCorrupt(f"{disk}: a GPT with entries of {size} bytes")
            if at * SECTOR >= disk.stat().st_size:
                raise ImageCorrupt(f"{disk}: a GPT whose entries lie behind the end of the disk")
            file.seek(at * SECTOR)
            return list(_gpt(file.read(min(count, MOST_PARTITIONS) * size), size))
    found = [
        Partition(number, struct.unpack_from("<I", entry, 8)[0] * SECTOR, f"{entry[4]:02x}")
        for number, entry in enumerate(entries, 1)
        if entry[4] and entry[4] not in EXTENDED
    ]
    # A boot sector without a table (or with a file system right behind it) also carries the mark.
    return found or [Partition(0, 0)]


def _gpt(table: bytes, size: int) -> Iterator[Partition]:
    for number, at in enumerate(range(0, len(table) - size + 1, size), 1):
        if any(table[at : at + 16]):
            kind = str(uuid.UUID(bytes_le=table[at : at + 16]))
            yield Partition(number, struct.unpack_from("<Q", table, at + 32)[0] * SECTOR, kind)


@dataclass(frozen=True)
class Files:
    """The files of one ext file system of a disk."""

    disk: Path
    partition: Partition
    listed: dict[str, list[str]] = field(default_factory=dict, compare=False)  # folders seen so far
    deadline: float = field(default_factory=lambda: time.monotonic() + PATIENCE, compare=False)

    fstype = "ext4"  # its driver mounts ext2 and ext3 too

    @property
    def words(self) -> str:
        """Of the command line: where the root file system is. One that fills its disk grows with it; a partition does not."""
        if self.partition.number:
            return f"belljar.root={self.device}"
        return f"belljar.sectors={self.disk.stat().st_size // SECTOR}"

    @property
    def device(self) -> str:
        """Its name in a guest whose first disk this is."""
        return f"/dev/vda{self.partition.number or ''}"

    def read(self, path: str) -> bytes:
        """A file's bytes. Raises ImageCorrupt when it is missing or too large. Does not follow a link at the end."""
        return self._debugfs(f'cat "{self._plain(path)}"')

    def names(self, path: str) -> list[str]:
        """The names in a folder; empty when there is no such folder."""
        if path not in self.listed:
            self.listed[path] = self._names(path)
        return self.listed[path]

    def _names(self, path: str) -> list[str]:
        try:
            listing = self._debugfs(f'ls -p "{self._plain(path)}"')
        except ImageCorrupt:
            return []
        # /inode/mode/uid/gid/name/size/
        rows = (line.split("/") for line in listing.decode("utf-8", "replace").splitlines() if line.startswith("/"))
        return [row[5] for row in rows if len(row) >= 7 and row[5] not in (".", "..")]

    def link(self, path: str) -> str:
        """Where a short symbolic link points to; empty when it is none."""
        with suppress(ImageCorrupt):
            if found := LINK.search(self._debugfs(f'stat "{self._plain(path)}"')):
                return found[1].decode("utf-8", "replace")
        return ""

    def _plain(self, path: str) -> str:
        if not PLAIN_PATH.fullmatch(path):
            raise ImageCorrupt(f"{path!r}: a file name belljar does not ask for")
        return path

    def _debugfs(self, command: str) -> bytes:
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise ImageCorrupt(f"the disk's file systems cannot be read in {PATIENCE:.0f} s")
        limits = Limits(min(SECONDS, math.ceil(left)), LARGEST_FILE)
        where = f"{{0}}?offset={self.partition.offset}"
        printed = run(["debugfs", "-R", command, where], [self.disk], limits)
        # debugfs ends well whatever happened. Its first line is its version; more is a complaint.
        if complaint := printed.err.decode("utf-8", "replace").strip().splitlines()[1:]:
            raise ImageCorrupt(f"debugfs: {complaint[0]}")
        return printed.out


def has_others(disk: Path) -> bool:
    """Has it a file system that is not looked into here, and may be a root (xfs, btrfs)?"""
    size = disk.stat().st_size
    with open(disk, "rb") as file:
        for partition in partitions(disk):
            for at, mark in OTHERS:
                if partition.offset + at < size:
                    file.seek(partition.offset + at)
                    if file.read(len(mark)) == mark:
                        return True
    return False


def ext_file_systems(disk: Path) -> list[Files]:
    """The ext2/3/4 file systems of a disk, in the order of its partitions."""
    found: list[Files] = []
    size, deadline = disk.stat().st_size, time.monotonic() + PATIENCE
    with open(disk, "rb") as file:
        for partition in partitions(disk):
            if partition.offset >= size:
                continue
            file.seek(partition.offset + EXT_MAGIC_AT)
            if file.read(2) == EXT_MAGIC:
                found.append(Files(disk, partition, deadline=deadline))
    return found
