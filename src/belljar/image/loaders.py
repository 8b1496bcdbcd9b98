"""For which firmware a disk has a boot loader: a BIOS reads the first sector, a UEFI the file /EFI/BOOT/BOOTX64.EFI of an EFI
system partition. Only looked for, never run; the disk is not trusted.

The FAT reader knows folders and nothing else. Form: Microsoft's FAT specification, version 1.03.
"""

from __future__ import annotations

import struct
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from belljar.image.look import SECTOR, Partition, partitions
from belljar.model import Firmware

BOOT_CODE = 440  # bytes of the first sector before the partition table
SMALLEST_CODE = 16  # bytes that are not zero: a loader has some hundred, a remnant a few
ESP_KINDS = ("c12a7328-f81f-11d2-ba4b-00a0c93ec93b", "ef")
LOADER = (b"EFI", b"BOOT", b"BOOTX64.EFI")
MOST_CLUSTERS = 512  # of one folder; with 64 KiB each, the largest a FAT folder can be is smaller
ENTRY, FOLDER, LONG_NAME, DELETED = 32, 0x10, 0x0F, 0xE5


def firmware_kinds(disk: Path) -> list[str]:
    """The kinds of firmware that find something to start on this disk, BIOS first."""
    found = []
    with open(disk, "rb") as file:
        code = file.read(BOOT_CODE)
        if len(code) - code.count(0) >= SMALLEST_CODE and file.read(SECTOR)[70:72] == b"\x55\xaa":
            found.append(Firmware.BIOS.value)
        if any(has_loader(file, partition) for partition in _candidates(partitions(disk))):
            found.append(Firmware.UEFI.value)
    return found


def _candidates(there: list[Partition]) -> list[Partition]:
    """Where a UEFI looks: the EFI system partitions; on a disk without a table, the disk."""
    return [one for one in there if one.kind in ESP_KINDS or not one.number]


def has_loader(file: BinaryIO, partition: Partition) -> bool:
    """Does this FAT file system hold the loader of removable media? What is no FAT, or lies, does not."""
    with suppress(struct.error, OverflowError, OSError, _Lie):
        fat = Fat.read(file, partition.offset)
        place = fat.root()
        for name in LOADER:
            place = fat.find(place, name)
        return place > 0
    return False


class _Lie(Exception):
    """The file system contradicts itself."""


@dataclass(frozen=True)
class Fat:
    """The few numbers of a FAT file system by which its folders are found."""

    file: BinaryIO
    offset: int
    bits: int  # of an entry of its table: 12, 16, 32
    table_at: int
    root_at: int  # FAT12, FAT16: the root folder lies apart
    root_size: int
    data_at: int
    cluster: int  # bytes
    clusters: int
    root_cluster: int

    @classmethod
    def read(cls, file: BinaryIO, offset: int) -> Fat:
        file.seek(offset)
        head = file.read(SECTOR)
        sector, per_cluster, reserved, tables, entries, small, _, size16 = struct.unpack_from("<HBHBHHBH", head, 11)
        large, size32 = struct.unpack_from("<II", head, 32)
        total, size = small or large, size16 or size32
        if sector not in (512, 1024, 2048, 4096) or per_cluster not in (1, 2, 4, 8, 16, 32, 64, 128):
            raise _Lie
        if not reserved or tables not in (1, 2) or not size or head[510:512] != b"\x55\xaa":
            raise _Lie
        root_at = (reserved + tables * size) * sector
        data_at = root_at + -(-entries * ENTRY // sector) * sector
        clusters = (total * sector - data_at) // (per_cluster * sector)
        bits = 12 if clusters < 4085 else 16 if clusters < 65525 else 32
        if clusters < 1 or (bits == 32) == bool(entries):
            raise _Lie
        (root_cluster,) = struct.unpack_from("<I", head, 44)
        return cls(
            file, offset, bits, reserved * sector, root_at, entries * ENTRY, data_at, per_cluster * sector, clusters,
            root_cluster if bits == 32 else 0,
        )  # fmt: skip

    def root(self) -> int:
        return self.root_cluster

    def find(self, folder: int, name: bytes) -> int:
        """The first cluster of what is called *name* in a folder. Raises _Lie when it is not there."""
        stem, _, ending = name.partition(b".")
        wanted = stem.ljust(8) + ending.ljust(3)
        for data in self._blocks(folder):
            for at in range(0, len(data) - ENTRY + 1, ENTRY):
                entry = data[at : at + ENTRY]
                if entry[0] == 0:
                    raise _Lie  # the end of the folder
                if entry[0] == DELETED or entry[11] & LONG_NAME == LONG_NAME or entry[:11].upper() != wanted:
                    continue
                if bool(entry[11] & FOLDER) != (not ending):
                    continue
                high, low = struct.unpack_from("<H", entry, 20)[0], struct.unpack_from("<H", entry, 26)[0]
                return int(high << 16 | low)
        raise _Lie

    def _blocks(self, folder: int) -> list[bytes]:
        """The pieces of a folder, a bounded number of them: a chain may run in a circle."""
        if folder == 0 and self.bits != 32:
            self.file.seek(self.offset + self.root_at)
            return [self.file.read(self.root_size)]
        pieces: list[bytes] = []
        while 2 <= folder < self.clusters + 2 and len(pieces) < MOST_CLUSTERS:
            self.file.seek(self.offset + self.data_at + (folder - 2) * self.cluster)
            pieces.append(self.file.read(self.cluster))
            folder = self._next(folder)
        return pieces

    def _next(self, cluster: int) -> int:
        at = self.offset + self.table_at + cluster * self.bits // 8
        self.file.seek(at)
        value = int.from_bytes(self.file.read(4)[: 4 if self.bits == 32 else 2], "little")
        if self.bits == 12:
            return value >> 4 if cluster & 1 else value & 0xFFF
        return value & 0x0FFFFFFF
