"""`belljar reap --batch [SYSTEM]`: end machines whose job the batch system does not know any more."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from belljar import batch
from belljar.jobs import orphans

if TYPE_CHECKING:
    from belljar.assembly import House


def run(args: argparse.Namespace, house: House) -> int:
    """Exit 1 when a system or a user's folder could not be asked, or something of a machine could not be cleared away."""
    from belljar.cli import complain
    from belljar.cli.render import show

    systems = batch.names() if args.batch == "all" else (args.batch,)
    found, trouble = orphans.settle(house, systems, dry=args.dry_run)
    if found or args.format == "json":
        rows = [tuple(one.values()) for one in found]
        show(found, ("USER", "MACHINE", "JOB", "WHAT"), rows, as_=args.format)
    for line in trouble:
        complain(line, "")
    return 1 if trouble else 0
