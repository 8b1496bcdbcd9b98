"""The serial console: kept in a bounded log, and shown to whoever attached to it."""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress
from pathlib import Path

from belljar.machine import CONSOLE_LOG
from belljar.machine.life.output import RollingFile

HALF = 1 << 20  # the log and its predecessor hold the last one to two MiB a guest wrote


class Console:
    """Reads the domain's console until it ends. A guest that floods it fills no disk."""

    def __init__(self, folder: Path, line: socket.socket, awaited: bytes = b"") -> None:
        self._line = line
        self._viewers: set[socket.socket] = set()
        self._log = RollingFile(folder / CONSOLE_LOG, HALF)
        self._awaited, self._end = awaited, b""
        self.seen = asyncio.Event()  # *awaited* was written

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        with suppress(OSError):
            while data := await loop.sock_recv(self._line, 1 << 16):
                with suppress(OSError):  # a full disk costs us the log, not the machine
                    self._log.write(data)
                self._watch(data)
                for viewer in list(self._viewers):
                    try:
                        viewer.send(data)  # a viewer that does not read misses something; the guest does not wait
                    except BlockingIOError:
                        pass
                    except OSError:
                        self._viewers.discard(viewer)

    async def attach(self, viewer: socket.socket) -> None:
        """Show the console to this connection and type what it sends, until it closes."""
        loop = asyncio.get_running_loop()
        self._viewers.add(viewer)
        try:
            while data := await loop.sock_recv(viewer, 4096):
                await loop.sock_sendall(self._line, data)
        finally:
            self._viewers.discard(viewer)

    def close(self) -> None:
        self._log.close()

    def _watch(self, data: bytes) -> None:
        if self._awaited and not self.seen.is_set():
            text = self._end + data
            self._end = text[-len(self._awaited) :]
            if self._awaited in text:
                self.seen.set()
