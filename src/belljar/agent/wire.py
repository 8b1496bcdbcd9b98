"""The wire between the host and the guest's agent: its words, frames and parser, for both sides.

THE WIRE. One duplex byte channel without connections. The host begins a conversation with PAD and a GREETING: the 8
bytes of MAGIC, a nonce of 16 bytes, and the nonce again. The agent answers the same 40 bytes, then a HELLO frame. What
comes before a greeting is discarded by both sides. A new greeting ends the old conversation (its payloads are killed, or,
where its nonce begins with HEIR, run on unheard) and begins the next; a hang-up of the channel ends it too. MAGIC occurs nowhere else on the way to the agent (in a call
each byte 255 is followed by a 1, see `stuffed`; DATA is split where it would, see `portions`), so a greeting is seen even
in the middle of a frame that an earlier host did not finish; PAD is there for the case that a few bytes of it were missing.

    frame   type u8, flags u8 (0), id u32, size u32 (big endian), then `size` bytes
    id      a call, process or stream, numbered by the host. Streams of process n: 4n stdin, 4n+1 stdout, 4n+2 stderr
    words   byte strings without NUL, joined by NUL; numbers in decimal; a list begins with its length
    to the agent    CALL (words: name, arguments)  SIGNAL (u8, + 128: to the leader alone, not to its group)  RESIZE (rows u16, columns u16)  PING (8 bytes)
    to the host     HELLO (PROTOCOL)  REPLY (words)  ERROR (words: kind, message; id 0 ends the conversation)
                    EXIT (END, then words: error, message; after the process's last DATA)  PONG (8 bytes)
    both ways       DATA (at most 64 KiB)  EOF  CREDIT (u32: so many bytes were consumed)  RESET (nobody reads on)

Each stream begins with WINDOW bytes of credit; DATA costs its size, CREDIT gives back what the receiver has passed on.
So a slow reader stops the writer at the far end, and neither side ever holds more than a window per stream. Anything
else on the wire is a WireError and ends the conversation.
"""

from __future__ import annotations

import struct
from _collections_abc import Iterator

PROTOCOL = 1
PORT = "org.belljar.agent"

MAGIC = b"\xffBELLJAR"
PAD = bytes(len(MAGIC))
HEIR = b"WENT ON\0"  # begins a nonce, by which a forked guest is greeted: what ran in its parent runs on
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
TO_AGENT = STREAM_FRAMES | {CALL: MAX_CALL, SIGNAL: 1, RESIZE: 4, PING: 8}
TO_HOST = STREAM_FRAMES | {HELLO: 64 * KIB, REPLY: 64 * KIB, ERROR: 64 * KIB, EXIT: 64 * KIB, PONG: 8}
EXACT = (EOF, CREDIT, RESET, SIGNAL, RESIZE, PING, PONG)  # bodies that have one size only

OF_PROCESS = (SIGNAL, RESIZE)  # their id is the process's, not a stream's

STDIN, STDOUT, STDERR = range(3)
NOT_FOUND, NOT_EXECUTABLE, FAILED = 127, 126, 125
LEADER = 0x80  # in a SIGNAL: for the payload's first process alone


class Patience:
    """Seconds for what takes a guest long."""

    GROW = 120  # for what was plugged in; a processor takes an emulated guest half a second
    KEYS = 60  # for new host keys
    PACKED = 60  # for the mounts of a packed folder


class WireError(ValueError):
    """The other side sent what the protocol does not allow."""


def greeting(nonce: bytes) -> bytes:
    """The bytes that begin a conversation, and the same that answer it."""
    return MAGIC + nonce + nonce


def welcome(nonce: bytes) -> bytes:
    """The agent's answer to a greeting: the same bytes, and a HELLO."""
    return greeting(nonce) + frame(HELLO, 0, b"%d" % PROTOCOL)


def stuffed(body: bytes) -> bytes:
    """The words of a call as they travel to the agent: MAGIC cannot be among them, whatever they hold."""
    return body.replace(b"\xff", b"\xff\1")


def portions(data: bytes) -> Iterator[bytes]:
    """Bodies for DATA frames to the agent: none too large, none with MAGIC in it."""
    begin = 0
    while begin < len(data):
        end = min(begin + MAX_DATA, len(data))
        if (at := data.find(MAGIC, begin, end)) >= 0:
            end = at + 1
        yield data[begin:end]
        begin = end


def frame(kind: int, number: int, body: bytes = b"") -> bytes:
    return HEADER.pack(kind, 0, number, len(body)) + body


def join(*words: bytes) -> bytes:
    return b"\0".join(words)


def without_nul(data: bytes) -> bytes:
    """A file's content as a word of a call, which has no NUL."""
    return data.replace(b"\1", b"\1\2").replace(b"\0", b"\1\1")


def with_nul(word: bytes) -> bytes:
    """The content again. Each byte 1 begins a pair, so what is found from the left is always one."""
    return word.replace(b"\1\1", b"\0").replace(b"\1\2", b"\1")


class Words:
    """Reads words in their order. Raises ValueError or IndexError where they are not what was asked for."""

    def __init__(self, words: list[bytes]) -> None:
        self.words, self.at = words, 0

    @classmethod
    def of_call(cls, body: bytes) -> Words:
        return cls(body.replace(b"\xff\1", b"\xff").split(b"\0"))

    def next(self) -> bytes:
        self.at += 1
        return self.words[self.at - 1]

    def text(self) -> str:
        return self.next().decode("utf-8", "surrogateescape")

    def number(self) -> int:
        return int(self.next())

    def some(self, each: int = 1) -> list[bytes]:
        """A list, of *each* words per entry."""
        count, begin = self.number(), self.at
        self.at += count * each
        if not begin <= self.at <= len(self.words):
            raise IndexError("a list that is longer than its call, or of negative length")
        return self.words[begin : self.at]

    def rows(self, each: int) -> list[list[bytes]]:
        """The same, entry by entry."""
        words = self.some(each)
        return [words[at : at + each] for at in range(0, len(words), each)]


class Parser:
    """Bytes in, frames out; holds little more than the largest frame. *accepts*: the frame types this side takes, each with
    the size of its largest body. *answer*: the greeting to wait for; None takes any greeting, at any time."""

    def __init__(self, accepts: dict[int, int], answer: bytes | None = None) -> None:
        self.accepts, self.answer = accepts, answer
        self.listens = answer is None
        self.greeted = False
        self.buffer = bytearray()
        self.clean = 0  # bytes of the frame that has begun in which no greeting begins
        self.tail = b""  # of the last frame: a greeting may have begun there

    def feed(self, data: bytes) -> None:
        """What came. `take` has its frames."""
        self.buffer += data

    def forget(self) -> None:
        """The conversation is over; look for the next greeting in what has come and will come."""
        self.buffer[:0] = self.tail
        self.greeted, self.clean, self.tail = False, 0, b""

    def take(self) -> tuple[int, int, bytes] | None:
        """(type, id, body) of the next frame; type GREETING has the nonce as its body. None: more bytes are needed."""
        buffer = self.buffer
        if not self.greeted:
            return self._seek()
        if self.listens and buffer.startswith(PAD + MAGIC[:1]):  # between two frames
            del buffer[: len(PAD)]
        if self.listens and buffer.startswith(MAGIC[:1]):
            return self._greeting()
        if len(buffer) < HEADER.size:
            return None
        kind, flags, number, size = HEADER.unpack_from(buffer)
        largest, end = self.accepts.get(kind, -1), HEADER.size + size
        if size > largest or flags or (size < largest and kind in EXACT):
            raise WireError(f"frame type {kind}, flags {flags}, id {number}, size {size}")
        if self.listens:
            at = buffer.find(MAGIC, self.clean, end)
            if at >= 0:  # whoever began this frame broke off, and somebody else began anew
                self.clean = 0
                del buffer[:at]
                return self._greeting()
            self.clean = max(0, min(len(buffer), end) - len(MAGIC))
        if len(buffer) < end:
            return None
        body = bytes(memoryview(buffer)[HEADER.size : end])
        del buffer[:end]
        self.clean = 0
        if self.listens:
            self.tail = body[1 - len(MAGIC) :]
        return kind, number, body

    def _seek(self) -> tuple[int, int, bytes] | None:
        """Skip to a whole greeting whose nonces are the same."""
        pattern = self.answer or MAGIC
        while (at := self.buffer.find(pattern)) >= 0:
            del self.buffer[:at]
            try:
                return self._greeting()
            except WireError:
                del self.buffer[:1]
        del self.buffer[: -len(pattern)]
        return None

    def _greeting(self) -> tuple[int, int, bytes] | None:
        """The greeting that begins here, once all of it has come. Raises WireError where something else does."""
        begun = bytes(self.buffer[:GREETING_SIZE])
        if not MAGIC.startswith(begun[: len(MAGIC)]):
            raise WireError("frame type 255")
        if len(begun) < GREETING_SIZE:
            return None
        nonce = begun[len(MAGIC) : -NONCE_SIZE]
        if begun != greeting(nonce):
            raise WireError("a greeting whose nonces differ")
        del self.buffer[:GREETING_SIZE]
        self.greeted = True
        return GREETING, 0, nonce
