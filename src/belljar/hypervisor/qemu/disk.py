"""The files a qcow2 disk is made of, from the overlay down to its base. Only headers are read, only qcow2 is taken.

QEMU gets each layer as an open descriptor, so it needs no right to walk our folders and can open nothing else.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

from belljar.errors import ImageCorrupt

MAGIC = b"QFI\xfb"
DEEPEST = 8
LONGEST_NAME = 1023  # docs/interop/qcow2.txt: backing_file_size


def layers(top: Path) -> list[Path]:
    """The disk's files, the overlay first. Raises ImageCorrupt when one is missing or is no qcow2 file."""
    found: list[Path] = []
    path: Path | None = top
    while path is not None:
        if len(found) == DEEPEST:
            raise ImageCorrupt(f"{top}: more than {DEEPEST} files deep")
        found.append(path)
        path = backing(path)
    return found


def backing(path: Path) -> Path | None:
    """The file below this one, None at the base."""
    try:
        with open(path, "rb", buffering=0) as file:
            head = file.read(20)
            if len(head) < 20 or head[:4] != MAGIC:
                raise ImageCorrupt(f"{path}: not a qcow2 file")
            offset, length = struct.unpack(">QI", head[8:20])
            if not offset:
                return None
            if not 0 < length <= LONGEST_NAME:
                raise ImageCorrupt(f"{path}: the name of its backing file is {length} bytes long")
            file.seek(offset)
            name = os.fsdecode(file.read(length))
    except FileNotFoundError as exc:
        raise ImageCorrupt(f"{path}: missing") from exc
    except OSError as exc:
        raise ImageCorrupt(f"{path}: cannot be read: {exc.strerror}") from exc
    return path.parent / name
