"""`belljar extend ID TIME`: a machine's deadline, moved while it lives."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from belljar.cli.parser import add_machine, as_duration
from belljar.errors import NoSuchMachine

if TYPE_CHECKING:
    from belljar.assembly import House

HELP = "Let a machine live longer: its deadline comes later by this time. `belljar stop --at` sets one. The guest's features tell it."


def arguments(parser: argparse.ArgumentParser) -> None:
    add_machine(parser)
    parser.add_argument("by", type=as_duration, metavar="TIME", help="how much later, such as 30m or 2h")


def run(args: argparse.Namespace, house: House) -> int:
    return move(house, args.machine, by=args.by)


def move(house: House, reference: str, **how: float) -> int:
    """Give a living machine another deadline, `at` a moment or `by` some seconds later, and say which it is now."""
    from belljar.jobs.users import reach
    from belljar.machine.life import control
    from belljar.machine.life.deadline import stamp

    house, view = reach(house, reference)
    if not view.alive:
        raise NoSuchMachine(f"{view.id}: the machine has ended")
    with control.connect(view.folder) as connection:
        answer = control.ask(connection, "deadline", **how)
    print(f"{view.id}  {stamp(float(answer['at']))}")
    return 0
