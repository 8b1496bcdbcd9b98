"""A payload as the host sees it: its streams, its signals, its end."""

from __future__ import annotations

import asyncio
import os
import struct
from collections.abc import Coroutine
from typing import Any

from belljar.agent.wire import (
    CREDIT,
    DATA,
    END,
    EOF,
    ERROR,
    EXIT,
    LEADER,
    REPLY,
    RESET,
    RESIZE,
    SIGNAL,
    U32,
    WINDOW_SIZE,
    WireError,
    frame,
)
from belljar.errors import AgentLost, GuestError, HostError, NoSpace
from belljar.guest import ExitStatus, Sink, Streams
from belljar.guest.channel import Channel
from belljar.guest.streams import Downstream, Upstream
from belljar.host.files import no_space_as_error
from belljar.model import Usage

STDIN, STDOUT, STDERR, SCRIPT = range(4)
LONGEST_MESSAGE = 1000
LONGEST_TIME = 1e12  # seconds


class Running:
    """Implements `Process`. Fed with the frames of its number by the conversation."""

    def __init__(self, number: int, channel: Channel, streams: Streams) -> None:
        self._number, self._channel = number, channel
        loop = asyncio.get_running_loop()
        self.started: asyncio.Future[None] = loop.create_future()
        self._status: asyncio.Future[ExitStatus] = loop.create_future()
        self._upstreams: dict[int, Upstream] = {}
        self._downstreams: dict[int, Downstream] = {}
        self._sources: dict[int, asyncio.Task[None]] = {}
        self._sinks: list[asyncio.Task[None]] = []
        if streams.stdin is not None:
            self.send_from(STDIN, streams.stdin)
        for index, sink in ((STDOUT, streams.stdout), (STDERR, streams.stderr)):
            if sink is not None:
                self._receive_into(index, sink)

    def send_from(self, index: int, source: Any) -> None:
        """Feed one of the process's streams from a source."""
        number = 4 * self._number + index
        stream = self._upstreams[number] = Upstream(number, source, self._channel.send)
        self._sources[number] = self._task(stream.run())

    def _receive_into(self, index: int, sink: Sink) -> None:
        number = 4 * self._number + index
        stream = self._downstreams[number] = Downstream(number, sink, self._channel.send)
        self._sinks.append(self._task(stream.run()))

    @staticmethod
    def _task(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return asyncio.get_running_loop().create_task(work)

    # -- what the caller does

    async def wait(self) -> ExitStatus:
        """May be cancelled and called again."""
        status = await asyncio.shield(self._status)
        if self._sinks:
            await asyncio.wait(self._sinks)
        for task in self._sinks:
            if not task.cancelled() and (broken := task.exception()) is not None:
                raise broken
        for number, stream in self._downstreams.items():
            if stream.error is not None:
                raise sink_error(number & 3, stream.error) from stream.error
        return status

    async def signal(self, number: int, *, alone: bool = False) -> None:
        if not self._status.done():
            self._channel.send(frame(SIGNAL, self._number, bytes([number | LEADER if alone else number])))

    async def resize(self, rows: int, columns: int) -> None:
        if not self._status.done():
            self._channel.send(frame(RESIZE, self._number, WINDOW_SIZE.pack(min(rows, 65535), min(columns, 65535))))

    # -- what the guest says

    @property
    def is_over(self) -> bool:
        return self._status.done()

    def receive(self, kind: int, number: int, body: bytes) -> None:
        if kind == DATA and number in self._downstreams:
            self._downstreams[number].feed(body)
        elif kind == CREDIT and number in self._upstreams:
            self._upstreams[number].grant(U32.unpack(body)[0])
        elif kind == EOF and number in self._downstreams:
            self._downstreams[number].end()
        elif kind == RESET and number in self._sources:
            self._sources[number].cancel()  # the payload closed its end
        elif kind in (REPLY, ERROR):
            self._begun(kind, body)
        elif kind == EXIT:
            self._ended(read_exit(body))

    def _begun(self, kind: int, body: bytes) -> None:
        if self.started.done():
            raise WireError(f"a second answer to call {self._number}")
        if kind == ERROR:
            self.fail(refusal(body))
        else:
            self.started.set_result(None)

    def _ended(self, status: ExitStatus) -> None:
        if self._status.done() or not self.started.done():
            raise WireError(f"an end of process {self._number} at a wrong time")
        for task in self._sources.values():
            task.cancel()
        for stream in self._downstreams.values():
            stream.end()
        self._status.set_result(status)

    def fail(self, error: GuestError) -> None:
        """It cannot be started, or the guest is lost."""
        for task in (*self._sources.values(), *self._sinks):
            task.cancel()
        for future in (self.started, self._status):
            if not future.done():
                future.set_exception(error)
                future.exception()  # it is no mistake when nobody waits for it


def read_exit(body: bytes) -> ExitStatus:
    """The EXIT frame's body. Nothing in it is trusted."""
    try:
        status, user, system, peak, oom_killed = END.unpack_from(body)
    except struct.error as exc:
        raise WireError(f"an end of {len(body)} bytes") from exc
    by_signal = os.WIFSIGNALED(status)
    if status > 0xFFFF or not (by_signal or os.WIFEXITED(status)):
        raise WireError(f"wait status {status}")
    if not (0 <= user < LONGEST_TIME and 0 <= system < LONGEST_TIME):
        raise WireError("processor times that make no sense")
    error, message = read_words(body[END.size :], 2)
    return ExitStatus(
        exit_code=None if by_signal else os.WEXITSTATUS(status),
        signal=os.WTERMSIG(status) if by_signal else None,
        core_dumped=by_signal and os.WCOREDUMP(status),
        usage=Usage(user, system, peak),
        oom_killed=oom_killed,
        error=error,
        message=message,
    )


def read_words(body: bytes, count: int) -> list[str]:
    """So many words said by the guest, each made fit for a terminal's line."""
    words = body.split(b"\0")
    if len(words) != count:
        raise WireError(f"{len(words)} words where {count} belong")
    return [one_line(word.decode("utf-8", "replace")) for word in words]


def one_line(text: str) -> str:
    """What the guest says, as a line that can be shown on a terminal."""
    return "".join(char if char.isprintable() else "?" for char in text[:LONGEST_MESSAGE])


def refusal(body: bytes) -> GuestError:
    """An ERROR frame's body as one of our errors."""
    from belljar import errors

    kind, message = read_words(body, 2)
    message = message or "the agent gave no reason"
    if kind == "protocol":
        return AgentLost(f"the agent ended the conversation: {message}")
    by_kind = {
        "no-9p": errors.NoNineP,
        "no-virtiofs": errors.NoVirtiofs,
        "no-disk": errors.NoDisk,
        "no-overlay": errors.NoPackedFolders,
        "no-nfs": errors.NoNfs,
        "nfs-refused": errors.ExportRefused,
        "nfs-silent": errors.MountFailed,
        "nfs-flush": errors.ShareNotFlushed,
    }
    return by_kind.get(kind, errors.GuestRefused)(message)


def sink_error(index: int, error: OSError) -> HostError:
    """Why bytes of the payload could not be written outside."""
    name = {STDOUT: "stdout", STDERR: "stderr"}.get(index, "output")
    try:
        from pathlib import Path

        with no_space_as_error(Path(f"the payload's {name}")):
            raise error
    except NoSpace as exc:
        return NoSpace(exc.message, hint="Free space where it is written to, or send it elsewhere.")
    except (OSError, HostError):
        return HostError(f"the payload's {name} cannot be written: {error.strerror or error}")
