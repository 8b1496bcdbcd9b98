"""`belljar kill-all`: end every machine of this host, even when settings, store and all else are broken.

It looks at nothing but /proc: a QEMU process of ours carries its mark on its command line, whoever started it.
Supervisors that live notice the death of their machine and clean up; what dead ones left is `belljar reap`'s.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from typing import NamedTuple

from belljar.cli.parser import FORMAT, Verb
from belljar.cli.render import show
from belljar.host import processes

MARK = re.compile(rb"(?:^|,)guest=belljar-([A-Za-z0-9._-]{1,80})(?:,|$)")
DEADLINE = 10.0  # seconds until a killed process must be gone


class Found(NamedTuple):
    """A QEMU process of ours."""

    machine: str
    pid: int
    owner: int


def kill_all(args: argparse.Namespace, house: None) -> int:
    found = [one for one in marked() if os.geteuid() in (0, one.owner)]
    survivors = [] if args.dry_run else processes.kill_and_wait([one.pid for one in found], timeout=DEADLINE)
    results = [
        {"machine": one.machine, "pid": one.pid, "owner": one.owner, "result": _result(one, survivors, args.dry_run)}
        for one in found
    ]
    show(results, ("MACHINE", "PID", "OWNER", "RESULT"), [tuple(each.values()) for each in results], as_=args.format)
    return 1 if survivors else 0


def marked() -> Iterator[Found]:
    """Every process with belljar's mark behind `-name`."""
    for pid in processes.all_pids():
        with suppress(OSError):
            argv = processes.command_line(pid)
            for flag, value in pairwise(argv):
                if flag == b"-name" and (mark := MARK.search(value)):
                    owner = os.stat(processes.PROC / str(pid)).st_uid
                    yield Found(mark.group(1).decode(), pid, owner)
                    break


def _result(one: Found, survivors: list[int], dry: bool) -> str:
    if dry:
        return "would be killed"
    return f"still there after {DEADLINE:.0f} s (the kernel holds it)" if one.pid in survivors else "killed"


VERBS = {
    "kill-all": Verb(
        "Kill every QEMU process that carries belljar's mark, all at once, and report what became of each. Root: those of "
        "every user; others: their own. Needs no settings, no store and no running belljar.",
        kill_all,
        f"""
        -n --dry-run | only say what would be killed
        {FORMAT}""",
        needs_house=False,
    )
}
