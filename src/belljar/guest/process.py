"""A payload as the host sees it: its streams, which run by credit, its signals, its end."""

from __future__ import annotations

import asyncio
import errno
import os
import struct
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from belljar import errors
from belljar.agent import wire
from belljar.errors import AgentLost, GuestError, HostError, NoSpace, printable
from belljar.guest import OTHER_SHARE, ExitStatus, Sink, Source, Standstill, Streams
from belljar.guest.channel import Channel
from belljar.model import Usage

LONGEST_MESSAGE = 1000
REMEDIES = {  # by the agent's word for what the guest lacks
    "no-disk": "Use an image whose kernel has virtio_blk and looks at the PCI bus anew when told; or add `--start cold`.",
    "no-filesystem": OTHER_SHARE,
}
LONGEST_TIME = 1e12  # seconds
Send = Callable[[bytes], None]
GONE = (errno.EPIPE, errno.ECONNRESET, errno.EIO)  # EIO: a terminal that hung up


class Upstream:
    """From a source to the guest, as far as the guest gives credit."""

    def __init__(self, number: int, source: Source, send: Send, taken_up: Standstill | None) -> None:
        """What was taken up tells itself how much it may be sent."""
        self._number, self._source, self._send = number, source, send
        self._credit, self._skip = (0, taken_up.stdin) if taken_up else (wire.WINDOW, 0)
        self._news = asyncio.Event()
        self.sent = 0  # bytes
        self._is_resting = False  # nothing is sent meanwhile

    def grant(self, amount: int) -> None:
        self._credit += amount
        if self._credit > wire.MAX_CREDIT:
            raise wire.WireError(f"stream {self._number}: too much credit")
        self._news.set()

    def rest(self, is_resting: bool) -> None:
        self._is_resting = is_resting
        self._news.set()

    async def _skip_what_was_sent(self) -> None:
        """The input is there from its beginning, and a part of it has been in the guest since before."""
        with suppress(OSError):
            while self._skip and (data := await self._source.read(min(self._skip, wire.WINDOW))):
                self._skip -= len(data)

    async def _may_send(self) -> None:
        while self._is_resting or not self._credit:
            self._news.clear()
            await self._news.wait()

    async def run(self) -> None:
        """Carry to the source's end. A source that cannot be read has ended."""
        await self._skip_what_was_sent()
        while True:
            await self._may_send()
            try:
                data = await self._source.read(min(self._credit, wire.WINDOW))
            except OSError:
                data = b""
            await self._may_send()  # it may rest since
            if not data:
                self._send(wire.frame(wire.EOF, self._number))
                return
            self._credit -= len(data)
            self.sent += len(data)
            for part in wire.portions(data):
                self._send(wire.frame(wire.DATA, self._number, part))


class Downstream:
    """From the guest to a sink. The guest may have a window of bytes on the way that the sink has not taken."""

    def __init__(self, number: int, sink: Sink, send: Send) -> None:
        self._number, self._sink, self._send = number, sink, send
        self._queue: deque[bytes] = deque()
        self._held = 0  # bytes received and not yet given back as credit
        self._owed = 0  # of these, bytes the sink has taken
        self._is_ended, self._is_whole = False, True
        self._news = asyncio.Event()
        self._taken, self._is_broken = asyncio.Event(), False
        self.received = self.written = 0  # bytes; those of the sink
        self.error: OSError | None = None  # why the sink took no more, where that is worth telling

    def feed(self, data: bytes) -> None:
        self._held += len(data)
        if self._held > wire.WINDOW or self._is_ended:
            raise wire.WireError(f"stream {self._number}: data without credit or after its end")
        self.received += len(data)
        self._queue.append(data)
        self._news.set()

    def end(self, *, is_whole: bool = True) -> None:
        """Nothing more comes. The sink is closed only if its stream is whole."""
        self._is_ended, self._is_whole = True, self._is_whole and is_whole
        self._news.set()

    async def settled(self) -> None:
        """Returns when the sink has all that came, or takes no more."""
        while self.written < self.received and not self._is_broken:
            self._taken.clear()
            await self._taken.wait()

    async def run(self) -> None:
        """Carry to the stream's end, or to the sink's: then the payload finds nobody reading."""
        try:
            while await self._carry():
                pass
        except OSError as exc:
            if exc.errno not in GONE and not isinstance(exc, (BrokenPipeError, ConnectionResetError)):
                self.error = exc
            self._send(wire.frame(wire.RESET, self._number))
            self._is_broken = True
            self._taken.set()
        finally:
            with suppress(OSError):
                if self._is_whole:
                    await self._sink.close()

    async def _carry(self) -> bool:
        while not self._queue:
            if self._is_ended:
                return False
            self._news.clear()
            await self._news.wait()
        data = self._queue[0] if len(self._queue) == 1 else b"".join(self._queue)
        self._queue.clear()
        await self._sink.write(data)
        self.written += len(data)
        self._taken.set()
        self._owed += len(data)
        if self._owed >= wire.WINDOW // 4 and not self._is_ended:
            self._send(wire.frame(wire.CREDIT, self._number, wire.U32.pack(self._owed)))
            self._held -= self._owed
            self._owed = 0
        return True


class Running:
    """A payload, a copy or a connection. The conversation feeds it with the frames of its number."""

    def __init__(self, number: int, channel: Channel, streams: Streams, taken_up: Standstill | None = None) -> None:
        self._number, self._channel = number, channel
        self._before = taken_up or Standstill(number)
        loop = asyncio.get_running_loop()
        self.started: asyncio.Future[None] = loop.create_future()
        self._status: asyncio.Future[ExitStatus] = loop.create_future()
        sinks = {4 * number + wire.STDOUT: streams.stdout, 4 * number + wire.STDERR: streams.stderr}
        self._outputs = {id: Downstream(id, sink, channel.send) for id, sink in sinks.items() if sink is not None}
        self._writing = [loop.create_task(output.run()) for output in self._outputs.values()]
        self._input = None if streams.stdin is None else Upstream(4 * number, streams.stdin, channel.send, taken_up)
        self._reading = None if self._input is None else loop.create_task(self._input.run())

    # -- what the caller does

    async def wait(self) -> ExitStatus:
        """Returns when the sinks have every byte and no process of the payload is left. May be cancelled and called again. Raises
        AgentLost."""
        status = await asyncio.shield(self._status)
        if self._writing:
            await asyncio.wait(self._writing)
        for task in self._writing:
            if not task.cancelled() and (broken := task.exception()) is not None:
                raise broken
        for number, output in self._outputs.items():
            if output.error is not None:
                raise sink_error(number & 3, output.error) from output.error
        return status

    async def signal(self, number: int, *, alone: bool = False) -> None:
        """To the payload's process group, or to its first process alone. Signalling what ended is success."""
        self._send(wire.SIGNAL, bytes([number | wire.LEADER if alone else number]))

    def rest(self, is_resting: bool) -> None:
        """Send no more input, for as long as that."""
        if self._input is not None:
            self._input.rest(is_resting)

    async def standstill(self) -> Standstill:
        """Where its streams stand, once the sinks have all that came."""
        for output in self._outputs.values():
            await output.settled()
        written = {number & 3: output.written for number, output in self._outputs.items()}
        sent, before = self._input.sent if self._input else 0, self._before
        stdout, stderr = (written.get(stream, 0) for stream in (wire.STDOUT, wire.STDERR))
        return Standstill(self._number, before.stdin + sent, before.stdout + stdout, before.stderr + stderr)

    async def resize(self, rows: int, columns: int) -> None:
        self._send(wire.RESIZE, wire.WINDOW_SIZE.pack(min(rows, 65535), min(columns, 65535)))

    def _send(self, kind: int, body: bytes) -> None:
        if not self._status.done():
            self._channel.send(wire.frame(kind, self._number, body))

    # -- what the guest says

    @property
    def is_over(self) -> bool:
        return self._status.done()

    def receive(self, kind: int, number: int, body: bytes) -> None:
        output = self._outputs.get(number)
        if kind == wire.DATA and output is not None:
            output.feed(body)
        elif kind == wire.CREDIT and self._input is not None and number == 4 * self._number:
            self._input.grant(wire.U32.unpack(body)[0])
        elif kind == wire.EOF and output is not None:
            output.end()
        elif kind == wire.RESET and output is not None:
            output.end(is_whole=False)  # of a connection that broke off
        elif kind == wire.RESET and self._reading is not None and number == 4 * self._number:
            self._reading.cancel()  # the payload closed its end
        elif kind in (wire.REPLY, wire.ERROR):
            self._begun(kind, body)
        elif kind == wire.EXIT:
            self._ended(read_exit(body))

    def _begun(self, kind: int, body: bytes) -> None:
        if self.started.done():
            raise wire.WireError(f"a second answer to call {self._number}")
        if kind == wire.ERROR:
            self.fail(refusal(body))
        else:
            self.started.set_result(None)

    def _ended(self, status: ExitStatus) -> None:
        if self._status.done() or not self.started.done():
            raise wire.WireError(f"an end of process {self._number} at a wrong time")
        if self._reading is not None:
            self._reading.cancel()
        for output in self._outputs.values():
            output.end()
        self._status.set_result(status)

    def fail(self, error: GuestError) -> None:
        """It cannot be started, or the guest is lost."""
        for task in (*self._writing, *([self._reading] if self._reading else [])):
            task.cancel()
        for future in (self.started, self._status):
            if not future.done():
                future.set_exception(error)
                future.exception()  # it is not a mistake when nobody waits for it


def read_exit(body: bytes) -> ExitStatus:
    """The EXIT frame's body. Nothing in it is trusted."""
    try:
        status, user, system, peak, oom_killed = wire.END.unpack_from(body)
    except struct.error as exc:
        raise wire.WireError(f"an end of {len(body)} bytes") from exc
    by_signal = os.WIFSIGNALED(status)
    if status > 0xFFFF or not (by_signal or os.WIFEXITED(status)):
        raise wire.WireError(f"wait status {status}")
    if not (0 <= user < LONGEST_TIME and 0 <= system < LONGEST_TIME):
        raise wire.WireError("processor times that make no sense")
    error, message = read_words(body[wire.END.size :], 2)
    exit_code, number = (None, os.WTERMSIG(status)) if by_signal else (os.WEXITSTATUS(status), None)
    core_dumped, usage = by_signal and os.WCOREDUMP(status), Usage(user, system, peak)
    return ExitStatus(exit_code, number, core_dumped, usage, oom_killed, error, message)


def read_words(body: bytes, count: int) -> list[str]:
    """So many words said by the guest, each made fit for a terminal's line."""
    words = body.split(b"\0")
    if len(words) != count:
        raise wire.WireError(f"{len(words)} words where {count} belong")
    return [printable(word.decode("utf-8", "replace")[:LONGEST_MESSAGE]) for word in words]


def refusal(body: bytes) -> GuestError:
    """An ERROR frame's body as one of our errors."""
    kind, message = read_words(body, 2)
    message = message or "the agent gave no reason"
    if kind == "protocol":
        return AgentLost(f"the agent ended the conversation: {message}")
    if kind == "no-overlay":
        return errors.NoPackedFolders(message)
    return errors.GuestRefused(message, hint=REMEDIES.get(kind))


def sink_error(index: int, error: OSError) -> HostError:
    name = {wire.STDOUT: "stdout", wire.STDERR: "stderr"}.get(index, "output")
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        hint = "Free space where it is written to, or send it elsewhere."
        return NoSpace(f"the payload's {name}: {error.strerror}", hint=hint)
    return HostError(f"the payload's {name} cannot be written: {error.strerror or error}")
