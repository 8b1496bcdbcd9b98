"""Disks: the machine's own, those that it has beyond its template, and the disc that its guest's own init reads."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

from belljar.hints import TYPE_CHECKING, Any
from belljar.hypervisor import DomainSpec
from belljar.hypervisor.devices import MODERN, Kind

if TYPE_CHECKING:
    from belljar.hypervisor.libvirt import Ends
    from belljar.hypervisor.qemu.process.launch import Launch

# Devices that a template never has sit at the far end of the bus, eight in a slot, so that all others keep their places.
LAST_SLOT = 0x1E  # the one behind it is the board's own
FUNCTIONS = 8
WRITTEN: dict[str, Any] = {"cache": {"no-flush": True}}  # what a machine writes is gone with it: no flush is needed
READ: dict[str, Any] = {"read-only": True}
LETTERS = "abcdefghijklmnopqrstuvwxyz"


class OwnDisk(Kind):
    """The overlay on its base. A template's is synced when it is saved. A full host disk stops the guest. A guest that only becomes a
    template reads none."""

    def words(self, launch: Launch) -> list[str]:
        boot, size = launch.spec.boot, launch.spec.disk_size
        nothing = ["-blockdev", compact({"driver": "null-co", "node-name": "disk0", "size": size})]
        words = chain("disk", launch.layers, WRITTEN) or nothing
        if boot.is_disc:
            # On a controller that every firmware boots from, and guests with nothing there need no driver for.
            return [*words, "-device", "ich9-ahci,id=discs", "-device", "ide-cd,bus=discs.0,drive=disk0,bootindex=1"]
        order = "" if boot.kernel else ",bootindex=1"
        return [*words, "-device", f"virtio-blk-pci-non-transitional,drive=disk0,werror=enospc,rerror=report{order}"]

    def xml(self, spec: DomainSpec, ends: Ends, place: Callable[[], str]) -> Iterator[str]:
        """With the further ones: the guest's names of them are in their order."""
        names = (f"vd{first}{second}" for first in ("", *LETTERS) for second in LETTERS)
        first = '<boot order="1"/>' if spec.boot.kernel is None else ""
        if spec.boot.is_disc:  # a CD-ROM, on a controller that every firmware boots from
            traits = '<target dev="sda" bus="sata"/><readonly/><boot order="1"/>'
            driver = f'<driver name="qemu" type="qcow2"/>{sources(ends.layers)}{traits}'
            yield f'<disk type="file" device="cdrom">{driver}</disk>'
        else:
            yield element(ends.layers, "qcow2", first, next(names), place())
        for extra, below in zip(spec.disks, ends.below, strict=True):
            traits = f"<serial>{extra.name}</serial>" + ("<readonly/>" if extra.readonly else "")
            yield element((extra.path, *below), extra.format, traits, next(names), place())
        if spec.seed is not None:
            yield element((spec.seed,), "raw", "<serial>seed</serial><readonly/>", next(names), place())


class FurtherDisks(Kind):
    """Each an inherited descriptor, known to the guest by its serial."""

    def words(self, launch: Launch) -> list[str]:
        words: list[str] = []
        if launch.spec.seed:
            # A read-only disc that every guest has a driver for, because its own disk needs the same one.
            words = node("seed", "raw", launch.seed, READ)
            words += ["-device", "virtio-blk-pci-non-transitional,drive=seed,serial=seed"]
        for number, (disk, fds) in enumerate(zip(launch.spec.disks, launch.disks, strict=True)):
            name, trait = f"x-{disk.name}-", READ if disk.readonly else {**WRITTEN, "discard": "unmap"}
            words += chain(name, fds, trait) if disk.format == "qcow2" else node(f"{name}0", disk.format, fds[0], trait)
            device = f"virtio-blk-pci-non-transitional,drive={name}0,serial={disk.name},werror=enospc,rerror=report"
            words += ["-device", f"{device},{place_at_the_end(number)}"]
        return words


def place_at_the_end(number: int) -> str:
    """The bus address of the n-th device that a template does not have."""
    slot, function = LAST_SLOT - number // FUNCTIONS, number % FUNCTIONS
    return f"addr={slot:#x}.{function:#x}" + (",multifunction=on" if function == 0 else "")


def node(name: str, format: str, fd: int, trait: dict[str, Any], **more: Any) -> list[str]:
    """A file that QEMU inherits, as the block node *name*. A descriptor's number is that of its file set, too."""
    file = {"driver": "file", "filename": f"/dev/fdset/{fd}", "node-name": f"{name}-file"} | trait
    whole = {"driver": format, "node-name": name, "file": f"{name}-file"} | more | trait
    return ["-add-fd", f"fd={fd},set={fd}", "-blockdev", compact(file), "-blockdev", compact(whole)]


def chain(name: str, fds: tuple[int, ...], trait: dict[str, Any]) -> list[str]:
    """A qcow2 disk, the overlay first, as the nodes *name*0 and so on; what it stands on is only read."""
    words: list[str] = []
    for level in reversed(range(len(fds))):
        backing = f"{name}{level + 1}" if level + 1 < len(fds) else None
        words += node(f"{name}{level}", "qcow2", fds[level], READ if level else trait, backing=backing)
    return words


def compact(value: dict[str, Any]) -> str:
    return json.dumps(value, separators=(",", ":"))


def element(layers: tuple[Path, ...], format: str, traits: str, name: str, place: str) -> str:
    """A full host disk stops the guest."""
    cache = "writeback" if "<readonly/>" in traits else "unsafe"
    driver = f'<driver name="qemu" type="{format}" cache="{cache}" error_policy="enospace" rerror_policy="report"/>'
    target = f'<target dev="{name}" bus="virtio"/>{traits}{place}'
    return f'<disk type="file" device="disk" model="{MODERN}">{driver}{sources(layers)}{target}</disk>'


def sources(layers: tuple[Path, ...]) -> str:
    """A disk's whole chain written down, so that libvirt reads no header; an empty element ends it."""
    from xml.sax.saxutils import quoteattr

    top, *below = (f"<source file={quoteattr(str(layer))}/>" for layer in layers)
    text = "<backingStore/>"
    for layer in reversed(below):
        text = f'<backingStore type="file"><format type="qcow2"/>{layer}{text}</backingStore>'
    return top + text


OWN, FURTHER = OwnDisk(), FurtherDisks()
