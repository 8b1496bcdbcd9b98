"""`belljar ps`: the machines of this user."""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING

from belljar.cli.parser import add_format

if TYPE_CHECKING:
    from belljar.assembly import House
    from belljar.machine import MachineView

HELP = "List the machines that run, with -a also those that ended and whose records are kept."
HEADS = ("ID", "NAME", "STATE", "IMAGE", "START", "CPUS", "MEMORY", "REQUESTER", "AGE", "RESULT")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-a", "--all", action="store_true", help="ended machines too")
    add_format(parser)


def run(args: argparse.Namespace, house: House) -> int:
    from belljar.cli.render import show

    machines = house.machines.list(ended=args.all)
    now = time.time()
    show(machines, HEADS, [row(machine, now) for machine in machines], as_=args.format)
    return 0


def row(machine: MachineView, now: float) -> tuple[object, ...]:
    """One line of the table."""
    from belljar.cli.render import duration, size

    # A supervisor that is dead left its last state behind; `belljar reap` will finish what it began.
    state = machine.state if machine.alive or machine.ended else f"{machine.state} (abandoned)"
    age = duration(max(0.0, now - machine.created)) if machine.created else ""
    return (
        machine.id, machine.name, state, machine.image, machine.start, machine.cpus, size(machine.memory),
        machine.requester, age, result(machine),
    )  # fmt: skip


def result(machine: MachineView) -> str:
    """How it ended, in a word or two."""
    outcome = machine.outcome
    if not outcome:
        return ""
    if outcome.get("signal") is not None:
        end = f"signal {outcome['signal']}"
    elif outcome.get("exit_code") is not None:
        end = f"exit {outcome['exit_code']}"
    else:
        end = ""
    cause = str(outcome.get("cause", ""))
    return end if cause == "finished" else f"{cause} {end}".strip()
