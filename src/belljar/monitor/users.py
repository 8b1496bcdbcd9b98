"""A user's ledger, read for root row by row in a child that became the user: what lies in a user's folder is the user's to write."""

from __future__ import annotations

import json
import os
import resource
import select
import signal
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from belljar.errors import CommandFailed
from belljar.host.privileges import User, become
from belljar.model import GIB, MIB

SILENCE = 60.0  # seconds without a row, after which the child is given up
LARGEST = 1 * MIB  # bytes of a row


def rows_as(user: User, read: Callable[[], Iterable[object]]) -> Iterator[Any]:
    """What *read* yields in the child, as JSON has it. Raises CommandFailed where it fails, is silent or yields too much at once."""
    receiver, sender = os.pipe2(os.O_CLOEXEC)
    child = os.fork()
    if child == 0:
        _write(user, read, sender)
    os.close(sender)
    try:
        rest = b""
        while True:
            if not select.select([receiver], [], [], SILENCE)[0]:
                raise CommandFailed(f"the ledger of {user.name}: no row came for {SILENCE:g} s")
            if not (data := os.read(receiver, 1 << 16)):
                break
            *lines, rest = (rest + data).split(b"\n")
            if len(rest) > LARGEST:
                raise CommandFailed(f"the ledger of {user.name}: a row of more than {LARGEST // MIB} MiB")
            yield from map(json.loads, lines)
        status, child = os.waitpid(child, 0)[1], 0
        if status:
            raise CommandFailed(f"the ledger of {user.name}: could not be read")
    finally:
        os.close(receiver)
        if child:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def _write(user: User, read: Callable[[], Iterable[object]], sender: int) -> None:
    """The child's whole life."""
    code = 1
    try:
        become(user)
        resource.setrlimit(resource.RLIMIT_AS, (GIB, GIB))  # a ledger may be one line without end
        with open(sender, "wb") as file:
            for item in read():
                file.write(json.dumps(item, separators=(",", ":")).encode() + b"\n")
        code = 0
    finally:
        os._exit(code)
