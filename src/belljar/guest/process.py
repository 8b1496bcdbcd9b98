"""A payload as the host sees it: its streams, its signals, its end."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Coroutine
from typing import Any

from belljar.agent.agent import (
    CREDIT,
    DATA,
    EOF,
    ERROR,
    EXIT,
    REPLY,
    RESET,
    RESIZE,
    SIGNAL,
    U32,
    WINDOW_SIZE,
    WireError,
    frame,
)  # fmt: skip
from belljar.errors import AgentLost, GuestError, HostError, NoSpace
from belljar.guest import ExitStatus, Sink, Streams
from belljar.guest.channel import Channel
from belljar.guest.streams import Downstream, Upstream
from belljar.host.files import no_space_as_error
from belljar.model import Usage

STDIN, STDOUT, STDERR, SCRIPT = range(4)
LONGEST_MESSAGE = 1000


class Running:
    """Implements `Process`. Fed with the frames of its number by the conversation."""

    def __init__(self, number: int, channel: Channel, streams: Streams) -> None:
        self._number, self._channel = number, channel
        loop = asyncio.get_running_loop()
        self.started: asyncio.Future[dict[str, Any]] = loop.create_future()
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

    async def signal(self, number: int) -> None:
        if not self._status.done():
            self._channel.send(frame(SIGNAL, self._number, bytes([number])))

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
            self.started.set_result({})

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
    told = read_object(body)
    status = number_in(told, "status", 0xFFFF)
    by_signal = os.WIFSIGNALED(status)
    if not by_signal and not os.WIFEXITED(status):
        raise WireError(f"wait status {status}")
    return ExitStatus(
        exit_code=None if by_signal else os.WEXITSTATUS(status),
        signal=os.WTERMSIG(status) if by_signal else None,
        core_dumped=by_signal and os.WCOREDUMP(status),
        usage=Usage(
            number_in(told, "user", 1e12), number_in(told, "system", 1e12), int(number_in(told, "peak", 1 << 62))
        ),
        oom_killed=told.get("oom") is True,
        error=one_line(told.get("error")),
        message=one_line(told.get("message")),
    )


def read_object(body: bytes) -> dict[str, Any]:
    """A JSON object sent by the guest."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as exc:
        raise WireError(f"not JSON: {exc}") from exc
    if not isinstance(value, dict):
        raise WireError("not a JSON object")
    return value


def number_in(told: dict[str, Any], name: str, largest: float) -> Any:
    """A number that is not negative; 0 where there is none."""
    value = told.get(name, 0)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= largest:
        raise WireError(f"{name}: {str(value)[:40]} is not a number from 0 to {largest:.0f}")
    return value


def one_line(value: object) -> str:
    """What the guest says, as a line that can be shown on a terminal."""
    text = value if isinstance(value, str) else ""
    return "".join(char if char.isprintable() else "?" for char in text[:LONGEST_MESSAGE])


def refusal(body: bytes) -> GuestError:
    """An ERROR frame's body as one of our errors."""
    from belljar.errors import GuestRefused, NoNineP

    told = read_object(body)
    kind, message = one_line(told.get("kind")), one_line(told.get("message")) or "the agent gave no reason"
    if kind == "no-9p":
        return NoNineP(message)
    if kind == "protocol":
        return AgentLost(f"the agent ended the conversation: {message}")
    return GuestRefused(message)


def sink_error(index: int, error: OSError) -> HostError:
    """Why bytes of the payload could not be written outside."""
    name = {STDOUT: "stdout", STDERR: "stderr"}.get(index, "output")
    try:
        from pathlib import Path

        with no_space_as_error(Path(f"the payload's {name}")):
            raise error
    except NoSpace as exc:
        return exc
    except (OSError, HostError):
        return HostError(f"the payload's {name} cannot be written: {error.strerror or error}")
