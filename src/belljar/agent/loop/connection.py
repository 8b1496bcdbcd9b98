"""A connection to a service of this guest's: for the host it is a process whose streams are the connection's."""

from __future__ import annotations

import _socket
import errno
import os
from _collections_abc import Callable

from belljar.agent.loop.channel import Channel
from belljar.agent.loop.streams import Inflow, Outflow
from belljar.agent.wire import CREDIT, DATA, END, EOF, EXIT, RESET, SIGNAL, STDIN, STDOUT

LISTENERS = (("/proc/net/tcp", _socket.AF_INET, "127.0.0.1"), ("/proc/net/tcp6", _socket.AF_INET6, "::1"))


class Inlet(Inflow):
    """Bytes for a service, which may go on speaking after their end."""

    def __init__(self, agent: Channel, number: int, fd: int, ended: Callable[[], None]) -> None:
        super().__init__(agent, number, fd)
        self.ended, self.is_whole = ended, False

    def finish(self) -> None:
        end = _socket.socket(fileno=self.fd)
        try:
            end.shutdown(_socket.SHUT_WR)
        except OSError:  # the service is gone
            pass
        end.detach()
        self.is_whole = True
        self.drop()

    def drop(self) -> None:
        super().drop()
        self.ended()


class Outlet(Outflow):
    """Bytes of a service. It ends by RESET instead of EOF where the service broke off: then some may be missing."""

    def __init__(self, agent: Channel, number: int, fd: int, inlet: Inlet, ended: Callable[[], None]) -> None:
        super().__init__(agent, number, fd, ended)
        self.inlet, self.is_whole = inlet, False

    def fail(self) -> None:
        self.inlet.is_whole = False
        self.inlet.drop()
        self.finish()

    def finish(self) -> None:
        if self.fd >= 0:
            self.is_whole = self.inlet.fd >= 0 or self.inlet.is_whole
            self.agent.send(EOF if self.is_whole else RESET, self.number)
            self.drop()
            self.ended()


class Connection:
    """Its EXIT comes when both directions have ended, with 0 where both came to their ends; or when the host signals or resets it."""

    pid = 0

    def __init__(self, agent: Channel, number: int, port: int, gone: Callable[[Connection], None]) -> None:
        """Raises OSError where nothing listens."""
        self.agent, self.number, self.gone = agent, number, gone
        self.is_silent = self.is_over = False
        fd = connect(port)
        self.inlet = Inlet(agent, 4 * number + STDIN, os.dup(fd), self.advance)
        self.outlet = Outlet(agent, 4 * number + STDOUT, fd, self.inlet, self.advance)

    def take(self, kind: int, number: int, body: bytes) -> None:
        """A frame of the host's."""
        if kind in (SIGNAL, RESET):
            self.drop()
        elif kind == DATA and number == self.inlet.number:
            self.inlet.feed(body)
        elif kind == EOF and number == self.inlet.number:
            self.inlet.end()
        elif kind == CREDIT and number == self.outlet.number:
            self.outlet.grant(int.from_bytes(body))

    def drop(self) -> None:
        """Break it off."""
        self.outlet.drop()
        self.inlet.drop()

    def advance(self) -> None:
        if self.inlet.fd >= 0 or self.outlet.fd >= 0 or self.is_over:
            return
        self.is_over = True
        if not self.is_silent:
            status = 0 if self.outlet.is_whole else 1 << 8
            self.agent.send(EXIT, self.number, END.pack(status, 0.0, 0.0, 0, False) + b"\0")
        self.gone(self)

    def abandon(self) -> None:
        """Nobody listens any more."""
        self.is_silent = True
        self.drop()


def connect(port: int) -> int:
    """A socket to what listens on this port of the loopback; one whose queue is full answers later. Raises OSError."""
    for table, family, address in LISTENERS:
        try:
            with open(table, "rb") as file:
                lines = [line.split() for line in file]
        except FileNotFoundError:  # a guest without IPv6
            continue
        if any(words[3] == b"0A" and words[1].endswith(b":%04X" % port) for words in lines):
            end = _socket.socket(family, _socket.SOCK_STREAM | _socket.SOCK_NONBLOCK | _socket.SOCK_CLOEXEC)
            end.setsockopt(_socket.IPPROTO_TCP, _socket.TCP_NODELAY, 1)
            end.connect_ex((address, port))  # what comes of it, the first read says
            return end.detach()
    raise OSError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
