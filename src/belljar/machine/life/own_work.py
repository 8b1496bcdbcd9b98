"""Machines that know their own work: no payload, no agent; they end when they power themselves off.

What came of it they may say in a joboutput, `shutdown_message`: three digits, a blank, free text (HSF-TN-2016-04).
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from belljar.errors import BelljarError, NoSpace
from belljar.host.files import free_bytes, no_space_as_error, read_capped
from belljar.hypervisor import ExtraDisk
from belljar.machine import JOBOUTPUTS
from belljar.machine.life.life import Life
from belljar.machine.states import CLASSES
from belljar.model import MIB, Cause

MESSAGE = "shutdown_message"
LONGEST, LARGEST = 300, 64 << 10
EMPTY, SMALLEST_ROOM = "empty", 256 * MIB
FORM = re.compile(r"([1-9][0-9]{2}) (.*)")
FAILED = 400  # and all above it: banned, no environment, a fault of the grid's, a transient one


def conclude(life: Life) -> None:
    """The machine powered itself off: its own message is the outcome. Codes from 400 on are exit code 1, every other end
    is 0: that there was no work (300) is no failure."""
    code, text = message(life.folder / JOBOUTPUTS / MESSAGE)
    reason = (
        f"the guest powered itself off: {text}" if text else "the guest powered itself off and said nothing about it"
    )
    cause = life.outcome.cause if life.outcome.cause in (Cause.CANCELLED, Cause.WALLTIME) else Cause.FINISHED
    if cause is not Cause.FINISHED:
        reason = f"{life.outcome.reason}; {reason}"
    life.note(cause=cause, klass=CLASSES[cause], exit_code=int(code >= FAILED), reason=reason, hint="", error="")
    life.record.tell("shutdown-message", code=code, text=text)
    if life.left_in_order:
        from belljar.machine.extras.cache import left_in_order

        left_in_order(life)


def message(path: Path) -> tuple[int, str]:
    """(code, the line), or (0, "") where there is none, or none of this form. The guest wrote it."""
    try:
        text = read_capped(path, LARGEST).decode(errors="replace")
    except (OSError, BelljarError):
        return 0, ""
    line = "".join(char for char in text.partition("\n")[0] if char.isprintable())[:LONGEST].strip()
    found = FORM.match(line)
    return (int(found[1]), line) if found else (0, "")


def add_empty_disk(life: Life, size: int) -> None:
    """A disk without anything on it, which goes away with the machine. A guest that boots from a disc makes its file systems
    there itself; it takes no room until it is written to. Raises NoSpace."""
    path = life.attach(EMPTY, EMPTY)
    if (free := free_bytes(path.parent)) < SMALLEST_ROOM:
        raise NoSpace(f"{path.parent}: {free // MIB} MiB free, a machine's empty disk wants {SMALLEST_ROOM // MIB} MiB")
    with no_space_as_error(path):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.ftruncate(descriptor, size)
        finally:
            os.close(descriptor)
    life.disks += (ExtraDisk(EMPTY, path, "raw", readonly=False),)
