"""The large files of a checkpoint, written and read: memory, which comes and goes by a pipe, and disks. Nothing here is quick."""

from __future__ import annotations

import asyncio
import fcntl
import os
import subprocess
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from belljar.errors import CheckpointFailed, CommandMissing, HypervisorError
from belljar.host.commands import SEARCH_PATH, run_beside, which
from belljar.host.files import PRIVATE_FILE, no_space_as_error, private, sync, write_all
from belljar.host.threads import in_thread, wholly_in_thread
from belljar.hypervisor import Domain, Templates
from belljar.machine.checkpoints import CHUNK, Part, checksum
from belljar.model import MIB

# docs/develop/decisions/0031-checkpoints.md has the figures. Without it the bytes are written as they are.
ZSTD, CAT = "zstd", "cat"
PACK = {ZSTD: ("-1", "-T0", "-q", "-c"), CAT: ()}
UNPACK = {ZSTD: ("-d", "-q", "-c"), CAT: ()}
LONGEST = 4 * 3600.0  # seconds that a disk may take


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
        child = subprocess.Popen(
            [path, *options], stdin=source, stdout=target, stderr=subprocess.DEVNULL, env=environment
        )
    finally:
        os.close(source)
        os.close(target)
    try:
        yield child
    finally:
        child.kill()
        child.wait()


def _pipe() -> tuple[int, int]:
    reading, writing = os.pipe2(os.O_CLOEXEC)
    with suppress(OSError):  # a user may have so many large ones
        fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, MIB)
    return reading, writing


async def write_memory(templates: Templates, domain: Domain, target: Path, program: str) -> Part:
    """All of a guest that stands still. Raises NoSpace, HypervisorError, CheckpointFailed."""
    (source, memory), (packed, writing) = _pipe(), _pipe()
    with _filter(program, PACK[program], source, writing) as child:
        keeping = asyncio.ensure_future(wholly_in_thread(lambda: _keep(packed, target)))
        try:
            try:
                await templates.write_memory(domain, memory, timeout=LONGEST)
            finally:
                os.close(memory)
        except HypervisorError:
            await keeping  # it says why nobody read on
            raise
        except BaseException:  # re-raised
            child.kill()
            await asyncio.wait({keeping})
            raise
        part = await keeping
        if await in_thread(child.wait):
            raise CheckpointFailed(f"{program} ended with {child.returncode} while it packed the guest's memory")
    return part


def _keep(source: int, target: Path) -> Part:
    """In a thread: from the pipe to the disk."""
    size = crc = 0
    try:
        with no_space_as_error(target), open(target, "xb", buffering=0, opener=private) as file:
            while data := os.read(source, CHUNK):
                write_all(file.fileno(), data)
                size, crc = size + len(data), zlib.crc32(data, crc)
            os.fsync(file.fileno())
    finally:
        os.close(source)
    return Part(size, crc)


@contextmanager
def memory(path: Path, program: str) -> Iterator[int]:
    """A pipe from which a QEMU reads it, while the block lasts."""
    reading, writing = _pipe()
    try:
        with _filter(program, UNPACK[program], os.open(path, os.O_RDONLY | os.O_CLOEXEC), writing):
            yield reading
    finally:
        os.close(reading)


async def write_disk(disk: Path, below: Path | None, base: Path, target: Path) -> Part:
    """What a machine's disk has above its image's, *base*, in one file, with what *below* it is a template's. Its guest stands still."""
    await run_beside(["cp", "--reflink=auto", "--sparse=always", "--", str(disk), str(target)], timeout=LONGEST)
    rebase = ["qemu-img", "rebase", "-q", "-F", "qcow2", "-b"]
    if below is not None:
        await run_beside([*rebase, str(below), "-u", str(target)], timeout=LONGEST)
    await run_beside([*rebase, str(base), str(target)], timeout=LONGEST)
    return await _sealed(target)


def opened(pid: int, path: Path) -> Path:
    """A name of a file that this process has open, which may have been removed since: a template is, while its clones live."""
    names = (str(path.resolve()), f"{path.resolve()} (deleted)")
    with suppress(OSError):
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            if os.readlink(fd) in names:
                return fd
    return path


async def write_further_disk(disk: Path, format: str, target: Path) -> Part:
    """The same of a disk that stands on nothing."""
    await run_beside(
        ["qemu-img", "convert", "-q", "-U", "-f", format, "-O", "qcow2", str(disk), str(target)], timeout=LONGEST
    )
    return await _sealed(target)


async def _sealed(target: Path) -> Part:
    def seal() -> Part:
        os.chmod(target, PRIVATE_FILE)
        sync(target)
        return Part(target.stat().st_size, checksum(target))

    return await wholly_in_thread(seal)


async def read_disk(source: Path, base: Path, disk: Path) -> None:
    """A machine's disk again, on its image's."""
    await run_beside(["cp", "--reflink=auto", "--sparse=always", "--", str(source), str(disk)], timeout=LONGEST)
    await run_beside(["qemu-img", "rebase", "-q", "-u", "-F", "qcow2", "-b", str(base), str(disk)], timeout=LONGEST)


async def read_further_disk(source: Path, format: str, disk: Path) -> None:
    await run_beside(
        ["qemu-img", "convert", "-q", "-f", "qcow2", "-O", format, str(source), str(disk)], timeout=LONGEST
    )
    os.chmod(disk, PRIVATE_FILE)
