"""One act on several machines: each in a process of its own, all at once, so that one that goes wrong keeps no other, and
root can become the user of each."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import NoReturn

from belljar.errors import OUR_FAILURE


def add_machines(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "machines", nargs="+", metavar="ID",
        help="the machine's id, a unique prefix of it, its name, or its batch job's id (slurm:4711); root: USER/ID too",
    )  # fmt: skip


def each(args: argparse.Namespace, act: Callable[[str], int]) -> int:
    """The exit code of the first that has one other than 0, in the order they were named."""
    names = list(dict.fromkeys(args.machines))
    if len(names) == 1:
        args.machine = names[0]  # for hints
        return act(names[0])
    children = [_begin(args, one, act) for one in names]
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    return next((code if code > 0 else 128 - code for code in codes if code), 0)


def _begin(args: argparse.Namespace, machine: str, act: Callable[[str], int]) -> int:
    child = os.fork()
    if child == 0:
        _be(args, machine, act)
    return child


def _be(args: argparse.Namespace, machine: str, act: Callable[[str], int]) -> NoReturn:
    from belljar.cli import told, with_hints

    code, args.machine = OUR_FAILURE, machine
    try:
        code = told(lambda: with_hints(lambda: act(machine), args), detail=args.verbose)
    finally:
        os._exit(code)
