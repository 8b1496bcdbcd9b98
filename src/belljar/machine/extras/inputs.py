"""What `--in` brings: a copy through the agent, or for a large folder a read-only squashfs on a disk of its own.

It is made from the same tar stream as a copy: the same modes, times (to the second) and links, the same refusals.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from belljar.agent.guest.system import Refused
from belljar.agent.transfer.tar import Packer
from belljar.errors import CommandFailed, InputMissing, NoPackedFolders, NoSpace
from belljar.guest import Guest
from belljar.host.commands import SEARCH_PATH, which
from belljar.host.files import PRIVATE_FILE
from belljar.host.threads import in_thread
from belljar.hypervisor import ExtraDisk
from belljar.machine import Settings
from belljar.machine.extras import Equipment, Extra
from belljar.machine.life.life import Lifecycle
from belljar.model import Account, Payload, Transfer

PACKED, MOST_PACKED = "packed", 8  # the disks' names have a number
PROGRAM = "mksquashfs"
# No compression: the guest unpacks under emulation, and what is read comes from the host's page cache.
OPTIONS = ("-tar", "-noappend", "-no-progress", "-quiet", "-noI", "-noD", "-noF", "-noX", "-mem", "128M")
ENVIRONMENT = {"PATH": SEARCH_PATH, "LC_ALL": "C"}
LONGEST = 4 * 3600.0  # seconds one folder may take
MESSAGE = 4096


class Inputs(Extra):
    """All of them, in their order, each by its disk or as a copy."""

    def __init__(self, payload: Payload, settings: Settings) -> None:
        self._payload, self._settings = payload, settings
        self._packed: dict[Transfer, str] = {}  # by the names of their disks

    async def prepare(self, life: Lifecycle, there: Equipment) -> Equipment:
        """Raises NoSpace, InputMissing."""
        self._life, payload = life, self._payload
        if not (self._settings.pack_files or self._settings.pack_size):
            return there
        # In a thread: the folders may lie on a file server that does not answer, and the job can be cancelled all the same.
        for item in await in_thread(lambda: list(folders_to_pack(payload, self._settings))):
            name = f"{PACKED}{len(self._packed)}"
            path = life.attach(PACKED, name)
            try:
                with life.phase("pack"):
                    await pack_folder(item, path, payload.account, life.request.machine.cpus)
            except CommandFailed as error:  # a limit of the job on memory, a file with holes: then it is copied
                life.record.tell("not-packed", reason=error.message)
                path.unlink(missing_ok=True)
                continue
            there = there.with_disk(ExtraDisk(name, path, "raw", readonly=True))
            self._packed[item] = name
        if self._packed:
            life.point("after-attachments")
        return there

    async def furnish(self, guest: Guest, payload: Payload, devices: Mapping[str, str]) -> None:
        """A guest that cannot use a packed folder gets it as a copy, too."""
        if payload.files:
            await guest.place(payload.files, payload.account)  # what is copied in may lie in folders of theirs
        for item in payload.inputs:
            if name := self._packed.get(item):
                try:
                    await guest.mount_packed(name, devices[name], item.inside, payload.account, payload.cwd)
                    continue
                except NoPackedFolders as error:
                    self._life.record.tell("not-packed", reason=error.message)
            await guest.put(item, payload.account, payload.cwd)


def folders_to_pack(payload: Payload, settings: Settings) -> Iterator[Transfer]:
    """The inputs that are quicker as a disk: folders of many files or many bytes, where the host can pack them."""
    large = [item for item in payload.inputs if os.path.isdir(item.outside) and is_large(item.outside, settings)]
    if which(PROGRAM) is not None:
        yield from large[:MOST_PACKED]


def is_large(folder: str, settings: Settings) -> bool:
    """Does the folder reach one of the limits of the settings? Holes do not count, nor what cannot be read."""
    files = size = 0
    for place, folders, names in os.walk(folder):
        files += len(folders) + len(names)
        if 0 < settings.pack_files <= files:
            return True
        for name in names:
            with suppress(OSError):
                status = os.lstat(os.path.join(place, name))
                size += min(status.st_size, status.st_blocks * 512)
        if 0 < settings.pack_size <= size:
            return True
    return False


async def pack_folder(item: Transfer, target: Path, account: Account, cpus: int) -> None:
    """Pack the folder into *target* (0600), owned by the account. Raises InputMissing, NoSpace, CommandFailed."""
    target.touch(PRIVATE_FILE, exist_ok=False)  # noqa: ASYNC240
    owner = ("-force-uid", str(account.uid), "-force-gid", str(account.gid))
    argv = [which(PROGRAM) or PROGRAM, "-", str(target), *OPTIONS, *owner, "-processors", str(cpus)]
    words = os.memfd_create(PROGRAM, os.MFD_CLOEXEC)  # a pipe could fill up, and stop it
    # It reads from us, so it ends when we do, however that is.
    child = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=words, env=ENVIRONMENT)  # noqa: ASYNC220
    try:
        async with asyncio.timeout(LONGEST):
            await in_thread(lambda: _feed(child, item))
        message = os.pread(words, MESSAGE, max(0, os.fstat(words).st_size - MESSAGE)).decode(errors="replace")
    except TimeoutError as exc:
        raise CommandFailed(f"{PROGRAM}: {item.outside} was not packed within {LONGEST:.0f} s, killed") from exc
    finally:
        child.kill()
        child.wait()
        os.close(words)
    if child.returncode != 0:
        if "No space left" in message:
            raise NoSpace(f"{target.parent}: no space left to pack {item.outside}")
        lines = message.strip().splitlines() or ["no message"]
        raise CommandFailed(f"{PROGRAM}: exit {child.returncode}: {lines[-1]}")


def _feed(child: subprocess.Popen[bytes], item: Transfer) -> None:
    """In a thread: the folder into the program, and its end. Raises InputMissing for what is wrong with the folder."""
    assert child.stdin is not None
    try:
        Packer(child.stdin.write, tuple(map(os.fsencode, item.skip))).pack(os.fsencode(item.outside))
    except BrokenPipeError:
        pass  # it ended early; its last words say why
    except (Refused, OSError) as exc:
        child.kill()  # half a folder is of no use
        reason = exc.message if isinstance(exc, Refused) else f"{item.outside}: {exc.strerror}"
        raise InputMissing(reason) from exc
    finally:
        with suppress(BrokenPipeError):
            child.stdin.close()
        child.wait()
