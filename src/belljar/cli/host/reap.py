"""`belljar reap`: finish what dead supervisors left behind; with --batch end what outlived its batch job too."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from belljar import batch
from belljar.cli.parser import add_format

if TYPE_CHECKING:
    from belljar.assembly import House

HELP = (
    "Finish what dead belljar processes left behind: kill their QEMU, remove their files, write their outcome. "
    "Machines that live are not touched. Every start of belljar does this too, for what it finds cheaply. With --batch, "
    "machines whose job is gone are ended too: jobs that the batch system did not know in two answers, `batch.gone_after` "
    "apart. A system that cannot be asked knows all its jobs. Root does it for every user of the node (`paths.node`). Exit 1 when something could not be "
    "finished; it keeps nothing else from being."
)


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-n", "--dry-run", action="store_true", help="only say what would be undone")
    parser.add_argument(
        "--batch",
        nargs="?",
        const="all",
        choices=("all", *batch.names()),
        metavar="SYSTEM",
        help="ask the batch systems which jobs live, or only this one",
    )
    add_format(parser)


def run(args: argparse.Namespace, house: House) -> int:
    if args.batch:
        from belljar.cli.batch import clean as batch_clean

        return batch_clean.run(args, house)
    from belljar.cli.render import show

    undone = house.machines.leftovers() if args.dry_run else house.machines.reap()
    if undone or args.format == "json":
        rows = [(one.machine, one.what, one.path, one.error) for one in undone]
        show(list(undone), ("MACHINE", "WHAT", "WHERE", "ERROR"), rows, as_=args.format)
    return 1 if any(one.error for one in undone) else 0
