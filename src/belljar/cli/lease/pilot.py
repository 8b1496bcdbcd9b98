"""`belljar pilot`: the job that the batch system starts on each node of a lease. For `belljar lease serve`, not for people."""

from __future__ import annotations

import os

from belljar.assembly import House
from belljar.cli.parser import Args, Verb

OPTIONS = """
FILE | the job file that the service wrote, mode 0600
--rank N | number of this node among those of its job; default: as the batch system says"""


def run(args: Args, house: House) -> int:
    from belljar.lease.pilot.start import run

    return run(args.file, args.rank, house.folders.logs / "pilots", house.folders.scratch, os.environ)


VERBS = {
    "pilot": Verb("Hold a node for a lease: make its machines as its service says, and end them in time.", run, OPTIONS)
}
