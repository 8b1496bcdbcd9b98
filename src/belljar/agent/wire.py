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
    the size of its largest body. *answer*: the greeting to wait for; None takes any greeting, at any time: there ends what an
    earlier host did not finish."""

    def __init__(self, accepts: dict[int, int], answer: bytes | None = None) -> None:
        self.accepts, self.answer = accepts, answer
        self.greeted = False
        self.buffer = bytearray()
        self.later: list[bytearray] = []  # what came from each further greeting on
        self.tail = b""  # of all that came: a greeting may have begun there

    def feed(self, data: bytes) -> None:
        """What came. `take` has its frames."""
        newest = self.later[-1] if self.later else self.buffer
        if self.answer is not None:
            newest += data
            return
        whole = self.tail + data
        first, *rest = whole.split(MAGIC)
        newest += first[len(self.tail) :]
        self.later += [bytearray(MAGIC + part) for part in rest]
        self.tail = whole[1 - len(MAGIC) :]

    def forget(self) -> None:
        """The conversation is over; look for the next greeting in what will come."""
        self.greeted = False
        self.buffer.clear()

    def take(self) -> tuple[int, int, bytes] | None:
        """(type, id, body) of the next frame; type GREETING has the nonce as its body. None: more bytes are needed."""
        while True:
            frame = self._frame() if self.greeted else self._greeting()
            if frame is not None or not self.later:
                return frame
            self.buffer, self.greeted = self.later.pop(0), False

    def _frame(self) -> tuple[int, int, bytes] | None:
        buffer = self.buffer
        if len(buffer) < HEADER.size:
            return None
        kind, flags, number, size = HEADER.unpack_from(buffer)
        largest, end = self.accepts.get(kind, -1), HEADER.size + size
        if size > largest or flags or (size < largest and kind in EXACT):
            raise WireError(f"frame type {kind}, flags {flags}, id {number}, size {size}")
        if len(buffer) < end:
            return None
        body = bytes(memoryview(buffer)[HEADER.size : end])
        del buffer[:end]
        return kind, number, body

    def _greeting(self) -> tuple[int, int, bytes] | None:
        """Skip to the greeting, once all of it has come."""
        buffer, pattern = self.buffer, self.answer or MAGIC
        begin = buffer.find(pattern)
        del buffer[: begin if begin >= 0 else -len(pattern)]
        if begin < 0 or len(buffer) < GREETING_SIZE:
            return None
        nonce = bytes(buffer[len(MAGIC) : GREETING_SIZE - NONCE_SIZE])
        if not buffer.startswith(greeting(nonce)):
            raise WireError("a greeting whose nonces differ")
        del buffer[:GREETING_SIZE]
        self.greeted = True
        return GREETING, 0, nonce
