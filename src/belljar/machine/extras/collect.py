"""Keeps chosen folders of a guest with its machine's records: one tar archive, which belljar never unpacks.

It is made after the job's files are delivered, so an error here is journaled and is not the job's.
"""

from __future__ import annotations

import asyncio
from typing import BinaryIO

from belljar.errors import BelljarError, in_words
from belljar.guest import Guest
from belljar.host.files import private
from belljar.machine import COLLECTED
from belljar.machine.life.life import Lifecycle

LONGEST = 30.0  # seconds for all of it


class Archive:
    """A `Sink` into a file, of at most *limit* bytes. What is more is refused, and `is_cut` tells so."""

    def __init__(self, file: BinaryIO, limit: int) -> None:
        self._file, self._limit, self.size, self.is_cut = file, limit, 0, False

    async def write(self, data: bytes) -> None:
        room = self._limit - self.size
        self.size += self._file.write(data[:room])
        if len(data) > room:
            self.is_cut = True
            raise BrokenPipeError

    async def close(self) -> None:
        """The stream's end."""


async def collect(guest: Guest, life: Lifecycle) -> None:
    """Fetch what `request.collect` names into the machine's folder, and journal how that went. Raises nothing."""
    trouble, size, is_cut = "", 0, False
    try:
        with open(life.folder / COLLECTED, "xb", opener=private) as file:  # noqa: ASYNC230
            archive = Archive(file, life.request.collect_limit)
            try:
                async with asyncio.timeout(LONGEST):
                    await guest.collect(life.request.collect, archive)
            finally:
                size, is_cut = archive.size, archive.is_cut
    except TimeoutError:
        trouble = f"not finished after {LONGEST:g} s"
    except BelljarError as error:
        trouble = error.message
    except OSError as error:
        trouble = in_words(error)
    life.record.tell("collected", bytes=size, cut_off=is_cut, trouble=trouble)
