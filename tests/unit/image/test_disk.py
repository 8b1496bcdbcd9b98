"""Which firmware finds something to start on a disk, and what a disk may say about that without harm."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from tests.unit.image.image_parts import SECTOR, gpt, mbr

from belljar.errors import ImageCorrupt, ImageUnfit
from belljar.image.intake import disk as disks
from belljar.image.intake import intake
from belljar.image.progress import Progress
from belljar.model import MIB

ESP_AT = 2048
ESP = bytes.fromhex("28732ac11ff8d211ba4b00a0c93ec93b")  # its type, as a GPT has it


def as_esp(disk: Path) -> Path:
    gpt(disk, kind=ESP, p15=ESP_AT)
    return disk


def empty(path: Path) -> Path:
    path.write_bytes(bytes(2 * MIB))
    return path


def test_a_uefi_looks_into_an_efi_system_partition_and_no_other(tmp_path: Path) -> None:
    disk = as_esp(empty(tmp_path / "disk"))
    assert disks.partitions(disk)[0][1] in disks.ESP_KINDS
    assert disks.firmware_kinds(disk) == ["uefi"]
    other = empty(tmp_path / "other")
    mbr(other, ESP_AT)
    assert disks.firmware_kinds(other) == []
    with open(other, "r+b") as file:
        file.seek(446 + 4)
        file.write(b"\xef")
    assert disks.firmware_kinds(other) == ["uefi"]


def test_code_in_the_first_sector_is_for_a_bios(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.write_bytes(bytes(range(1, 200)).ljust(MIB, b"\0"))
    assert disks.firmware_kinds(disk) == []  # no mark at its end
    mbr(disk, 2048)
    assert disks.firmware_kinds(disk) == ["bios"]


@pytest.mark.parametrize(
    ("at", "value"), [(72, 1 << 40), (72, (1 << 64) - 1), (80, (4096 << 32) + 0xFFFFFFFF), (80, 128)]
)
def test_a_gpt_that_lies_is_refused(tmp_path: Path, at: int, value: int) -> None:
    """Where its entries are, how many, and how long one is."""
    disk = as_esp(empty(tmp_path / "disk"))
    with open(disk, "r+b") as file:
        file.seek(SECTOR + at)
        file.write(struct.pack("<Q", value))
    for look in (disks.firmware_kinds, disks.may_have_a_root):
        with pytest.raises(ImageCorrupt, match="its GPT cannot be read"):
            look(disk)


@pytest.mark.parametrize(("asked", "says"), [("bios", "only one for uefi"), ("none", "may not boot by firmware")])
def test_a_firmware_the_disk_has_nothing_for_is_refused(tmp_path: Path, asked: str, says: str) -> None:
    disk = as_esp(empty(tmp_path / "disk"))
    with pytest.raises(ImageUnfit, match=says):
        intake._start(intake.Origin("test", "x", firmware=asked), None, disks.firmware_kinds(disk), Progress())
    boot = intake._start(intake.Origin("test", "x", firmware="uefi"), None, ["uefi"], Progress())
    assert boot.facts["use_firmware"] == "uefi"
