"""The door of the image room: turns an image reference into a disk.

Images are never written. Each is known by the sha256 of its disk file; names are links to digests. A store is a
folder; a user's private store stands before the site's read-only one. A machine gets a qcow2 overlay of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from belljar.model import GIB, MIB, MachineId


@dataclass(frozen=True)
class Settings:
    """`[image]` in the settings files."""

    default: str = field(
        default="debian12", metadata={"help": "image of a job that names none; debian12 is built on first use"}
    )
    max_size: int = field(
        default=64 * GIB, metadata={"help": "largest download and largest unpacked image", "unit": "bytes"}
    )
    stall_timeout: float = field(
        default=60.0, metadata={"help": "a download without a byte for this long is broken off", "unit": "seconds"}
    )
    lock_timeout: float = field(
        default=3600.0,
        metadata={"help": "longest wait for another process that fetches or builds the same image", "unit": "seconds"},
    )
    reserve: int = field(
        default=256 * MIB,
        metadata={"help": "free space the scratch disk must have for a machine to start", "unit": "bytes"},
    )
    mirror: str = field(
        default="",
        metadata={
            "help": "Debian mirror for image builds; empty: as apt on this host is configured, else the suite's default"
        },
    )


@dataclass(frozen=True)
class Image:
    """An image in a store."""

    digest: str  # sha256 of the disk file, hexadecimal
    names: tuple[str, ...]
    disk: Path  # qcow2, read-only
    virtual_size: int  # bytes
    kernel: Path | None
    initrd: Path | None  # the image's own part: modules and /init; `boot_files` adds the agent
    append: str
    boot_digest: str  # sha256 over kernel, initrd and append
    source: str  # "build debian bookworm", "file:///...", "https://..."
    created: float
    os: str = ""  # PRETTY_NAME, where known
    store: Path = Path()  # the folder it lies in
    facts: dict[str, Any] = field(default_factory=dict)  # packages, kernel version, min_memory...


@dataclass(frozen=True)
class BootFiles:
    """Kernel, initial ramdisk with the agent in it, and command line. kernel None: firmware boots from the disk."""

    kernel: Path | None
    initrd: Path | None
    append: str
    digest: str


Users = Callable[[str], list[str]]  # digest -> who still needs the image, in words ("template 3f2a...")


def nobody(digest: str) -> list[str]:
    return []


class ImageStore(Protocol):
    """Images by name or digest."""

    def resolve(self, reference: str) -> Image:
        """The image of this name, digest or unique digest prefix (8 digits or more), checked cheaply against what was
        stored (size, mtime, inode, qcow2 header). Raises ImageUnknown, ImageCorrupt."""

    def ensure_default(self) -> Image:
        """The default image, built now (single flight, progress on stderr) when it is missing and is `debian12`."""

    def boot_files(self, image: Image) -> BootFiles:
        """What to boot it with: the image's initrd with the present agent appended, cached by digest."""

    def hold(self, image: Image, id: MachineId) -> AbstractContextManager[None]:
        """Keep the image from being removed while inside. The hold is gone when the holder dies."""

    def images(self) -> list[Image]: ...
    def verify(self, image: Image) -> list[str]: ...
    def remove(self, image: Image, *, force: bool = False) -> None: ...
    def tag(self, image: Image, name: str) -> Image: ...
    def gc(self, *, dry_run: bool = False) -> Iterator[Path]: ...


class Overlays(Protocol):
    """Writable disks on top of images."""

    def size(self, image: Image, wanted: int | None) -> int:
        """The size a machine's disk gets, in bytes. Raises ImpossibleSize."""

    def create(self, path: Path, image: Image, size: int | None) -> int:
        """Make a qcow2 overlay (0600) at *path* of *size* bytes or the image's; returns its virtual size.
        Raises ImpossibleSize when smaller than the image, NoSpace when the host has no room for it."""

    def discard(self, path: Path) -> None: ...


def load(private: Path, site: Path | None, settings: Settings, users: Users = nobody) -> ImageStore:
    """The store in the folder *private*, before the one in *site*. *users* says who still needs an image."""
    from belljar.image.store import Store

    return Store(private, site, settings, users)


def load_overlays(settings: Settings) -> Overlays:
    from belljar.image.overlay import DiskOverlays

    return DiskOverlays(settings)


def agent_source() -> str:
    """The guest agent, for images belljar cannot put it into at each start."""
    from belljar.image.initramfs import AGENT

    return AGENT.read_text(encoding="utf-8")
