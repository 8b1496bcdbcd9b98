"""Domains by libvirt, for sites whose hosts are run by it: driver.py is the `Hypervisor`, xml.py what it asks for,
connection.py the connection with its deadlines, holder.py the process that holds it, domain.py a domain while it lives."""

from __future__ import annotations

from pathlib import Path

from belljar.records import dataclass


@dataclass(frozen=True)
class Ends:
    """The host's side of a domain. Every file by a path that QEMU's user can open."""

    layers: tuple[Path, ...]  # the disk, overlay first
    below: tuple[tuple[Path, ...], ...] = ()  # what each further disk stands on, the upper ones first
    firmware: str = ""  # the file of the UEFI; empty: the BIOS that comes with QEMU
    emulator: str = ""  # empty: libvirt's choice
    cpu: str = "max"  # in QEMU's words
    label: tuple[int, int] | None = None  # uid and gid of the process; None: libvirt's choice
