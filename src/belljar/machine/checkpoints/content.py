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
from belljar.hints import Any
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
def _filter(program: str, options: tuple[str, ...], **ends: Any) -> Iterator[subprocess.Popen[bytes]]:
    """The program between these ends. It ends with the block."""
    if (path := which(program)) is None:
        hint = f"Install it: the memory of this checkpoint is packed by {program}."
        raise CommandMissing(f"{program}: no such program on this host", hint=hint)
    environment = {"PATH": SEARCH_PATH, "LC_ALL": "C"}
    with subprocess.Popen([path, *options], stderr=subprocess.PIPE, env=environment, **ends) as child:
        try:
            with suppress(OSError):  # a user may have so many large ones
                fcntl.fcntl(child.stdin or child.stdout, fcntl.F_SETPIPE_SZ, MIB)  # type: ignore[arg-type]
            yield child
        finally:
            child.kill()


async def write_memory(templates: Templates, domain: Domain, target: Path, program: str) -> Part:
    """All of a guest that stands still. Raises HypervisorError, CheckpointFailed."""
    trouble: HypervisorError | None = None
    with open(target, "xb", opener=private) as file:  # noqa: ASYNC230
        with _filter(program, PACK[program], stdin=subprocess.PIPE, stdout=file) as child:
            assert child.stdin is not None and child.stderr is not None
            try:
                await templates.write_memory(domain, child.stdin.fileno(), timeout=LONGEST)
            except HypervisorError as error:  # where the program ended first, it says why
                trouble = error
            child.stdin.close()
            complaints = child.stderr
            complaint, code = await in_thread(lambda: (complaints.read(), child.wait()))
            if code:
                raise CheckpointFailed(
                    f"the guest's memory was not written: {complaint.decode(errors='replace').strip()}"
                )
    if trouble is not None:
        raise trouble
    return await sealed(target)


@contextmanager
def memory(path: Path, program: str) -> Iterator[int]:
    """A pipe from which a QEMU reads it, while the block lasts."""
    with open(path, "rb") as file, _filter(program, UNPACK[program], stdin=file, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        yield child.stdout.fileno()


async def write_disk(disk: Path, layers: Sequence[Path], base: Path, target: Path) -> Part:
    """What a machine's disk has above its image's, *base*, in one file, with what the *layers* between them have. Its guest stands
    still. Raises ImageCorrupt."""
    copies = [target, *(target.with_suffix(f".layer{number}") for number in range(len(layers)))]
    for source, copy, below in zip((disk, *layers), copies, (*copies[1:], base), strict=True):
        await read_disk(source, below, copy)
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
    """A disk's copy, on *base*. Raises ImageCorrupt."""
    await _copy(source, disk)
    await run_beside([*REBASE, str(base), "-u", str(disk)], timeout=LONGEST)


async def read_further_disk(source: Path, disk: Path) -> None:
    await run_beside(["qemu-img", "convert", "-q", "-f", "qcow2", "-O", "raw", str(source), str(disk)], timeout=LONGEST)
    os.chmod(disk, PRIVATE_FILE)
