"""Images that are a tree of files: a folder, or the squashfs in a file of Apptainer's. Each becomes one plain tar file, the only layer.

SIF: https://github.com/apptainer/sif/blob/main/pkg/sif/sif.go"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import IO, Any

from belljar.errors import CommandFailed, CommandMissing, ImageCorrupt, ImageUnfit
from belljar.host import commands
from belljar.image.container import FOREIGN, malformed
from belljar.image.intake import sandbox
from belljar.image.progress import Progress

MAGIC = b"SIF_MAGIC\0"
# Launch, magic, version, arch, uuid, times, descriptors, places and sizes.
HEADER = struct.Struct("<32s10s3s3s16sqqqqqqqq")
DESCRIPTOR = struct.Struct("<i?IIIqqqqqqq128s384s")  # type, used, id, group, link, offset, size, ..., name, extra
PARTITION, SQUASHFS, PRIMARY, AMD64 = 0x4004, 1, 2, b"02\0"
MOST_DESCRIPTORS = 1000
OUTSIDE = ("./proc/*", "./sys/*", "./dev/*", "./run/*")


def packed(source: str, folder: Path, largest: int, progress: Progress) -> tuple[Path, dict[str, Any]]:
    """The tar file of such a source, in *folder*, and what is known of how it starts. An ordinary user's folder becomes root's in the
    image, as in Apptainer's."""
    kind, _, place = source.partition(":")
    target = folder / "tree.tar"
    progress.step(f"Packing {source}")
    if kind == "sif":
        part = folder / "part.squashfs"
        with open(place, "rb") as file, open(part, "xb") as out, malformed(source):
            _copy_partition(source, file, out, largest)
        try:
            sandbox.run(["sqfs2tar", "{0}"], [part], sandbox.CONVERSION, largest, stdout=target)
        except CommandMissing as exc:
            remedy = commands.remedy(commands.SQUASHFS)
            raise CommandMissing(exc.message, hint=f"Apptainer's images need it. As root: {remedy}") from exc
        part.unlink()
        return target, {"Cmd": ["/.singularity.d/runscript"]}
    owner = () if os.geteuid() == 0 else ("--owner=0", "--group=0")
    argv = ["tar", "--create", f"--directory={os.path.abspath(place)}", "--numeric-owner", "--sparse", "--xattrs",
            "--xattrs-include=*", *owner, *(f"--exclude={path}" for path in OUTSIDE), "."]  # fmt: skip
    try:
        sandbox.run_in(folder, argv, sandbox.CONVERSION, largest, with_owners=os.geteuid() == 0, stdout=target)
    except CommandFailed as exc:
        hint = "All its files must be readable."
        raise ImageUnfit(f"{source}: {exc.message.strip().splitlines()[-1]}", hint=hint) from exc
    return target, {}


def _copy_partition(source: str, file: IO[bytes], out: IO[bytes], largest: int) -> None:
    """The file system with the root. Raises ImageCorrupt, ImageUnfit."""
    head = HEADER.unpack(file.read(HEADER.size))
    if head[1] != MAGIC:
        raise ImageCorrupt(f"{source}: not an image of Apptainer's")
    if head[3] != AMD64:
        raise ImageUnfit(f"{source}: is for another architecture than amd64", hint=FOREIGN)
    total, place = head[8], head[9]
    file.seek(place)
    for _ in range(min(total, MOST_DESCRIPTORS)):
        kind, used, *_, extra = entry = DESCRIPTOR.unpack(file.read(DESCRIPTOR.size))
        filesystem, role = struct.unpack_from("<ii", extra)
        if used and kind == PARTITION and role == PRIMARY:
            if filesystem != SQUASHFS:
                hint = "Give an image that is not encrypted."
                raise ImageUnfit(f"{source}: its root is encrypted, or no squashfs", hint=hint)
            offset, size = entry[5], entry[6]
            if not 0 < size <= largest or offset < 0:
                raise ImageCorrupt(f"{source}: a partition of {size} bytes")
            while size and (sent := os.sendfile(out.fileno(), file.fileno(), offset, size)):
                offset, size = offset + sent, size - sent
            return
    raise ImageCorrupt(f"{source}: has no root file system")
