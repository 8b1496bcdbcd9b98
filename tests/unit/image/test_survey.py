"""A root of xfs or btrfs: what a machine told of it becomes a direct boot, and what it tells is not trusted."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
from tests.unit.image.image_parts import system

from belljar.errors import ImageCorrupt, ImageUnfit, WorkshopFailed
from belljar.image import Image
from belljar.image.intake import intake, survey
from belljar.image.intake.survey import Survey
from belljar.image.progress import Silent
from belljar.image.store.store import Store
from belljar.model import MIB

RELEASE = "6.1.0-9-amd64"
FOLDERS = ("boot", "usr/lib/modules", "usr/bin", f"usr/lib/modules/{RELEASE}")


def told(root: Path, target: Path, **changes: Any) -> None:
    """The archive the machine would send of the system in *root*."""
    names = {f"/{folder}": [path.name for path in (root / folder).iterdir()] for folder in FOLDERS}
    words: dict[str, Any] = {
        "number": 2, "fstype": "xfs", "subvolume": "", "names": names, "links": {"/usr/bin/python3": "python3.11"},
        **changes,
    }  # fmt: skip
    said = target.with_name("survey.json")
    said.write_text(json.dumps(words))
    with tarfile.open(target, "w") as tar:
        tar.add(said, "survey.json")
        for path in root.rglob("*"):
            if path.is_file():
                tar.add(path, str(path.relative_to(root)))


def take(store: Store, surveyor: intake.Surveyor, firmware: str = "auto") -> Image:
    with intake.draft(store, "test") as folder:
        raw = folder / "disk.raw"
        raw.write_bytes(b"XFSB".ljust(MIB, b"\0"))
        return intake.take(store, folder, raw, intake.Origin("test", "x", firmware=firmware), Silent(), surveyor)


def module(root: Path) -> Path:
    """The system with a driver for xfs."""
    folder = system(
        root, RELEASE, dep="kernel/virtio_blk.ko:\nkernel/xfs.ko: kernel/libcrc32c.ko\nkernel/libcrc32c.ko:\n"
    )
    modules = folder / "usr/lib/modules" / RELEASE / "kernel"
    for name in ("xfs", "libcrc32c"):
        (modules / f"{name}.ko").write_bytes((modules / "virtio_blk.ko").read_bytes())
    return folder


def test_a_root_of_xfs_is_booted_directly(store: Store, tmp_path: Path) -> None:
    root = module(tmp_path / "root")
    image = take(store, lambda disk, size, target: told(root, target))
    assert image.append.endswith(" belljar.root=/dev/vda2 belljar.fstype=xfs") and image.os == "Small Linux 1"
    assert (image.facts["boots_by"], image.facts["fstype"], image.facts["root"]) == ("kernel", "xfs", "/dev/vda2")
    assert image.initrd and b"modules/xfs.ko" in image.initrd.read_bytes()
    assert not list(image.disk.parent.glob("survey*.tar"))


def test_a_root_in_a_subvolume_says_so(store: Store, tmp_path: Path) -> None:
    root = module(tmp_path / "root")
    image = take(store, lambda disk, size, target: told(root, target, fstype="btrfs", subvolume="@", number=0))
    assert image.append.endswith(" belljar.root=/dev/vda belljar.fstype=btrfs belljar.mount=rw,noatime,subvol=@")


def test_what_no_machine_can_look_into_boots_by_firmware(store: Store) -> None:
    def fail(disk: Path, size: int, target: Path) -> None:
        assert size == MIB and disk.name == "disk.qcow2"
        raise WorkshopFailed("no root file system was found on the disk")

    assert take(store, fail).facts == {"boots_by": "firmware", "firmware": []}


def test_a_disk_that_may_not_boot_by_firmware_is_then_refused(store: Store) -> None:
    def fail(disk: Path, size: int, target: Path) -> None:
        raise WorkshopFailed("no root file system was found on the disk")

    with pytest.raises(ImageUnfit):
        take(store, fail, firmware="none")
    assert store.images() == [] and list((store.folder / "drafts").iterdir()) == []


LIES: dict[str, dict[str, Any]] = {
    "a partition with words behind it": {"number": "1 init=/bin/evil"},
    "a partition below nothing": {"number": -1},
    "a file system with words behind it": {"fstype": "xfs init=/bin/evil"},
    "a subvolume with words behind it": {"subvolume": "@ init=/bin/evil"},
    "a subvolume with options behind it": {"subvolume": "@,suid"},
    "names that are none": {"names": 7},
    "links that are none": {"links": [1]},
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_is_no_answer(tmp_path: Path, lie: str) -> None:
    told(module(tmp_path / "root"), tmp_path / "tar", **LIES[lie])
    with pytest.raises(ImageCorrupt, match="no usable answer"):
        Survey(tmp_path / "tar")


@pytest.mark.parametrize("data", [b"", b"noise" * 1000, bytes(10240)])
def test_noise_is_no_answer(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "tar").write_bytes(data)
    with pytest.raises(ImageCorrupt):
        Survey(tmp_path / "tar")


def test_a_link_in_the_archive_leads_nowhere(tmp_path: Path) -> None:
    told(module(tmp_path / "root"), tmp_path / "tar")
    with tarfile.open(tmp_path / "tar", "a") as tar:
        entry = tarfile.TarInfo("boot/vmlinuz-9.9")
        entry.type, entry.linkname = tarfile.SYMTYPE, "/etc/shadow"
        tar.addfile(entry)
    with pytest.raises(ImageCorrupt, match="not found"):
        Survey(tmp_path / "tar").read("/boot/vmlinuz-9.9")


def test_more_than_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told(module(tmp_path / "root"), tmp_path / "tar")
    monkeypatch.setattr(survey, "LARGEST_FILE", 10)
    with pytest.raises(ImageCorrupt, match="at most 10"):
        Survey(tmp_path / "tar").read("/var/lib/dpkg/status")
    monkeypatch.setattr(survey, "MOST_MEMBERS", 2)
    with pytest.raises(ImageCorrupt, match="too many files"):
        Survey(tmp_path / "tar")
