"""Guest memory that other processes may map, too: an unnamed file of one machine's own, a clone's a copy of its template's."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

from belljar.errors import HostError, NoMemory, TemplateError
from belljar.host.threads import in_thread
from belljar.model import MIB

PIECE = 16 * MIB


async def own_memory(size: int, source: Path | None) -> int:
    """A descriptor of *size* bytes: zeros, or what is in *source*, a file with holes, and not its holes. It takes as long
    as the bytes are many, and holds up nobody else. Raises NoMemory, HostError, TemplateError. Cancelled, it leaves nothing."""
    is_wanted = True
    try:
        return await in_thread(lambda: make(size, source, lambda: is_wanted), undo=os.close)
    except BaseException:
        is_wanted = False
        raise


def make(size: int, source: Path | None, goes_on: Callable[[], bool] = lambda: True) -> int:
    """As `own_memory`, in this thread. What it returns when it does not go on is of no use."""
    fd = os.memfd_create("belljar-ram", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, size)
        if source is not None:
            original = os.open(source, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                copy_data(original, fd, size, goes_on)
            finally:
                os.close(original)
    except FileNotFoundError as exc:
        os.close(fd)
        raise TemplateError(f"the template cannot be used any more: {source}: missing") from exc
    except OSError as exc:
        os.close(fd)
        what = f"the guest's memory of {size // MIB} MiB"
        if exc.errno == errno.EFBIG:
            raise HostError(
                f"{what} is more than a file may have here",
                hint="Raise the limit on the size of files (`ulimit -f`), or share folders without `virtiofs:`.",
            ) from exc
        raise NoMemory(f"{what} cannot be had: {exc.strerror or exc}") from exc
    return fd


def copy_data(source: int, target: int, size: int, goes_on: Callable[[], bool] = lambda: True) -> None:
    """What is in *source*, and none of its holes."""
    at = 0
    while at < size:
        try:
            at = os.lseek(source, at, os.SEEK_DATA)
        except OSError as exc:
            if exc.errno == errno.ENXIO:
                return  # nothing but a hole until the end
            raise
        end = min(os.lseek(source, at, os.SEEK_HOLE), size)
        os.lseek(target, at, os.SEEK_SET)
        while at < end and goes_on():
            count = os.sendfile(target, source, at, min(end - at, PIECE))
            if count == 0:
                raise OSError(errno.EIO, "it ends before its size")
            at += count
        if at < end:
            return
