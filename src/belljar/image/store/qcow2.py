"""The qcow2 form: see from a header that nobody trusts whether QEMU would open more than its file, write the empty overlay that is a
machine's own disk. An image is never written. docs/interop/qcow2.txt of QEMU.

Nothing here runs a program: docs/develop/decisions/0025-downloads-and-headers.md says why `qemu-img info` is not asked.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

from belljar.errors import ImageCorrupt, ImageTooLarge, NoSpace, OverLimit
from belljar.host.files import free_bytes, no_space_as_error, private
from belljar.image import Image, Settings
from belljar.model import GIB, MIB

MAGIC = b"QFI\xfb"
HEADER = struct.Struct(">4sIQIIQIIQQIIQQQQII")
HEADER_LENGTH = 104
CLUSTER_BITS = 16
CLUSTER = 1 << CLUSTER_BITS
LARGEST_BACKING_NAME = 1023
# For a header: magic, version, where the backing file's name is and how long, size, encryption, incompatible features.
READ = struct.Struct(">4sIQI4xQI36xQ")
EXTERNAL_DATA, CORRUPT = 4, 2
BACKING_FORMAT, END = 0xE2792ACA, 0
SECTOR = 512  # bytes; QEMU rounds a size down to these
LARGEST_DISK = 4096 * GIB


def virtual_size(path: Path) -> int:
    """The disk's size, from one small read. Raises ImageCorrupt when it is not a qcow2 file."""
    return _read(path)[0]


def check_alone(path: Path, largest: int, *, is_layer: bool = False) -> int:
    """The disk's size. Raises ImageTooLarge, and ImageCorrupt where QEMU would open another file as well, or want a key. All else
    that a header may say is for QEMU to refuse, which then opens this file alone. *is_layer*: it may stand on another one."""
    size, complaints = _read(path, is_layer)
    if size > largest:
        raise ImageTooLarge(f"{path}: a disk of {size} bytes, the limit is {largest}")
    if complaints:
        hint = "Flatten it with `qemu-img convert -O qcow2` at its source."
        raise ImageCorrupt(f"{path}: {complaints[0]}", hint=hint)
    return size


def _read(path: Path, is_layer: bool = False) -> tuple[int, list[str]]:
    """The disk's size, and what must not be."""
    with open(path, "rb", buffering=0) as file:
        head = file.read(READ.size)
    magic, version, name_at, name_length, size, encryption, features = READ.unpack(head.ljust(READ.size, b"\0"))
    if magic != MAGIC or len(head) < 72:
        raise ImageCorrupt(f"{path}: not a qcow2 file")
    features = features if version > 2 else 0
    complaints = {
        "it has a backing file": (name_at or name_length) and not is_layer,
        "it is encrypted": encryption,
        "its data lies in another file": features & EXTERNAL_DATA,
        "it is marked corrupt": features & CORRUPT,
        f"its disk has {size} bytes, not whole sectors of {SECTOR}": size % SECTOR or size == 0,
    }
    return size, [what for what, is_so in complaints.items() if is_so]


def write_overlay(path: Path, backing: Path, size: int) -> None:
    """Make an empty qcow2 file of *size* bytes on top of *backing* (qcow2 too), mode 0600. What `qemu-img create` does in
    the time of a process; here it is one write. Nothing may be at *path* yet."""
    data = overlay_bytes(os.fsencode(backing), size)
    with open(path, "xb", opener=private) as file:
        file.write(data)


def overlay_bytes(backing: bytes, size: int) -> bytes:
    """Clusters: header, refcount table, one refcount block, L1 table (one cluster maps 4 TiB)."""
    if len(backing) > LARGEST_BACKING_NAME:
        raise ImageCorrupt(f"{backing!r}: the path is too long for qcow2 ({LARGEST_BACKING_NAME} bytes)")
    entries = -(-size // (CLUSTER * CLUSTER // 8))
    l1_clusters = max(1, -(-entries * 8 // CLUSTER))
    extensions = struct.pack(">II8s", BACKING_FORMAT, 5, b"qcow2") + struct.pack(">II", END, 0)
    header = HEADER.pack(
        MAGIC, 3, HEADER_LENGTH + len(extensions), len(backing), CLUSTER_BITS, size, 0, entries, 3 * CLUSTER, CLUSTER, 1,
        0, 0, 0, 0, 0, 4, HEADER_LENGTH,
    )  # fmt: skip
    refcount_table = struct.pack(">Q", 2 * CLUSTER)
    refcount_block = struct.pack(">H", 1) * (3 + l1_clusters)
    clusters = (header + extensions + backing, refcount_table, refcount_block)
    return b"".join(cluster.ljust(CLUSTER, b"\0") for cluster in clusters) + b"\0" * (l1_clusters * CLUSTER)


class Overlays:
    def __init__(self, settings: Settings = Settings()) -> None:  # noqa: B008 - a frozen value
        self.settings = settings

    def size(self, image: Image, asked: int | None) -> int:
        """The size a machine's disk gets, in bytes. Raises OverLimit."""
        size = image.virtual_size if asked is None else -(-asked // SECTOR) * SECTOR
        if size < image.virtual_size:
            what = f"a disk of {size // MIB} MiB is too small: the image's has {image.virtual_size // MIB} MiB"
            raise OverLimit(what, hint="Ask for a larger --disk, or none.")
        if size > LARGEST_DISK:
            raise OverLimit(f"a disk of {size // GIB} GiB is too large: at most {LARGEST_DISK // GIB} GiB")
        return size

    def create(self, path: Path, image: Image, size: int | None) -> int:
        """Make a qcow2 overlay (0600) at *path* of *size* bytes or the image's; returns its virtual size.
        Raises OverLimit when smaller than the image, NoSpace when the host has no room for it."""
        size = self.size(image, size)
        self.check_room(path.parent)
        with no_space_as_error(path):
            write_overlay(path, image.disk, size)
        return size

    def check_room(self, folder: Path) -> None:
        """Raise NoSpace where less than `image.reserve` is free for one more machine's disk."""
        if (free := free_bytes(folder)) < (needed := self.settings.reserve):
            raise NoSpace(f"{folder}: {free // MIB} MiB free, a machine needs {needed // MIB} MiB to start")

    def discard(self, path: Path) -> None:
        """Remove it. Missing is success."""
        path.unlink(missing_ok=True)
