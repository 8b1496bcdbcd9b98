"""A connection to a service of this guest's: for the host it is a process whose streams are the connection's."""

from __future__ import annotations

import _socket
import errno
import os
from _collections_abc import Callable

from belljar.agent.loop.channel import Channel
from belljar.agent.loop.streams import Inflow, Outflow
from belljar.agent.wire import CREDIT, DATA, END, EOF, EXIT, RESET, SIGNAL, STDIN, STDOUT

LOOPBACKS = ((_socket.AF_INET, "127.0.0.1"), (_socket.AF_INET6, "::1"))
BRIEFLY = 0.1  # seconds


class Connection:
    """Its EXIT comes when both directions have ended, or when the host signals or resets it."""

    pid = 0
    stays = False

    def __init__(self, agent: Channel, number: int, port: int, gone: Callable[[Connection], None]) -> None:
        """Raises OSError where nothing listens."""
        self.agent, self.number, self.gone = agent, number, gone
        self.end = connect(port)
        inner, outer = os.dup(self.end.fileno()), os.dup(self.end.fileno())
        self.inlet = Inflow(agent, 4 * number + STDIN, inner, self.advance, self.say_end)
        self.outlet = Outflow(agent, 4 * number + STDOUT, outer, self.advance, self.fail)

    def take(self, kind: int, number: int, body: bytes) -> None:
        if kind in (SIGNAL, RESET):
            self.abandon()
        elif kind == DATA and number == self.inlet.number:
            self.inlet.feed(body)
        elif kind == EOF and number == self.inlet.number:
            self.inlet.end()
        elif kind == CREDIT and number == self.outlet.number:
            self.outlet.grant(int.from_bytes(body))

    def say_end(self, fd: int) -> None:
        """The service may go on speaking."""
        self.end.shutdown(_socket.SHUT_WR)

    def fail(self) -> None:
        """The service broke off: of what it said some may be missing."""
        self.agent.send(RESET, self.outlet.number)
        self.abandon()

    def abandon(self) -> None:
        self.outlet.drop()
        self.inlet.drop()

    leave = take_up = abandon

    def advance(self) -> None:
        if self.inlet.fd < 0 and self.outlet.fd < 0:
            self.end.close()
            self.agent.send(EXIT, self.number, END.pack(0, 0.0, 0.0, 0, False) + b"\0")
            self.gone(self)


def connect(port: int) -> _socket.socket:
    """To what listens on this port of the loopback. Raises OSError."""
    for family, address in LOOPBACKS:
        try:
            end = _socket.socket(family, _socket.SOCK_STREAM | _socket.SOCK_CLOEXEC)
            end.setsockopt(_socket.IPPROTO_TCP, _socket.TCP_NODELAY, 1)
            end.settimeout(BRIEFLY)
            end.connect((address, port))
        except TimeoutError:  # its queue is full: it answers later
            pass
        except OSError:
            continue
        return end
    raise OSError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
