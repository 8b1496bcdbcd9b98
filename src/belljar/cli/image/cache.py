"""`belljar cache ...`: the disks that machines of this user find again (`belljar run --cache`)."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from belljar.cli.parser import add_format, as_size

if TYPE_CHECKING:
    from belljar.assembly import House
    from belljar.machine.extras.cache import Cache

HELP = (
    "Prepare, list and remove cache disks: `belljar run --cache SIZE` gives a machine one that no other machine has, and that"
    " keeps what is on it when the guest powers itself off."
)
HEADS = ("NUMBER", "STATE", "SIZE", "STORED", "FILE")


def arguments(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="what", required=True, metavar="WHAT")
    prepare = verbs.add_parser("prepare", help="have caches ready before machines ask for them")
    prepare.add_argument("--count", type=int, default=1, metavar="N", help="how many, in all (1)")
    prepare.add_argument("--size", type=as_size, required=True, metavar="SIZE", help="such as 20G; sparse at first")
    add_format(prepare)
    add_format(verbs.add_parser("list", help="list the caches"))
    add_format(verbs.add_parser("remove", help="remove every cache that no machine has"))


def run(args: argparse.Namespace, house: House) -> int:
    from belljar.errors import BadOption
    from belljar.machine.extras import cache as caches

    if args.what == "prepare":
        if args.count < 1 or args.count > caches.MOST:
            raise BadOption(f"--count {args.count}: from 1 to {caches.MOST}")
        list(caches.prepare(house.folders, args.count, args.size))
    if args.what == "remove":
        return _show(list(caches.remove(house.folders)), args.format, is_gone=True)
    return _show(caches.found(house.folders), args.format)


def _show(caches: list[Cache], form: str, *, is_gone: bool = False) -> int:
    from belljar.cli.render import show, size

    values, rows = [], []
    for cache in caches:
        facts = None if is_gone else cache.path.stat()
        state, length = ("removed", 0) if facts is None else (cache.state(), facts.st_size)
        stored = 0 if facts is None else facts.st_blocks * 512
        values.append(
            {"number": cache.number, "state": state, "size": length, "stored": stored, "path": str(cache.path)}
        )
        rows.append((cache.number, state, size(length), size(stored), cache.path))
    show(values, HEADS, rows, as_=form)
    return 0
