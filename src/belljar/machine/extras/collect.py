"""Keeps chosen folders of a guest with its machine's records: one tar archive, which belljar never unpacks.

It is made after the job's files are delivered, so an error here is journaled and is not the job's.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from belljar.errors import BelljarError
from belljar.guest import Guest
from belljar.host.files import no_space_as_error, write_all
from belljar.machine import COLLECTED
from belljar.machine.life.life import Life

LONGEST = 30.0  # seconds for all of it


class Archive:
    """A `Sink` that is a file of at most *limit* bytes. What is more is refused, and `is_cut` tells so."""

    def __init__(self, path: Path, limit: int) -> None:
        self._limit = limit
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        with no_space_as_error(path):
            self._descriptor = os.open(path, flags, 0o600)
        self.size, self.is_cut = 0, False

    async def write(self, data: bytes) -> None:
        room = self._limit - self.size
        write_all(self._descriptor, data[:room])
        self.size += min(len(data), room)
        if len(data) > room:
            self.is_cut = True
            raise BrokenPipeError

    async def close(self) -> None:
        """The stream's end. The file itself is closed by `finish`."""

    def finish(self) -> None:
        os.close(self._descriptor)


async def collect(guest: Guest, life: Life) -> None:
    """Fetch what `request.collect` names into the machine's folder, and journal how that went. Raises nothing."""
    trouble, size, is_cut = "", 0, False
    try:
        archive = Archive(life.folder / COLLECTED, life.request.collect_limit)
        try:
            async with asyncio.timeout(LONGEST):
                await guest.collect(life.request.collect, archive)
        finally:
            archive.finish()
            size, is_cut = archive.size, archive.is_cut
    except TimeoutError:
        trouble = f"not finished after {LONGEST:g} s"
    except BelljarError as error:
        trouble = error.message
    except OSError as error:
        trouble = str(error)
    life.record.tell("collected", bytes=size, cut_off=is_cut, trouble=trouble)
