"""Which firmware finds something to start on a disk, and what a disk may say about that without harm."""

from __future__ import annotations

import io
import struct
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.image.image_parts import gpt, mbr

from belljar.errors import ImageCorrupt, ImageUnfit
from belljar.host import commands
from belljar.image import intake, loaders, look
from belljar.image.look import Partition
from belljar.model import MIB

SECTOR = 512
ESP_AT = 2048
ESP = bytes.fromhex("28732ac11ff8d211ba4b00a0c93ec93b")  # its type, as a GPT has it
KINDS = {"12": (2 * MIB, ()), "16": (16 * MIB, ()), "32": (64 * MIB, ("-F",))}


def fat(path: Path, bits: str, *, name: str = "BOOTX64.EFI", at: int = ESP_AT, fill: int = 0) -> Path:
    """An EFI system partition with a loader in it, made by mtools; *fill* further names stand before the folder EFI."""
    size, words = KINDS[bits]
    with open(path, "ab") as file:
        file.truncate(at * SECTOR + size)
    where = f"{path}@@{at * SECTOR}"
    geometry = ["-T", str(size // SECTOR), "-h", "16", "-s", "63", "-c", "1"]
    execute("mformat", "-i", where, *geometry, *words, "::")
    for number in range(fill):
        execute("mmd", "-i", where, f"::/a long name that takes three entries {number}")
    execute("mmd", "-i", where, "::/EFI", "::/EFI/BOOT")
    loader = path.with_name("loader")
    loader.write_bytes(b"MZ" + bytes(3000))
    execute("mcopy", "-i", where, str(loader), f"::/EFI/BOOT/{name}")
    return path


def execute(*argv: str) -> None:
    commands.run(list(argv), timeout=30)


def as_esp(disk: Path) -> Path:
    gpt(disk, p15=ESP_AT)
    with open(disk, "r+b") as file:
        file.seek(1024 + 14 * 128)
        file.write(ESP)
    return disk


@pytest.mark.parametrize("bits", KINDS)
def test_a_loader_of_removable_media_is_found_in_every_fat(tmp_path: Path, bits: str) -> None:
    disk = as_esp(fat(tmp_path / "disk", bits, fill=20))
    assert look.partitions(disk)[0].kind in loaders.ESP_KINDS
    with open(disk, "rb") as file:
        head = loaders.Fat.read(file, ESP_AT * SECTOR)
    assert str(head.bits) == bits
    assert loaders.firmware_kinds(disk) == ["uefi"]


def test_the_loader_of_another_processor_is_none(tmp_path: Path) -> None:
    assert loaders.firmware_kinds(as_esp(fat(tmp_path / "disk", "16", name="BOOTAA64.EFI"))) == []


def test_a_fat_that_is_no_efi_system_partition_is_not_looked_into(tmp_path: Path) -> None:
    disk = fat(tmp_path / "disk", "16")
    mbr(disk, ESP_AT)
    assert loaders.firmware_kinds(disk) == []
    with open(disk, "r+b") as file:
        file.seek(446 + 4)
        file.write(b"\xef")
    assert loaders.firmware_kinds(disk) == ["uefi"]


def test_code_in_the_first_sector_is_for_a_bios(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.write_bytes(bytes(range(1, 200)).ljust(MIB, b"\0"))
    assert loaders.firmware_kinds(disk) == []  # no mark at its end
    mbr(disk, 2048)
    assert loaders.firmware_kinds(disk) == ["bios"]


def test_a_folder_in_a_circle_ends(tmp_path: Path) -> None:
    """The root of this FAT32 is one cluster of deleted entries that says that it goes on with itself."""
    disk = fat(tmp_path / "disk", "32", at=0)
    with open(disk, "r+b") as file:
        head = loaders.Fat.read(file, 0)
        file.seek(head.table_at + head.root_cluster * 4)
        file.write(struct.pack("<I", head.root_cluster))
        file.seek(head.data_at + (head.root_cluster - 2) * head.cluster)
        file.write((b"\xe5" + bytes(31)) * (head.cluster // 32))
        assert len(head._blocks(head.root_cluster)) == loaders.MOST_CLUSTERS
        assert not loaders.has_loader(file, Partition(0, 0))


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=80), st.integers(0, 90), st.integers(0, 1 << 70))
def test_no_lie_makes_the_reader_do_anything_but_say_no(noise: bytes, at: int, offset: int) -> None:
    data = bytearray(8192)
    struct.pack_into("<HBHBHHBH", data, 11, 512, 1, 1, 2, 16, 5000, 0xF8, 1)
    data[510:512] = b"\x55\xaa"
    data[at : at + len(noise)] = noise
    assert not loaders.has_loader(io.BytesIO(data), Partition(1, offset if offset % 3 else 0))


@pytest.mark.parametrize("at", [1 << 40, (1 << 64) - 1])
def test_a_gpt_whose_entries_lie_behind_the_end_is_refused(tmp_path: Path, at: int) -> None:
    disk = tmp_path / "disk"
    disk.write_bytes(bytes(MIB))
    gpt(disk, p1=2048)
    with open(disk, "r+b") as file:
        file.seek(512 + 72)
        file.write(struct.pack("<Q", at))
    with pytest.raises(ImageCorrupt, match="behind the end"):
        look.partitions(disk)


def test_a_gpt_of_four_billion_entries_of_the_largest_size_is_read_to_a_bound(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.write_bytes(b"\x01" * MIB)
    gpt(disk, p1=2048)
    with open(disk, "r+b") as file:
        file.seek(512 + 80)
        file.write(struct.pack("<II", 0xFFFFFFFF, 4096))
    assert 0 < len(look.partitions(disk)) <= look.MOST_PARTITIONS
    assert loaders.firmware_kinds(disk) == ["bios"] and look.ext_file_systems(disk) == []


@pytest.mark.parametrize(("asked", "says"), [("bios", "only one for uefi"), ("none", "may not boot by firmware")])
def test_a_firmware_the_disk_has_nothing_for_is_refused(tmp_path: Path, asked: str, says: str) -> None:
    disk = as_esp(fat(tmp_path / "disk", "16"))
    with pytest.raises(ImageUnfit, match=says):
        intake._chosen(disk, intake.Boot(), intake.Origin("test", "x", firmware=asked))
    chosen = intake._chosen(disk, intake.Boot(), intake.Origin("test", "x", firmware="uefi"))
    assert chosen.facts["use_firmware"] == "uefi"
