"""Wait for a lock of this host without blocking the loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from pathlib import Path

from belljar.errors import LockTimeout
from belljar.host.locks import Lock, locked, try_lock
from belljar.host.threads import in_thread
from belljar.image import Image, ImageStore
from belljar.model import MachineId

# Told what a job waits for that takes long, and of which image (its digest; "": none was measured); shows it while inside.
Showing = Callable[[str, str], AbstractContextManager[None]]


def in_silence(what: str, digest: str) -> AbstractContextManager[None]:
    return nullcontext()


async def lock_of(path: Path, *, timeout: float, what: str, shared: bool = False) -> Lock:
    """The lock, taken; release it. Whoever gives up waiting does not get it later either. Raises LockTimeout."""
    if (free := try_lock(path, shared=shared)) is not None:
        return free

    def take() -> Lock:
        with locked(path, timeout=timeout, what=what, shared=shared) as lock:
            held, lock.descriptor = Lock(path, lock.descriptor), -1
        return held

    try:
        async with asyncio.timeout(timeout):
            return await in_thread(take, undo=Lock.release)
    except TimeoutError as exc:
        raise LockTimeout(f"waited {timeout:g} s for another process that is about to {what}") from exc


@asynccontextmanager
async def holding(images: ImageStore, image: Image, id: MachineId) -> AsyncIterator[None]:
    """`images.hold`, without blocking the loop while somebody else has the image for himself."""
    try:
        hold = images.hold(image, id, patience=0.0)
        hold.__enter__()
    except LockTimeout:
        hold = images.hold(image, id)
        await in_thread(hold.__enter__, undo=lambda _: hold.__exit__(None, None, None))
    try:
        yield
    finally:
        hold.__exit__(None, None, None)
