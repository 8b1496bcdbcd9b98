"""`belljar reap`: finish what dead supervisors left behind."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from belljar.cli.parser import add_format

if TYPE_CHECKING:
    from belljar.assembly import House

HELP = (
    "Finish what dead belljar processes left behind: kill their QEMU, remove their files, write their outcome. "
    "Machines that live are not touched. Every start of belljar does this too, for what it finds cheaply."
)


def arguments(parser: argparse.ArgumentParser) -> None:
    add_format(parser)


def run(args: argparse.Namespace, house: House) -> int:
    from belljar.cli.render import as_json, plain

    undone = list(house.machines.reap())
    if args.format == "json":
        print(as_json(undone))
    for line in undone if args.format == "table" else ():
        print(plain(str(line)))
    return 0
