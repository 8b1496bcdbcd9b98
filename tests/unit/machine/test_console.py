"""The serial console's log: bounded, and whole whatever happens to it."""

import asyncio
import socket
from pathlib import Path

from belljar.machine import CONSOLE_LOG
from belljar.machine.life.output import HALF, Console


async def log_of(folder: Path, data: bytes) -> None:
    """The guest writes this, and ends."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for end in (ours, theirs):
            end.setblocking(False)
        console = Console(folder, ours)
        running = asyncio.ensure_future(console.run())
        await asyncio.get_running_loop().sock_sendall(theirs, data)
        theirs.close()
        await running
        console.close()


async def test_the_log_keeps_the_newest_part(tmp_path: Path) -> None:
    await log_of(tmp_path, b"old" + bytes(HALF) + b"new")
    newest, before = ((tmp_path / name).stat().st_size for name in (CONSOLE_LOG, f"{CONSOLE_LOG}.1"))
    assert newest + before == HALF + 6 and before > HALF


async def test_a_log_that_cannot_be_begun_anew_goes_on(tmp_path: Path) -> None:
    """And its descriptor stays its own: one that was closed is the next file's, and the guest would write there."""
    (tmp_path / f"{CONSOLE_LOG}.1").mkdir()  # so the rename fails; on a full disk the opening does
    await log_of(tmp_path, bytes(HALF * 2))
    assert (tmp_path / CONSOLE_LOG).stat().st_size == HALF * 2
