"""The large files of a checkpoint, written and read: memory, which comes and goes by a pipe, and disks. Nothing here is quick.

A QEMU that its guest took over may have written anything into its disk's header: no file that is named there is opened.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from belljar.errors import CheckpointFailed, CommandMissing, HypervisorError
from belljar.host.commands import SEARCH_PATH, run_beside, which
from belljar.host.files import PRIVATE_FILE, private, sync
from belljar.host.threads import in_thread, wholly_in_thread
from belljar.hypervisor import Domain, Templates
from belljar.image import check_layer
from belljar.machine.checkpoints import Part, part
from belljar.model import MIB

# docs/develop/decisions/0031-checkpoints.md has the figures. Without it the bytes are written as they are.
ZSTD, CAT = "zstd", "cat"
PACK = {ZSTD: ("-1", "-T0", "-q", "-c"), CAT: ()}
UNPACK = {ZSTD: ("-d", "-q", "-c"), CAT: ()}
LONGEST = 4 * 3600.0  # seconds that a disk may take
REBASE = ("qemu-img", "rebase", "-q", "-F", "qcow2", "-b")


def packer() -> str:
    """The program by which memory is packed here."""
    return ZSTD if which(ZSTD) else CAT


@contextmanager
def _filter(program: str, options: tuple[str, ...], source: int, target: int) -> Iterator[subprocess.Popen[bytes]]:
    """The program between two descriptors, which are closed here. It ends with the block."""
    try:
        if (path := which(program)) is None:
            hint = f"Install it: the memory of this checkpoint is packed by {program}."
            raise CommandMissing(f"{program}: no such program on this host", hint=hint)
        environment = {"PATH": SEARCH_PATH, "LC_ALL": "C"}
        child = subprocess.Popen([path, *options], stdin=source, stdout=target, stderr=subprocess.PIPE, env=environment)
    finally:
        os.close(source)
        os.close(target)
    with child:
        try:
            yield child
        finally:
            child.kill()


def _pipe() -> tuple[int, int]:
    reading, writing = os.pipe2(os.O_CLOEXEC)
    with suppress(OSError):  # a user may have so many large ones
        fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, MIB)
    return reading, writing


async def write_memory(templates: Templates, domain: Domain, target: Path, program: str) -> Part:
    """All of a guest that stands still. Raises HypervisorError, CheckpointFailed."""
    file, (source, memory) = private(str(target), os.O_WRONLY | os.O_CREAT | os.O_EXCL), _pipe()
    trouble: HypervisorError | None = None
    with _filter(program, PACK[program], source, file) as child:
        try:
            await templates.write_memory(domain, memory, timeout=LONGEST)
        except HypervisorError as error:  # where the program ended first, it says why
            trouble = error
        finally:
            os.close(memory)
        _, complaint = await in_thread(child.communicate)
        if child.returncode:
            raise CheckpointFailed(f"the guest's memory was not written: {complaint.decode(errors='replace').strip()}")
    if trouble is not None:
        raise trouble
    return await sealed(target)


@contextmanager
def memory(path: Path, program: str) -> Iterator[int]:
    """A pipe from which a QEMU reads it, while the block lasts."""
    reading, writing = _pipe()
    try:
        with _filter(program, UNPACK[program], os.open(path, os.O_RDONLY | os.O_CLOEXEC), writing):
            yield reading
    finally:
        os.close(reading)


async def write_disk(disk: Path, layers: Sequence[Path], base: Path, target: Path) -> Part:
    """What a machine's disk has above its image's, *base*, in one file, with what the *layers* between them have. Its guest stands
    still. Raises ImageCorrupt."""
    copies = [target, *(target.with_suffix(f".layer{number}") for number in range(len(layers)))]
    for source, copy, below in zip((disk, *layers), copies, (*copies[1:], base), strict=True):
        await _copy(source, copy)
        await run_beside([*REBASE, str(below), "-u", str(copy)], timeout=LONGEST)
    if layers:
        await run_beside([*REBASE, str(base), str(target)], timeout=LONGEST)
    for copy in copies[1:]:
        copy.unlink()
    return await sealed(target)


async def _copy(disk: Path, target: Path) -> None:
    await run_beside(["cp", "--reflink=auto", "--sparse=always", "--", str(disk), str(target)], timeout=LONGEST)
    os.chmod(target, PRIVATE_FILE)  # a template's is only read
    check_layer(target)


def opened(pid: int, path: Path) -> Path:
    """A name of a file that this process has open, which may have been removed since: a template is, while its clones live."""
    names = (str(path.resolve()), f"{path.resolve()} (deleted)")
    with suppress(OSError):
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            if os.readlink(fd) in names:
                return fd
    return path


async def write_further_disk(disk: Path, target: Path) -> Part:
    """The same of a raw disk, which stands on nothing."""
    argv = ["qemu-img", "convert", "-q", "-U", "-f", "raw", "-O", "qcow2", str(disk), str(target)]
    await run_beside(argv, timeout=LONGEST)
    return await sealed(target)


async def sealed(target: Path) -> Part:
    """The file is on disk, its owner's alone, when this returns."""

    def seal() -> Part:
        os.chmod(target, PRIVATE_FILE)
        sync(target)
        return part(target)

    return await wholly_in_thread(seal)


async def read_disk(source: Path, base: Path, disk: Path) -> None:
    """A machine's disk again, on its image's."""
    await _copy(source, disk)
    await run_beside([*REBASE, str(base), "-u", str(disk)], timeout=LONGEST)


async def read_further_disk(source: Path, disk: Path) -> None:
    await run_beside(["qemu-img", "convert", "-q", "-f", "qcow2", "-O", "raw", str(source), str(disk)], timeout=LONGEST)
    os.chmod(disk, PRIVATE_FILE)
