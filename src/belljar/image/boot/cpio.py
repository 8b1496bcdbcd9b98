"""Write cpio archives in the `newc` form, the one the kernel unpacks as its initial ramdisk.

Archives are reproducible: no times, everything owned by root, numbered in order. Archives may be concatenated: the
kernel unpacks one after the other. Form: Documentation/driver-api/early-userspace/buffer-format.rst of Linux.
"""

from __future__ import annotations

import stat
from collections.abc import Iterable

ALIGNMENT = 4
TRAILER = "TRAILER!!!"


# Path without a leading slash, mode with the type in it, content, numbers of a device.
Entry = tuple[str, int, bytes, tuple[int, int]]


def folder(path: str) -> Entry:
    return path, stat.S_IFDIR | 0o755, b"", (0, 0)


def file(path: str, data: bytes, mode: int = 0o644) -> Entry:
    return path, stat.S_IFREG | mode, data, (0, 0)


def archive(entries: Iterable[Entry]) -> bytes:
    """The bytes of a whole archive. Folders must come before what lies in them: the kernel makes no parents."""
    end: Entry = (TRAILER, 0, b"", (0, 0))
    return b"".join(_record(number, *entry) for number, entry in enumerate([*entries, end], 1))


def _record(number: int, path: str, mode: int, data: bytes, device: tuple[int, int]) -> bytes:
    name = path.encode() + b"\0"
    links = 2 if stat.S_ISDIR(mode) else 1
    fields = (number, mode, 0, 0, links, 0, len(data), 0, 0, *device, len(name), 0)
    head = b"070701" + b"".join(b"%08X" % field for field in fields) + name
    return b"".join(part + b"\0" * (-len(part) % ALIGNMENT) for part in (head, data))
