#!/usr/bin/python3
"""belljar's guest agent: gives the guest its identity, runs payloads, carries their streams and files.

One file, standard library only, Python 3.6 or later. It travels into the guest; the host imports the wire and the tar
code from here, so both ends speak by the same words. What is asked, and when, is decided outside (belljar.guest).

THE WIRE. One duplex byte channel without connections. The host begins a conversation with a GREETING: the 8 bytes of
MAGIC, a nonce of 16 bytes, their CRC-32. The agent answers the same 28 bytes, then a HELLO frame. What comes before a
greeting is discarded by both sides. MAGIC's first byte is no frame type: where a frame could begin, a new greeting
ends the old conversation (its payloads are killed) and begins the next. A hang-up of the channel ends it too.

    frame   type u8, flags u8 (0), id u32, size u32 (big endian), then `size` bytes
    id      a call, process or stream, numbered by the host. Streams of process n: 4n stdin, 4n+1 stdout, 4n+2 stderr,
            4n+3 its script
    to the agent    CALL (name, NUL, JSON)  SIGNAL (u8)  RESIZE (rows u16, columns u16)  PING (8 bytes)
    to the host     HELLO (JSON)  REPLY (JSON)  ERROR (JSON: kind, message; id 0 ends the conversation)
                    EXIT (JSON, after the process's last DATA)  PONG (8 bytes)
    both ways       DATA (at most 64 KiB)  EOF  CREDIT (u32: so many bytes were consumed)  RESET (nobody reads on)

Each stream begins with WINDOW bytes of credit; DATA costs its size, CREDIT gives back what the receiver has passed on.
So a slow reader stops the writer at the far end, and neither side ever holds more than a window per stream. In JSON,
bytes travel as latin-1 text. Anything else on the wire is a WireError and ends the conversation.
"""
# ruff: noqa: UP, SIM105, RUF005, RUF012, B904  (the oldest Python that must run this file is 3.6)

import binascii
import collections
import errno
import json
import os
import select
import signal
import stat
import struct
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Iterator, NoReturn

    Json = dict[str, Any]

VERSION = "0.1.0"  # of belljar; a test keeps it equal to belljar.__version__
PROTOCOL = 1
PORT = "org.belljar.agent"

MAGIC = b"\xffBELLJAR"
NONCE_SIZE = 16
GREETING_SIZE = len(MAGIC) + NONCE_SIZE + 4
HEADER = struct.Struct("!BBII")
U32 = struct.Struct("!I")
WINDOW_SIZE = struct.Struct("!HH")

HELLO, CALL, REPLY, ERROR, DATA, EOF, CREDIT, RESET, EXIT, PING, PONG, SIGNAL, RESIZE = range(1, 14)
GREETING = 0xFF

KIB, MIB = 1 << 10, 1 << 20
MAX_DATA = 64 * KIB
MAX_CALL = 16 * MIB
WINDOW = 256 * KIB
MAX_CREDIT = 1 << 30
INLINE_SCRIPT = MIB  # larger scripts go by their own stream

STREAM_FRAMES = {DATA: MAX_DATA, EOF: 0, CREDIT: 4, RESET: 0}
TO_AGENT = dict(STREAM_FRAMES, **{})
TO_AGENT.update({CALL: MAX_CALL, SIGNAL: 1, RESIZE: 4, PING: 8})
TO_HOST = dict(STREAM_FRAMES, **{})
TO_HOST.update({HELLO: 64 * KIB, REPLY: MIB, ERROR: 64 * KIB, EXIT: 64 * KIB, PONG: 8})
EXACT = (EOF, CREDIT, RESET, SIGNAL, RESIZE, PING, PONG)  # bodies that have one size only

STDIN, STDOUT, STDERR, SCRIPT = range(4)
NOT_FOUND, NOT_EXECUTABLE, FAILED = 127, 126, 125


# -- the wire, for both sides ------------------------------------------------------------------------------------------


class WireError(ValueError):
    """The other side sent what the protocol does not allow."""


def greeting(nonce: bytes) -> bytes:
    """The 28 bytes that begin a conversation, and the same 28 that answer it."""
    return MAGIC + nonce + U32.pack(binascii.crc32(nonce))


def frame(kind: int, number: int, body: bytes = b"") -> bytes:
    """One frame, ready to send."""
    return HEADER.pack(kind, 0, number, len(body)) + body


def credit(number: int, amount: int) -> bytes:
    return HEADER.pack(CREDIT, 0, number, 4) + U32.pack(amount)


def text_of(data: bytes) -> str:
    """Bytes as they travel in JSON."""
    return data.decode("latin-1")


def bytes_of(text: str) -> bytes:
    return text.encode("latin-1")


class Parser(object):
    """Bytes in, frames out. `room` is where to read into, `filled` says how much came, `take` gives the next frame.

    *accepts* has the frame types this side takes, each with the size of its largest body. *answer* is the greeting to
    wait for; None takes any greeting, at any frame boundary. The buffer never grows beyond the largest frame.
    """

    ROOM = 256 * KIB

    def __init__(self, accepts: "dict[int, int]", answer: "bytes | None" = None) -> None:
        self.accepts, self.answer = accepts, answer
        self.listens = answer is None
        self.greeted = False
        self.buffer = bytearray(self.ROOM)
        self.start = self.end = 0
        self.wanted = 0  # bytes of the frame that has begun, header included

    def room(self) -> memoryview:
        """Free space, never empty, for what comes next."""
        have = self.end - self.start
        need = max(self.wanted, have + MAX_DATA // 2)
        if not have:
            self.start = self.end = 0
            if len(self.buffer) > self.ROOM and need <= self.ROOM:
                self.buffer = bytearray(self.ROOM)  # a large call is over
        elif self.start + need > len(self.buffer):
            old = self.buffer
            size = max(need, self.ROOM) if need > len(old) else len(old)
            self.buffer = bytearray(size)
            self.buffer[:have] = memoryview(old)[self.start : self.end]
            self.start, self.end = 0, have
        return memoryview(self.buffer)[self.end :]

    def filled(self, count: int) -> None:
        self.end += count

    def feed(self, data: bytes) -> None:
        """For those who have the bytes already."""
        view = memoryview(data)
        while view:
            room = self.room()
            part = view[: len(room)]
            room[: len(part)] = part
            self.end += len(part)
            view = view[len(part) :]
            if view and self.end - self.start >= self.wanted > 0:
                raise WireError("fed faster than taken")

    def forget(self) -> None:
        """The conversation is over; look for the next greeting in what has come and will come."""
        self.greeted, self.wanted = False, 0

    def take(self) -> "tuple[int, int, bytes] | None":
        """(type, id, body) of the next frame; type GREETING has the nonce as its body. None: more bytes are needed."""
        if not self.greeted:
            return self._seek()
        have = self.end - self.start
        if self.listens and have and self.buffer[self.start] == GREETING:
            return self._greeted_again(have)
        if have < HEADER.size:
            self.wanted = 0
            return None
        kind, flags, number, size = HEADER.unpack_from(self.buffer, self.start)
        largest = self.accepts.get(kind, -1)
        if size > largest or flags or (size < largest and kind in EXACT):
            raise WireError("frame type %d, flags %d, id %d, size %d" % (kind, flags, number, size))
        begin = self.start + HEADER.size
        if begin + size > self.end:
            self.wanted = HEADER.size + size
            return None
        self.wanted = 0
        self.start = begin + size
        return kind, number, bytes(memoryview(self.buffer)[begin : begin + size])

    def _seek(self) -> "tuple[int, int, bytes] | None":
        """Skip to a whole greeting whose checksum is right."""
        pattern = self.answer or MAGIC
        while True:
            at = self.buffer.find(pattern, self.start, self.end)
            if at < 0:
                self.start = max(self.start, self.end - len(pattern) + 1)
                return None
            self.start = at
            if self.end - at < GREETING_SIZE:
                return None
            nonce = self._nonce()
            if nonce is not None:
                self.start += GREETING_SIZE
                self.greeted = True
                return GREETING, 0, nonce
            self.start += 1

    def _greeted_again(self, have: int) -> "tuple[int, int, bytes] | None":
        begun = bytes(memoryview(self.buffer)[self.start : self.start + min(have, len(MAGIC))])
        if not MAGIC.startswith(begun):
            raise WireError("frame type 255")
        if have < GREETING_SIZE:
            return None
        nonce = self._nonce()
        if nonce is None:
            raise WireError("a greeting with a wrong checksum")
        self.start += GREETING_SIZE
        return GREETING, 0, nonce

    def _nonce(self) -> "bytes | None":
        whole = bytes(memoryview(self.buffer)[self.start : self.start + GREETING_SIZE])
        nonce = whole[len(MAGIC) : len(MAGIC) + NONCE_SIZE]
        return nonce if whole == greeting(nonce) else None
