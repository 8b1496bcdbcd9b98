"""The qcow2 form: read the header of a file nobody trusts, write the empty overlay that is a machine's own disk. An image is never
written. docs/interop/qcow2.txt of QEMU.

Nothing here runs a program. A header that passes `read_trusted` names no other file, so QEMU opens this one alone.
"""

from __future__ import annotations

import os
import struct
from contextlib import suppress
from pathlib import Path

from belljar.errors import ImageCorrupt, ImageTooLarge, ImpossibleSize, NoSpace
from belljar.host.files import free_bytes, no_space_as_error, write_all
from belljar.image import Image, Settings
from belljar.model import GIB, MIB
from belljar.records import dataclass

MAGIC = b"QFI\xfb"
HEADER = struct.Struct(">4sIQIIQIIQQIIQQQQII")
HEADER_LENGTH = 104
CLUSTER_BITS = 16
CLUSTER = 1 << CLUSTER_BITS
LARGEST_HEADER = 64 << 10
LARGEST_L1 = 4 << 20  # entries: QEMU's own limit of 32 MiB
LARGEST_TABLE = 8 << 20  # QEMU's own limit
LARGEST_BACKING_NAME = 1023
COMPRESSION_AT = 104

DIRTY, CORRUPT, EXTERNAL_DATA, COMPRESSION, EXTENDED_L2 = 1, 2, 4, 8, 16
HARMLESS = DIRTY | COMPRESSION | EXTENDED_L2
END, BACKING_FORMAT, EXTERNAL_DATA_NAME, ENCRYPTION = 0, 0xE2792ACA, 0x44415441, 0x0537BE77


@dataclass(frozen=True)
class Header:
    """What the first bytes of a qcow2 file say."""

    version: int
    backing: tuple[int, int]  # offset and length of its name; (0, 0): none
    cluster_bits: int
    size: int  # virtual, bytes
    encryption: int
    l1: tuple[int, int]  # entries, offset
    refcounts: tuple[int, int]  # offset, clusters
    snapshots: tuple[int, int]  # number, offset of their table
    incompatible: int
    refcount_order: int  # a count has 2 ** this bits
    compression: int
    length: int


def virtual_size(path: Path) -> int:
    """The disk's size, from one small read. Raises ImageCorrupt when it is no qcow2 file."""
    with open(path, "rb", buffering=0) as file:
        return parse(file.read(HEADER_LENGTH), path).size


def parse(data: bytes, path: Path) -> Header:
    """Read the fixed part of a header, version 2 or 3. Raises ImageCorrupt."""
    if len(data) < 72 or data[:4] != MAGIC:
        raise ImageCorrupt(f"{path}: not a qcow2 file")
    padded = data[:HEADER_LENGTH].ljust(HEADER_LENGTH, b"\0")
    (_, version, backing_at, backing_length, bits, size, encryption, l1_entries, l1_at, table_at, table_clusters,
     snapshots, snapshots_at, incompatible, _, _, order, length) = HEADER.unpack(padded)  # fmt: skip
    compression = data[COMPRESSION_AT] if version == 3 and length > COMPRESSION_AT < len(data) else 0
    if version == 2:
        incompatible, order, length = 0, 4, 72
    elif version != 3 or len(data) < HEADER_LENGTH:
        raise ImageCorrupt(f"{path}: qcow2 version {version} is not known")
    return Header(
        version, (backing_at, backing_length), bits, size, encryption, (l1_entries, l1_at), (table_at, table_clusters),
        (snapshots, snapshots_at), incompatible, order, compression, length,
    )  # fmt: skip


def read_trusted(path: Path, largest: int) -> Header:
    """The header of a file from outside, after every check that keeps QEMU from opening anything but this file, or from
    reserving memory and disk without measure. Raises ImageCorrupt, ImageTooLarge."""
    with open(path, "rb") as file:
        data = file.read(LARGEST_HEADER)
    header = parse(data, path)
    if header.size > largest:
        raise ImageTooLarge(f"{path}: a disk of {header.size} bytes, the limit is {largest}")
    for wrong, what in _complaints(header, os.path.getsize(path)):
        if wrong:
            raise ImageCorrupt(f"{path}: {what}", hint="Flatten it with `qemu-img convert -O qcow2` at its source.")
    _check_extensions(data, header, path)
    return header


def _complaints(header: Header, file_size: int) -> list[tuple[bool, str]]:
    entries, l1_at = header.l1
    table_at, table_clusters = header.refcounts
    snapshots, snapshots_at = header.snapshots
    sane = 9 <= header.cluster_bits <= 21
    extended = bool(header.incompatible & EXTENDED_L2)  # entries of 16 bytes: half as many to a table
    covered = entries << (2 * header.cluster_bits - (4 if extended else 3)) if sane else 0
    cluster = 1 << header.cluster_bits if sane else 1
    fits = 1 <= table_clusters <= 4096 and table_clusters * cluster <= LARGEST_TABLE
    ends = header.length % 8 == 0 and HEADER_LENGTH <= header.length <= min(4096, cluster)
    is_packed = bool(header.incompatible & COMPRESSION)
    return [
        (any(header.backing), "it has a backing file"),
        (header.encryption != 0, "it is encrypted"),
        (bool(header.incompatible & EXTERNAL_DATA), "its data lies in another file"),
        (bool(header.incompatible & CORRUPT), "it is marked corrupt"),
        (bool(header.incompatible & ~(HARMLESS | EXTERNAL_DATA | CORRUPT)), "it uses features belljar does not know"),
        (not sane, "its cluster size makes no sense"),
        (header.size == 0, "its disk is empty"),
        (header.size % 512 != 0, "its size is not a whole number of sectors"),
        (entries > LARGEST_L1 or covered < header.size, "its size makes no sense"),
        (not cluster <= l1_at <= file_size - 8 * entries, "its tables lie outside of the file"),
        (not cluster <= table_at <= file_size - 8, "its tables lie outside of the file"),
        (bool(l1_at % cluster or table_at % cluster), "its tables do not begin where clusters do"),
        (not fits, "its reference table makes no sense"),
        (snapshots > 1024, "it has too many snapshots"),
        (bool(snapshots) and not cluster <= snapshots_at < file_size, "its snapshots lie outside of the file"),
        (header.refcount_order > 6, "its reference counts make no sense"),
        (extended and header.cluster_bits < 14, "its clusters are too small for their parts"),
        (header.compression > 1, "it is compressed in a way belljar does not know"),
        (bool(header.compression) != is_packed, "it contradicts itself about its compression"),
        (header.version == 3 and not ends, "its header's length makes no sense"),
    ]


def _check_extensions(data: bytes, header: Header, path: Path) -> None:
    at = header.length
    while at + 8 <= len(data):
        kind, length = struct.unpack_from(">II", data, at)
        if kind == END:
            return
        if kind in (EXTERNAL_DATA_NAME, ENCRYPTION):
            raise ImageCorrupt(f"{path}: it is encrypted or its data lies in another file")
        at += 8 + (length + 7 & ~7)
    raise ImageCorrupt(f"{path}: its header has no end")


def write_overlay(path: Path, backing: Path, size: int) -> None:
    """Make an empty qcow2 file of *size* bytes on top of *backing* (qcow2 too), mode 0600. What `qemu-img create` does in
    the time of a process; here it is one write. Nothing may be at *path* yet."""
    data = overlay_bytes(os.fsencode(backing), size)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        write_all(descriptor, data)
    finally:
        os.close(descriptor)


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


SECTOR = 512
LARGEST_DISK = 4096 * GIB


class DiskOverlays:
    """Writable disks on top of images, as `belljar.image.Overlays` promises them."""

    def __init__(self, settings: Settings = Settings()) -> None:  # noqa: B008 - a frozen value
        self.settings = settings

    def size(self, image: Image, wanted: int | None) -> int:
        size = image.virtual_size if wanted is None else -(-wanted // SECTOR) * SECTOR
        if size < image.virtual_size:
            raise ImpossibleSize(
                f"a disk of {size // MIB} MiB is too small: the image's has {image.virtual_size // MIB} MiB",
                hint="Ask for a larger --disk, or none.",
            )
        if size > LARGEST_DISK:
            raise ImpossibleSize(f"a disk of {size // GIB} GiB is too large: at most {LARGEST_DISK // GIB} GiB")
        return size

    def create(self, path: Path, image: Image, size: int | None) -> int:
        size = self.size(image, size)
        self.check_room(path.parent)
        with no_space_as_error(path):
            try:
                write_overlay(path, image.disk, size)
            except BaseException as exc:
                if not isinstance(exc, FileExistsError):
                    self.discard(path)
                raise
        return size

    def check_room(self, folder: Path) -> None:
        if (free := free_bytes(folder)) < self.settings.reserve:
            raise NoSpace(
                f"{folder}: {free // MIB} MiB free, a machine needs {self.settings.reserve // MIB} MiB to start"
            )

    def discard(self, path: Path) -> None:
        with suppress(FileNotFoundError):
            os.unlink(path)
