"""A root of xfs or btrfs: what a machine told of it becomes a direct boot, and what it tells is not trusted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
from tests.unit.image.image_parts import surveyor, system

from belljar.errors import ImageCorrupt, ImageError, ImageUnfit
from belljar.image import Image, Surveyor
from belljar.image.intake import intake, survey
from belljar.image.intake.survey import Survey
from belljar.image.progress import Progress
from belljar.image.store.store import Store
from belljar.machine.workshop.workshop import SCRIPT
from belljar.model import MIB

RELEASE = "6.1.0-9-amd64"


def take(store: Store, surveyor: Surveyor, firmware: str = "auto") -> Image:
    with intake.draft(store, "test") as folder:
        raw = folder / "disk.raw"
        raw.write_bytes(b"XFSB".ljust(MIB, b"\0"))
        origin = intake.Origin("test", "x", firmware=firmware)
        store.surveyor = surveyor
        return intake.take(store, folder, origin, Progress())


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
    image = take(store, surveyor(root, number=2, fstype="xfs"))
    assert image.append.endswith(" belljar.root=/dev/vda2 belljar.fstype=xfs") and image.os == "Small Linux 1"
    assert (image.facts["boots_by"], image.facts["fstype"], image.facts["root"]) == ("kernel", "xfs", "/dev/vda2")
    assert image.initrd and b"modules/xfs.ko" in image.initrd.read_bytes()
    assert not list(image.disk.parent.glob("survey*.tar"))


def test_a_root_in_a_subvolume_says_so(store: Store, tmp_path: Path) -> None:
    root = module(tmp_path / "root")
    image = take(store, surveyor(root, fstype="btrfs", subvolume="@", number=0))
    assert image.append.endswith(" belljar.root=/dev/vda belljar.fstype=btrfs belljar.mount=rw,noatime,subvol=@")


def test_what_no_machine_can_look_into_boots_by_firmware(store: Store) -> None:
    def fail(disk: Path, size: int, target: Path) -> None:
        assert size == MIB and disk.name == "disk.qcow2"
        raise ImageError("no root file system was found on the disk")

    assert take(store, fail).facts == {"boots_by": "firmware", "firmware": []}


def test_a_disk_that_may_not_boot_by_firmware_is_then_refused(store: Store) -> None:
    def fail(disk: Path, size: int, target: Path) -> None:
        raise ImageError("no root file system was found on the disk")

    with pytest.raises(ImageUnfit):
        take(store, fail, firmware="none")
    assert store.images() == [] and list((store.folder / "drafts").iterdir()) == []


THINNED = """\
import json, os, runpy, sys
script = runpy.run_path(sys.argv[1])
wanted = json.loads(sys.argv[3])
os.chroot(sys.argv[2])
os.chdir("/")
script["write_thinned"](b'{"number": 0, "fstype": "ext4"}', wanted, {*wanted["modules"], "ext4"})
"""


def test_what_a_machine_is_asked_for_is_all_that_a_whole_root_would_tell(tmp_path: Path) -> None:
    """The guest's own script, on a root that this host has; /sbin leads to /usr/sbin, as usual by now."""
    root = system(tmp_path / "root")
    for folder, name in (("usr/sbin", "agetty"), ("usr/bin", "cloud-init"), ("usr/lib/systemd", "systemd")):
        (root / folder).mkdir(parents=True, exist_ok=True)
        (root / folder / name).write_text("")
    (root / "usr/sbin/init").symlink_to("../lib/systemd/systemd")
    (root / "sbin").symlink_to("usr/sbin")
    (root / "usr/share").mkdir()
    (root / "usr/share/large").write_bytes(bytes(MIB))
    surveyor(root)(tmp_path, 0, tmp_path / "whole")
    argv = [sys.executable, "-c", THINNED, str(SCRIPT), str(root), json.dumps(survey.WANTED)]
    rights = [] if os.geteuid() == 0 else ["unshare", "--user", "--map-root-user"]
    with open(tmp_path / "thin", "wb") as file:
        subprocess.run([*rights, *argv], stdout=file, check=True)
    thin, whole = Survey(tmp_path / "thin", MIB), Survey(tmp_path / "whole", MIB)
    assert survey.describe(thin) == survey.describe(whole)
    assert survey.describe(thin)[1]["init_system"] == "systemd"
    boots = [intake._start(intake.Origin("test", "x"), root, [], Progress()) for root in (thin, whole)]
    assert boots[0] == boots[1] and boots[0].kernel
    assert (tmp_path / "thin").stat().st_size < MIB


LIES: dict[str, dict[str, Any]] = {
    "a partition with words behind it": {"number": "1 init=/bin/evil"},
    "a partition below nothing": {"number": -1},
    "a file system with words behind it": {"fstype": "xfs init=/bin/evil"},
    "a subvolume with words behind it": {"subvolume": "@ init=/bin/evil"},
    "a subvolume with options behind it": {"subvolume": "@,suid"},
    "a number that is none": {"number": [1]},
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_is_no_answer(tmp_path: Path, lie: str) -> None:
    place = {"number": 2, "fstype": "xfs", "subvolume": "", **LIES[lie]}
    surveyor(module(tmp_path / "root"), **place)(tmp_path, 0, tmp_path / "tar")
    with pytest.raises(ImageCorrupt, match="no usable answer"):
        Survey(tmp_path / "tar", MIB)


@pytest.mark.parametrize("data", [b"", b"noise" * 1000, bytes(10240)])
def test_noise_is_no_answer(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "tar").write_bytes(data)
    with pytest.raises(ImageCorrupt):
        Survey(tmp_path / "tar", MIB)


def test_a_link_in_the_archive_leads_nowhere(tmp_path: Path) -> None:
    surveyor(module(tmp_path / "root"))(tmp_path, 0, tmp_path / "tar")
    with tarfile.open(tmp_path / "tar", "a") as tar:
        entry = tarfile.TarInfo("boot/vmlinuz-9.9")
        entry.type, entry.linkname = tarfile.SYMTYPE, "/etc/shadow"
        tar.addfile(entry)
    with pytest.raises(ImageCorrupt, match="not found"):
        Survey(tmp_path / "tar", MIB).read("/boot/vmlinuz-9.9")


def test_more_than_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    surveyor(module(tmp_path / "root"))(tmp_path, 0, tmp_path / "tar")
    monkeypatch.setattr(survey, "LARGEST_FILE", 10)
    with pytest.raises(ImageCorrupt, match="at most 10"):
        Survey(tmp_path / "tar", MIB).read("/var/lib/dpkg/status")
    monkeypatch.setattr(survey, "MOST_MEMBERS", 2)
    with pytest.raises(ImageCorrupt, match="too many files"):
        Survey(tmp_path / "tar", MIB)
