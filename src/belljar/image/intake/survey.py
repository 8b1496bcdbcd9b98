"""A root file system as an archive describes it: what kind of system it is, and the files that a direct boot needs.

The archive is the root itself with most of its files left out, or named without their bytes (as FIFOs). A machine of
`machine.workshop` wrote it, and may have worked on a hostile disk; so nothing in it is trusted: nothing is unpacked,
and every size has a limit. For a system that was built here it is the whole root.
"""

from __future__ import annotations

import json
import posixpath
import re
import tarfile
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from belljar.errors import ImageCorrupt
from belljar.image.boot import modules

FILE = "survey.json"
LARGEST_FILE = 256 << 20
MOST_MEMBERS = 200_000
KINDS = ("ext4", "xfs", "btrfs")
VERSION = re.compile(r"[0-9][A-Za-z0-9._+~-]*")
PLAIN = re.compile(r"[A-Za-z0-9@._-]{0,60}")
INITS = ("/usr/sbin/init", "/sbin/init")
CLOUD_INIT = ("/usr/bin/cloud-init", "/bin/cloud-init", "/usr/local/bin/cloud-init")
SYSTEMD = ("/usr/lib/systemd/systemd", "/lib/systemd/systemd")
UNIT = "/etc/systemd/system/multi-user.target.wants/belljar-agent.service"
RELEASES = ("/usr/lib/os-release", "/etc/os-release")
MODULE_FOLDERS = ("/usr/lib/modules", "/lib/modules")
BUSYBOXES = ("/usr/bin/busybox", "/bin/busybox")
UNREADABLE = (tarfile.TarError, OSError, ValueError, TypeError, AttributeError, ArithmeticError, RecursionError)
# What the workshop machine is asked for, besides the kernels in the disk.
WANTED = {
    "modules": modules.NAMES,
    "files": [*RELEASES, *BUSYBOXES],
    "names": [UNIT, *INITS, *SYSTEMD, *CLOUD_INIT],
}


class Survey:
    """Its index is read once, then files by path. *disk_size*: of the disk it describes."""

    def __init__(self, archive: Path, disk_size: int) -> None:
        self._archive, self._disk_size = archive, disk_size
        try:
            with tarfile.open(archive, "r:") as tar:
                members = list(islice(tar, MOST_MEMBERS + 1))
            if len(members) > MOST_MEMBERS:
                raise ImageCorrupt("the machine that looked into the disk listed too many files")
            self._members = {posixpath.normpath(f"/{member.name}"): member for member in members}
            # Without this file, the disk is one ext4 file system.
            place = json.loads(self.read(f"/{FILE}")) if self.has(f"/{FILE}") else {}
            number, self.fstype = int(place.get("number", 0)), str(place.get("fstype", "ext4"))
            self.subvolume = str(place.get("subvolume", ""))
        except UNREADABLE as exc:
            raise ImageCorrupt(f"the machine that looked into the disk gave no usable answer: {exc}") from exc
        is_usable = 0 <= number <= 128 and self.fstype in KINDS and PLAIN.fullmatch(self.subvolume)
        if not (members and is_usable):
            raise ImageCorrupt("the machine that looked into the disk gave no usable answer")
        self.device = f"/dev/vda{number or ''}"
        self.modules = next(filter(self.names, MODULE_FOLDERS), "")  # the folder of all kernels' modules

    @property
    def words(self) -> str:
        """From the command line: where the root is and how it is mounted. An ext4 that fills its disk grows with it."""
        if self.fstype == "ext4":
            is_whole = self.device == "/dev/vda"
            return f"belljar.sectors={self._disk_size // 512}" if is_whole else f"belljar.root={self.device}"
        mount = f" belljar.mount=rw,noatime,subvol={self.subvolume}" if self.subvolume else ""
        return f"belljar.root={self.device} belljar.fstype={self.fstype}{mount}"

    def versions(self) -> list[str]:
        return list(filter(VERSION.fullmatch, self.names(self.modules)))

    def names(self, folder: str) -> list[str]:
        """The names in a folder; empty when the archive has none."""
        return [name for parent, name in map(posixpath.split, self._members) if parent == folder]

    def has(self, path: str) -> bool:
        return path in self._members

    def link(self, path: str) -> str:
        """Where a link points to; empty for anything else."""
        return self._members[path].linkname if path in self._members else ""

    def read(self, path: str) -> bytes:
        """A file's bytes. Does not follow a link. Raises ImageCorrupt when the archive does not have it, or it is too large."""
        file = self._members.get(path)
        if file is None or not file.isreg():
            raise ImageCorrupt(f"{path}: not found in the disk")
        if not 0 <= file.size <= LARGEST_FILE:
            raise ImageCorrupt(f"{path}: {file.size} bytes, at most {LARGEST_FILE} are read")
        with open(self._archive, "rb") as archive:
            archive.seek(file.offset_data)
            return archive.read(file.size)


def describe(root: Survey) -> tuple[str, dict[str, Any]]:
    """The system's name, and the facts of `Image.facts`; those that were not found are left out."""
    properties: dict[str, Any] = {**_init(root), "cloud_init": any(map(root.has, CLOUD_INIT))}
    if root.has(UNIT):
        properties["agent"] = True
    with suppress(ImageCorrupt):  # of any of its kernels, since the disk decides which one a firmware starts
        properties["mounts"] = modules.mounts(root.read, [f"{root.modules}/{version}" for version in root.versions()])
    return _name(root), properties


def _name(root: Survey) -> str:
    for path in RELEASES:
        with suppress(ImageCorrupt):
            if name := pretty_name(root.read(path).decode("utf-8", "replace")):
                return name
    return ""


def pretty_name(text: str) -> str:
    """What an os-release file calls the system."""
    name = re.search(r'^PRETTY_NAME="?([^"\n]{1,100})', text, re.MULTILINE)
    return "".join(char for char in name[1] if char.isprintable()) if name else ""


def _init(root: Survey) -> dict[str, str]:
    """The path the kernel would start, and whether that is systemd."""
    if init := next(filter(root.has, INITS), ""):
        is_systemd = root.link(init).endswith("/systemd")
        return {"init": "/sbin/init", "init_system": "systemd" if is_systemd else "other"}
    systemd = next(filter(root.has, SYSTEMD), "")
    return {"init": systemd, "init_system": "systemd" if systemd else ""}
