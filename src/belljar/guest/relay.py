"""Lets a second local client talk to a guest that is spoken to already: `belljar exec` and `belljar cp`.

The client speaks the agent's own protocol over its connection (a plain `Conversation` will do); numbers are translated,
credit is passed on end to end. A client that goes away has its processes killed; one that breaks the rules is sent
away before its frames can end the guest's conversation.
"""

from __future__ import annotations

import asyncio
import socket

from belljar.agent import wire
from belljar.errors import GuestError
from belljar.guest.channel import Channel
from belljar.guest.conversation import Conversation

ALLOWED, PROCESSES = (b"start", b"connect", b"add_account"), (b"start", b"connect")
MOST_CALLS = 256  # of one client at a time
KILL = bytes([9])


class Relay:
    def __init__(self, conversation: Conversation, connection: socket.socket) -> None:
        self.conversation = conversation
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.client = Channel(connection, wire.Parser(wire.TO_AGENT), self._receive, self.end)
        self.forwards: dict[int, Forward] = {}  # by the client's number

    def close(self) -> None:
        self.client.close()
        self._drop_all()

    def _drop_all(self) -> None:
        for forward in list(self.forwards.values()):
            forward.orphan()
        self.forwards.clear()

    def end(self, error: GuestError | None = None) -> None:
        if not self.over.done():
            self.over.set_result(None)

    def _receive(self, kind: int, number: int, body: bytes) -> None:
        if kind == wire.GREETING:
            self._drop_all()
            self.client.send(wire.welcome(body))
        elif kind == wire.PING:
            self.client.send(wire.frame(wire.PONG, number, body))
        elif kind == wire.CALL:
            self._call(number, body)
        else:
            key = number if kind in (wire.SIGNAL, wire.RESIZE) else number >> 2
            if key in self.forwards:
                self.forwards[key].to_guest(kind, number, body)

    def _call(self, number: int, body: bytes) -> None:
        if number in self.forwards or len(self.forwards) >= MOST_CALLS:
            raise wire.WireError(f"call {number}: there already, or one too many")
        name = body.partition(b"\0")[0]
        if name not in ALLOWED:
            why = wire.join(b"refused", b"this can only be asked by the machine's supervisor")
            return self.client.send(wire.frame(wire.ERROR, number, why))
        try:
            channel = self.conversation.open_channel()
        except GuestError:
            return self.end()
        inner = self.conversation.next_number()
        self.forwards[number] = forward = Forward(self, number, inner, channel, is_process=name in PROCESSES)
        self.conversation.register(inner, forward)
        channel.send(wire.frame(wire.CALL, inner, body))


class Forward:
    """One call of a client and, where it started something, that process with its streams."""

    def __init__(self, relay: Relay, outer: int, inner: int, guest: Channel, *, is_process: bool) -> None:
        self._relay, self._outer, self._inner, self._guest = relay, outer, inner, guest
        self._is_process = is_process
        self.is_over = False
        self._is_orphan = False
        self._credit = dict.fromkeys(range(4), wire.WINDOW)  # what the client may still send, by stream
        self._held = dict.fromkeys(range(4), 0)  # what the guest sent and the client did not give back
        self._ended: set[int] = set()

    def to_guest(self, kind: int, number: int, body: bytes) -> None:
        """From the client. Raises WireError for what the agent would take as the end of everything."""
        if kind in (wire.SIGNAL, wire.RESIZE):
            return self._guest.send(wire.frame(kind, self._inner, body))
        stream = number & 3
        if kind == wire.DATA:
            self._credit[stream] -= len(body)
            if self._credit[stream] < 0 or stream in self._ended:
                raise wire.WireError(f"stream {number}: data without credit or after its end")
        elif kind == wire.EOF:
            self._ended.add(stream)
        elif kind == wire.CREDIT:
            self._held[stream] -= wire.U32.unpack(body)[0]
            if self._held[stream] < 0:
                raise wire.WireError(f"stream {number}: credit for what was never sent")
        number = 4 * self._inner + stream
        for part in wire.portions(body) if kind == wire.DATA else (body,):
            self._guest.send(wire.frame(kind, number, part))

    def receive(self, kind: int, number: int, body: bytes) -> None:
        stream = number & 3
        if kind == wire.DATA:
            self._held[stream] += len(body)
            if self._held[stream] > wire.WINDOW and not self._is_orphan:
                raise wire.WireError(f"stream {number}: data without credit")
        elif kind == wire.CREDIT:
            self._credit[stream] += wire.U32.unpack(body)[0]
        is_last = kind == (wire.EXIT if self._is_process else wire.REPLY) or kind == wire.ERROR
        if not self._is_orphan:
            is_stream = kind in (wire.DATA, wire.EOF, wire.CREDIT, wire.RESET)
            self._relay.client.send(wire.frame(kind, 4 * self._outer + stream if is_stream else self._outer, body))
            if is_last:
                self._relay.forwards.pop(self._outer, None)
        self.is_over = is_last

    def orphan(self) -> None:
        """The client is gone: its process is killed, what it says goes nowhere."""
        self._is_orphan = True
        if self._is_process and not self.is_over:
            self._guest.send(wire.frame(wire.SIGNAL, self._inner, KILL))
            for stream in range(4):
                self._guest.send(wire.frame(wire.RESET, 4 * self._inner + stream))

    def fail(self, error: GuestError) -> None:
        self._relay.end()
