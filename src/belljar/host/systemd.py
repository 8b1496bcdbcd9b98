"""What a service tells systemd (sd_notify(3))."""

from __future__ import annotations

import os
import socket
from contextlib import suppress


def notify(*lines: str) -> None:
    """Tell systemd, where it started us (sd_notify(3))."""
    place = os.environ.get("NOTIFY_SOCKET", "")
    if place:
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.sendto("\n".join(lines).encode(), "\0" + place[1:] if place.startswith("@") else place)
