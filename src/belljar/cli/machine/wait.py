"""`belljar wait ID`: sleep until a machine has ended, then exit as its payload did."""

from __future__ import annotations

import argparse
import fcntl
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from belljar.cli.parser import as_duration
from belljar.cli.several import add_machines, each
from belljar.errors import OUR_FAILURE, BelljarError

if TYPE_CHECKING:
    from belljar.assembly import House

HELP = (
    "Wait until a machine has ended, then exit with its payload's code (128 + N where signal N ended it; "
    "125 where it never ran, or where --timeout passed before). Of several, the first code that is not 0."
)


class NotEnded(BelljarError):
    """The machine did not end within --timeout."""

    hint = "It goes on running; wait again, or end it with `belljar stop ID`."


def arguments(parser: argparse.ArgumentParser) -> None:
    add_machines(parser)
    parser.add_argument(
        "--timeout", type=as_duration, metavar="TIME", help="give up waiting after this long, such as 90s or 5m"
    )


def run(args: argparse.Namespace, house: House) -> int:
    return each(args, lambda machine: wait(house, machine, args.timeout))


def wait(house: House, reference: str, timeout: float | None) -> int:
    """The exit code of one machine, when it has ended."""
    from belljar.cli.batch.users import reach

    house, machine = reach(house, reference)
    if not machine.ended:
        wait_for_end(machine.folder, timeout)
        machine = house.machines.find(machine.id)
    if not machine.ended:  # its supervisor was killed: finish what it left, and have the outcome written
        house.machines.reap()
        machine = house.machines.find(machine.id)
    outcome = machine.outcome or {}
    code = exit_code(outcome)
    if code == OUR_FAILURE and outcome.get("exit_code") is None:
        raise BelljarError(
            f"{machine.id}: {outcome.get('reason') or 'ended without an outcome'}", hint=outcome.get("hint") or None
        )
    return code


def exit_code(outcome: dict[str, Any]) -> int:
    """The code by which a shell would know this end."""
    if outcome.get("signal") is not None:
        return 128 + int(outcome["signal"])
    if outcome.get("exit_code") is not None:
        return int(outcome["exit_code"])
    return OUR_FAILURE


def wait_for_end(folder: Path, timeout: float | None) -> None:
    """Return when nobody holds the machine's lock any more. The kernel wakes us, whatever ended the supervisor."""
    from belljar.machine import LOCK

    try:
        descriptor = os.open(folder / LOCK, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return  # it ended between our look and now

    def expire(*_: object) -> None:
        raise NotEnded(f"{folder.name}: still running after {timeout:g} s")

    before = signal.signal(signal.SIGALRM, expire)
    try:
        with suppress(FileNotFoundError):
            signal.setitimer(signal.ITIMER_REAL, timeout or 0.0)
            fcntl.flock(descriptor, fcntl.LOCK_SH)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        os.close(descriptor)
