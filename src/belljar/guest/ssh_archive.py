"""What an ssh guest is sent at once, as a tar archive: the files of a payload, and root's own."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Sequence

from belljar.model import PlainFile


def unpacking(folder: str) -> str:
    """A command that makes a folder of ours from an archive on its standard input."""
    return f"umask 022; rm -rf {folder} && mkdir -p -m 0711 {folder} && tar -x -p -f - -C /"


def sorted_files(files: Sequence[PlainFile]) -> tuple[list[PlainFile], list[PlainFile]]:
    """Root's own files with contents, which the guest's tar puts in their places; and the others, which take a script."""
    quick = [file for file in files if file.data is not None and not file.is_users]
    return quick, [file for file in files if file.data is None or file.is_users]


def archive(folder: str, contents: dict[str, bytes], files: Sequence[PlainFile] = ()) -> bytes:
    """A tar archive, to be unpacked at the root: what goes into a folder of ours, and root's own files."""
    rows = [(f"{folder}/{name}", data, 0o644) for name, data in contents.items()]
    rows += [(os.fsdecode(file.path), file.data or b"", file.mode) for file in files]
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w", format=tarfile.GNU_FORMAT, errors="surrogateescape") as tar:
        for name, data, mode in rows:
            member = tarfile.TarInfo(name.lstrip("/"))
            member.size, member.mode = len(data), mode
            tar.addfile(member, io.BytesIO(data))
    return whole.getvalue()
