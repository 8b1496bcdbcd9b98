"""A machine's own disk: a qcow2 overlay that holds what differs from the image. The image is never written."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from belljar.errors import ImpossibleSize, NoSpace
from belljar.host.files import free_bytes, no_space_as_error
from belljar.image import Image, Settings
from belljar.image.store.qcow2 import write_overlay
from belljar.model import GIB, MIB

SECTOR = 512
LARGEST_DISK = 4096 * GIB


class DiskOverlays:
    """Writable disks on top of images."""

    def __init__(self, settings: Settings = Settings()) -> None:  # noqa: B008 - a frozen value
        self.settings = settings

    def size(self, image: Image, wanted: int | None) -> int:
        """The size a machine's disk gets, in bytes. Raises ImpossibleSize."""
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
        """Make a qcow2 overlay (0600) at *path* of *size* bytes or the image's; returns its virtual size.
        Raises ImpossibleSize when smaller than the image, NoSpace when the host has no room for it."""
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
        """Raise NoSpace where less than `image.reserve` is free."""
        if (free := free_bytes(folder)) < self.settings.reserve:
            raise NoSpace(
                f"{folder}: {free // MIB} MiB free, a machine needs {self.settings.reserve // MIB} MiB to start"
            )

    def discard(self, path: Path) -> None:
        """Remove it. Missing is success."""
        with suppress(FileNotFoundError):
            os.unlink(path)
