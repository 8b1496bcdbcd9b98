"""Carries out an Ending: the system's commands, each under a deadline, then files. The process's own end is the caller's."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from contextlib import suppress

from belljar.batch.job.terms import Ending
from belljar.errors import BelljarError

Run = Callable[[tuple[str, ...]], bytes]  # a command of the system; raises CommandFailed, CommandMissing


def carry_out(ending: Ending, run: Run) -> tuple[Ending, str]:
    """Run what the ending wants run. Returns the ending that holds then, and what went wrong on the way."""
    trouble = ""
    while True:
        try:
            for argv in ending.commands:
                run(argv)
            for path, content in ending.files:
                _write(path, content)
            return ending, trouble
        except (BelljarError, OSError) as exc:
            trouble = f"{trouble}; {exc}" if trouble else str(exc)
            if ending.otherwise is None:
                return ending, trouble
            ending = ending.otherwise


def take_back(ending: Ending) -> None:
    """Remove what it wrote."""
    for path, _ in ending.files:
        with suppress(OSError):
            os.unlink(path)


def let_in(ending: Ending) -> None:
    """HTCondor's starter looks for the file as another user, in a folder that is the job's alone: let it through, and read.
    The group's bits are for a site where that user is in the job's group. Raises OSError."""
    if ending.opens:
        for path, _ in ending.files:
            os.chmod(path, 0o644)
        os.chmod(ending.opens, stat.S_IMODE(os.stat(ending.opens).st_mode) | 0o011)


def _write(path: bytes, content: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        os.write(descriptor, content)
    finally:
        os.close(descriptor)
