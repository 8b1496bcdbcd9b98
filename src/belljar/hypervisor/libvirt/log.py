"""libvirt's own log of a domain: a file for each, which libvirt keeps for ever. Where it is ours to take away, what QEMU
said goes to the machine's records, and the file goes with the machine."""

from __future__ import annotations

import os
import re
from collections.abc import Container
from contextlib import suppress
from pathlib import Path

MACHINE = re.compile(r"[0-9a-f]{12}")
OVER = 60.0  # seconds without a word, after which the log of a domain without a process is over
LONGEST = 64 << 10  # bytes from the end of it that are read
# libvirt's own lines: the command with its variables, one word a line, and what begins with the time in this form.
LIBVIRTS = re.compile(rb"\\$|-msg timestamp=on$|\d{4}-\d\d-\d\d [\d:.]+\+0000: ")


def default_log_folder(uid: int) -> Path:
    """https://libvirt.org/kbase/debuglogs.html"""
    return Path("/var/log/libvirt/qemu") if uid == 0 else Path(os.path.expanduser("~/.cache/libvirt/qemu/log"))


def take_over(log: Path, into: Path) -> None:
    """Append what QEMU said to *into*, and remove the log. Raises OSError."""
    words = said_by_qemu(log)
    log.unlink()
    if words:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        with open(os.open(into, flags, 0o600), "wb", buffering=0) as file:
            file.write(words)


def said_by_qemu(log: Path) -> bytes:
    with open(log, "rb") as file:
        file.seek(max(os.fstat(file.fileno()).st_size - LONGEST, 0))
        lines = file.read(LONGEST).splitlines()
    return b"".join(line + b"\n" for line in lines if not LIBVIRTS.search(line))


def sweep(folder: Path, prefix: str, living: Container[str], now: float) -> None:
    """Remove the logs of machines that are gone: a daemon that hears of an end late writes that into a new file."""
    with suppress(OSError):
        for log in os.scandir(folder):
            id = log.name.removeprefix(prefix).removesuffix(".log")
            is_ours = log.name == f"{prefix}{id}.log" and MACHINE.fullmatch(id)
            if is_ours and id not in living and now - log.stat(follow_symlinks=False).st_mtime > OVER:
                os.unlink(log.path)
