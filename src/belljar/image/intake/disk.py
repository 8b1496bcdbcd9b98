"""What the first bytes of a disk's partitions tell, without reading a file system: for which firmware it has a boot loader, and
whether it may have a root file system. Only marks are looked for; nothing of the disk is trusted."""

from __future__ import annotations

import struct
import uuid
from collections.abc import Iterator
from pathlib import Path

from belljar.errors import ImageCorrupt
from belljar.model import Firmware
from belljar.records import dataclass

SECTOR = 512
MBR_TABLE, MBR_ENTRY, MBR_MARK = 446, 16, b"\x55\xaa"
GPT_MARK = b"EFI PART"
PROTECTIVE = 0xEE
EXTENDED = {0x05, 0x0F, 0x85}
MOST_PARTITIONS = 128
BOOT_CODE = 440  # bytes of the first sector before the partition table
SMALLEST_CODE = 16  # bytes that are not zero: a loader has some hundred, a remnant a few
ESP_KINDS = ("c12a7328-f81f-11d2-ba4b-00a0c93ec93b", "ef")  # EFI system partitions
FILE_SYSTEMS = ((1024 + 56, b"\x53\xef"), (0, b"XFSB"), (0x10040, b"_BHRfS_M"))  # ext2/3/4, xfs, btrfs


@dataclass(frozen=True)
class Partition:
    """Where a file system may begin."""

    offset: int
    kind: str = ""  # of a GPT the type's GUID, of an MBR two hexadecimal digits; lower case


def partitions(disk: Path) -> list[Partition]:
    """The partitions of a disk with MBR or GPT; the whole disk when it has neither."""
    with open(disk, "rb") as file:
        first, second = file.read(SECTOR), file.read(SECTOR)
        entries = [first[at : at + MBR_ENTRY] for at in range(MBR_TABLE, MBR_TABLE + 64, MBR_ENTRY)]
        if first[MBR_TABLE + 64 : SECTOR] != MBR_MARK:
            return [Partition(0)]
        if second.startswith(GPT_MARK) and any(entry[4] == PROTECTIVE for entry in entries):
            at, count, size = struct.unpack_from("<QII", second, 72)
            if not 128 <= size <= 4096:
                raise ImageCorrupt(f"{disk}: a GPT with entries of {size} bytes")
            if at * SECTOR >= disk.stat().st_size:
                raise ImageCorrupt(f"{disk}: a GPT whose entries lie behind the end of the disk")
            file.seek(at * SECTOR)
            return list(_gpt(file.read(min(count, MOST_PARTITIONS) * size), size))
    used = (entry for entry in entries if entry[4] and entry[4] not in EXTENDED)
    table = [Partition(struct.unpack_from("<I", entry, 8)[0] * SECTOR, f"{entry[4]:02x}") for entry in used]
    # A boot sector without a table (or with a file system right behind it) also carries the mark.
    return table or [Partition(0)]


def _gpt(table: bytes, size: int) -> Iterator[Partition]:
    for at in range(0, len(table) - size + 1, size):
        if any(table[at : at + 16]):
            kind = str(uuid.UUID(bytes_le=table[at : at + 16]))
            yield Partition(struct.unpack_from("<Q", table, at + 32)[0] * SECTOR, kind)


def firmware_kinds(disk: Path) -> list[str]:
    """The kinds of firmware that find something to start on this disk, BIOS first: a BIOS starts code in the first sector, a
    UEFI looks into EFI system partitions."""
    with open(disk, "rb") as file:
        sector = file.read(SECTOR)
    code = sector[:BOOT_CODE]
    for_bios = len(code) - code.count(0) >= SMALLEST_CODE and sector[510:] == MBR_MARK
    for_uefi = any(partition.kind in ESP_KINDS for partition in partitions(disk))
    return [Firmware.BIOS.value] * for_bios + [Firmware.UEFI.value] * for_uefi


def may_have_a_root(disk: Path) -> bool:
    """Does it have a file system that can be a root (ext2, ext3, ext4, xfs, btrfs)?"""
    with open(disk, "rb") as file:
        for at, mark in ((start.offset + at, mark) for start in partitions(disk) for at, mark in FILE_SYSTEMS):
            if at < disk.stat().st_size:
                file.seek(at)
                if file.read(len(mark)) == mark:
                    return True
    return False
