"""Frames over a connected stream socket, inside the event loop. What the frames mean is left to conversation and relay.

Output is queued without limit here: the credit of the streams is what bounds it.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

from belljar.agent.wire import Parser, WireError
from belljar.errors import AgentLost, GuestError, ProtocolViolation

Receive = Callable[[int, int, bytes], None]  # a frame's type, number and body
Lost = Callable[[GuestError], None]
READS = 16  # of the socket, before other callbacks of the loop have their turn
TOGETHER = 1 << 18  # bytes read at once


class Channel:
    """One end of the wire. `receive` gets each frame; `lost` is called once, when nothing more can come."""

    def __init__(self, connection: socket.socket, parser: Parser, receive: Receive, lost: Lost) -> None:
        self._socket, self._parser, self._receive, self._lost = connection, parser, receive, lost
        self._out = bytearray()
        self._loop = asyncio.get_running_loop()
        self._is_writing = False
        self.is_open = True
        connection.setblocking(False)
        self._descriptor = connection.fileno()
        self.last_heard = self._loop.time()
        self._loop.add_reader(self._descriptor, self._readable)

    def send(self, data: bytes) -> None:
        """Queue a frame. What is sent to a closed channel is lost, as on any wire."""
        if not self.is_open:
            return
        self._out += data
        if not self._is_writing:
            self._write()

    def close(self) -> None:
        """Stop listening and talking. The socket stays its owner's."""
        if self.is_open:
            self.is_open = False
            self._out.clear()
            self._loop.remove_reader(self._descriptor)
            if self._is_writing:
                self._loop.remove_writer(self._descriptor)

    def _fail(self, error: GuestError) -> None:
        if self.is_open:
            self.close()
            self._lost(error)

    def _readable(self) -> None:
        for _ in range(READS):
            try:
                data = self._socket.recv(TOGETHER)
            except BlockingIOError:
                return
            except OSError as exc:
                return self._fail(AgentLost(f"the channel to the guest broke: {exc.strerror}"))
            if not data:
                return self._fail(AgentLost("the channel to the guest was closed"))
            self.last_heard = self._loop.time()
            self._parser.feed(data)
            self._take_all()
            if not self.is_open or len(data) < TOGETHER:
                return

    def _take_all(self) -> None:
        try:
            while self.is_open:
                if (received := self._parser.take()) is None:
                    return
                self._receive(*received)
        except WireError as exc:
            self._fail(ProtocolViolation(f"what came over the channel is not the agent's protocol: {exc}"))
        except GuestError as exc:
            self._fail(exc)

    def _write(self) -> None:
        try:
            while self._out:
                del self._out[: self._socket.send(self._out)]
        except BlockingIOError:
            pass
        except OSError:  # the reader learns why
            self._out.clear()
        if bool(self._out) is not self._is_writing:
            self._is_writing = bool(self._out)
            if self._is_writing:
                self._loop.add_writer(self._descriptor, self._write)
            else:
                self._loop.remove_writer(self._descriptor)
