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
from contextlib import suppress
from pathlib import Path
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
        register(domain, libvirt.VIR_DOMAIN_EVENT_ID_REBOOT, self._rebooted, None)
        stream = self._connection.newStream(libvirt.VIR_STREAM_NONBLOCK)
        domain.openChannel(None, stream, 0)
        Pump(libvirt, stream, self._channel)
        Pump(libvirt, Terminal(libvirt, console_of(domain.XMLDesc())), self._console)

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
            self.tell("lost" if is_loss(self._libvirt, exc) else "refused", words_of(exc))

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

    def _rebooted(self, *_: Any) -> None:
        self.tell("event", "reset", "the guest asked for a reboot")


class Terminal:
    """A guest's console with what a pump takes of a stream. virDomainOpenConsole would take a lock in /var/lock for it, which a
    daemon that is killed leaves behind, and which no other user's daemon can then remove."""

    def __init__(self, libvirt: Any, path: str) -> None:
        self._libvirt = libvirt
        self._fd = os.open(path, os.O_RDWR | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC)
        tty.setraw(self._fd)

    def recv(self, size: int) -> Any:
        try:
            return os.read(self._fd, size)
        except BlockingIOError:
            return -2

    def send(self, data: bytes) -> int:
        try:
            return os.write(self._fd, data)
        except BlockingIOError:
            return -2

    def eventAddCallback(self, events: int, call: Any, _: Any) -> None:
        """libvirt's events of streams and of descriptors have the same numbers."""
        tell = lambda _, __, seen, ___: call(self, seen, None)  # noqa: E731
        self._watch = self._libvirt.virEventAddHandle(self._fd, events, tell, None)

    def eventUpdateCallback(self, events: int) -> None:
        self._libvirt.virEventUpdateHandle(self._watch, events)

    def eventRemoveCallback(self) -> None:
        self._libvirt.virEventRemoveHandle(self._watch)
        os.close(self._fd)


class Pump:
    """Copies between a stream of libvirt's and a socket of the supervisor's. The supervisor always reads its sockets soon, so
    they may be waited for."""

    def __init__(self, libvirt: Any, stream: Any, line: socket.socket) -> None:
        self._libvirt, self._stream, self._line = libvirt, stream, line
        self._unsent = b""
        self._watch = libvirt.virEventAddHandle(line.fileno(), libvirt.VIR_EVENT_HANDLE_READABLE, self._outward, None)
        stream.eventAddCallback(libvirt.VIR_STREAM_EVENT_READABLE, self._inward, None)

    def _outward(self, *_: Any) -> None:
        self._unsent = self._line.recv(SIZE)
        if self._unsent:
            self._send()
        else:
            self._libvirt.virEventUpdateHandle(self._watch, 0)

    def _send(self) -> None:
        """As much as the stream takes now. What is left keeps the supervisor waiting."""
        libvirt = self._libvirt
        while self._unsent and (count := self._stream.send(self._unsent)) > 0:
            self._unsent = self._unsent[count:]
        libvirt.virEventUpdateHandle(self._watch, 0 if self._unsent else libvirt.VIR_EVENT_HANDLE_READABLE)
        more = libvirt.VIR_STREAM_EVENT_WRITABLE if self._unsent else 0
        self._stream.eventUpdateCallback(libvirt.VIR_STREAM_EVENT_READABLE | more)

    def _inward(self, stream: Any, events: int, _: Any) -> None:
        try:
            if events & self._libvirt.VIR_STREAM_EVENT_WRITABLE:
                self._send()
            data = stream.recv(SIZE)
            if data == -2:  # there is nothing now
                return
            self._line.sendall(data)
        except (self._libvirt.libvirtError, OSError):
            data = b""
        if not data:
            stream.eventRemoveCallback()
            self._libvirt.virEventRemoveHandle(self._watch)
            self._line.close()


def console_of(document: str) -> str:
    """The terminal behind the serial port of a domain that runs."""
    path = ElementTree.fromstring(document).find("./devices/serial/source")
    return "" if path is None else path.get("path", "")


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


def words_of(error: Any) -> str:
    """libvirt's message, in one line of a sane length."""
    return " ".join(str(error.get_error_message() or error).split())[:1000]


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
