"""`belljar stop ID`: TERM to the payload, a time of grace, then the machine's end."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from belljar.cli.parser import as_duration, as_moment
from belljar.cli.several import add_machines, each

if TYPE_CHECKING:
    from belljar.assembly import House
    from belljar.machine import MachineView

HELP = "End machines: TERM to the payload, and after the grace the machine itself. Returns when all are gone."


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--grace",
        type=as_duration,
        metavar="TIME",
        help="time for the payload to end by itself (default: the machine's)",
    )
    parser.add_argument(
        "--at",
        type=as_moment,
        metavar="TIME",
        help="not now: its deadline is this moment, such as 18:30, 2026-12-24T18:00 or +45m; returns at once",
    )
    add_machines(parser)


def run(args: argparse.Namespace, house: House) -> int:
    if args.at is not None:
        from belljar.cli.machine.extend import move
        from belljar.errors import BadOption

        if args.grace is not None:
            raise BadOption("--grace with --at: at its deadline a machine has the grace it was begun with")
        return each(args, lambda machine: move(house, machine, at=args.at))
    return each(args, lambda machine: end(house, machine, {"do": "stop", "grace": args.grace}))


def end(house: House, reference: str, question: dict[str, object]) -> int:
    """Ask the supervisor to end the machine, then wait until its lock is free. An ended machine is success."""
    from belljar.cli.machine.wait import until_ended
    from belljar.errors import NoSuchMachine
    from belljar.jobs.users import reach
    from belljar.machine.life import control

    house, view = reach(house, reference)
    if view.ended:
        return 0
    if view.alive:
        let_go_on(view)
    try:
        with control.connect(view.folder) as connection:
            control.ask(connection, str(question.pop("do")), **question)
    except NoSuchMachine:
        if view.alive:
            raise
        house.machines.reap()  # its supervisor is dead: finish what it left
        return 0
    until_ended(house, view.id, None)
    return 0


def let_go_on(view: MachineView) -> None:
    """A supervisor that was suspended (Ctrl-Z, a batch system) hears nothing: continue it, so that it can end."""
    import os
    import signal
    from contextlib import suppress

    from belljar.host.processes import is_stopped
    from belljar.journal import read

    for event in read(view.folder)[:1]:
        pid = event.get("pid")  # of whoever holds the machine's lock
        if event["event"] == "claim" and isinstance(pid, int) and pid > 1 and is_stopped(pid):
            with suppress(OSError):
                os.kill(pid, signal.SIGCONT)
