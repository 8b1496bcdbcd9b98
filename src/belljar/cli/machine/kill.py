"""`belljar kill ID`: the machine's end, now."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from belljar.cli.several import add_machines, each

if TYPE_CHECKING:
    from belljar.assembly import House

HELP = "End machines at once, without asking their payloads. Returns when all are gone."


def arguments(parser: argparse.ArgumentParser) -> None:
    add_machines(parser)


def run(args: argparse.Namespace, house: House) -> int:
    from belljar.cli.machine.stop import end

    return each(args, lambda machine: end(house, machine, {"do": "kill"}))
