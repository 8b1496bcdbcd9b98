"""A program of its own: it holds one machine's connection to libvirt, and carries the bytes of its channel and its console.

Calls come as lines of JSON on a socket, answers and events go back on it. It imports nothing of belljar. libvirt's daemon destroys
what was started on a connection when that closes (VIR_DOMAIN_START_AUTODESTROY), so whatever a call hangs in, to kill this process
is to undo it all.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import tty
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any
from xml.etree import ElementTree

SIZE = 1 << 18


class Holder:
    """Serves one supervisor. Its public methods are the calls it takes."""

    def __init__(self, libvirt: Any, control: socket.socket, channel: socket.socket, console: socket.socket) -> None:
        self._libvirt, self._control = libvirt, control
        self._channel, self._console = channel, console
        self._rest = b""
        self._connection: Any = None
        self._domain: Any = None

    def open(self, uri: str, interval: int, count: int) -> int:
        """The daemon's version. Its silence is noticed after *count* intervals of so many seconds."""
        self._connection = self._libvirt.open(uri)
        self._connection.registerCloseCallback(self._closed, None)
        self._connection.setKeepAlive(interval, count)
        return int(self._connection.getLibVersion())

    def capabilities(self, emulator: str) -> None:
        """Have the daemon find out what this QEMU can do, which it then remembers."""
        self._connection.getDomainCapabilities(emulator)

    def create(self, document: str) -> None:
        """The domain, paused, with its events listened to and both its lines open: nothing of what it says is missed."""
        libvirt = self._libvirt
        flags = libvirt.VIR_DOMAIN_START_AUTODESTROY | libvirt.VIR_DOMAIN_START_PAUSED
        self._domain = domain = self._connection.createXML(document, flags)
        register = self._connection.domainEventRegisterAny
        register(domain, libvirt.VIR_DOMAIN_EVENT_ID_LIFECYCLE, self._lifecycle, None)
        register(domain, libvirt.VIR_DOMAIN_EVENT_ID_IO_ERROR_REASON, self._disk_error, None)
        reboot = partial(self.tell, "event", "reset", "the guest asked for a reboot")
        register(domain, libvirt.VIR_DOMAIN_EVENT_ID_REBOOT, lambda *_: reboot(), None)
        stream, terminal = self._connection.newStream(), terminal_of(domain.XMLDesc())
        domain.openChannel(None, stream, 0)
        carry(self._channel, stream.recv, stream.send)
        carry(self._console, partial(os.read, terminal), partial(os.write, terminal))

    def ask(self, call: str, *words: Any) -> None:
        """Call a method of the domain itself."""
        getattr(self._domain, call)(*words)

    # -- between the supervisor and libvirt ------------------------------------------------------------------------------

    def hear(self, *_: object) -> None:
        """Calls of the supervisor; it ends with the supervisor's end of the socket."""
        data = self._control.recv(SIZE)
        if not data:
            os._exit(0)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._serve(*json.loads(line))

    def _serve(self, call: str, *words: Any) -> None:
        try:
            self.tell("done", getattr(self, call)(*words))
        except OSError as exc:
            self.tell("refused", str(exc))
        except self._libvirt.libvirtError as exc:
            # In one line of a sane length.
            text = " ".join(str(exc.get_error_message() or exc).split())[:1000]
            self.tell("lost" if is_loss(self._libvirt, exc) else "refused", text)

    def tell(self, kind: str, *words: Any) -> None:
        self._control.sendall(json.dumps([kind, *words]).encode() + b"\n")

    def _closed(self, _: Any, reason: int, __: Any) -> None:
        silent = reason == self._libvirt.VIR_CONNECT_CLOSE_REASON_KEEPALIVE
        self.tell("closed", "it does not answer keepalives" if silent else "it ended the connection")

    def _lifecycle(self, _: Any, __: Any, event: int, detail: int, ___: Any) -> None:
        if happened := translate(self._libvirt, event, detail):
            self.tell("event", *happened)

    def _disk_error(self, _: Any, __: Any, path: str, alias: str, action: int, reason: str, ___: Any) -> None:
        self.tell("event", "disk-full" if reason == "enospc" else "disk-error", reason)


def carry(line: socket.socket, receive: Callable[[int], bytes], send: Callable[[bytes], int]) -> None:
    """Copy between one of the supervisor's sockets and the guest, in a thread for each direction. The line is hung up when the guest's
    end is gone, by whatever error that is told."""

    def inward() -> None:
        with suppress(Exception):
            while data := receive(SIZE):
                line.sendall(data)
        with suppress(OSError):
            line.shutdown(socket.SHUT_RDWR)

    def outward() -> None:
        with suppress(Exception):
            while data := line.recv(SIZE):
                while data:
                    data = data[send(data) :]

    for work in (inward, outward):
        Thread(target=work, daemon=True).start()


def terminal_of(document: str) -> int:
    """The one behind the serial port of a domain that runs. virDomainOpenConsole would take a lock in /var/lock for it, which a daemon
    that is killed leaves behind, and which no other user's daemon can then remove."""
    path = ElementTree.fromstring(document).find("./devices/serial/source")
    fd = os.open("" if path is None else path.get("path", ""), os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
    tty.setraw(fd)
    return fd


def translate(libvirt: Any, event: int, detail: int) -> tuple[str, str] | None:
    """libvirt's event as one of ours: its kind and its detail. "exited" means that libvirt is done with the domain.
    https://libvirt.org/html/libvirt-libvirt-domain.html#virDomainEventType"""
    if event == libvirt.VIR_DOMAIN_EVENT_SHUTDOWN and detail != libvirt.VIR_DOMAIN_EVENT_SHUTDOWN_HOST:
        return "shutdown", "guest-shutdown"
    if event == libvirt.VIR_DOMAIN_EVENT_CRASHED:
        return "panicked", "the guest's kernel panicked"
    if event == libvirt.VIR_DOMAIN_EVENT_STOPPED:
        words = {
            libvirt.VIR_DOMAIN_EVENT_STOPPED_SHUTDOWN: "shut down", libvirt.VIR_DOMAIN_EVENT_STOPPED_DESTROYED: "destroyed",
            libvirt.VIR_DOMAIN_EVENT_STOPPED_CRASHED: "crashed", libvirt.VIR_DOMAIN_EVENT_STOPPED_FAILED: "failed",
        }  # fmt: skip
        return "exited", words.get(detail, f"detail {detail}")
    return None


def is_loss(libvirt: Any, error: Any) -> bool:
    """Did the way to the daemon fail, and not what was asked for?"""
    domains, codes = (libvirt.VIR_FROM_RPC, libvirt.VIR_FROM_REMOTE), (libvirt.VIR_ERR_NO_CONNECT, libvirt.VIR_ERR_RPC)
    return error.get_error_domain() in domains or error.get_error_code() in codes


def main(*fds: str) -> None:
    """*fds*: of control, channel and console."""
    lines = [socket.socket(fileno=int(fd)) for fd in fds]
    sys.path.append(str(Path(__file__).parents[3]))  # beside belljar
    try:
        import libvirt  # type: ignore[import-untyped, import-not-found, unused-ignore]
    except ImportError:
        lines[0].sendall(json.dumps(["missing", sys.executable]).encode() + b"\n")
        return
    libvirt.registerErrorHandler(lambda context, error: None, None)  # it would write to stderr
    libvirt.virEventRegisterDefaultImpl()
    holder = Holder(libvirt, *lines)
    libvirt.virEventAddHandle(lines[0].fileno(), libvirt.VIR_EVENT_HANDLE_READABLE, holder.hear, None)
    while True:
        with suppress(libvirt.libvirtError):
            libvirt.virEventRunDefaultImpl()


if __name__ == "__main__":
    main(*sys.argv[2:])
