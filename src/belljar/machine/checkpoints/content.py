"""The large files of a checkpoint, written and read: memory, which comes and goes by a pipe, and disks. Nothing here is quick.

A QEMU that its guest took over may have written anything into its disk's header: no file that is named there is opened.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from belljar.errors import CheckpointFailed
from belljar.hints import Any
from belljar.host.commands import bare_environment, path_of, run_beside, which
from belljar.host.files import PRIVATE_FILE, private
from belljar.host.threads import in_thread
from belljar.hypervisor import Domain, DomainSpec, Templates
from belljar.image import check_layer
from belljar.machine.checkpoints import DISK, MEMORY, Checkpoint
from belljar.machine.extras import Equipment
from belljar.machine.extras.disks import EXCHANGE, Exchange
from belljar.machine.life.life import Lifecycle
from belljar.model import MIB, SEED
from belljar.records import replace

# How each program packs, and unpacks. docs/develop/decisions/0031-checkpoints.md has the figures. Without zstd the bytes are written as
# they are.
PACKERS = {"zstd": (("-1", "-T0", "-q", "-c"), ("-d", "-q", "-c")), "cat": ((), ())}
LONGEST = 4 * 3600.0  # seconds that a disk may take
REBASE = ("qemu-img", "rebase", "-q", "-F", "qcow2", "-b")


@contextmanager
def _filter(program: str, options: Sequence[str], **ends: Any) -> Iterator[subprocess.Popen[bytes]]:
    """The program between these ends. It ends with the block. Raises CommandMissing."""
    path = path_of(program, f"Install it: the memory of this checkpoint is packed by {program}.")
    with subprocess.Popen([path, *options], stderr=subprocess.PIPE, env=bare_environment(), **ends) as child:
        try:
            with suppress(OSError):  # a user may have so many large ones
                fcntl.fcntl(child.stdin or child.stdout, fcntl.F_SETPIPE_SZ, MIB)  # type: ignore[arg-type]
            yield child
        finally:
            child.kill()


async def write_memory(templates: Templates, domain: Domain, target: Path) -> str:
    """All of a guest that stands still. Returns the program by which it is packed. Raises HypervisorError, CheckpointFailed."""
    program = next(name for name in PACKERS if which(name))
    with (
        open(target, "xb", opener=private) as file,  # noqa: ASYNC230
        _filter(program, PACKERS[program][0], stdin=subprocess.PIPE, stdout=file) as child,
    ):
        assert child.stdin is not None
        writing = templates.write_memory(domain, child.stdin.fileno(), timeout=LONGEST)
        (trouble,) = await asyncio.gather(writing, return_exceptions=True)
        _, complaint = await in_thread(child.communicate)
        if child.returncode:  # then it says why; QEMU only knows that the pipe is broken
            text = complaint.decode(errors="replace").strip()
            raise CheckpointFailed(f"the guest's memory was not written: {text}")
        if trouble is not None:
            raise trouble
    return program


@contextmanager
def reading(checkpoint: Checkpoint) -> Iterator[int]:
    """A pipe from which a QEMU reads the memory, while the block lasts."""
    program = checkpoint.packed_by
    with (
        open(checkpoint.folder / MEMORY, "rb") as file,
        _filter(program, PACKERS[program][1], stdin=file, stdout=subprocess.PIPE) as child,
    ):
        assert child.stdout is not None
        yield child.stdout.fileno()


async def write_disk(disk: Path, layers: Sequence[Path], base: Path, target: Path) -> None:
    """What a machine's disk has above its image's, *base*, in one file, with what the *layers* between them have. Its guest stands
    still. Raises ImageCorrupt."""
    copies = [target, *(target.with_suffix(f".layer{number}") for number in range(len(layers)))]
    for source, copied, below in zip((disk, *layers), copies, (*copies[1:], base), strict=True):
        await read_disk(source, below, copied)
    if layers:
        await run_beside([*REBASE, str(base), str(target)], timeout=LONGEST)
    for layer in copies[1:]:
        layer.unlink()


async def read_disk(source: Path, base: Path, disk: Path) -> None:
    """A disk's copy, on *base*. Raises ImageCorrupt."""
    await copy(source, disk)
    check_layer(disk)
    await run_beside([*REBASE, str(base), "-u", str(disk)], timeout=LONGEST)


async def copy(source: Path, target: Path) -> None:
    await run_beside(["cp", "--reflink=auto", "--sparse=always", "--", str(source), str(target)], timeout=LONGEST)
    os.chmod(target, PRIVATE_FILE)  # a template's is only read


async def convert(source: Path, form: str, target: Path, new: str) -> None:
    """A further disk, which stands on nothing, in another format: a raw one has its size anywhere."""
    argv = ["qemu-img", "convert", "-q", "-U", "-f", form, "-O", new, str(source), str(target)]
    await run_beside(argv, timeout=LONGEST)
    os.chmod(target, PRIVATE_FILE)


def opened(pid: int, path: Path) -> Path:
    """A name of a file that this process has open, which may have been removed since: a template is, while its clones live."""
    names = (str(path.resolve()), f"{path.resolve()} (deleted)")
    with suppress(OSError):
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            if os.readlink(fd) in names:
                return fd
    return path


# -- for the machine that goes on ------------------------------------------------------------------------------------------


async def place(checkpoint: Checkpoint, spec: DomainSpec, base: Path) -> None:
    """Its disk and its disc, for this machine alone."""
    await read_disk(checkpoint.folder / DISK, base, spec.disk)
    if spec.owner[0] != os.geteuid():
        os.chown(spec.disk, *spec.owner)
    if spec.seed is not None:
        await copy(checkpoint.folder / SEED, spec.seed)


class RestoredDisks(Exchange):
    """What it had beside its own disk."""

    async def prepare(self, life: Lifecycle, there: Equipment) -> Equipment:
        """Raises NoSpace, CommandFailed."""
        assert life.checkpoint is not None
        for disk in life.checkpoint.spec.disks:
            if disk.name == EXCHANGE:
                there = await super().prepare(life, there)
                continue
            path = life.attach(disk.name.rstrip("0123456789"), disk.name)
            await convert(life.checkpoint.folder / f"{disk.name}.qcow2", "qcow2", path, "raw")
            there = there.with_disk(replace(disk, path=path))
        life.point("after-attachments")
        return there
