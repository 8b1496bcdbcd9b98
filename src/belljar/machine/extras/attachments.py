"""What a machine gets beside its own disk: an empty scratch disk, and large folders of `--in` as read-only disks.

The files lie beside the overlay, begin with the machine's id, are in the journal before they are made, and go away with the
machine. The guest finds each disk by its name.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from belljar.errors import CommandFailed, CommandMissing, NoPackedFolders, NoSpace
from belljar.guest import Guest
from belljar.host.commands import run_beside, which
from belljar.host.files import free_bytes, no_space_as_error
from belljar.host.threads import in_thread
from belljar.hypervisor import ExtraDisk
from belljar.machine import Settings
from belljar.machine.life.life import Life
from belljar.model import MIB, SCRATCH_PLACE, Payload, RunPayload, Transfer

SCRATCH = "scratch"
FORMAT_TIMEOUT = 60.0
PACKED = "packed"  # and a number
MOST_PACKED = 8
# Nothing of it outlives the machine, and nobody but the payload's user is to have room in it.
FORMAT = ("-q", "-F", "-t", "ext4", "-O", "^has_journal,^resize_inode", "-m", "0", "-L", SCRATCH)
LAZY = ("-E", "lazy_itable_init=1,nodiscard")


async def make(life: Life, settings: Settings) -> dict[str, Transfer]:
    """Make the files; the disks are then the life's. Returns the packed folders by the names of their disks.
    Raises NoSpace, CommandMissing, InputMissing, and CommandFailed for a scratch disk."""
    if life.request.machine.scratch is not None:
        path = life.attach(SCRATCH, SCRATCH)
        await make_scratch(path, life.request.machine.scratch)
        life.disks += (ExtraDisk(SCRATCH, path, "raw", readonly=False),)
    work = life.request.work
    packed: dict[str, Transfer] = {}
    if isinstance(work, RunPayload):
        payload = work.payload
        # In a thread: the folders may lie on a file server that does not answer, and the job can be cancelled all the same.
        for item in await in_thread(lambda: list(folders_to_pack(payload, settings))):
            from belljar.machine.extras.packing import pack_folder

            name = f"{PACKED}{len(packed)}"
            path = life.attach(PACKED, name)
            try:
                with life.phase("pack"):
                    await pack_folder(item, path, payload.account, life.request.machine.cpus)
            except CommandFailed as error:  # a limit of the job on memory, say: then it is copied
                life.record.tell("not-packed", reason=error.message)
                path.unlink(missing_ok=True)
                continue
            life.disks += (ExtraDisk(name, path, "raw", readonly=True),)
            packed[name] = item
    return packed


async def make_scratch(path: Path, size: int) -> None:
    """An empty file system in a file that takes no room until it is written to. Raises NoSpace, CommandMissing."""
    if (free := free_bytes(path.parent)) < size:
        raise NoSpace(f"{path.parent}: {free // MIB} MiB free, the scratch disk is to have {size // MIB} MiB")
    if which("mke2fs") is None:
        raise CommandMissing("mke2fs: no such program on this host", hint="Install e2fsprogs, or do without --scratch.")
    with no_space_as_error(path):
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.ftruncate(fd, size)
        finally:
            os.close(fd)
    await run_beside(["mke2fs", *FORMAT, *LAZY, str(path)], timeout=FORMAT_TIMEOUT)


def folders_to_pack(payload: Payload, settings: Settings) -> Iterator[Transfer]:
    """The inputs that are quicker as a disk: folders of many files or many bytes, where the host can pack them."""
    from belljar.machine.extras.packing import can_pack

    found = [item for item in payload.inputs if os.path.isdir(item.outside) and is_large(item.outside, settings)]
    if found and can_pack():
        yield from found[:MOST_PACKED]


def is_large(folder: str, settings: Settings) -> bool:
    """Has the folder as many files, or bytes, as the settings say? Holes do not count: a copy leaves them out. Stops
    counting there. What cannot be read counts for nothing: the copy itself says so."""
    files = size = 0
    waiting = [folder]
    while waiting:
        with suppress(OSError), os.scandir(waiting.pop()) as found:
            for entry in found:
                files += 1
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(entry.path)
                elif entry.is_file(follow_symlinks=False):
                    with suppress(OSError):
                        facts = entry.stat(follow_symlinks=False)
                        size += min(facts.st_size, facts.st_blocks * 512)
                if (settings.pack_files and files >= settings.pack_files) or 0 < settings.pack_size <= size:
                    return True
    return False


async def furnish(guest: Guest, life: Life, packed: dict[str, Transfer], payload: Payload) -> None:
    """Put the disks where the payload looks for them, and the inputs in their places, in their order, each by its disk or
    as a copy. A guest that cannot use a packed folder gets it as a copy too."""
    names = [disk.name for disk in life.disks]
    devices = dict(zip(names, await guest.find_disks(names), strict=True))
    if SCRATCH in devices:
        await guest.mount_scratch(devices[SCRATCH], SCRATCH_PLACE, payload.account)
    if payload.inputs and payload.files:
        await guest.place(payload.files, payload.account)  # what is copied in may lie in folders of theirs
    for item in payload.inputs:
        name = next((name for name, other in packed.items() if other is item), None)
        if name is None or not await _laid(guest, life, name, devices[name], item, payload):
            await guest.put(item, payload.account, payload.cwd)


async def _laid(guest: Guest, life: Life, name: str, device: str, item: Transfer, payload: Payload) -> bool:
    try:
        await guest.mount_packed(name, device, item.inside, payload.account, payload.cwd)
    except NoPackedFolders as error:
        life.record.tell("not-packed", reason=error.message)
        return False
    return True
