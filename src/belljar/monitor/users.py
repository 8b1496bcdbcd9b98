"""A user's ledger, read for root row by row in a child that became the user: what lies in a user's folder is the user's to write."""

from __future__ import annotations

import json
import os
import resource
import select
import signal
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from belljar.errors import CommandFailed
from belljar.host.privileges import User, become
from belljar.model import MIB

SILENCE = 60.0  # seconds without a row, after which the child is given up
LARGEST, ROOM = MIB, 256 * MIB  # bytes: of a row; of memory for one, which may be a line without end


def rows_as(user: User, read: Callable[[], Iterable[object]]) -> Iterator[Any]:
    """What *read* yields in the child, as JSON has it. Raises CommandFailed where it fails, is silent or yields too much at once."""
    receiver, sender = os.pipe2(os.O_CLOEXEC)
    child, status, rest = os.fork(), None, b""
    if child == 0:
        _write(user, read, sender)
    os.close(sender)
    try:
        while len(rest) <= LARGEST and select.select([receiver], [], [], SILENCE)[0]:
            if not (data := os.read(receiver, 1 << 16)):
                status = os.waitpid(child, 0)[1]
                break
            *lines, rest = (rest + data).split(b"\n")
            yield from map(json.loads, lines)
    finally:
        os.close(receiver)
        if status is None:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    if status != 0:
        why = "could not be read" if status else f"no row of at most {LARGEST // MIB} MiB came for {SILENCE:g} s"
        raise CommandFailed(f"the ledger of {user.name}: {why}")


def _write(user: User, read: Callable[[], Iterable[object]], sender: int) -> None:
    """The child's whole life."""
    code = 1
    try:
        become(user)
        most = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + ROOM
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        with open(sender, "wb") as file:
            file.writelines(json.dumps(item, separators=(",", ":")).encode() + b"\n" for item in read())
        code = 0
    finally:
        os._exit(code)
