"""A folder of checkpoints: machines that were frozen, each as a numbered folder. The last two are kept.

    DIR/lock            held by the machine that is written there, or that goes on from there
    DIR/N/manifest.json all that a machine needs to go on, and the checksums of the other files; written last
    DIR/N/memory        memory and device state, as QEMU writes them; packed by zstd where it was there
    DIR/N/disk.qcow2    what its disk has above its image's
    DIR/N/NAME.qcow2    each further disk
    DIR/stdout, stderr  copies of a batch job's output files (jobs/batch/output.py)
    DIR/N.draft         one in the making; a reaper removes what was left, and whoever takes the lock

A checkpoint is whole or it is not there: its draft is on disk before it gets its name.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from belljar.errors import CheckpointUnfit, MachineBusy, in_words
from belljar.guest import Identity, Standstill
from belljar.host.files import PRIVATE_FILE, check_ours, private_folder, read_capped, remove_tree, sync, write_whole
from belljar.host.locks import Lock, try_lock
from belljar.hypervisor import DomainSpec, Hypervisor
from belljar.machine.life.identity import FRESH
from belljar.machine.life.life import Point
from belljar.model import MIB, Context, Request, RunPayload, dumps
from belljar.reading import from_json, strict_json
from belljar.records import dataclass, replace

FORMAT = 3
KEPT = 2
LARGEST_MANIFEST = 32 * MIB  # a script is in it
SLOWEST = 5 * MIB  # bytes in a second of packed memory that is loaded
MANIFEST, MEMORY, DISK, LOCK, DRAFT = "manifest.json", "memory", "disk.qcow2", "lock", ".draft"


@dataclass(frozen=True)
class Checkpoint:
    """One that is there: what its manifest says."""

    folder: Path
    format: int
    belljar: str
    traits: dict[str, str]  # what the next host must have in common with the last
    context: Context
    spec: DomainSpec  # what the machine had become, without its card; paths are those of its host
    request: Request  # its timeout is what was left of it
    identity: Identity  # its entropy is fresh each time it is read
    standstill: Standstill
    restarts: int
    packed_by: str  # the program that unpacks the memory
    files: dict[str, int]  # the other files, and their checksums

    @property
    def load_time(self) -> float:
        """Seconds that its memory may take."""
        return os.stat(self.folder / MEMORY).st_size / SLOWEST

    def asked(self, request: Request) -> Request:
        """What the machine is, by its checkpoint; whose it is, and how long it may go on, by who asks."""
        machine, work = replace(self.request.machine, image=self.spec.image_digest), self.request.work
        if isinstance(work, RunPayload) and isinstance(request.work, RunPayload):  # what comes out may go elsewhere now
            pairs = zip(work.payload.outputs, request.work.payload.outputs, strict=False)
            outputs = tuple(replace(then, outside=now.outside, skip=now.skip) for then, now in pairs)
            work = replace(work, payload=replace(work.payload, outputs=outputs))
        return replace(request, machine=machine, work=work)

    def check(self, spec: DomainSpec, hypervisor: Hypervisor) -> None:
        """Raise CheckpointUnfit where a machine of this host cannot load its state."""
        for name, trait in hypervisor.cloning.traits(spec).items():
            if (before := self.traits.get(name, "")) != trait:
                was, is_here = (f" {text}" if len(text) < 80 else "" for text in (before, trait))
                raise CheckpointUnfit(f"{self.folder}: written with another {name}{was} than this host has{is_here}")


def take(path: Path) -> Lock:
    """Have the folder, made where it is missing, for one machine. Raises MachineBusy, UnsafeFolder, HostError."""
    private_folder(path)
    if (lock := try_lock(path / LOCK)) is None:
        hint = "Let that machine end first, or name another folder."
        raise MachineBusy(f"{path}: a machine is written to this folder or goes on from it now", hint=hint)
    for leftover in path.glob(f"*{DRAFT}"):
        remove_tree(leftover)
    return lock


def draft_in(path: Path, intend: Callable[[str, Path], object]) -> Path:
    """An empty folder for the next one."""
    draft = path / f"{max(numbers(path), default=0) + 1}{DRAFT}"
    intend("checkpoint", draft)
    draft.mkdir(0o700)
    return draft


def publish(checkpoint: Checkpoint, point: Point) -> int:
    """Give this draft its manifest and its name, and remove what is older than the last two."""
    draft, path = checkpoint.folder, checkpoint.folder.parent
    write_whole(draft / MANIFEST, dumps(checkpoint), durable=True)
    point("freeze-manifest")
    number = int(draft.name.removesuffix(DRAFT))
    os.rename(draft, path / str(number))
    sync(path)
    for old in numbers(path)[KEPT:]:
        with suppress(OSError):
            remove_tree(path / str(old))
    return number


def numbers(path: Path) -> list[int]:
    """Of the checkpoints, the newest first."""
    return sorted((int(entry.name) for entry in path.glob("*") if entry.name.isdecimal()), reverse=True)


def newest(path: Path, *, read_all: bool = False) -> tuple[Checkpoint | None, list[str]]:
    """The newest that is not damaged, as far as its manifest tells, or each byte of it; and what is wrong with those that are newer.
    Raises UnsafeFolder, CheckpointUnfit."""
    complaints: list[str] = []
    for number in numbers(path):
        try:
            checkpoint = peek(path / str(number))
            for name, then in checkpoint.files.items() if read_all else ():
                if checksum(checkpoint.folder / name) != then:
                    raise ValueError(f"{name} is not what was written")
            return checkpoint, complaints
        except (OSError, ValueError) as exc:
            why = in_words(exc) if isinstance(exc, OSError) else exc
            complaints.append(f"checkpoint {number} in {path} is damaged: {why}")
    return None, complaints


def peek(folder: Path) -> Checkpoint:
    """What it says of itself. Raises OSError and ValueError where it is damaged, UnsafeFolder, CheckpointUnfit."""
    check_ours(folder)
    data = read_capped(folder / MANIFEST, LARGEST_MANIFEST)
    try:
        value = strict_json(data)
        if (made := value["format"]) != FORMAT:
            problem = f"written in form {made} by belljar {value['belljar']}, this one reads form {FORMAT}"
            raise CheckpointUnfit(f"{folder}: {problem}", hint="Go on with that version of belljar.")
        checkpoint = from_json(Checkpoint, value)
        identity = replace(checkpoint.identity, entropy=os.urandom(FRESH))
        return replace(checkpoint, folder=folder, identity=identity)
    except (ValueError, KeyError, TypeError) as exc:
        raise ValueError(f"{MANIFEST}: {exc}") from exc


def seal(draft: Path) -> dict[str, int]:
    """Its files are on disk, their owner's alone, when this returns; their checksums."""
    files = {}
    for path in draft.iterdir():
        os.chmod(path, PRIVATE_FILE)
        sync(path)
        files[path.name] = checksum(path)
    return files


def checksum(path: Path) -> int:
    crc = 0
    with open(path, "rb", buffering=0) as file:
        while chunk := file.read(MIB):
            crc = zlib.crc32(chunk, crc)
    return crc
