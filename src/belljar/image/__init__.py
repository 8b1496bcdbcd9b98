"""The door of the image room: turns an image reference into a disk.

Images are never written. Each is known by a digest of its files and of what is said of it; names are links to digests. A store is a
folder; a user's private store stands before the site's read-only one. A machine gets a qcow2 overlay of its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

from belljar.errors import BadSetting
from belljar.hints import Any
from belljar.host.quick_imports import sha256
from belljar.model import GIB, MIB, Container, Firmware, NetworkMode, Payload, setting
from belljar.records import dataclass, field

USUAL = "debian12"  # the image that is built on its first use


@dataclass(frozen=True)
class Settings:
    """`[image]` in the settings files."""

    default: str = setting(USUAL, "image of a job that names none; debian12 is built on first use")
    max_size: int = setting(64 * GIB, "largest download and largest unpacked image", unit="bytes")
    stall_timeout: float = setting(
        60.0, "a download that brings less than 1 KiB a second over this time is broken off", unit="seconds"
    )
    lock_timeout: float = setting(3600.0, "longest wait for another fetch or build of the same image", unit="seconds")
    reserve: int = setting(256 * MIB, "free space the scratch disk must have for a machine to start", unit="bytes")
    mirror: str = setting("", "Debian mirror for image builds; empty: deb.debian.org")
    sources: tuple[str, ...] = setting(
        (),
        "repositories for images that are not here, in this order: ADDRESS#sha256=DIGEST, as `belljar image publish --init` prints them",
    )
    trust: tuple[str, ...] = setting(
        (),
        "whose signature images of a registry must have, `REGISTRY cosign --OPTION...` each: options of `cosign verify`;"
        " REGISTRY is HOST[:PORT][/PATH] or *, the first that fits",
    )
    sync_interval: float = setting(
        300.0, "least time between two questions to the source of an image named by address or path", unit="seconds"
    )
    cache_limit: int = setting(
        0,
        "while all images take more, those from sources go, least recently used first; 0: no limit",
        unit="bytes",
    )


@dataclass(frozen=True)
class Recipe:
    """What a warm image is made by: a guest of its base, of this size, runs the payload; its memory is then a template."""

    base: str  # digest of the image whose disk it has
    base_name: str
    payload: Payload  # `outside` of its inputs: their names in the archive `INPUTS`
    cpus: int
    memory: int  # bytes
    timeout: float  # seconds it may take
    by: str  # the user who stored it
    network: NetworkMode = NetworkMode.NONE  # none, or user
    allow: tuple[str, ...] = ()  # what it may reach by that, where not all


@dataclass(frozen=True)
class Image:
    digest: str  # hexadecimal, see `manifest.image_digest`
    names: tuple[str, ...]
    disk: Path  # qcow2, read-only
    virtual_size: int  # bytes
    kernel: Path | None
    initrd: Path | None  # the image's own part: modules and /init; `boot_files` adds the agent
    append: str
    source: str  # "build debian bookworm", "file:///...", "https://..."
    created: float
    os: str = ""  # PRETTY_NAME, where known
    store: Path = Path()  # the folder it lies in
    facts: dict[str, Any] = field(default_factory=dict)  # what the import saw, by docs/reference/files.md
    wrong: tuple[str, ...] = ()  # what `verify` found; the image is not started until it is replaced

    @property
    def called(self) -> str:
        """Its first name; the digest's first digits where it has none."""
        return self.names[0] if self.names else self.digest[:12]

    @property
    def container(self) -> Container | None:
        """What a container image says of its processes; None of other images."""
        if not self.facts.get("container"):
            return None  # most images, and no job of theirs pays for what reads one
        from belljar.reading import from_json

        return from_json(Container, self.facts["container"])

    @property
    def recipe(self) -> Recipe | None:
        """Of a warm image; None of others, whose guests are booted and nothing else. Raises ImageCorrupt."""
        if "warm" not in self.facts:
            return None
        from belljar.image.warm import recipe_of

        return recipe_of(self)

    @property
    def is_disc(self) -> bool:
        """Is it a CD-ROM that the firmware boots, instead of a hard disk?"""
        return self.facts.get("boots_by") == "disc"


@dataclass(frozen=True)
class BootFiles:
    """Kernel, initial ramdisk and command line for one context. kernel None: *firmware* boots from the disk."""

    kernel: Path | None
    initrd: Path | None
    append: str
    digest: str
    firmware: Firmware = Firmware.BIOS
    init: str = ""  # the image's own init that will run; empty: belljar's (or, by firmware, whatever the disk has)


# Where an image that runs its own init has the agent with its interpreter, by hand or by injection.
AGENT_PATH = "/usr/lib/belljar"
UNIT = Path(__file__).parent / "boot/inside/belljar-agent.service"
UNIT_PATH = "/etc/systemd/system/belljar-agent.service"

# How sources of container images begin.
CONTAINERS = ("docker://", "docker-archive:", "oci:", "oci-archive:", "sif:", "dir:")

HOLD_TIMEOUT = 10.0  # seconds; an exclusive lock on an image is held for a short check or a removal only
Users = Callable[[str], list[str]]  # digest -> what still needs the image, in words ("template 3f2a...")
# Looks into a qcow2 disk of so many bytes, and writes what it saw to a file: see `intake.survey`.
Surveyor = Callable[[Path, int, Path], object]


def mistakes(settings: Settings) -> Iterator[tuple[str, BadSetting]]:
    """(key, what is wrong) of each value that could not be used, though its type is right."""
    from belljar.image.container.trust import rules as trust_rules
    from belljar.image.site import source_of
    from belljar.image.store.store import NAME

    if not (is_source(settings.default) or NAME.fullmatch(settings.default.removeprefix("sha256:"))):
        hint = "`belljar image list` shows the names; a digest, an http(s) address or an absolute path will do, too."
        yield "default", BadSetting(f"{settings.default!r}: an image cannot have this name", hint=hint)
    try:
        trust_rules(settings)
    except BadSetting as exc:
        yield "trust", exc
    for line in settings.sources:  # none is asked
        try:
            source_of(line)
        except BadSetting as exc:
            yield "sources", exc


def check_layer(disk: Path) -> None:
    """Raise ImageCorrupt where this is no qcow2 file, or QEMU would open others than it and those below it."""
    from belljar.image.store import qcow2

    qcow2.check_alone(disk, qcow2.LARGEST_DISK, is_layer=True)


def unpacked(image: Image) -> AbstractContextManager[Path]:
    """A folder with the input files of a warm image's recipe, for a while. Raises CommandFailed, NoSpace."""
    from belljar.image import warm

    return warm.unpacked(image)


def small_file(url: str, largest: int, *, patience: float, public_only: bool = False) -> bytes:
    """What is at an http(s) address now, of at most *largest* bytes, within *patience* seconds. *public_only*: not from this host or
    a private network. Raises DownloadFailed, ImageTooLarge, CommandMissing."""
    from belljar.image.intake import fetch

    return fetch.small_file(url, largest, patience=patience, public_only=public_only)


def is_source(reference: str) -> bool:
    """Does it say where an image comes from, an address or a path from the root? Else it is a name or a digest."""
    return reference.startswith(("/", "http://", "https://", *CONTAINERS))


def is_container(source: str) -> bool:
    """Does a container image come from there?"""
    return source.startswith(CONTAINERS)


def name_of(source: str) -> str:
    """The name that the image of an address or a path has in the store, without which it could not be listed or removed."""
    words = re.sub(r"[^A-Za-z0-9._-]+", "-", source.rpartition("/")[2])[:40]
    return f"from-{words}-{sha256(source.encode()).hexdigest()[:12]}"


def layer_name(image: Image) -> str:
    """The name of the layer that puts the present agent into this image's disk, in the store's folder `layers`."""
    from belljar.agent import bundle

    # With the time it was stored: what was made of a damaged copy is not used for the repaired one.
    words = [AGENT_PATH, bundle.key().hex(), UNIT_PATH, agent_unit(), repr(image.created)]
    return f"{image.digest[:32]}-{sha256(chr(10).join(words).encode()).hexdigest()[:16]}"


def agent_unit() -> str:
    return UNIT.read_text(encoding="utf-8")
