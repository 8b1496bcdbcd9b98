"""The wire between the host and the guest's agent: its words, frames and parser, for both sides.

THE WIRE. One duplex byte channel without connections. The host begins a conversation with PAD and a GREETING: the 8
bytes of MAGIC, a nonce of 16 bytes, and the nonce again. The agent answers the same 40 bytes, then a HELLO frame. What
comes before a greeting is discarded by both sides. A new greeting ends the old conversation (its payloads are killed)
and begins the next; a hang-up of the channel ends it too. MAGIC occurs nowhere else on the way to the agent (in a call
each byte 255 is followed by a 1, see `stuffed`; DATA is split where it would, see `portions`), so a greeting is seen even
in the middle of a frame that an earlier host did not finish; PAD is there for the case that a few bytes of it were missing.

    frame   type u8, flags u8 (0), id u32, size u32 (big endian), then `size` bytes
    id      a call, process or stream, numbered by the host. Streams of process n: 4n stdin, 4n+1 stdout, 4n+2 stderr,
            4n+3 its script
    words   byte strings without NUL, joined by NUL; numbers in decimal; a list begins with its length
    to the agent    CALL (words: name, arguments)  SIGNAL (u8, + 128: to the leader alone, not to its group)  RESIZE (rows u16, columns u16)  PING (8 bytes)
    to the host     HELLO (words)  REPLY (words)  ERROR (words: kind, message; id 0 ends the conversation)
                    EXIT (END, then words: error, message; after the process's last DATA)  PONG (8 bytes)
    both ways       DATA (at most 64 KiB)  EOF  CREDIT (u32: so many bytes were consumed)  RESET (nobody reads on)

Each stream begins with WINDOW bytes of credit; DATA costs its size, CREDIT gives back what the receiver has passed on.
So a slow reader stops the writer at the far end, and neither side ever holds more than a window per stream. Anything
else on the wire is a WireError and ends the conversation.
"""

import os
import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Iterator

VERSION = "0.1.0"  # of belljar; a test keeps it equal to belljar.__version__
PROTOCOL = 1
PORT = "org.belljar.agent"

MAGIC = b"\xffBELLJAR"
PAD = bytes(len(MAGIC))
NONCE_SIZE = 16
GREETING_SIZE = len(MAGIC) + 2 * NONCE_SIZE
HEADER = struct.Struct("!BBII")
U32 = struct.Struct("!I")
WINDOW_SIZE = struct.Struct("!HH")
END = struct.Struct("!IddQ?")  # wait status, user seconds, system seconds, peak bytes, killed for lack of memory

HELLO, CALL, REPLY, ERROR, DATA, EOF, CREDIT, RESET, EXIT, PING, PONG, SIGNAL, RESIZE = range(1, 14)
GREETING = 0xFF

KIB, MIB = 1 << 10, 1 << 20
MAX_DATA = 64 * KIB
MAX_CALL = 16 * MIB
WINDOW = 256 * KIB
MAX_CREDIT = 1 << 30

STREAM_FRAMES = {DATA: MAX_DATA, EOF: 0, CREDIT: 4, RESET: 0}
TO_AGENT = {CALL: MAX_CALL, SIGNAL: 1, RESIZE: 4, PING: 8}
TO_AGENT.update(STREAM_FRAMES)
TO_HOST = {HELLO: 64 * KIB, REPLY: 64 * KIB, ERROR: 64 * KIB, EXIT: 64 * KIB, PONG: 8}
TO_HOST.update(STREAM_FRAMES)
EXACT = (EOF, CREDIT, RESET, SIGNAL, RESIZE, PING, PONG)  # bodies that have one size only

STDIN, STDOUT, STDERR, SCRIPT = range(4)
NOT_FOUND, NOT_EXECUTABLE, FAILED = 127, 126, 125
LEADER = 0x80  # in a SIGNAL: for the payload's first process alone

GROW_PATIENCE = 120  # seconds for what was plugged in; a processor takes an emulated guest half a second
KEYS_PATIENCE = 60  # seconds for new host keys
PACKED_PATIENCE = 60  # seconds for the mounts of a packed folder


class WireError(ValueError):
    """The other side sent what the protocol does not allow."""


def greeting(nonce: bytes) -> bytes:
    """The bytes that begin a conversation, and the same that answer it."""
    return MAGIC + nonce + nonce


def stuffed(body: bytes) -> bytes:
    """The words of a call as they travel to the agent: MAGIC cannot be among them, whatever they hold."""
    return body.replace(b"\xff", b"\xff\1")


def unstuffed(body: bytes) -> bytes:
    return body.replace(b"\xff\1", b"\xff")


def portions(data: bytes) -> "Iterator[bytes]":
    """Bodies for DATA frames to the agent: none too large, none with MAGIC in it."""
    begin = 0
    while begin < len(data):
        end = min(begin + MAX_DATA, len(data))
        found = data.find(MAGIC, begin, end)
        if found >= 0:
            end = found + 1
        yield data[begin:end]
        begin = end


def frame(kind: int, number: int, body: bytes = b"") -> bytes:
    """One frame, ready to send."""
    return HEADER.pack(kind, 0, number, len(body)) + body


def credit(number: int, amount: int) -> bytes:
    return HEADER.pack(CREDIT, 0, number, 4) + U32.pack(amount)


def join(*words: bytes) -> bytes:
    return b"\0".join(words)


def hello_of(boot_nonce: bytes, system: str, has_9p: bool) -> bytes:
    """The words of a HELLO."""
    texts = (VERSION, boot_nonce.decode("ascii"), system, os.uname().release)
    said = [b"%d" % PROTOCOL] + [text.encode("utf-8", "replace").replace(b"\0", b"?") for text in texts]
    return join(*(said + [b"9p" if has_9p else b""]))


def without_nul(data: bytes) -> bytes:
    """A file's content as a word of a call, which has no NUL."""
    return data.replace(b"\1", b"\1\2").replace(b"\0", b"\1\1")


def with_nul(word: bytes) -> bytes:
    """The content again. Each byte 1 begins a pair, so what is found from the left is always one."""
    return word.replace(b"\1\1", b"\0").replace(b"\1\2", b"\1")


class Words:
    """Reads words in their order. Raises ValueError or IndexError where they are not what was asked for."""

    def __init__(self, words: "list[bytes]") -> None:
        self.words, self.at = words, 0

    def next(self) -> bytes:
        self.at += 1
        return self.words[self.at - 1]

    def text(self) -> str:
        return self.next().decode("utf-8", "surrogateescape")

    def number(self) -> int:
        return int(self.next())

    def some(self, each: int = 1) -> "list[bytes]":
        """A list, of *each* words per entry."""
        count, begin = self.number(), self.at
        self.at += count * each
        if not begin <= self.at <= len(self.words):
            raise IndexError("a list that is longer than its call, or of negative length")
        return self.words[begin : self.at]


class Parser:
    """Bytes in, frames out; never holds more than the largest frame. *accepts*: the frame types this side takes, each with the
    size of its largest body. *answer*: the greeting to wait for; None takes any greeting, at any time."""

    ROOM = 256 * KIB

    def __init__(self, accepts: "dict[int, int]", answer: "bytes | None" = None) -> None:
        self.accepts, self.answer = accepts, answer
        self.listens = answer is None
        self.greeted = False
        self.buffer = bytearray(self.ROOM)
        self.start = self.end = 0
        self.wanted = 0  # bytes of the frame that has begun, header included
        self.clean = 0  # bytes of it that hold no greeting
        self.tail = b""  # of the last frame: a greeting may have begun there

    def room(self) -> memoryview:
        """Free space, never empty, for what comes next."""
        have = self.end - self.start
        need = max(self.wanted, have + MAX_DATA // 2)
        if not have:
            self.start = self.end = 0
        if need > len(self.buffer) or (not have and len(self.buffer) > self.ROOM):
            begun = self.buffer[self.start : self.end]
            self.buffer = bytearray(max(need, self.ROOM))  # a large call begins, or is over
            self.buffer[:have] = begun
            self.start, self.end = 0, have
        elif self.start + need > len(self.buffer):
            self.buffer[:have] = self.buffer[self.start : self.end]
            self.start, self.end = 0, have
        return memoryview(self.buffer)[self.end :]

    def filled(self, count: int) -> None:
        self.end += count

    def forget(self) -> None:
        """The conversation is over; look for the next greeting in what has come and will come."""
        self.greeted, self.wanted, self.clean = False, 0, 0
        begun = self.tail + self.buffer[self.start : self.end]
        self.tail = b""
        self.buffer = bytearray(max(self.ROOM, len(begun)))
        self.buffer[: len(begun)] = begun
        self.start, self.end = 0, len(begun)

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
        if self.listens and self._greeting_within(begin + size):
            return self._greeted_again(self.end - self.start)
        if begin + size > self.end:
            self.wanted = HEADER.size + size
            return None
        self.wanted = self.clean = 0
        self.start = begin + size
        body = bytes(memoryview(self.buffer)[begin : begin + size])
        if self.listens:
            self.tail = body[1 - len(MAGIC) :]
        return kind, number, body

    def _greeting_within(self, end: int) -> bool:
        """Did the one who began this frame break off, and somebody else begin anew? Then go there."""
        end = min(end, self.end)
        at = self.buffer.find(MAGIC, self.start + max(self.clean - len(MAGIC), 0), end)
        self.clean = end - self.start
        if at < 0:
            return False
        self.start, self.wanted, self.clean = at, 0, 0
        return True

    def _seek(self) -> "tuple[int, int, bytes] | None":
        """Skip to a whole greeting whose nonces are the same."""
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
            raise WireError("a greeting whose nonces differ")
        self.start += GREETING_SIZE
        return GREETING, 0, nonce

    def _nonce(self) -> "bytes | None":
        begin = self.start + len(MAGIC)
        twice = bytes(memoryview(self.buffer)[begin : begin + 2 * NONCE_SIZE])
        nonce = twice[:NONCE_SIZE]
        return nonce if twice == nonce + nonce else None
