"""What a service tells systemd (sd_notify(3)), and the signals that it obeys."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from belljar.service.streams import first_of


def notify(*lines: str) -> None:
    """Tell systemd, where it started us (sd_notify(3))."""
    if place := os.environ.get("NOTIFY_SOCKET", ""):
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.sendto("\n".join(lines).encode(), "\0" + place[1:] if place.startswith("@") else place)


async def serving(*works: Coroutine[Any, Any, object], reload: Callable[[], None]) -> None:
    """All this work, until TERM or INT, or until one of it ends or fails. HUP calls *reload*."""

    def again() -> None:
        notify("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")
        reload()
        notify("READY=1")

    def stop() -> None:
        notify("STOPPING=1")
        ended.set()

    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    loop.add_signal_handler(signal.SIGHUP, again)
    notify("READY=1")
    await first_of(*works, ended.wait())
