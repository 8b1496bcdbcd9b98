"""`belljar image extract`, `insert`: files out of and into disks."""

from __future__ import annotations

import argparse
import os
import re
from typing import TYPE_CHECKING

from belljar.cli.parser import acts
from belljar.errors import BadOption, InputMissing, OutputUnwritable

if TYPE_CHECKING:
    from belljar.assembly import House
    from belljar.machine.workshop.workshop import Item

OWNER = re.compile(r"(\d{1,9})(?::(\d{1,9}))?")


def extract(args: argparse.Namespace, house: House) -> int:
    """Copy paths of a disk to here."""
    from belljar.jobs import disks

    if not disks.is_archive(args.output):
        names = [os.path.basename(os.path.normpath(path)) for path in args.paths]
        if doubled := sorted({name for name in names if names.count(name) > 1}):
            hint = "Extract them one by one, or into an archive."
            raise BadOption(f"two paths would be called {doubled[0]}", hint=hint)
        if not args.output.is_dir():
            raise OutputUnwritable(f"{args.output}: no such folder", hint="Make it, or name an archive: FILE.tar.")
    disks.extract(house, args.disk, args.paths, args.output)
    return 0


def insert(args: argparse.Namespace, house: House) -> int:
    """Make a new image of one, with files of this host."""
    from belljar.image.store.store import check_name
    from belljar.jobs import disks

    check_name(args.name)
    items = [_item(text, _mode(args.mode), _owner(args.owner)) for text in args.items]
    print(disks.insert(house, args.image, items, args.name).digest)
    return 0


def _item(text: str, mode: int | None, owner: tuple[int, int]) -> Item:
    from belljar.machine.workshop.workshop import Item

    source, colon, target = text.rpartition(":")
    if not colon or not source or not target.startswith("/"):
        raise BadOption(f"{text}: not of the form SRC:DST with an absolute DST")
    if not os.path.exists(source):
        raise InputMissing(f"{source}: does not exist", hint="Correct SRC:DST.")
    return Item(os.path.abspath(source), target, mode, owner)


def _mode(text: str | None) -> int | None:
    if text is None:
        return None
    if not re.fullmatch(r"[0-7]{3,4}", text):
        raise BadOption(f"--mode {text}: not of the form 644 or 0755")
    return int(text, 8)


def _owner(text: str) -> tuple[int, int]:
    found = OWNER.fullmatch(text)
    if not found:
        raise BadOption(f"--owner {text}: not of the form UID or UID:GID, in numbers")
    return int(found[1]), int(found[2] or found[1])


DISK = "IMAGE|ID @disk | an image, or a machine that has ended and was run with --keep"
ACTS = acts(
    f"""
    # extract | copy files and folders out of an image, or out of a kept machine
    {DISK}
    PATH + @paths | a path in it
    -o --output DIR|FILE.tar[.gz] :path =. | the folder they are copied into, as your own files; or an archive, with owners and
    | modes (default: .)
    # insert | make a new image of one, with files and folders put in
    IMAGE | name or digest; it stays as it is
    SRC:DST + @items | a path here and its absolute path in the image; a folder's / takes it in
    --name NAME ! | the new image's name
    --mode OCTAL | of what is put in (default: as it is here)
    --owner UID[:GID] =0:0 | of what is put in, in numbers (0:0)""",
    {"extract": extract, "insert": insert},
)
