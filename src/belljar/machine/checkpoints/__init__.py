"""A folder of checkpoints: machines that were frozen, each as a numbered folder. The last two are kept.

    DIR/lock            held by the machine that is written there, or that goes on from there
    DIR/N/manifest.json all that a machine needs to go on, and size and checksum of the other files; written last
    DIR/N/memory        memory and device state, as QEMU writes them; packed by zstd where it was there
    DIR/N/disk.qcow2    what its disk has above its image's
    DIR/N/NAME.qcow2    each further disk
    DIR/N.draft         one in the making; a reaper removes what was left, and whoever takes the lock

A checkpoint is whole or it is not there: its draft is on disk before it gets its name.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path

from belljar.errors import CheckpointUnfit, MachineBusy, UnsafeFolder, in_words
from belljar.guest import Identity, Standstill
from belljar.host.files import check_ours, private_folder, read_capped, remove_tree, sync, write_whole
from belljar.host.locks import Lock, try_lock
from belljar.hypervisor import DomainSpec
from belljar.machine.life.identity import FRESH
from belljar.model import MIB, Context, Request, dumps
from belljar.reading import from_json, strict_json
from belljar.records import dataclass, replace

FORMAT = 2
KEPT = 2
LARGEST_MANIFEST = 32 * MIB  # a script is in it
LARGEST_SEED = 1024 * MIB
SLOWEST = 5 * MIB  # bytes in a second of packed memory that is loaded
MANIFEST, MEMORY, DISK, LOCK, DRAFT = "manifest.json", "memory", "disk.qcow2", "lock", ".draft"


@dataclass(frozen=True)
class Part:
    """A file of a checkpoint."""

    size: int
    crc: int


@dataclass(frozen=True)
class Manifest:
    """All of a checkpoint but its large files."""

    format: int
    belljar: str
    written: float  # seconds since the epoch
    traits: dict[str, str]  # what the next host must have in common with the last
    context: Context
    spec: DomainSpec  # what the machine had become, without its card; paths are those of its host
    request: Request
    identity: Identity  # without its entropy
    standstill: Standstill
    restarts: int
    ran: float  # seconds its work had been running
    packed_by: str  # the program that unpacks the memory
    files: dict[str, Part]


class Checkpoint:
    """One that is there, its manifest read."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder, self.manifest = folder, manifest

    @property
    def identity(self) -> Identity:
        """Who its guest was, and is; but for its random numbers."""
        return replace(self.manifest.identity, entropy=os.urandom(FRESH))

    @property
    def load_time(self) -> float:
        """Seconds that its memory may take."""
        return self.manifest.files[MEMORY].size / SLOWEST

    def memory(self) -> AbstractContextManager[int]:
        """A pipe from which a QEMU reads it, while the block lasts."""
        from belljar.machine.checkpoints import content

        return content.memory(self.folder / MEMORY, self.manifest.packed_by)


class Damaged(Exception):
    """It is not what was written."""


class Checkpoints:
    """A folder of one machine, from `take` to `release`."""

    def __init__(self, path: Path, lock: Lock) -> None:
        self.path, self._lock = path, lock
        self.origin: Checkpoint | None = None  # where its machine goes on from
        self.complaints: list[str] = []  # about those that are newer

    def release(self) -> None:
        self._lock.release()

    def draft(self, intend: Callable[[str, Path], object]) -> Path:
        """An empty folder for the next one."""
        draft = self.path / f"{max(numbers(self.path), default=0) + 1}{DRAFT}"
        intend("checkpoint", draft)
        draft.mkdir(0o700)
        return draft

    def publish(self, draft: Path) -> int:
        """Give it its name, and remove what is older than the last two."""
        sync(draft)
        number = int(draft.name.removesuffix(DRAFT))
        os.rename(draft, self.path / str(number))
        sync(self.path)
        for old in numbers(self.path)[KEPT:]:
            with suppress(OSError):
                remove_tree(self.path / str(old))
        return number


def take(path: Path) -> Checkpoints:
    """Have the folder, made where it is missing, for one machine. Raises MachineBusy, UnsafeFolder, HostError."""
    private_folder(path)
    if (lock := try_lock(path / LOCK)) is None:
        hint = "Let that machine end first, or name another folder."
        raise MachineBusy(f"{path}: a machine is written to this folder or goes on from it now", hint=hint)
    try:
        for leftover in path.glob(f"*{DRAFT}"):
            remove_tree(leftover)
    except BaseException:  # re-raised: nobody else has the lock to release
        lock.release()
        raise
    return Checkpoints(path, lock)


def numbers(path: Path) -> list[int]:
    """Of the checkpoints, the newest first."""
    return sorted((int(name) for name in os.listdir(path) if name.isdecimal()), reverse=True)


def newest(path: Path, look: Callable[[Path], Checkpoint]) -> tuple[Checkpoint | None, list[str]]:
    """The newest that *look* (`read` or `peek`) does not find damaged, and what is wrong with those that are newer. Raises UnsafeFolder,
    CheckpointUnfit."""
    complaints: list[str] = []
    for number in numbers(path):
        try:
            return look(path / str(number)), complaints
        except Damaged as exc:
            complaints.append(f"checkpoint {number} in {path} is damaged: {exc}")
    return None, complaints


def write_manifest(draft: Path, manifest: Manifest) -> None:
    write_whole(draft / MANIFEST, dumps(manifest), durable=True)


def read(folder: Path) -> Checkpoint:
    """All of it, each byte looked at. Raises Damaged, UnsafeFolder, CheckpointUnfit."""
    checkpoint = peek(folder)
    for name, then in checkpoint.manifest.files.items():
        try:
            status = os.lstat(folder / name)
            if status.st_uid not in (os.geteuid(), 0) or status.st_mode & 0o022:
                raise UnsafeFolder(f"{folder / name}: others may have changed it")
            if status.st_size != then.size or part(folder / name) != then:
                raise Damaged(f"{name} is not what was written")
        except OSError as exc:
            raise Damaged(in_words(exc)) from exc
    return checkpoint


def peek(folder: Path) -> Checkpoint:
    """What it says of itself. Raises Damaged, UnsafeFolder, CheckpointUnfit."""
    try:
        check_ours(folder)
        check_ours(folder / MANIFEST)
        value = strict_json(read_capped(folder / MANIFEST, LARGEST_MANIFEST))
        if isinstance(value, dict) and isinstance(made := value.get("format"), int) and made != FORMAT:
            raise CheckpointUnfit(
                f"{folder}: written in form {made} by belljar {value.get('belljar')}, this one reads form {FORMAT}",
                hint="Go on with that version of belljar.",
            )
        return Checkpoint(folder, from_json(Manifest, value))
    except (OSError, ValueError) as exc:
        raise Damaged(f"{MANIFEST}: {in_words(exc) if isinstance(exc, OSError) else exc}") from exc


def part(path: Path) -> Part:
    """Of a file that is written."""
    crc = 0
    with open(path, "rb", buffering=0) as file:
        while chunk := file.read(MIB):
            crc = zlib.crc32(chunk, crc)
        return Part(file.tell(), crc)
