"""PCI devices of this host, as its kernel shows them in sysfs, and the classes that a site sorts them into. Changes nothing.

https://www.kernel.org/doc/Documentation/ABI/testing/sysfs-bus-pci
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path

from belljar.model import setting
from belljar.records import dataclass

PCI, MDEV = "sys/bus/pci", "sys/bus/mdev"
ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[01][0-9a-f]\.[0-7]")
IS_MEMORY, IS_FAR = 0x200, 0x102000  # linux/ioport.h: memory; prefetchable, of 64 bits
BARS = 6
FUNCTION, VIRTUAL, MEDIATED = (
    "function",
    "virtual",
    "mediated",
)  # virtual: SR-IOV; mediated: a part made by a driver (mdev)
WORDS = ("vendor", "device", "class", "address", "kind")  # of a pattern
REQUIRED, NONE_ACCEPTED = "required", "none-accepted"


@dataclass(frozen=True)
class Device:
    """What sysfs tells of one. Numbers are hexadecimal text, as there."""

    address: str  # 0000:41:00.0; of a mediated device its UUID
    folder: Path
    kind: str
    vendor: str
    device: str
    class_: str  # base and sub class: "0302"
    driver: str
    group: str  # of the IOMMU; "": there is none
    node: int  # of memory and processors; -1: the host has one alone
    resets: tuple[str, ...]  # how it can be reset
    windows: tuple[int, int]  # bytes of address space: below 4 GiB, and prefetchable

    def fits(self, pattern: str) -> bool:
        """Does it fit every word of `vendor=10de class=03*`?"""
        attributes = dict(zip(WORDS, (self.vendor, self.device, self.class_, self.address, self.kind), strict=True))
        pairs = (word.partition("=") for word in pattern.split())
        return all(fnmatchcase(attributes[name], value.lower()) for name, _, value in pairs)


@dataclass(frozen=True)
class DeviceClass:
    """A table [class.NAME] of devices.toml."""

    name: str
    match: tuple[str, ...] = setting(
        (), "patterns of its devices, of the words vendor=, device=, class=, address=, kind="
    )
    groups: tuple[str, ...] = setting((), "groups of users who may have them; empty: everybody")
    driver: str = setting("", "the host's driver that they go back to; empty: the one that had them")
    reset: str = setting(REQUIRED, "none-accepted: also those that cannot be reset", choices=(REQUIRED, NONE_ACCEPTED))
    ids: tuple[str, ...] = setting((), "the batch system's names of them, by their addresses' order; empty: 0, 1, ...")

    def devices(self, known: Iterable[Device]) -> list[Device]:
        """Its devices, in the order of their addresses."""
        return [device for device in known if any(map(device.fits, self.match))]


Site = tuple[DeviceClass, ...]


def class_of(device: Device, site: Site) -> DeviceClass | None:
    """The first that it fits."""
    return next((known for known in site if known.devices([device])), None)


def read(root: Path) -> dict[str, Device]:
    """Every device by its address, in the order of addresses; mediated ones come last."""
    functions = [folder for folder in _entries(root / PCI / "devices") if ADDRESS.fullmatch(folder.name)]
    return {folder.name: _device(folder) for folder in (*functions, *_entries(root / MDEV / "devices"))}


def _device(folder: Path) -> Device:
    is_part = not ADDRESS.fullmatch(folder.name)
    whose = folder.resolve().parent if is_part else folder
    resets = tuple(_text(folder / "reset_method").split())
    if is_part or (not resets and (folder / "reset").exists()):  # its driver's affair; before Linux 5.15
        resets = ("reset",)
    vendor, device, class_ = (_text(whose / name).removeprefix("0x")[:4] for name in ("vendor", "device", "class"))
    kind = MEDIATED if is_part else VIRTUAL if (folder / "physfn").exists() else FUNCTION
    driver, group, node = _link(folder / "driver"), _link(folder / "iommu_group"), int(_text(whose / "numa_node") or -1)
    return Device(folder.name, folder, kind, vendor, device, class_, driver, group, node, resets, _windows(folder))


def _windows(folder: Path) -> tuple[int, int]:
    """From lines `first last flags`, one for each of its regions."""
    sizes = {True: 0, False: 0}
    for line in _text(folder / "resource").splitlines()[:BARS]:
        first, last, flags = (int(word, 16) for word in line.split())
        if flags & IS_MEMORY:
            sizes[flags & IS_FAR == IS_FAR] += last - first + 1
    return sizes[False], sizes[True]


def _entries(folder: Path) -> list[Path]:
    with suppress(OSError):
        return [folder / name for name in sorted(os.listdir(folder))]
    return []


def _text(path: Path) -> str:
    with suppress(OSError):
        return path.read_text().strip()
    return ""


def _link(path: Path) -> str:
    with suppress(OSError):
        return os.path.basename(os.readlink(path))
    return ""
