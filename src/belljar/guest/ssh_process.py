"""A payload behind an ssh server: its streams on one session, its record read from another."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from belljar.errors import AgentLost, GuestError, HostError
from belljar.guest import ExitStatus, Sink, Source, Streams
from belljar.guest.process import STDERR, STDOUT, sink_error
from belljar.guest.ssh_link import Link, library, lost, whole
from belljar.guest.ssh_record import read_record

if TYPE_CHECKING:
    import asyncssh

    Watcher = asyncssh.SSHClientProcess[bytes]

CHUNK = 1 << 16
GONE = (BrokenPipeError, ConnectionResetError)
RECORD_SECONDS = 5.0
HELD_SECONDS = 10.0  # after the end, for bytes that are still on their way
END_OF_LINE = b"\x04"  # what a terminal takes for the end of its input, at the begin of a line
LARGEST_RECORD = 4096
BEGIN_SECONDS = 60.0  # for the guest's scripts to come to the payload


class SshProcess:
    """Implements `Process`. `begin` starts it, and nothing else may be called before that returned."""

    def __init__(self, link: Link, folder: str, names: dict[str, str], streams: Streams, watcher: Watcher) -> None:
        self._watcher = watcher
        self._link, self._folder, self._names, self._streams = link, folder, names, streams
        self._process: asyncssh.SSHClientProcess[bytes] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._feeding: asyncio.Task[None] | None = None
        self._ending: asyncio.Task[ExitStatus] | None = None
        self._errors: list[HostError] = []
        self._is_terminal = False
        self._runner_ended = asyncio.Event()
        self._taken, self._in_sinks = 0, 0
        self.is_over = False

    async def begin(self, terminal: bool) -> None:
        """Start it; returns when it runs, or has ended already."""
        options: dict[str, Any] = {}
        self._is_terminal = terminal
        if terminal:
            rows, columns = self._streams.window or (24, 80)
            options = {"request_pty": "force", "term_type": "dumb", "term_size": (columns, rows)}
        self._process = await self._link.process(f"sh {self._folder}/run", **options)
        for name in ("exit_status_received", "exit_signal_received"):
            _call_before(self._process, name, self._runner_ended.set)
        out, err = self._streams.stdout, self._streams.stderr
        self._tasks = [
            self._task(self._carry(self._process.stdout, out, STDOUT)),
            self._task(self._carry(self._process.stderr, err, STDERR)),
        ]
        if self._streams.stdin is not None:
            self._feeding = self._task(self._feed(self._streams.stdin))
        else:
            with suppress(OSError):
                self._process.stdin.write_eof()
        self._told = asyncio.ensure_future(self._watcher.stdout.readline())
        self._told.add_done_callback(_take_note)
        self._watching = asyncio.ensure_future(self._watch())
        self._watching.add_done_callback(_take_note)
        self._ending = asyncio.get_running_loop().create_task(self._end())
        self._ending.add_done_callback(_take_note)
        await asyncio.wait({self._told, self._ending}, timeout=BEGIN_SECONDS, return_when=asyncio.FIRST_COMPLETED)

    @staticmethod
    def _task(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return asyncio.get_running_loop().create_task(work)

    # -- what the caller does

    async def wait(self) -> ExitStatus:
        """May be cancelled and called again."""
        assert self._ending is not None
        return await asyncio.shield(self._ending)

    async def signal(self, number: int, *, alone: bool = False) -> None:
        if self.is_over:
            return
        where = "" if alone else "-"
        with suppress(AgentLost):  # whoever waits for the payload hears of it
            await self._link.script(
                f"read -r p < {self._folder}/pid && [ ! -e {self._folder}/end ] && kill -{int(number)} {where}$p"
            )

    async def resize(self, rows: int, columns: int) -> None:
        if not self.is_over and self._process is not None:
            with suppress(OSError, library().Error):
                self._process.change_terminal_size(columns, rows)

    def fail(self, error: GuestError) -> None:
        """The guest is lost."""
        for task in (*self._tasks, self._feeding):
            if task is not None:
                task.cancel()
        if self._ending is not None and not self._ending.done():
            self._ending.cancel(error.message)

    # -- streams

    async def _feed(self, source: Source) -> None:
        """Carry to the source's end. A source that cannot be read has ended; a payload may leave its input unread."""
        assert self._process is not None
        stdin, is_at_begin = self._process.stdin, True
        with suppress(OSError, library().Error):
            while True:
                try:
                    data = await source.read(CHUNK)
                except OSError:
                    data = b""
                if not data and self._is_terminal:
                    stdin.write(END_OF_LINE if is_at_begin else END_OF_LINE * 2)
                    return
                if not data:
                    stdin.write_eof()
                    return
                is_at_begin = data.endswith(b"\n")
                stdin.write(data)
                await stdin.drain()

    async def _carry(self, reader: Any, sink: Sink | None, index: int) -> None:
        """Carry to the stream's end. When nobody reads any more the payload is told so as a pipe would."""
        is_read = sink is not None
        try:
            while data := await reader.read(CHUNK):
                self._taken += len(data)
                if not is_read or sink is None:
                    continue
                self._in_sinks += 1
                try:
                    await sink.write(data)
                except OSError as exc:
                    is_read = False
                    if not isinstance(exc, GONE):
                        self._errors.append(sink_error(index, exc))
                    self._tasks.append(self._task(self.signal(signal.SIGPIPE)))
                finally:
                    self._in_sinks -= 1
        finally:
            if sink is not None:
                with suppress(OSError):
                    await sink.close()

    # -- the end

    async def _end(self) -> ExitStatus:
        """The record, once the session has ended and every byte of it was taken."""
        try:
            status = await self._read_end()
        except asyncio.CancelledError as exc:
            raise AgentLost(str(exc) or "the conversation with the guest was closed") from exc
        finally:
            self.is_over = True
            self._told.cancel()
            self._watching.cancel()
            self._watcher.channel.abort()
            if self._feeding is not None:
                self._feeding.cancel()
        if self._errors:
            raise self._errors[0]
        return status

    async def _read_end(self) -> ExitStatus:
        assert self._process is not None
        process, asyncssh, broken = self._process, library(), None
        try:
            if await self._streams_end():
                await process.wait_closed()
        except (asyncssh.Error, OSError) as exc:
            broken = lost(exc)
        if broken is None and process.exit_status is None:
            why = (
                "what ran the payload was killed"
                if process.exit_signal
                else "the connection to the guest's ssh server broke"
            )
            broken = AgentLost(why)
        record, _, error = (await self._record()).partition(b"--\n")
        if broken is not None:
            await self._give_up(record, broken)
        if not record:
            raise AgentLost("the guest has no record of the payload's end: what ran it was killed")
        return read_record(record, error.decode("ascii", "replace").strip(), self._names)

    async def _streams_end(self) -> bool:
        """Return when both streams are at their ends; False: somebody holds them open who is none of the payload's."""
        carrying = asyncio.gather(*self._tasks[:2])
        carrying.add_done_callback(_take_note)
        ended = asyncio.ensure_future(self._runner_ended.wait())
        ends: set[asyncio.Future[Any]] = {carrying, ended}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        ended.cancel()
        while not carrying.done():
            taken = self._taken
            await asyncio.wait({carrying}, timeout=HELD_SECONDS)
            if not carrying.done() and taken == self._taken and not self._in_sinks:
                carrying.cancel()
                return False
        await carrying
        return True

    async def _watch(self) -> bytes:
        """The record, by the session that was there from the beginning."""
        await self._told
        said = await whole(self._watcher.stdout, LARGEST_RECORD)
        if b"--\n" not in said:
            raise AgentLost("the session that watched the payload broke")
        return said

    async def _record(self) -> bytes:
        """From the session that watched, or by a new one where that was lost."""
        with suppress(TimeoutError, OSError, AgentLost, library().Error):
            async with asyncio.timeout(RECORD_SECONDS):
                return await asyncio.shield(self._watching)
        where = self._folder
        return (await self._link.script(f"exec 2> /dev/null; cat {where}/status; echo --; cat {where}/error")).out

    async def _give_up(self, record: bytes, broken: AgentLost) -> None:
        """A payload whose session broke: what it wrote after that is lost, so its end is of no use."""
        if not record:
            with suppress(AgentLost):
                await self._link.script(f"read -r p < {self._folder}/pid && kill -9 -$p")
        how = "it had ended by then" if record else "it was killed"
        raise AgentLost(f"{broken.message}; some of the payload's output is missing, so {how} for nothing") from broken


def _call_before(process: Any, name: str, call: Callable[[], None]) -> None:
    """asyncssh tells a process of its command's end by these methods, and nobody else before its streams have ended too."""
    then = getattr(process, name)

    def told(*what: Any) -> None:
        call()
        then(*what)

    setattr(process, name, told)


def _take_note(task: asyncio.Future[Any]) -> None:
    """Whoever waits for it hears of its error; nobody may be waiting."""
    if not task.cancelled():
        task.exception()
