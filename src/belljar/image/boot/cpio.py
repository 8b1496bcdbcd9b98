"""Write cpio archives in the `newc` form, the one the kernel unpacks as its initial ramdisk.

Archives are reproducible: no times, everything owned by root, numbered in order. Archives may be concatenated: the
kernel unpacks one after the other. Form: Documentation/driver-api/early-userspace/buffer-format.rst of Linux.
"""

from __future__ import annotations

import stat
from collections.abc import Iterable

from belljar.records import dataclass

ALIGNMENT = 4
TRAILER = "TRAILER!!!"


@dataclass(frozen=True)
class Entry:
    """One file, folder, link or device. `mode` carries the type too."""

    path: str  # without a leading slash
    mode: int
    data: bytes = b""
    device: tuple[int, int] = (0, 0)


def folder(path: str) -> Entry:
    return Entry(path, stat.S_IFDIR | 0o755)


def file(path: str, data: bytes, mode: int = 0o644) -> Entry:
    return Entry(path, stat.S_IFREG | mode, data)


def archive(entries: Iterable[Entry]) -> bytes:
    """The bytes of a whole archive. Folders must come before what lies in them: the kernel makes no parents."""
    return b"".join(_record(entry, number) for number, entry in enumerate([*entries, Entry(TRAILER, 0)], 1))


def _record(entry: Entry, number: int) -> bytes:
    name = entry.path.encode() + b"\0"
    links = 2 if stat.S_ISDIR(entry.mode) else 1
    fields = (number, entry.mode, 0, 0, links, 0, len(entry.data), 0, 0, *entry.device, len(name), 0)
    head = b"070701" + b"".join(b"%08X" % field for field in fields) + name
    return b"".join(part + b"\0" * (-len(part) % ALIGNMENT) for part in (head, entry.data))
