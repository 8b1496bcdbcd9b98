"""Files and folders to and from the guest, as tar streams. The tar code itself is the agent's (belljar/agent/transfer).

Inside, a process of the account's own does the copy, so that the guest's kernel checks what it may do. Outside, a thread
reads or writes the files; a `Bridge` stands between that thread and the event loop.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from belljar import errors
from belljar.agent.guest.system import Refused, shown
from belljar.agent.transfer.tar import CHUNK, Exchange, Packer, has_large
from belljar.agent.transfer.untar import unpack
from belljar.guest import ExchangeDisk, ExitStatus, Sink, Streams
from belljar.host.files import opened
from belljar.host.threads import in_thread
from belljar.model import Account, Transfer

if TYPE_CHECKING:
    from belljar.guest.process import Running

    Ours = Callable[[], "Refused | None"]
    Begin = Callable[[list[bytes], Account, bytes | None, Streams], Awaitable[Running]]  # a copy at the guest's side

ROOT = Account("root", 0, 0, "root", home="/root")
SAFE_MODE = 0o777  # a file from the guest gets no set-uid bit on the host
BROKEN_OFF = "broken"


async def put(begin: Begin, item: Transfer, account: Account, cwd: bytes | None, by: ExchangeDisk | None) -> None:
    source, target = os.fsencode(item.outside), os.fsencode(item.inside)
    try:
        os.stat(source)
    except OSError as exc:
        raise errors.InputMissing(f"{item.outside}: {exc.strerror}") from exc
    if by is not None and not await in_thread(lambda: has_large(source)):
        by = None
    bridge = Bridge(by)
    order = [b"put", target, by.serial if by else b"", _name_of(source)]
    process = await begin(order, account, cwd, Streams(bridge, None, None))
    status, trouble = await _both_ends(process, bridge, lambda: bridge.pack(source, item.skip))
    if trouble is not None:
        raise errors.InputMissing(trouble.message)
    _check(status, f"{shown(target)} in the guest")


async def get(begin: Begin, item: Transfer, account: Account, cwd: bytes | None, by: ExchangeDisk | None) -> None:
    source, target = os.fsencode(item.inside), os.fsencode(item.outside)
    bridge = Bridge(by)
    which = b"changed" if item.changed_only else b"all"
    order = [b"get", source, by.serial if by else b"", which, *map(os.fsencode, item.skip)]
    process = await begin(order, account, cwd, Streams(None, bridge, None))
    status, trouble = await _both_ends(process, bridge, lambda: bridge.unpack(target, _name_of(source)))
    if trouble is None or trouble.kind == "broken":  # what ended the guest's side broke ours too
        _check(status, f"{shown(source)} in the guest")
    if trouble is not None:
        raise _about_output(trouble)


async def collect(begin: Begin, paths: Sequence[str], sink: Sink) -> None:
    order = [b"collect", *map(os.fsencode, paths)]
    process = await begin(order, ROOT, b"/", Streams(None, sink, None))
    try:
        status = await process.wait()
    finally:
        await process.signal(signal.SIGKILL)
    if status.error != BROKEN_OFF and status.exit_code != 0 and status.signal != signal.SIGPIPE:
        raise errors.GuestRefused(status.message or f"the archive in the guest ended with {status}")


async def _both_ends(process: Running, bridge: Bridge, ours: Ours) -> tuple[ExitStatus, Refused | None]:
    """The guest's end of a copy, and in a thread *ours*: how each ended."""
    thread = asyncio.ensure_future(in_thread(ours))
    try:
        status = await process.wait()
        bridge.give_up()  # the guest may have given up before the end; what it had sent can still be read
        return status, await thread
    finally:
        bridge.give_up()
        await process.signal(signal.SIGKILL)
        bridge.clear()


def _name_of(path: bytes) -> bytes:
    """The name a file keeps when it is copied into a folder."""
    return os.path.basename(os.path.abspath(path))


def _check(status: ExitStatus, what: str) -> None:
    """Raise what the guest's end of the copy met."""
    message = status.message or f"{what}: the copy ended with {status}"
    if status.error == "missing":
        raise errors.OutputMissing(message)
    if status.error == "space":
        raise errors.GuestRefused(f"{message} (in the guest)", hint="Ask for a larger disk with `--disk`.")
    if status.exit_code != 0:
        raise errors.GuestRefused(message)


def _about_output(trouble: Refused) -> errors.BelljarError:
    if trouble.kind == "space":
        return errors.NoSpace(trouble.message)
    if trouble.kind == "refused":
        hint = "Correct `--out PATH[:DST]`: a folder you may write to, no special file."
        return errors.BadOption(trouble.message, hint=hint)
    sent = "the guest sent " if trouble.kind == "unsafe" else ""
    return errors.ProtocolViolation(sent + trouble.message)


class Bridge:
    """A stream between a thread, which may block, and the event loop: at the loop's end a `Source` and a `Sink`."""

    def __init__(self, by: ExchangeDisk | None) -> None:
        self._by = by
        self._loop = asyncio.get_running_loop()
        self._ours, self._threads = socket.socketpair()
        self._ours.setblocking(False)

    def __del__(self) -> None:
        self._ours.close()
        self._threads.close()

    async def read(self, limit: int) -> bytes:
        return await self._loop.sock_recv(self._ours, limit)

    async def write(self, data: bytes) -> None:
        await self._loop.sock_sendall(self._ours, data)

    async def close(self) -> None:
        with suppress(OSError):
            self._ours.shutdown(socket.SHUT_WR)

    def give_up(self) -> None:
        """The thread finds its stream closed."""
        with suppress(OSError):
            self._ours.shutdown(socket.SHUT_RDWR)

    def clear(self) -> None:
        """What lay on the exchange disk takes no more room."""
        if self._by is not None:
            size = os.stat(self._by.path).st_size
            os.truncate(self._by.path, 0)
            os.truncate(self._by.path, size)

    def pack(self, source: bytes, skip: tuple[str, ...]) -> Refused | None:
        """In the thread, once. A stream that failed ends without its last blocks, so the guest knows."""
        with self._threads, suppress(BrokenPipeError):
            try:
                with self._threads.makefile("wb", CHUNK) as whole, self._exchange() as exchange:
                    Packer(whole.write, map(os.fsencode, skip), exchange=exchange).pack(source)
            except Refused as exc:
                return exc
            except BrokenPipeError:
                raise
            except OSError as exc:
                return Refused("refused", f"{shown(source)}: {exc.strerror}")
        return None

    def unpack(self, target: bytes, name: bytes) -> Refused | None:
        """In the thread, once."""
        with self._threads:
            try:
                with self._exchange() as exchange:
                    unpack(self._threads.recv, target, name, SAFE_MODE, exchange)
            except Refused as exc:
                return exc
        return None

    @contextmanager
    def _exchange(self) -> Iterator[Exchange | None]:
        if self._by is None:
            yield None
            return
        with opened(self._by.path, os.O_RDWR | os.O_NOFOLLOW) as descriptor:
            yield Exchange(descriptor, False)
