"""`belljar cp`: files into or out of a running machine."""

from __future__ import annotations

import argparse
import asyncio
import os
from typing import TYPE_CHECKING

from belljar import batch
from belljar.errors import BadOption, InputMissing, OutputMissing, OutputUnwritable

if TYPE_CHECKING:
    from belljar.assembly import House
    from belljar.machine import MachineView

HELP = "Copy a file or folder into or out of a running machine: one of SRC and DST is ID:PATH, the other a path here."


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--user", metavar="NAME|UID[:GID]", help="who reads and writes in the guest (default: the machine's user)"
    )
    parser.add_argument("source", metavar="SRC", help="PATH here, or ID:PATH in the machine")
    parser.add_argument("target", metavar="DST", help="ID:PATH in the machine, or PATH here")


def run(args: argparse.Namespace, house: House) -> int:
    from belljar.jobs.users import reach

    source_id, source = split(args.source)
    target_id, target = split(args.target)
    if bool(source_id) == bool(target_id):
        raise BadOption(
            "one of SRC and DST must be ID:PATH, the other a path here",
            hint="For example: belljar cp 3f2a:/etc/os-release .",
        )
    if target_id and not os.path.lexists(source):
        raise InputMissing(f"{source}: does not exist", hint="Correct SRC.")
    house, view = reach(house, source_id or target_id)
    if source_id and os.path.isdir(target):
        target = os.path.join(target, os.path.basename(source.rstrip("/")) or source_id)
    if source_id and not os.path.isdir(os.path.dirname(target)):
        raise OutputUnwritable(
            f"{os.path.dirname(target)}: no such folder here", hint="Make it, or name another place."
        )
    asyncio.run(_copy(house, view, source, target, args.user, into=bool(target_id)))
    return 0


def split(text: str) -> tuple[str, str]:
    """(ID, PATH), or ("", PATH) for a path here: one with a slash before its first colon, or without a colon."""
    id, colon, path = text.partition(":")
    if colon and id in batch.names():  # a batch id has a colon of its own
        number, colon, path = path.partition(":")
        id = f"{id}:{number}"
    if not colon or "/" in id or os.path.lexists(text):
        return "", os.path.abspath(text)
    if not id or not path:
        raise BadOption(f"{text}: not of the form ID:PATH")
    return id, path


async def _copy(house: House, view: MachineView, source: str, target: str, user: str | None, *, into: bool) -> None:
    from belljar.cli.machine import request as words
    from belljar.machine.outside.talking import account_of, talk

    account = words.account_of(user) if user else account_of(view) or words.account_of(None)
    cwd = os.fsencode(str(view.payload.get("cwd") or "/"))
    try:
        async with talk(view, house.converse) as guest:
            if into:
                await guest.put(source, target, account, cwd)
            else:
                await guest.get(source, target, account, cwd)
    except OutputMissing as exc:
        raise OutputMissing(exc.message, hint="Correct ID:PATH.") from exc
