"""Wait for a lock of this host without blocking the loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from belljar.errors import LockTimeout
from belljar.host.locks import Lock, locked
from belljar.host.threads import in_thread

# Told what a job waits for that takes long, and of which image (its digest; "": none was measured); shows it while inside.
Showing = Callable[[str, str], AbstractContextManager[None]]


def in_silence(what: str, digest: str) -> AbstractContextManager[None]:
    return nullcontext()


async def lock_of(path: Path, *, timeout: float, what: str) -> Lock:
    """The lock, taken; release it. Whoever gives up waiting does not get it later either. Raises LockTimeout."""

    def take() -> Lock:
        with locked(path, timeout=timeout, what=what) as lock:
            held, lock.descriptor = Lock(path, lock.descriptor), -1
        return held

    try:
        async with asyncio.timeout(timeout):
            return await in_thread(take, undo=Lock.release)
    except TimeoutError as exc:
        raise LockTimeout(f"waited {timeout:g} s for another process that is about to {what}") from exc
