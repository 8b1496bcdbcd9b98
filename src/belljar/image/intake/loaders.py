"""For which firmware a disk seems to have a boot loader: a BIOS starts code in the first sector, a UEFI looks into EFI system
partitions. Only their marks are looked for; nothing of the disk is trusted."""

from __future__ import annotations

from pathlib import Path

from belljar.image.intake.look import SECTOR, partitions
from belljar.model import Firmware

BOOT_CODE = 440  # bytes of the first sector before the partition table
SMALLEST_CODE = 16  # bytes that are not zero: a loader has some hundred, a remnant a few
ESP_KINDS = ("c12a7328-f81f-11d2-ba4b-00a0c93ec93b", "ef")


def firmware_kinds(disk: Path) -> list[str]:
    """The kinds of firmware that find something to start on this disk, BIOS first."""
    found = []
    with open(disk, "rb") as file:
        code = file.read(BOOT_CODE)
        if len(code) - code.count(0) >= SMALLEST_CODE and file.read(SECTOR)[70:72] == b"\x55\xaa":
            found.append(Firmware.BIOS.value)
    if any(partition.kind in ESP_KINDS for partition in partitions(disk)):
        found.append(Firmware.UEFI.value)
    return found
