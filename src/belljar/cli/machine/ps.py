"""`belljar ps`: the machines of this user."""

from __future__ import annotations

import argparse
import os
import time
from typing import TYPE_CHECKING

from belljar.cli.parser import add_format
from belljar.errors import BadOption

if TYPE_CHECKING:
    from belljar.assembly import House
    from belljar.machine import MachineView

HELP = "List the machines that run, with -a also those that ended and whose records are kept."
HEADS = ("ID", "NAME", "STATE", "IMAGE", "START", "CPUS", "MEMORY", "REQUESTER", "AGE", "RESULT")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-a", "--all", action="store_true", help="ended machines too")
    parser.add_argument(
        "--all-users",
        action="store_true",
        help="as root: of every user with a folder below `paths.node`, root's own too",
    )
    parser.add_argument("-q", "--quiet", action="store_true", help="only the ids, one a line")
    add_format(parser)


def run(args: argparse.Namespace, house: House) -> int:
    from belljar.cli.render import show

    machines = house.machines.list(ended=args.all)
    now = time.time()
    if args.all_users and args.quiet:
        raise BadOption("--quiet with --all-users: an id without its user names no machine")
    if args.all_users:
        return _of_all(house, [row(machine, now) for machine in machines], args)
    if args.quiet:
        print("".join(f"{machine.id}\n" for machine in machines), end="")
        return 0
    show(machines, HEADS, [row(machine, now) for machine in machines], as_=args.format)
    if args.format == "table" and any(machine.alive for machine in machines):
        print(_room(house))
    return 0


def _room(house: House) -> str:
    """What the machines have reserved of this host, and what is left."""
    from belljar.cli.render import size
    from belljar.machine.life.reservation import room_now

    room = room_now(house.folders, house.settings.host)
    cpus = "" if room.cpus == float("inf") else f" of {room.cpus:g}"
    return f"reserved: {size(room.memory_reserved)} of memory ({size(room.memory)} left), {room.cpus_taken}{cpus} cpus"


def _of_all(house: House, own: list[tuple[object, ...]], args: argparse.Namespace) -> int:
    """Exit 1 when some user's machines could not be listed."""
    from belljar.cli import complain
    from belljar.cli.render import show
    from belljar.errors import NotPermitted
    from belljar.jobs.users import rows_of_all

    if os.geteuid() != 0:
        raise NotPermitted("--all-users: only root sees everybody's machines")
    now = time.time()
    rows, trouble = rows_of_all(house, lambda view: dict(zip(HEADS, row(view, now), strict=True)), ended=args.all)
    facts = [{"USER": "root", **dict(zip(HEADS, one, strict=True))} for one in own] + rows
    show(facts, ("USER", *HEADS), [tuple(one.get(head) for head in ("USER", *HEADS)) for one in facts], as_=args.format)
    for line in trouble:
        complain(line, "")
    return 1 if trouble else 0


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
