"""What the table of a disk's partitions and a few marks tell: for which firmware it has a boot loader, and whether it may have a root
file system. Nothing of the disk is trusted."""

from __future__ import annotations

from pathlib import Path

from belljar.errors import ImageCorrupt
from belljar.image.intake import sandbox
from belljar.model import Firmware

SECTOR, LARGEST_TABLE = 512, 1 << 20
BOOT_MARK = b"\x55\xaa"  # at the end of the first sector
GPT_MARK, PROTECTIVE = b"EFI PART", 0xEE  # at the second sector's beginning; what the MBR before a GPT says
MBR_KINDS = slice(450, 512, 16)  # bytes of the first sector
BOOT_CODE = 440  # bytes of the first sector before the partition table
SMALLEST_CODE = 16  # bytes that are not zero: a loader has some hundred, a remnant a few
ESP_KINDS = ("c12a7328-f81f-11d2-ba4b-00a0c93ec93b", "ef")  # EFI system partitions
FILE_SYSTEMS = ((1024 + 56, b"\x53\xef"), (0, b"XFSB"), (0x10040, b"_BHRfS_M"))  # ext2/3/4, xfs, btrfs


def partitions(disk: Path) -> list[tuple[int, str]]:
    """(where it begins, its type) of each partition of a disk with MBR or GPT; the whole disk when it has neither. The type is a
    GUID or the number of an MBR, in lower case. Raises ImageCorrupt."""
    argv, has_no_table = ["partx", "--raw", "--noheadings", "--output", "START,TYPE", "{0}"], 1
    printed = sandbox.run(argv, [disk], sandbox.UNPACKING, LARGEST_TABLE, fine=(0, has_no_table)).decode()
    if not printed:
        with open(disk, "rb") as file:
            first, second = file.read(SECTOR), file.read(SECTOR)
        if second.startswith(GPT_MARK) and PROTECTIVE in first[MBR_KINDS]:
            what = "a checksum is wrong, or it has no entry, or none but behind the end of the disk"
            raise ImageCorrupt(f"{disk}: its GPT cannot be read: {what}")
    rows = (line.partition(" ") for line in printed.splitlines())
    return [(int(start) * SECTOR, kind.removeprefix("0x")) for start, _, kind in rows] or [(0, "")]


def firmware_kinds(disk: Path) -> list[str]:
    """The kinds of firmware that find something to start on this disk, BIOS first: a BIOS starts code in the first sector, a
    UEFI looks into EFI system partitions."""
    with open(disk, "rb") as file:
        sector = file.read(SECTOR)
    code = sector[:BOOT_CODE]
    for_bios = len(code) - code.count(0) >= SMALLEST_CODE and sector[510:] == BOOT_MARK
    for_uefi = any(kind in ESP_KINDS for _, kind in partitions(disk))
    return [Firmware.BIOS.value] * for_bios + [Firmware.UEFI.value] * for_uefi


def may_have_a_root(disk: Path) -> bool:
    """Does it have a file system that can be a root (ext2, ext3, ext4, xfs, btrfs)?"""
    with open(disk, "rb") as file:
        for at, mark in ((start + at, mark) for start, _ in partitions(disk) for at, mark in FILE_SYSTEMS):
            if at < disk.stat().st_size:
                file.seek(at)
                if file.read(len(mark)) == mark:
                    return True
    return False
