"""Messages for a socket of an event loop: each is sent at once, or queued while the socket's buffer is full."""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable

from belljar.hints import Any


class Outbox:
    """Of one socket. *send*: its `send` or `sendto`; *most*: messages that may wait."""

    def __init__(self, end: socket.socket, send: Callable[..., object], most: int) -> None:
        self._loop, self._end, self._send, self._most = asyncio.get_running_loop(), end, send, most
        self._waiting: deque[tuple[Any, ...]] = deque()

    def send(self, *message: Any) -> bool:
        """Now, or as soon as there is room for it. False: too many wait. Raises OSError where it cannot be sent."""
        if not self._waiting:
            try:
                self._send(*message)
                return True
            except BlockingIOError:
                self._loop.add_writer(self._end, self._send_waiting)
        if len(self._waiting) >= self._most:
            return False
        self._waiting.append(message)
        return True

    def close(self) -> None:
        """What still waits is not sent."""
        self._loop.remove_writer(self._end)
        self._end.close()

    def _send_waiting(self) -> None:
        while self._waiting:
            try:
                self._send(*self._waiting[0])
            except BlockingIOError:
                return
            except OSError:  # this one cannot be sent; the next may be
                pass
            self._waiting.popleft()
        self._loop.remove_writer(self._end)
