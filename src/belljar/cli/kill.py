"""`belljar kill ID`: the machine's end, now."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from belljar.cli.parser import add_machine

if TYPE_CHECKING:
    from belljar.assembly import House

HELP = "End a machine at once, without asking its payload. Returns when it is gone."


def arguments(parser: argparse.ArgumentParser) -> None:
    add_machine(parser)


def run(args: argparse.Namespace, house: House) -> int:
    from belljar.cli.stop import end

    return end(house, args.machine, {"do": "kill"})
