"""`belljar reap`: finish what dead supervisors left behind; with --batch end what outlived its batch job too."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from belljar import batch
from belljar.cli.parser import FORMAT, Verb, add
from belljar.cli.render import show

if TYPE_CHECKING:
    from belljar.assembly import House


def reap(args: argparse.Namespace, house: House) -> int:
    """Exit 1 when a system or a user's folder could not be asked, or something of a machine could not be cleared away."""
    if args.batch:
        return _reap_batch(args, house)
    undone = house.machines.leftovers() if args.dry_run else house.machines.reap()
    if undone or args.format == "json":
        rows = [(one.machine, one.what, one.path, one.error) for one in undone]
        show(list(undone), ("MACHINE", "WHAT", "WHERE", "ERROR"), rows, as_=args.format)
    return 1 if any(one.error for one in undone) else 0


def _reap_batch(args: argparse.Namespace, house: House) -> int:
    from belljar.cli import complain
    from belljar.jobs import orphans

    systems = batch.names() if args.batch == "all" else (args.batch,)
    found, trouble = orphans.settle(house, systems, dry=args.dry_run)
    if found or args.format == "json":
        rows = [tuple(one.values()) for one in found]
        show(found, ("USER", "MACHINE", "JOB", "WHAT"), rows, as_=args.format)
    for line in trouble:
        complain(line, "")
    return 1 if trouble else 0


def _options(parser: argparse.ArgumentParser) -> None:
    add(parser, "-n --dry-run | only say what would be undone")
    parser.add_argument(
        "--batch", nargs="?", const="all", choices=("all", *batch.names()), metavar="SYSTEM",
        help="ask the batch systems which jobs live, or only this one",
    )  # fmt: skip
    add(parser, FORMAT)


VERBS = {
    "reap": Verb(
        "Finish what dead belljar processes left behind: kill their QEMU, remove their files, write their outcome. "
        "Machines that live are not touched. Every start of belljar does this too, for what it finds cheaply. With --batch, "
        "machines whose job is gone are ended too: jobs that the batch system did not know in two answers, `batch.gone_after` "
        "apart. A system that cannot be asked knows all its jobs. Root does it for every user of the node (`paths.node`). Exit 1 "
        "when something could not be finished; it keeps nothing else from being.",
        reap,
        _options,
    )
}
