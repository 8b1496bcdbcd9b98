"""A lean client of QEMU's machine protocol: commands with ids, events, deadlines, a bounded line length.

It talks over one connected socket and knows nothing of domains. QEMU is not trusted: a line that is too long or no
JSON object ends the conversation. https://www.qemu.org/docs/master/interop/qmp-spec.html
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable, Sequence

from belljar.errors import BelljarError, QmpError, QmpTimeout
from belljar.hints import Any

LONGEST_LINE = 4 << 20
READ_SIZE = 1 << 16

OnEvent = Callable[[str, dict[str, Any]], None]


class Monitor:
    """One conversation. Commands may be sent before QEMU greets: it answers them in order once it is up."""

    def __init__(self, connection: socket.socket, on_event: OnEvent) -> None:
        connection.setblocking(False)
        self._socket, self._on_event = connection, on_event
        self._loop = asyncio.get_running_loop()
        self._pending: dict[int, asyncio.Future[Any]] = {}
        self._commands = 0
        self._buffer = bytearray()
        self._broken: BelljarError | None = None
        self._loop.add_reader(connection, self._readable)
        self.handshake = self.send("qmp_capabilities")

    def send(
        self, command: str, arguments: dict[str, Any] | None = None, *, fds: Sequence[int] = ()
    ) -> asyncio.Future[Any]:
        """Send without waiting. The future becomes what QEMU returns, or QmpError."""
        self._commands += 1
        answer: asyncio.Future[Any] = self._loop.create_future()
        message = {"execute": command, "id": self._commands}
        if arguments:
            message["arguments"] = arguments
        if self._broken is not None:
            settle(answer, self._broken)
            return answer
        self._pending[self._commands] = answer
        try:
            line = json.dumps(message, separators=(",", ":")).encode("ascii") + b"\n"
            sent = socket.send_fds(self._socket, [line], fds) if fds else self._socket.send(line)
            if sent != len(line):  # half a command: nothing sensible can follow
                self.fail(QmpTimeout("QEMU does not read its monitor"))
        except BlockingIOError:  # QEMU takes nothing any more: commands are small and the socket's buffer is not
            self._answered(self._commands, QmpTimeout(f"QEMU does not read its monitor: {command} could not be sent"))
        except OSError:
            pass  # QEMU is ending: its end, or the deadline, is the answer
        return answer

    async def answer(self, future: asyncio.Future[Any], command: str, timeout: float) -> Any:
        """What QEMU returns to a command that was sent. Raises QmpError when it refuses, QmpTimeout."""
        done, _ = await asyncio.wait({future}, timeout=timeout)
        if not done:
            raise QmpTimeout(f"QEMU did not answer {command} within {timeout:g} s")
        return future.result()

    def fail(self, error: BelljarError) -> None:
        """End the conversation; whoever waits for an answer gets *error*."""
        if self._broken is not None:
            return
        self._broken = error
        self._loop.remove_reader(self._socket)
        self._socket.close()
        for number in list(self._pending):
            self._answered(number, error)

    def drain(self) -> None:
        """Hear what QEMU said before it ended."""
        while self._broken is None and self._readable():
            pass

    def _readable(self) -> bool:
        """Hear what there is now. False: nothing."""
        try:
            data = self._socket.recv(READ_SIZE)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:  # the process's end says more than this; until then deadlines hold
            self._loop.remove_reader(self._socket)
            return False
        self._buffer += data
        if len(self._buffer) > LONGEST_LINE:
            self.fail(QmpError(f"QEMU's monitor sent a line of more than {LONGEST_LINE} bytes"))
            return False
        *lines, rest = self._buffer.split(b"\n")
        self._buffer = rest
        for line in lines:
            if self._broken is None and line.strip():
                self._hear(line)
        return True

    def _hear(self, line: bytearray) -> None:
        try:
            message = json.loads(line)
        except ValueError:
            message = None
        match message:
            case {"QMP": _}:
                pass
            case {"event": str(name)}:
                details = message.get("data")
                self._on_event(name, details if isinstance(details, dict) else {})
            case {"return": value, "id": int(number)}:
                self._answered(number, value)
            case {"error": {"class": str(kind), "desc": str(text)}, "id": int(number)}:
                self._answered(number, QmpError(f"QEMU refused: {text} ({kind})"))
            case _:
                self.fail(QmpError(f"QEMU's monitor sent what is not QMP: {bytes(line[:80])!r}"))

    def _answered(self, number: int, value: Any) -> None:
        if (answer := self._pending.pop(number, None)) is not None:
            settle(answer, value)


def settle(answer: asyncio.Future[Any], value: Any) -> None:
    """Whoever asked gets the value, or the error. Nobody may wait for it any more, or yet."""
    if answer.done():
        return
    if isinstance(value, BaseException):
        answer.set_exception(value)
        answer.exception()
    else:
        answer.set_result(value)
