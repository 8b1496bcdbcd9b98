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
    parser.add_argument("-n", "--dry-run", action="store_true", help="only say what would be undone")
    add_format(parser)


def run(args: argparse.Namespace, house: House) -> int:
    from belljar.cli.render import show

    undone = house.machines.leftovers() if args.dry_run else house.machines.reap()
    if undone or args.format == "json":
        rows = [(one.machine, one.what, one.path) for one in undone]
        show(list(undone), ("MACHINE", "WHAT", "WHERE"), rows, as_=args.format)
    return 0
