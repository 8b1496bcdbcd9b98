"""Files and folders to and from the guest, as tar streams. The tar code itself is the agent's (belljar/agent/tar.py).

Inside, the copy is done by a process of the account's own, so that the guest's kernel checks what it may do. Outside, a
thread of ours reads or writes the files; a `Bridge` stands between that thread and the event loop.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from belljar.agent.guest.system import shown
from belljar.agent.transfer.tar import CHUNK, TransferError, pack
from belljar.agent.transfer.untar import unpack
from belljar.errors import (
    BelljarError,
    GuestRefused,
    InputMissing,
    NoSpace,
    OutputMissing,
    OutputUnwritable,
    ProtocolViolation,
)
from belljar.guest import ExitStatus, Sink, Streams
from belljar.host.threads import in_thread
from belljar.model import Account, Transfer

if TYPE_CHECKING:
    from belljar.guest.process import Running

    Begin = Callable[[list[bytes], Account, bytes | None, Streams], Awaitable[Running]]  # a copy at the guest's side

T = TypeVar("T")
ROOT = Account("root", 0, 0, "root", home="/root")
SAFE_MODE = 0o777  # a file from the guest gets no set-uid bit on the host
QUEUED = 2  # chunks between the thread and the loop
BROKEN_OFF = "over"


async def put(begin: Begin, item: Transfer, account: Account, cwd: bytes | None) -> None:
    """See `Guest.put`."""
    source, target = os.fsencode(item.outside), os.fsencode(item.inside)
    try:
        os.stat(source)
    except OSError as exc:
        raise InputMissing(f"{item.outside}: {exc.strerror}") from exc
    bridge = Giver()
    order = [b"put", target, _name_of(source)]
    process = await begin(order, account, cwd, Streams(bridge, None, None))
    packing = asyncio.ensure_future(in_thread(lambda: _pack(source, bridge, item.skip)))
    try:
        status = await process.wait()
        bridge.break_off()  # where the guest gave up before the end
        trouble = await packing
    finally:
        bridge.break_off()
        await process.signal(signal.SIGKILL)
    if trouble is not None and trouble.kind != BROKEN_OFF:
        raise InputMissing(trouble.message)
    _check(status, f"{shown(target)} in the guest")


async def get(begin: Begin, item: Transfer, account: Account, cwd: bytes | None) -> None:
    """See `Guest.get`."""
    source, target = os.fsencode(item.inside), os.fsencode(item.outside)
    bridge = Taker()
    order = [b"get", source, b"changed" if item.changed_only else b"all", *map(os.fsencode, item.skip)]
    process = await begin(order, account, cwd, Streams(None, bridge, None))
    unpacking = asyncio.ensure_future(in_thread(lambda: _unpack(target, _name_of(source), bridge)))
    unpacking.add_done_callback(lambda _: bridge.break_off())
    try:
        status = await process.wait()
        trouble = await unpacking
    finally:
        bridge.break_off()
        await process.signal(signal.SIGKILL)
    if trouble is not None and trouble.kind not in (BROKEN_OFF, "broken"):
        raise _about_output(trouble)
    _check(status, f"{shown(source)} in the guest")  # what ended the guest's side broke ours too
    if trouble is not None:
        raise _about_output(trouble)


async def collect(begin: Begin, paths: Sequence[str], sink: Sink) -> None:
    """See `Guest.collect`."""
    order = [b"collect", *map(os.fsencode, paths)]
    process = await begin(order, ROOT, b"/", Streams(None, sink, None))
    try:
        status = await process.wait()
    finally:
        await process.signal(signal.SIGKILL)
    if status.error != BROKEN_OFF and status.exit_code != 0 and status.signal != signal.SIGPIPE:
        raise GuestRefused(status.message or f"the archive in the guest ended with {status}")


def _name_of(path: bytes) -> bytes:
    """The name a file keeps when it is copied into a folder."""
    return os.path.basename(os.path.abspath(path))


def _pack(source: bytes, bridge: Giver, skip: tuple[str, ...]) -> TransferError | None:
    """In the thread. The stream's end is given in any case: without its last blocks the guest knows it is not whole."""
    try:
        pack(source, bridge.give, map(os.fsencode, skip))
        return None
    except TransferError as exc:
        return exc
    except OSError as exc:
        return TransferError("refused", f"{shown(source)}: {exc.strerror}")
    finally:
        with suppress(TransferError):
            bridge.end()


def _unpack(target: bytes, name: bytes, bridge: Taker) -> TransferError | None:
    """In the thread."""
    try:
        unpack(bridge.take, target, name, SAFE_MODE)
        return None
    except TransferError as exc:
        return exc


def _check(status: ExitStatus, what: str) -> None:
    """Raise what the guest's end of the copy met."""
    message = status.message or f"{what}: the copy ended with {status}"
    if status.error == "missing":
        raise OutputMissing(message)
    if status.error == "space":
        raise GuestRefused(f"{message} (in the guest)", hint="Ask for a larger disk with `--disk`.")
    if status.exit_code != 0:
        raise GuestRefused(message)


def _about_output(trouble: TransferError) -> BelljarError:
    if trouble.kind == "space":
        return NoSpace(trouble.message)
    if trouble.kind == "refused":
        return OutputUnwritable(trouble.message)
    return ProtocolViolation(f"the guest sent {trouble.message}" if trouble.kind == "unsafe" else trouble.message)


class Bridge:
    """Chunks between a thread that may block and the event loop, which may not."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[bytes] = asyncio.Queue(QUEUED)
        self._pending: Future[Any] | None = None
        self._rest = memoryview(b"")
        self.is_broken = False

    def break_off(self) -> None:
        """Let the other side go. The thread's next step raises TransferError."""
        self.is_broken = True
        if self._pending is not None:
            self._pending.cancel()
        with suppress(asyncio.QueueEmpty):
            while True:
                self._queue.get_nowait()

    def _cut(self, limit: int) -> bytes:
        data, self._rest = bytes(self._rest[:limit]), self._rest[limit:]
        return data

    def _wait_for(self, work: Coroutine[Any, Any, T]) -> T:
        """In the thread: have the loop do it."""
        try:
            pending: Future[T] = asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError as exc:  # the loop is closed
            work.close()
            raise TransferError(BROKEN_OFF, "the copy was broken off") from exc
        self._pending = pending
        if self.is_broken:
            pending.cancel()
        try:
            return pending.result()
        except CancelledError as exc:
            raise TransferError(BROKEN_OFF, "the copy was broken off") from exc


class Giver(Bridge):
    """The thread gives, the loop reads: a `Source`."""

    def __init__(self) -> None:
        super().__init__()
        self._parts: list[bytes] = []
        self._size = 0

    async def read(self, limit: int) -> bytes:
        if not self._rest:
            self._rest = memoryview(await self._queue.get())
        return self._cut(limit)

    def give(self, data: bytes) -> None:
        """In the thread. Small pieces are collected."""
        self._parts.append(data)
        self._size += len(data)
        if self._size >= CHUNK:
            self._flush()

    def end(self) -> None:
        self._flush()
        self._wait_for(self._queue.put(b""))

    def _flush(self) -> None:
        whole, self._parts, self._size = b"".join(self._parts), [], 0
        if whole:
            self._wait_for(self._queue.put(whole))


class Taker(Bridge):
    """The loop writes, the thread takes: a `Sink`."""

    async def write(self, data: bytes) -> None:
        if not self.is_broken:
            await self._queue.put(data)
        if self.is_broken:
            raise BrokenPipeError

    async def close(self) -> None:
        if not self.is_broken:
            await self._queue.put(b"")

    def take(self, limit: int) -> bytes:
        """In the thread: up to *limit* bytes, b"" at the end."""
        if not self._rest:
            self._rest = memoryview(self._wait_for(self._queue.get()))
        return self._cut(limit)
