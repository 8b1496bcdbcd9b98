"""`belljar console ID`: the machine's serial console, as it speaks; what is typed goes to it."""

from __future__ import annotations

import argparse
import os
import select
import sys
from typing import TYPE_CHECKING

from belljar.cli.parser import add_machine

if TYPE_CHECKING:
    from belljar.assembly import House

HELP = "Look at a running machine's serial console. Leave with Ctrl-]. What it said before is in `belljar logs ID --console`."
LEAVE = b"\x1d"  # Ctrl-]


def arguments(parser: argparse.ArgumentParser) -> None:
    add_machine(parser)


def run(args: argparse.Namespace, house: House) -> int:
    from belljar.jobs.users import reach
    from belljar.machine.life import control

    house, view = reach(house, args.machine)
    connection = control.connect(view.folder)
    control.ask(connection, "console")
    connection.settimeout(None)
    if not os.isatty(0):
        return _pump(connection.fileno())
    from belljar.jobs.terminal import RawTerminal

    terminal = RawTerminal(0)
    print(f"console of {view.id}; Ctrl-] leaves", file=sys.stderr)
    terminal.enter()
    try:
        return _pump(connection.fileno())
    finally:
        terminal.restore()


def _pump(console: int) -> int:
    """Bytes both ways until the machine ends, our input ends, or Ctrl-] is typed."""
    poller = select.poll()
    poller.register(console, select.POLLIN)
    poller.register(0, select.POLLIN)
    while True:
        for descriptor, _ in poller.poll():
            data = os.read(descriptor, 4096)
            if descriptor == console:
                if not data:
                    return 0
                os.write(1, data)
            elif not data:
                poller.unregister(0)
            elif LEAVE in data and os.isatty(0):
                return 0
            else:
                os.write(console, data)
