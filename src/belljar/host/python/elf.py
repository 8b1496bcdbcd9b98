"""What the head of a 64-bit ELF file says of its segments."""

from __future__ import annotations

import struct
from collections.abc import Iterator

MAGIC = b"\x7fELF"
LOAD, INTERP, NOTE = 1, 3, 4  # PT_LOAD, PT_INTERP, PT_NOTE
MOST_SEGMENTS = 64


def segments(program: bytes) -> Iterator[tuple[int, int, int, int, int]]:
    """(kind, offset, physical address, size in the file, size in memory) of each. Raises struct.error."""
    if program[:5] == MAGIC + b"\2":
        (table,) = struct.unpack_from("<Q", program, 32)
        size, count = struct.unpack_from("<HH", program, 54)
        for index in range(min(count, MOST_SEGMENTS)):
            kind, _, offset, _, place, length, in_memory = struct.unpack_from("<IIQQQQQ", program, table + index * size)
            yield kind, offset, place, length, in_memory


def loader_of(program: bytes) -> str:
    """The loader that a program asks for; empty where it asks for none."""
    loaders = (program[at : at + size] for kind, at, _, size, _ in segments(program) if kind == INTERP)
    return next(loaders, b"").rstrip(b"\0").decode()
