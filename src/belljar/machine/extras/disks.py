"""Empty disks that come and go with a machine: a scratch disk for its payload, one by which large files come and go, and one
for a guest that boots from a disc.

The sparse files lie beside the overlay, begin with the machine's id, and are journaled before they are made.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from belljar.errors import NoSpace
from belljar.guest import ExchangeDisk, Guest
from belljar.host.commands import path_of, run_beside
from belljar.host.files import free_bytes, no_space_as_error, private
from belljar.hypervisor import ExtraDisk
from belljar.machine.extras import Equipment, Extra
from belljar.machine.life.life import Lifecycle
from belljar.model import MIB, SCRATCH_PLACE, Payload

SCRATCH, EMPTY, EXCHANGE = "scratch", "empty", "exchange"
SMALLEST_ROOM = 256 * MIB  # for the empty disk of a guest that boots from a disc
FORMAT_TIMEOUT = 60.0
# Nothing of it outlives the machine, and nobody but the payload's user is to have room in it.
FORMAT = ("mke2fs", "-q", "-F", "-t", "ext4", "-O", "^has_journal,^resize_inode", "-m", "0")
LAZY = "lazy_itable_init=1,nodiscard"


class ScratchDisk(Extra):
    """Empty, with a file system, for the payload's user alone."""

    def __init__(self, size: int) -> None:
        self._size = size

    async def prepare(self, life: Lifecycle, there: Equipment) -> Equipment:
        """Raises NoSpace, CommandMissing, CommandFailed."""
        path = life.attach(SCRATCH, SCRATCH)
        argv = empty_ext4(path, self._size, self._size, SCRATCH, LAZY, what="--scratch")
        await run_beside(argv, timeout=FORMAT_TIMEOUT)
        life.point("after-attachments")
        return there.with_disk(ExtraDisk(SCRATCH, path, "raw", readonly=False))

    async def furnish(self, guest: Guest, payload: Payload, devices: Mapping[str, str]) -> None:
        await guest.mount_scratch(devices[SCRATCH], SCRATCH_PLACE, payload.account)


class Exchange(Extra):
    """A disk by which the content of large files comes and goes: the agent's port is slow. Host files are copied to it while the
    guest reads; it takes as much room as a file at a time."""

    def __init__(self, size: int) -> None:
        self._size, self._path = size, ""

    async def prepare(self, life: Lifecycle, there: Equipment) -> Equipment:
        """Without it files go by the port: a limit of the job on the sizes of files, say, is not a reason to fail."""
        path = life.attach(EXCHANGE, EXCHANGE)
        try:
            sparse(path, self._size)
        except OSError as error:
            life.record.tell("no-exchange", reason=str(error))
            return there
        self._path = str(path)
        return there.with_disk(ExtraDisk(EXCHANGE, path, "raw", readonly=False, is_late=True))

    async def furnish(self, guest: Guest, payload: Payload, devices: Mapping[str, str]) -> None:
        if self._path:
            guest.exchange_by(ExchangeDisk(self._path, EXCHANGE.encode()))


class EmptyDisk(Extra):
    """Without anything on it: a guest that boots from a disc makes its file systems there itself."""

    def __init__(self, size: int) -> None:
        self._size = size

    async def prepare(self, life: Lifecycle, there: Equipment) -> Equipment:
        """Raises NoSpace."""
        path = life.attach(EMPTY, EMPTY)
        check_room(path.parent, SMALLEST_ROOM, "a machine's empty disk wants")
        sparse(path, self._size)
        return there.with_disk(ExtraDisk(EMPTY, path, "raw", readonly=False))


def empty_ext4(path: Path, size: int, room: int, label: str, options: str, *, what: str) -> list[str]:
    """A new file of this size, and the command that makes a file system in it. Raises NoSpace, CommandMissing."""
    check_room(path.parent, room, f"{what} wants at least")
    path_of("mke2fs", f"Install e2fsprogs, or do without {what}.")
    sparse(path, size)
    return [*FORMAT, "-L", label, "-E", options, str(path)]


def check_room(folder: Path, size: int, what: str) -> None:
    if (free := free_bytes(folder)) < size:
        raise NoSpace(f"{folder}: {free // MIB} MiB free, {what} {size // MIB} MiB")


def sparse(path: Path, size: int) -> None:
    """A new file of this size (0600). Raises NoSpace."""
    with no_space_as_error(path), open(path, "xb", opener=private) as file:
        file.truncate(size)
