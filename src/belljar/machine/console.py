"""The serial console: kept in a bounded log, and shown to whoever attached to it."""

from __future__ import annotations

import asyncio
import os
import socket
from contextlib import suppress
from pathlib import Path

from belljar.machine import CONSOLE_LOG

HALF = 1 << 20  # the log and its predecessor hold the last one to two MiB a guest wrote


class Console:
    """Reads the domain's console until it ends. A guest that floods it fills no disk."""

    def __init__(self, folder: Path, line: socket.socket) -> None:
        self._path = folder / CONSOLE_LOG
        self._line = line
        self._viewers: set[socket.socket] = set()
        self._log = self._open()
        self._written = 0

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        with suppress(OSError):
            while data := await loop.sock_recv(self._line, 1 << 16):
                self._keep(data)
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
        os.close(self._log)

    def _open(self) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)

    def _keep(self, data: bytes) -> None:
        with suppress(OSError):  # a full disk costs us the log, not the machine
            self._written += os.write(self._log, data)
            if self._written > HALF:
                with suppress(FileNotFoundError):  # it has gone by this name already, and the opening failed
                    os.rename(self._path, self._path.with_name(CONSOLE_LOG + ".1"))
                before, self._log, self._written = self._log, self._open(), 0
                os.close(before)  # not sooner: its number may be another file's from then on
