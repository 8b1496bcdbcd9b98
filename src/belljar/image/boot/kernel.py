"""A Linux kernel file: what is in it, and the plain ELF inside a bzImage.

QEMU starts an ELF with a PVH note directly. That saves the guest from unpacking itself, which under emulation takes
longer than the rest of the kernel's start. Form: Documentation/arch/x86/boot.rst of Linux.
"""

from __future__ import annotations

import re
import struct

from belljar.errors import CommandMissing, ImageCorrupt
from belljar.host.python.elf import LOAD, MAGIC, NOTE, segments
from belljar.image.intake import sandbox

BOOT_FLAG, HEADER_MAGIC = (0x1FE, b"\x55\xaa"), (0x202, b"HdrS")
LARGEST_KERNEL = 256 << 20
LARGEST_NOTES = 64 << 10
# A note of "Xen": sizes of name and value, PHYS32_ENTRY.
PVH_ENTRY = re.compile(rb"\x04\0\0\0....\x12\0\0\0Xen\0", re.DOTALL)
PLAIN_ARCHIVE = b"070701"  # a ramdisk that is not packed
UNPACKED = 3  # times the size it has packed: xz makes of modules and programs about a third
OWN_NEEDS = 4 << 20  # of a kernel that has started, beside itself and its ramdisk: page tables, first processes
MEMORY_STEP = 8 << 20
LARGEST_END = 1 << 30  # a file that says more is no kernel of today


def is_bzimage(data: bytes) -> bool:
    """Is it a kernel in the form distributions ship for x86?"""
    return all(data.startswith(magic, at) for at, magic in (BOOT_FLAG, HEADER_MAGIC))


def release(data: bytes) -> str:
    """The version a bzImage says it is, as in /lib/modules/; empty when it does not say."""
    if not is_bzimage(data):
        return ""
    (pointer,) = struct.unpack_from("<H", data, 0x20E)
    text = data[pointer + 0x200 : pointer + 0x200 + 256].split(b"\0", 1)[0]
    return text.decode("ascii", "replace").split(" ", 1)[0] if pointer else ""


def directly_bootable(data: bytes) -> bytes | None:
    """The ELF inside this bzImage when QEMU can start it by its PVH entry; None when it must be booted as it is."""
    try:
        elf = unpack(data)
        return elf if has_pvh_entry(elf) else None
    except (ImageCorrupt, CommandMissing, struct.error):
        return None


def unpack(data: bytes) -> bytes:
    """The kernel proper of a bzImage. Raises ImageCorrupt."""
    if not is_bzimage(data):
        raise ImageCorrupt("not a bzImage")
    setup_sectors = data[0x1F1] or 4
    offset, length = struct.unpack_from("<II", data, 0x248)
    start = (setup_sectors + 1) * 512 + offset
    # The unpacked size follows, as four bytes: a part of gzip's form, and something strange to the others.
    end = start + length - (0 if data[start:].startswith(sandbox.GZIP) else 4)
    elf = sandbox.unpacked(data[start:end], LARGEST_KERNEL, "the kernel inside the bzImage")
    if not elf.startswith(MAGIC):
        raise ImageCorrupt("the kernel inside the bzImage is no ELF file, or packed in a way belljar does not know")
    return elf


def has_pvh_entry(elf: bytes) -> bool:
    """Does this 64-bit ELF carry the note with the 32-bit entry that QEMU looks for?"""
    notes = (elf[at : at + min(size, LARGEST_NOTES)] for kind, at, _, size, _ in segments(elf) if kind == NOTE)
    return any(map(PVH_ENTRY.search, notes))


def least_memory(data: bytes, initrd: bytes) -> int:
    """Bytes of memory below which a guest of this kernel and ramdisk does not come up; 0: not known.

    The kernel lies where it was linked to, and its ramdisk is there twice while it is unpacked. Debian 12's (74 MiB of kernel,
    8 of ramdisk) came up with 96 MiB and panicked with 88."""
    try:  # where the kernel ends
        if is_bzimage(data):
            end = int(sum(struct.unpack_from("<QI", data, 0x258)))
        else:
            end = max((place + size for kind, _, place, _, size in segments(data) if kind == LOAD), default=0)
    except struct.error:
        return 0
    if not 0 < end <= LARGEST_END:
        return 0
    times = 2 if initrd.startswith(PLAIN_ARCHIVE) else 1 + UNPACKED
    needed = end + times * len(initrd) + OWN_NEEDS
    return -(-needed // MEMORY_STEP) * MEMORY_STEP
