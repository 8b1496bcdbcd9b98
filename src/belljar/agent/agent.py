#!/usr/bin/python3
"""belljar's guest agent: gives the guest its identity, runs payloads, carries their streams and files.

One file, standard library only, Python 3.6 or later. It travels into the guest; the host imports the wire and the tar
code from here, so both ends speak by the same words. What is asked, and when, is decided outside (belljar.guest).

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

THE HOT PATH. A guest under emulation that was resumed from a template runs every instruction for the first time, and
that is what costs: not loops, but each new piece of Python, libc and kernel. So on the way from a greeting to the
payload's first instruction nothing is imported, parsed, forked or created that could have been before (see `settle`).
"""
# The oldest Python that must run this file is 3.6, and every import costs a guest time.
# ruff: noqa: UP028, UP031, UP035, SIM105, SIM905, RUF005, RUF012, B904, B905, I001

import errno
import os
import select
import stat
import struct
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from collections import deque
    from typing import Any, Callable, Iterable, Iterator, NoReturn
else:  # what is below the library's modules of these names, and much quicker to import
    import _signal as signal
    from _collections import deque

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


COARSE_CLOCK = 5  # CLOCK_REALTIME_COARSE, by which file systems stamp
LEADER = 0x80  # in a SIGNAL: for the payload's first process alone


# -- the wire, for both sides ------------------------------------------------------------------------------------------


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
        begin = self.at + 1
        self.at = begin + self.number_at(begin - 1) * each
        if self.at > len(self.words):
            raise IndexError("a list that is longer than its call")
        return self.words[begin : self.at]

    def number_at(self, at: int) -> int:
        count = int(self.words[at])
        if count < 0:
            raise ValueError("a list of negative length")
        return count


class Parser:
    """Bytes in, frames out. `room` is where to read into, `filled` says how much came, `take` gives the next frame.

    *accepts* has the frame types this side takes, each with the size of its largest body. *answer* is the greeting to
    wait for; None takes any greeting, at any time. The buffer never grows beyond the largest frame.
    """

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

    def feed(self, data: bytes) -> "Iterator[tuple[int, int, bytes]]":
        """For those who have the bytes already: every frame that is whole once they came."""
        view = memoryview(data)
        while view:
            room = self.room()
            count = min(len(room), len(view))
            room[:count] = view[:count]
            self.end += count
            view = view[count:]
            for found in iter(self.take, None):
                yield found

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


# -- files as tar streams, for both sides ------------------------------------------------------------------------------
#
# The member "r" is the file or folder itself, "r/..." what is in it. Modes, times (to the nanosecond), symbolic and
# hard links and holes are kept; owners are not: files belong to whoever unpacks them. Sockets, pipes and devices stay.

ROOT = "r"
BLOCK = 512
CHUNK = 256 * KIB
MOST_METADATA = MIB  # one name or extended header
DEEPEST = 200
HOLES_FROM = MIB  # smaller files are sent with their zeros


class TransferError(Exception):
    """A copy that did not work: `kind` is missing, refused, unsafe, broken or space."""

    def __init__(self, kind: str, message: str) -> None:
        Exception.__init__(self, message)
        self.kind, self.message = kind, message


def shown(path: bytes) -> str:
    """A file name for a message."""
    return path.decode("utf-8", "backslashreplace")


def pack(
    source: bytes, write: "Callable[[bytes], object]", skip: "Iterable[bytes]" = (), since: int = 0
) -> "list[bytes]":
    """Write the file or folder as a tar stream, without the paths of *skip* (below it, relative) and without files that
    did not change since that moment (nanoseconds). Returns the special files that were left out."""
    return Packer(write, skip, since).pack(source)


class Packer:
    def __init__(self, write: "Callable[[bytes], object]", skip: "Iterable[bytes]" = (), since: int = 0) -> None:
        import tarfile

        self.tarfile, self.write = tarfile, write
        self.skip = {ROOT + "/" + path.decode("utf-8", "surrogateescape") for path in skip}
        self.since = since
        self.skipped = []  # type: list[bytes]
        self.linked = {}  # type: dict[tuple[int, int], str]

    def pack(self, source: bytes) -> "list[bytes]":
        try:
            facts = os.stat(source)  # the one who names a link means what it points to
        except OSError as exc:
            kind = "missing" if exc.errno in (errno.ENOENT, errno.ENOTDIR) else "refused"
            raise TransferError(kind, "%s: %s" % (shown(source), exc.strerror))
        if not stat.S_ISREG(facts.st_mode) and not stat.S_ISDIR(facts.st_mode):
            raise TransferError("refused", "%s: neither a file nor a folder" % shown(source))
        try:
            self._member(source, ROOT, facts, 0)
        except OSError as exc:
            if exc.filename is None:
                raise
            raise TransferError("refused", "%s: %s" % (shown(os.fsencode(exc.filename)), exc.strerror))
        self.write(bytes(2 * BLOCK))
        return self.skipped

    def _member(self, path: bytes, name: str, facts: os.stat_result, depth: int) -> None:
        if name in self.skip:
            return
        if stat.S_ISDIR(facts.st_mode):
            self._folder(path, name, facts, depth)
        elif facts.st_ctime_ns < self.since:
            pass
        elif stat.S_ISREG(facts.st_mode):
            self._file(path, name, facts)
        elif stat.S_ISLNK(facts.st_mode):
            target = os.readlink(path).decode("utf-8", "surrogateescape")
            self._header(name, facts, self.tarfile.SYMTYPE, link=target)
        else:
            self.skipped.append(path)

    def _folder(self, path: bytes, name: str, facts: os.stat_result, depth: int) -> None:
        if depth >= DEEPEST:
            raise TransferError("refused", "%s: more than %d folders deep" % (shown(path), DEEPEST))
        self._header(name, facts, self.tarfile.DIRTYPE)
        for entry in os.listdir(path):
            inner = path.rstrip(b"/") + b"/" + entry
            try:
                inner_facts = os.lstat(inner)
            except FileNotFoundError:
                continue  # it went away meanwhile
            self._member(inner, name + "/" + entry.decode("utf-8", "surrogateescape"), inner_facts, depth + 1)

    def _file(self, path: bytes, name: str, facts: os.stat_result) -> None:
        key = (facts.st_dev, facts.st_ino)
        if facts.st_nlink > 1:
            if key in self.linked:
                self._header(name, facts, self.tarfile.LNKTYPE, link=self.linked[key])
                return
            self.linked[key] = name
        # Not blocking: the name may have become a pipe since we looked.
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (os.O_NOFOLLOW if name != ROOT else 0)
        fd = os.open(path, flags)
        try:
            self._content(fd, path, name, os.fstat(fd))
        finally:
            os.close(fd)

    def _content(self, fd: int, path: bytes, name: str, facts: os.stat_result) -> None:
        size = facts.st_size
        parts = data_parts(fd, size) if size >= HOLES_FROM and facts.st_blocks * BLOCK < size else [(0, size)]
        stored = sum(length for _, length in parts)
        if parts == [(0, size)] or stored >= 1 << 33:  # tarfile misreads larger sparse members
            self._header(name, facts, self.tarfile.REGTYPE, size=size)
            parts, stored = [(0, size)], size
        else:
            self._sparse_header(name, facts, parts, stored)
        for offset, length in parts:
            self._copy(fd, path, offset, length)
        self.write(bytes(-stored % BLOCK))

    def _copy(self, fd: int, path: bytes, offset: int, length: int) -> None:
        while length:
            data = os.pread(fd, min(length, CHUNK), offset)
            if not data:
                raise TransferError("broken", "%s: became shorter while it was read" % shown(path))
            self.write(data)
            offset += len(data)
            length -= len(data)

    def _sparse_header(self, name: str, facts: os.stat_result, parts: "list[tuple[int, int]]", stored: int) -> None:
        """GNU sparse format 1.0: the map of the parts goes before the data."""
        lines = ["%d\n" % len(parts)] + ["%d\n%d\n" % part for part in parts]
        chart = "".join(lines).encode("ascii")
        chart += bytes(-len(chart) % BLOCK)
        extra = {
            "GNU.sparse.major": "1",
            "GNU.sparse.minor": "0",
            "GNU.sparse.name": name,
            "GNU.sparse.realsize": "%d" % facts.st_size,
        }
        self._header(name, facts, self.tarfile.REGTYPE, size=len(chart) + stored, extra=extra)
        self.write(chart)

    def _header(
        self,
        name: str,
        facts: os.stat_result,
        kind: bytes,
        size: int = 0,
        link: str = "",
        extra: "dict[str, str] | None" = None,
    ) -> None:
        member = self.tarfile.TarInfo(name)
        member.type, member.size, member.linkname = kind, size, link
        member.mode = stat.S_IMODE(facts.st_mode)
        nanoseconds = facts.st_mtime_ns
        sign = "-" if nanoseconds < 0 else ""
        member.pax_headers = {"mtime": "%s%d.%09d" % ((sign,) + divmod(abs(nanoseconds), 10**9))}
        member.pax_headers.update(extra or {})
        self.write(member.tobuf(self.tarfile.PAX_FORMAT, "utf-8", "surrogateescape"))


class Gatherer(Packer):
    """Packs for people to look at: whatever cannot be read is left out, what shrinks meanwhile is filled up."""

    def __init__(self, write: "Callable[[bytes], object]") -> None:
        Packer.__init__(self, self._send)
        self.out = write

    def gather(self, paths: "list[bytes]") -> None:
        """One archive of all these, each under its own path."""
        for path in paths:
            path = os.path.normpath(path)
            try:
                facts = os.stat(path)
            except OSError:
                continue
            self._member(path, path.decode("utf-8", "surrogateescape").strip("/") or ".", facts, 0)
        self.write(bytes(2 * BLOCK))

    def _send(self, data: bytes) -> None:
        try:
            self.out(data)
        except OSError as exc:  # nobody takes more; not to be taken for a file that cannot be read
            raise TransferError("over", "the archive was cut off: %s" % exc.strerror)

    def _member(self, path: bytes, name: str, facts: os.stat_result, depth: int) -> None:
        try:
            Packer._member(self, path, name, facts, depth)
        except OSError:
            self.skipped.append(path)
        except TransferError as exc:
            if exc.kind == "over":
                raise
            self.skipped.append(path)

    def _copy(self, fd: int, path: bytes, offset: int, length: int) -> None:
        while length:
            size = min(length, CHUNK)
            try:
                data = os.pread(fd, size, offset) or bytes(size)
            except OSError:
                data = bytes(size)
            self.write(data)
            offset += len(data)
            length -= len(data)


def data_parts(fd: int, size: int) -> "list[tuple[int, int]]":
    """(offset, length) of what is stored of a file with holes; ends with an empty part at its size, as GNU tar does."""
    parts, at = [], 0
    while at < size:
        try:
            begin = os.lseek(fd, at, os.SEEK_DATA)
        except OSError as exc:
            if exc.errno == errno.ENXIO:  # nothing but a hole up to the end
                break
            return [(0, size)]  # this file system does not tell
        at = min(os.lseek(fd, begin, os.SEEK_HOLE), size)
        if begin < at:
            parts.append((begin, at - begin))
    if parts != [(0, size)]:
        parts.append((size, 0))
    return parts


def unpack(read: "Callable[[int], bytes]", target: bytes, name: bytes, mode_mask: int = 0o7777) -> None:
    """Make *target* from a tar stream; where *target* is a folder already and a file comes, make it inside as *name*.

    `read(n)` gives up to n bytes, b"" at the end. The stream is not trusted: nothing outside of *target* is written or
    linked to, no link is followed on the way, a special file is never replaced, and a stream without its end is an
    error.
    """
    Unpacker(read, target, name, mode_mask).unpack()


class TarSource:
    """What tarfile reads from: forward only, and no more at once than a header may have."""

    def __init__(self, read: "Callable[[int], bytes]") -> None:
        self.raw = read
        self.position = 0
        self.metadata = 0
        self.is_ended = False

    def read(self, size: int) -> bytes:
        self.metadata += size
        if not 0 <= size <= MOST_METADATA or self.metadata > 16 * MOST_METADATA:
            raise TransferError("unsafe", "a tar header that is too large")
        parts, left = [], size
        while left:
            data = self.raw(left)
            if not data:
                break
            parts.append(data)
            left -= len(data)
        whole = b"".join(parts)
        self.position += len(whole)
        self.is_ended = size == BLOCK and whole == bytes(BLOCK)
        return whole

    def some(self, most: int) -> bytes:
        """File content."""
        data = self.raw(min(most, CHUNK))
        if not data:
            raise TransferError("broken", "the stream ended in the middle of a file")
        self.position += len(data)
        return data

    def tell(self) -> int:
        return self.position

    def seek(self, position: int) -> None:
        if position < self.position:
            raise TransferError("unsafe", "a tar stream that points backwards")
        while self.position < position:
            self.some(position - self.position)


class Unpacker:
    def __init__(self, read: "Callable[[int], bytes]", target: bytes, name: bytes, mode_mask: int) -> None:
        import tarfile

        self.tarfile, self.mode_mask, self.name = tarfile, mode_mask, name
        self.source = TarSource(read)
        self.target = os.path.realpath(target)  # the asker's own links are followed once, before the stream is heard
        self.top = -1
        self.leaf = b""
        self.open = []  # type: list[tuple[bytes, int, tuple[int, int] | None]]  # (name, fd, (mode, mtime) to set)

    def unpack(self) -> None:
        try:
            self._place()
            self._members()
        except TransferError:
            raise
        except OSError as exc:
            kind = "space" if exc.errno in (errno.ENOSPC, errno.EDQUOT) else "refused"
            raise TransferError(kind, "%s: %s" % (shown(self.target), exc.strerror))
        except Exception as exc:  # tarfile has many ways to stumble over a hostile stream
            raise TransferError("broken", "not a tar stream: %s: %s" % (type(exc).__name__, exc))
        finally:
            self._close_down_to(0)
            if self.top >= 0:
                os.close(self.top)

    def _place(self) -> None:
        if os.path.isdir(self.target) and self.target == b"/":
            raise TransferError("refused", "/: not a place to copy to; name a folder in it")
        folder, self.leaf = os.path.split(self.target)
        os.makedirs(folder or b".", exist_ok=True)
        self.top = os.open(folder or b".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def _members(self) -> None:
        source = self.source  # type: Any
        archive = self.tarfile.TarFile(fileobj=source, mode="r", encoding="utf-8", errors="surrogateescape")
        is_first = True
        while True:
            member = archive.next()
            archive.members = []  # type: ignore[attr-defined]  # tarfile would remember them all
            if member is None:
                break
            self.source.metadata = 0
            parts = self._parts(member.name)
            if is_first != (len(parts) == 1):
                raise TransferError("unsafe", "a tar stream whose members are out of order")
            is_first = False
            self._member(member, parts)
        if is_first or not self.source.is_ended:
            raise TransferError("broken", "the stream ended early")
        while self.source.raw(BLOCK):  # the writer's last blocks; it must not find us gone
            self.source.metadata += BLOCK
            if self.source.metadata > MOST_METADATA:
                raise TransferError("broken", "a tar stream that goes on after its end")
        self._close_down_to(0)

    def _parts(self, name: str) -> "list[bytes]":
        """The member's path below the target, the leaf first."""
        whole = name.encode("utf-8", "surrogateescape")
        parts = whole.split(b"/")
        if parts[0] != ROOT.encode() or any(p in (b"", b".", b"..") or b"\0" in p for p in parts) or len(whole) > 8192:
            raise TransferError("unsafe", "a tar stream that names %s" % shown(whole[:200]))
        if len(parts) > DEEPEST + 1:
            raise TransferError("unsafe", "a tar stream more than %d folders deep" % DEEPEST)
        return [self.leaf] + parts[1:]

    def _member(self, member: "Any", parts: "list[bytes]") -> None:
        if len(parts) == 1 and not member.isdir() and os.path.isdir(self.target):
            if not self.name or b"/" in self.name or self.name in (b".", b".."):
                raise TransferError("refused", "%s: is a folder" % shown(self.target))
            self.top, old = os.open(self.target, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC), self.top
            os.close(old)
            self.leaf, self.target = self.name, os.path.join(self.target, self.name)
            parts = [self.leaf]
        folder, leaf = self._enter(parts[:-1]), parts[-1]
        if member.isdir():
            self._make_folder(folder, leaf, member)
        elif member.issym():
            self._clear(folder, leaf)
            os.symlink(member.linkname.encode("utf-8", "surrogateescape"), leaf, dir_fd=folder)
            os.utime(leaf, ns=self._times(member), dir_fd=folder, follow_symlinks=False)
        elif member.islnk():
            self._hard_link(folder, leaf, member)
        elif member.isreg():
            self._make_file(folder, leaf, member)
        else:
            raise TransferError("unsafe", "a tar stream with a special file: %s" % shown(leaf))

    def _enter(self, parts: "list[bytes]") -> int:
        """The folder of these names, none of them a link. It stays open until the stream leaves it."""
        common = 0
        while common < min(len(parts), len(self.open)) and self.open[common][0] == parts[common]:
            common += 1
        self._close_down_to(common)
        for part in parts[common:]:
            fd = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._inner())
            self.open.append((part, fd, None))
        return self._inner()

    def _inner(self) -> int:
        return self.open[-1][1] if self.open else self.top

    def _close_down_to(self, depth: int) -> None:
        """Leave folders. Their modes and times are set now, when nothing more is put into them."""
        while len(self.open) > depth:
            _, fd, final = self.open.pop()
            try:
                if final is not None:
                    os.fchmod(fd, final[0])
                    os.utime(fd, ns=(final[1], final[1]))
            finally:
                os.close(fd)

    def _make_folder(self, folder: int, leaf: bytes, member: "Any") -> None:
        final = (member.mode & self.mode_mask, self._times(member)[0])  # type: tuple[int, int] | None
        try:
            os.mkdir(leaf, 0o700, dir_fd=folder)
        except FileExistsError:
            final = None  # what was there keeps its mode
        fd = os.open(leaf, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
        self.open.append((leaf, fd, final))

    def _make_file(self, folder: int, leaf: bytes, member: "Any") -> None:
        self._clear(folder, leaf)
        fd = os.open(leaf, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder)
        try:
            parts = [(0, member.size)] if member.sparse is None else member.sparse
            at = 0
            for offset, length in parts:
                if offset < at or length < 0 or offset + length > member.size:
                    raise TransferError("unsafe", "a tar stream with a wrong map of holes")
                at = offset + length
                self._fill(fd, offset, length)
            if member.sparse is not None:
                os.ftruncate(fd, member.size)
            os.fchmod(fd, member.mode & self.mode_mask)
            os.utime(fd, ns=self._times(member))
        finally:
            os.close(fd)

    def _fill(self, fd: int, offset: int, length: int) -> None:
        while length:
            data = self.source.some(length)
            length -= len(data)
            view = memoryview(data)
            while view:
                count = os.pwrite(fd, view, offset)
                view = view[count:]
                offset += count

    def _hard_link(self, folder: int, leaf: bytes, member: "Any") -> None:
        parts = self._parts(member.linkname)
        if len(parts) == 1:
            raise TransferError("unsafe", "a tar stream with a link to its own root")
        here, opened = self.top, []
        try:
            for part in parts[:-1]:
                here = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=here)
                opened.append(here)
            if not stat.S_ISREG(os.stat(parts[-1], dir_fd=here, follow_symlinks=False).st_mode):
                raise TransferError("unsafe", "a tar stream with a hard link to something that is no file")
            self._clear(folder, leaf)
            os.link(parts[-1], leaf, src_dir_fd=here, dst_dir_fd=folder, follow_symlinks=False)
        finally:
            for fd in opened:
                os.close(fd)

    def _clear(self, folder: int, leaf: bytes) -> None:
        """Make room for a file. Only files and links are replaced."""
        try:
            facts = os.stat(leaf, dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:
            return
        if not stat.S_ISREG(facts.st_mode) and not stat.S_ISLNK(facts.st_mode):
            raise TransferError("refused", "%s: neither a file nor a link, so it is not replaced" % shown(leaf))
        os.unlink(leaf, dir_fd=folder)

    @staticmethod
    def _times(member: "Any") -> "tuple[int, int]":
        """Access and modification time in nanoseconds; the extended header has them exactly."""
        text = member.pax_headers.get("mtime", "")
        sign, whole, _, part = (-1 if text[:1] == "-" else 1,) + text.lstrip("-").partition(".")
        if not (0 < len(whole) < 12 and whole.isdigit() and len(part) <= 9 and (part or "0").isdigit()):
            return 0, 0
        moment = sign * (int(whole) * 10**9 + int((part or "0").ljust(9, "0")))
        return moment, moment


# -- small words of the operating system -------------------------------------------------------------------------------


class Refused(Exception):
    """A call that cannot be done: goes back to the host as an ERROR."""

    def __init__(self, kind: str, message: str) -> None:
        Exception.__init__(self, message)
        self.kind, self.message = kind, message


def say(message: str) -> None:
    """One line on the guest's console."""
    try:
        os.write(2, ("belljar-agent: %s\n" % message).encode("utf-8", "replace"))
    except OSError:
        pass


def read_file(path: str, most: int = 64 * KIB) -> bytes:
    """The first bytes of a file; empty when there is none. Python makes a buffer of *most* bytes: a large one is a
    mapping of its own, to be made and unmade each time."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.read(fd, most)
    except OSError:
        return b""
    finally:
        os.close(fd)


def write_file(path: str, data: bytes, mode: int = 0o644, flags: int = os.O_TRUNC) -> None:
    """In place, at one go: nobody else runs yet when the agent writes."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | flags, mode)
    try:
        os.write(fd, data)
    finally:
        os.close(fd)


def make_folder(path: str, mode: int) -> None:
    try:
        os.makedirs(path)
        os.chmod(path, mode)
    except FileExistsError:
        pass


def close_quietly(fd: int) -> None:
    try:
        os.close(fd)
    except OSError:
        pass


class Libc:
    """The few calls Python does not have. Loaded at first use: ctypes is slow to import."""

    MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOATIME, MS_BIND, MNT_DETACH = 1, 2, 4, 1024, 4096, 2
    PR_SET_CHILD_SUBREAPER, POWER_OFF, IN_CLOSE_WRITE = 36, 0x4321FEDC, 8

    def __init__(self) -> None:
        import ctypes

        self.errno = ctypes.get_errno
        self.handle = ctypes.CDLL(None, use_errno=True)
        self.unsigned_long = ctypes.c_ulong

    def _check(self, result: int, what: str) -> None:
        if result != 0:
            number = self.errno()
            raise OSError(number, "%s: %s" % (what, os.strerror(number)))

    def mount(self, source: bytes, target: bytes, kind: bytes, flags: int, options: bytes) -> None:
        found = self.handle.mount(source, target, kind, self.unsigned_long(flags), options)
        self._check(found, "mount %s" % shown(target))

    def unmount(self, target: bytes, flags: int = MNT_DETACH) -> None:
        self._check(self.handle.umount2(target, flags), "unmount %s" % shown(target))

    def sync(self, fd: int) -> None:
        """Write out the file system that *fd* lies on. Raises what went wrong in that since it was last asked."""
        self._check(self.handle.syncfs(fd), "sync")

    def adopt_orphans(self) -> None:
        one, nothing = self.unsigned_long(1), self.unsigned_long(0)
        self._check(self.handle.prctl(self.PR_SET_CHILD_SUBREAPER, one, nothing, nothing, nothing), "prctl")

    def watch_writes(self, folder: bytes) -> int:
        """A descriptor to be read from when a file in there was written and closed."""
        fd = self.handle.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)  # type: int
        self._check(min(fd, 0), "inotify")
        self._check(min(self.handle.inotify_add_watch(fd, folder, self.IN_CLOSE_WRITE), 0), "watch %s" % shown(folder))
        return fd

    def power_off(self) -> None:
        self._check(self.handle.reboot(self.POWER_OFF), "reboot")


_libc = None  # type: Libc | None


def libc() -> Libc:
    global _libc
    if _libc is None:
        _libc = Libc()
    return _libc


# -- accounts: pure functions from the text of a file to its next text ------------------------------------------------


class Account:
    """Who a payload is."""

    def __init__(self, words: "Words") -> None:
        begin = words.at
        self.name, self.uid, self.gid = words.text(), words.number(), words.number()
        self.group, self.home, self.shell = words.text(), words.text(), words.text()
        pairs = words.some(2)
        self.groups = [(int(pairs[at]), Words(pairs[at + 1 : at + 2]).text()) for at in range(0, len(pairs), 2)]
        self.key = join(*words.words[begin : words.at])

    def check(self) -> None:
        """Raise Refused for what would break the files."""
        texts = [self.name, self.group, self.home, self.shell] + [name for _, name in self.groups]
        numbers = [self.uid, self.gid] + [number for number, _ in self.groups]
        if any(set(text) & set(":\n") for text in texts) or not self.name:
            raise Refused("refused", "an account with a name or path that no guest can have")
        if any(not 0 <= number < (1 << 32) - 1 for number in numbers):
            raise Refused("refused", "an account with an id that no guest can have")

    def is_plain_root(self) -> bool:
        """Every guest has this one."""
        return self.uid == 0 and self.name == "root" and not any(number for number, _ in self.groups)


def free_name(text: str, name: str, number: int) -> str:
    """*name*, or a variant of it where the file has it with another number: nobody of the image is renumbered."""
    for line in text.splitlines():
        fields = line.split(":")
        if fields[0] == name and fields[2:3] != [str(number)]:
            return "%s_%d" % (name, number)
    return name


def with_user(text: str, account: Account) -> str:
    """/etc/passwd with the account. A user of the same uid keeps working; ours is found first by uid, except root's."""
    uid = account.uid
    name = free_name(text, account.name, uid)
    rows = [line.split(":") for line in text.splitlines()]
    if any(row[0] == name for row in rows) or (uid == 0 and any(row[2:3] == ["0"] for row in rows)):
        return text
    line = "%s:x:%d:%d::%s:%s\n" % (name, uid, account.gid, account.home, account.shell)
    if any(row[2:3] == [str(uid)] for row in rows):
        return line + text
    return ended(text) + line


def with_shadow(text: str, name: str) -> str:
    """/etc/shadow with a locked entry."""
    if any(line.split(":")[0] == name for line in text.splitlines()):
        return text
    return ended(text) + name + ":*:19000:0:99999:7:::\n"


def with_groups(text: str, account: Account, user: str) -> str:
    """/etc/group with the account's groups, and the user in the supplementary ones."""
    lines = ended(text).splitlines()
    for gid, name, is_member in [(account.gid, account.group, False)] + [(g, n, True) for g, n in account.groups]:
        for index, line in enumerate(lines):
            fields = line.split(":")
            if fields[2:3] == [str(gid)] and len(fields) == 4:
                members = [member for member in fields[3].split(",") if member]
                if is_member and gid != account.gid and user not in members:
                    lines[index] = ":".join(fields[:3] + [",".join(members + [user])])
                break
        else:
            lines.append("%s:x:%d:%s" % (free_name(text, name, gid), gid, user if is_member else ""))
    return "".join(line + "\n" for line in lines)


def ended(text: str) -> str:
    return text + "\n" if text and not text.endswith("\n") else text


# -- the guest's network, by ioctl: no tool of the image is needed -----------------------------------------------------


class Card:
    """The guest's one network card."""

    def __init__(self) -> None:
        import _socket as socket
        import fcntl

        self.socket, self.ioctl = socket, fcntl.ioctl
        self.control = socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)

    def close(self) -> None:
        self.control.close()

    def name(self) -> str:
        for name in sorted(os.listdir("/sys/class/net")):
            if os.path.exists("/sys/class/net/%s/device" % name):
                return name
        raise Refused("refused", "the guest has no network card, or its kernel no driver for it")

    def _ask(self, request: int, name: str, value: bytes = b"") -> bytes:
        answer = self.ioctl(self.control, request, struct.pack("16s24s", name.encode(), value))
        return bytes(answer)[16:]

    def _address(self, text: str) -> bytes:
        return struct.pack("=HH4s8x", self.socket.AF_INET, 0, self.socket.inet_aton(text))

    def up(self, name: str) -> None:
        flags = struct.unpack("=H", self._ask(0x8913, name)[:2])[0]  # SIOCGIFFLAGS
        if not flags & 1:
            self._ask(0x8914, name, struct.pack("=H", flags | 1))  # SIOCSIFFLAGS, IFF_UP

    def set_mac(self, name: str, mac: str) -> str:
        """Returns what the kernel says afterwards."""
        octets = bytes(int(octet, 16) for octet in mac.split(":"))
        self._ask(0x8924, name, struct.pack("=H6s", 1, octets))  # SIOCSIFHWADDR, ARPHRD_ETHER
        answer = self._ask(0x8927, name)  # SIOCGIFHWADDR
        return ":".join("%02x" % octet for octet in answer[2:8])

    def configure(self, name: str, address: str, gateway: str) -> None:
        number, _, prefix = address.partition("/")
        mask = (0xFFFFFFFF << (32 - int(prefix))) & 0xFFFFFFFF
        self._ask(0x8916, name, self._address(number))  # SIOCSIFADDR
        self._ask(0x891C, name, self._address(self.socket.inet_ntoa(U32.pack(mask))))  # SIOCSIFNETMASK
        self.up(name)
        if gateway:
            anywhere = self._address("0.0.0.0")
            route = struct.pack(
                "@L16s16s16sHhLPhPLLH", 0, anywhere, self._address(gateway), anywhere, 3, 0, 0, 0, 0, 0, 0, 0, 0
            )
            try:
                self.ioctl(self.control, 0x890B, route)  # SIOCADDRT, RTF_UP | RTF_GATEWAY
            except FileExistsError:
                pass


# -- where the agent runs: a real guest, or a rehearsal on the host ------------------------------------------------------

RUN = "/run/belljar"
BOOT_ID = "/proc/sys/kernel/random/boot_id"
CGROUPS = "/sys/fs/cgroup"
RNDADDENTROPY, RNDRESEEDCRNG = 0x40085203, 0x5207
MOUNT_PATIENCE = 5.0  # seconds for a 9p device whose driver is still being loaded
PLUG_PATIENCE = 15.0  # seconds for a virtiofs device that was plugged in while nobody looked
DISK_PATIENCE = 10.0  # seconds for a disk that the bus shows, until its driver is loaded
SSH = "/etc/ssh"
SSH_KEYGEN = "/usr/bin/ssh-keygen"
KEY_KINDS = ("ed25519", "ecdsa")
SSHD_PIDS = ("/run/sshd.pid", "/var/run/sshd.pid")
KEYS_PATIENCE = 60  # seconds for new host keys
SSHD_PATIENCE = 20  # seconds, of these, for the server to listen again
PACKED_PATIENCE = 60  # seconds for the mounts of a packed folder
PACKED, UPPER = b"/run/belljar/packed/", b"/var/lib/belljar/packed/"
PACKED_MODULES = ("squashfs", "overlay")
# The newest kernel's way first; the last one is every kernel's.
OVERLAY_OPTIONS = (b",redirect_dir=on,xino=auto,volatile", b",redirect_dir=on", b"")
FLUSH_PATIENCE = 30  # seconds for a file server to take what is not written yet, where the host says no other number
NFS_VERSIONS = ("4.2", "4.1", "4.0")
NFS_MODULES = ("nfs", "nfsv4", "rpcsec_gss_krb5")  # the last one is looked for by every mount, with sec=sys too
VIRTIOFS_MODULES = ("virtiofs",)
MODPROBES = ("/sbin/modprobe", "/usr/sbin/modprobe")
NO_SUCH_VERSION = (errno.EPROTONOSUPPORT, errno.EINVAL)
REFUSALS = (errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOTDIR, errno.EPROTONOSUPPORT, errno.EINVAL, errno.ESTALE)


class Guest:
    """A real guest: the agent is root and alone."""

    quiet = 0.3  # seconds between the last thing that settling does and its answer

    def __init__(self) -> None:
        self.boot_nonce = os.urandom(16).hex().encode("ascii")
        self.known = set()  # type: set[bytes]
        self.mounts = []  # type: list[bytes]
        self.remote = set()  # type: set[bytes]
        self.user = None  # type: Account | None
        self.ioctl = None  # type: Any
        self.set_hostname = None  # type: Any
        self.names = {}  # type: dict[str, int]
        self.kept = {}  # type: dict[bytes, int]
        self.sizes = {}  # type: dict[str, int]
        self.hosts = b""
        self.random = -1
        self.host_keys = []  # type: list[str]
        self.jobs = RUN + "/job"
        self.cgroup = ""
        self.spare = None  # type: Cgroup | None
        self.zygote = None  # type: Zygote | None

    def prepare(self) -> None:
        """Once per boot, before the first conversation."""
        for path in (RUN, self.jobs):
            make_folder(path, 0o711)
        if os.statvfs(RUN).f_flag & os.ST_NOEXEC:
            self.jobs = "/var/lib/belljar/job"
            make_folder(self.jobs, 0o711)
        write_file("/proc/self/oom_score_adj", b"-1000")
        self.random = os.open("/dev/urandom", os.O_RDWR | os.O_CLOEXEC)
        self.cgroup = self._make_cgroup()

    def _make_cgroup(self) -> str:
        """A control group for all payloads, with a reserve of memory left to the kernel and to us; "" where the kernel
        has no cgroup2."""
        folder = CGROUPS + "/belljar"
        if not os.path.exists(CGROUPS + "/cgroup.controllers"):
            libc().adopt_orphans()
            return ""
        make_folder(folder, 0o755)
        try:
            write_file(folder + "/cgroup.kill", b"1", flags=0)  # what an agent that died has left
        except OSError:
            pass
        for path in (CGROUPS, folder):
            for controller in (b"+memory", b"+pids"):
                try:
                    write_file(path + "/cgroup.subtree_control", controller, flags=0)
                except OSError:
                    pass  # this kernel does without
        sizes = [int(word) * KIB for word in read_file("/proc/meminfo").split() if word.isdigit()]
        total, available = sizes[0], sizes[2]
        reserve = total - available + max(16 * MIB, total // 32)  # what the kernel and we have now, and some more
        try:
            write_file(folder + "/memory.max", b"%d" % max(total - reserve, total // 2), flags=0)
        except OSError:
            pass
        return folder

    def describe(self) -> bytes:
        lines = [line.partition("=") for line in read_file("/etc/os-release").decode("utf-8", "replace").splitlines()]
        names = [value.strip("\"'") for key, _, value in lines if key == "PRETTY_NAME"]
        kernel = os.uname().release
        folders = ("/lib/modules/%s/kernel/fs/9p" % kernel, "/sys/module/9p")
        has_9p = b"\t9p\n" in read_file("/proc/filesystems") or any(map(os.path.exists, folders))
        return hello_of(self.boot_nonce, (names or [""])[0], has_9p)

    def identify(self, words: Words) -> bytes:
        """Become who the host says; answer what the kernel then says."""
        if not self.names:
            self._keep_names_in_memory()
        name, machine_id, nonce = words.next(), words.next(), words.next()
        mac, address, gateway, dns = words.text(), words.text(), words.text(), words.next()
        self._stir(bytes.fromhex(words.text()))
        time.clock_settime(time.CLOCK_REALTIME, words.number() / 1e6)
        self.set_hostname(name)
        self._put("hostname", name + b"\n")
        self._put("hosts", self.hosts + b"127.0.1.1 " + name + b"\n")
        self._put("machine-id", machine_id + b"\n")
        self._put("nonce", nonce + b"\n")
        parts = (nonce[:8], nonce[8:12], nonce[12:16], nonce[16:20], nonce[20:])
        self._put("boot_id", b"-".join(parts) + b"\n")
        if mac:
            mac = self._connect(mac, address, gateway, dns)
        sample = os.getrandom(32).hex()
        proof = (os.uname().nodename, self._get("machine-id"), self._get("boot_id").replace("-", ""), mac, sample)
        return "\0".join(proof).encode("ascii", "replace") + b"\0" + now()

    def _keep_names_in_memory(self) -> None:
        """The files that name the guest move to a file system in memory, and stay open. A clone then renames itself by
        a few writes: no block of its disk is read, allocated or journaled. The nonce becomes the boot's id for everyone
        who asks the kernel, for our file is mounted over the kernel's."""
        import _socket
        import fcntl

        self.ioctl, self.set_hostname = fcntl.ioctl, _socket.sethostname
        lines = [line for line in read_file("/etc/hosts").splitlines(True) if not line.startswith(b"127.0.1.1")]
        if not any(b"localhost" in line for line in lines):
            lines = [b"127.0.0.1 localhost\n", b"::1 localhost ip6-localhost ip6-loopback\n"]
        self.hosts = b"".join(lines)
        for leaf, mode in (
            ("hostname", 0o644),
            ("hosts", 0o644),
            ("machine-id", 0o444),
            ("nonce", 0o444),
            ("boot_id", 0o444),
        ):
            path = RUN + "/" + leaf
            write_file(path, b"", mode)
            self.names[leaf] = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            if leaf in ("hostname", "hosts", "machine-id"):
                os.symlink(path, "/etc/%s.belljar" % leaf)
                os.rename("/etc/%s.belljar" % leaf, "/etc/" + leaf)
        libc().mount((RUN + "/boot_id").encode(), BOOT_ID.encode(), b"none", Libc.MS_BIND, b"")

    def _keep_features(self) -> None:
        """Likewise the files in which each payload finds its features: they are there, empty and open, for making the
        first file of all takes a clone long. A folder of the image's own stays."""
        for folder, leaves in FEATURES.items():
            if os.path.lexists(b"/etc/" + folder):
                continue
            os.mkdir(RUN.encode() + b"/" + folder, 0o755)
            os.symlink(RUN.encode() + b"/" + folder, b"/etc/" + folder)
            for leaf in leaves:
                path = b"/etc/" + folder + b"/" + leaf
                write_file(path.decode(), b"", 0o644)
                self.kept[path] = os.open(path, os.O_WRONLY | os.O_CLOEXEC)

    def _put(self, leaf: str, text: bytes) -> None:
        os.pwrite(self.names[leaf], text, 0)
        if self.sizes.get(leaf) != len(text):
            os.ftruncate(self.names[leaf], len(text))
            self.sizes[leaf] = len(text)

    def _get(self, leaf: str) -> str:
        return os.pread(self.names[leaf], 64, 0).decode("ascii", "replace").strip()

    def _stir(self, entropy: bytes) -> None:
        """Fresh entropy into the kernel's pool, and from there into its generator at once."""
        self.ioctl(self.random, RNDADDENTROPY, struct.pack("ii", len(entropy) * 8, len(entropy)) + entropy)
        try:
            self.ioctl(self.random, RNDRESEEDCRNG)
        except OSError as exc:
            if exc.errno not in (errno.EINVAL, errno.ENOTTY):  # older than Linux 4.14
                raise

    def _connect(self, mac: str, address: str, gateway: str, dns: bytes) -> str:
        """Give the card its address, and to the guest its way out. Returns the MAC the kernel then has."""
        card = Card()
        try:
            name = card.name()
            mac = card.set_mac(name, mac)
            if address:
                card.configure(name, address, gateway)
            if dns:
                if os.path.islink("/etc/resolv.conf"):
                    os.unlink("/etc/resolv.conf")
                write_file("/etc/resolv.conf", b"nameserver " + dns + b"\n")
            return mac
        finally:
            card.close()

    def set_clock(self, words: Words) -> bytes:
        """Take the time over, or step *by* so much. In microseconds, as all times on the wire."""
        how, amount = words.next(), words.number() / 1e6
        time.clock_settime(time.CLOCK_REALTIME, time.time() + amount if how == b"by" else amount)
        return now()

    def mount(self, words: Words) -> bytes:
        """Mount a 9p share. cache=mmap: what the host changes is seen at once, and shared mappings work."""
        tag, target, how = words.next(), words.next(), words.next()
        checked_target(target)
        try:
            os.makedirs(target, exist_ok=True)
            self._mount_9p(tag, target, 0 if how == b"rw" else Libc.MS_RDONLY)
        except OSError as exc:
            if exc.errno == errno.ENODEV:
                raise Refused("no-9p", "the guest's kernel has no 9p file system")
            raise Refused("refused", "%s: cannot mount the share: %s" % (shown(target), exc.strerror))
        self.mounts.append(target)
        return b""

    def _mount_9p(self, tag: bytes, target: bytes, flags: int) -> None:
        """The device may still be missing while its driver is loaded: then wait for the kernel's next event."""
        options = b"trans=virtio,version=9p2000.L,msize=512000,cache=mmap,access=client"
        events, deadline = None, time.monotonic() + MOUNT_PATIENCE
        while True:
            try:
                return libc().mount(tag, target, b"9p", flags | Libc.MS_NOSUID | Libc.MS_NODEV, options)
            except OSError as exc:
                left = deadline - time.monotonic()
                if exc.errno not in (errno.ENOENT, errno.EBUSY) or left <= 0:
                    raise
            if events is None:
                events = kernel_events()  # listen first, then look once more
            else:
                events.settimeout(left)
                try:
                    events.recv(8192)
                except OSError:
                    pass

    def mount_virtiofs(self, words: Words) -> bytes:
        """Mount a folder by virtiofs. The server looks at the host's files each time it is asked."""
        tag, target, how = words.next(), checked_target(words.next()), words.next()
        flags = Libc.MS_NOSUID | Libc.MS_NODEV | (0 if how == b"rw" else Libc.MS_RDONLY)
        try:
            os.makedirs(target, exist_ok=True)
            if b"\tvirtiofs\n" not in filesystems():
                load_modules(VIRTIOFS_MODULES)
            self._mount_plugged(tag, target, flags)
        except OSError as exc:
            if exc.errno == errno.ENODEV:
                raise Refused("no-virtiofs", "the guest's kernel has no virtiofs file system")
            raise Refused("refused", "%s: cannot mount the share: %s" % (shown(target), exc.strerror))
        self.mounts.append(target)
        return b""

    def _mount_plugged(self, tag: bytes, target: bytes, flags: int) -> None:
        """A tag that the kernel does not know is EINVAL to it. A clone's device was plugged in while its guest stood still:
        the kernel is told to look at the bus anew, and then its events are waited for."""
        events, deadline = None, time.monotonic() + PLUG_PATIENCE
        try:
            while True:
                try:
                    return libc().mount(tag, target, b"virtiofs", flags, b"")
                except OSError as exc:
                    left = deadline - time.monotonic()
                    if exc.errno != errno.EINVAL or left <= 0:
                        raise
                if events is None:
                    events = kernel_events()  # listen first, then look once more
                    write_file("/sys/bus/pci/rescan", b"1", flags=0)
                else:
                    events.settimeout(left)
                    try:
                        events.recv(8192)
                    except OSError:
                        pass
        finally:
            if events is not None:
                events.close()

    def prepare_for(self, words: Words) -> bytes:
        """Before a template is saved: what its clones would otherwise each load anew."""
        modules = {b"nfs": NFS_MODULES, b"virtiofs": VIRTIOFS_MODULES}.get(words.next())
        if modules is None:
            raise Refused("bad-call", "nothing is known to prepare for that")
        load_modules(modules)
        return b""

    def renew_keys(self) -> "Callable[[], None]":
        """What gives the ssh server keys that no other clone has; for a child to do, as making keys takes a while."""
        old, self.host_keys = self.host_keys, []
        return lambda: renew_host_keys(old, SSH)

    def mount_nfs(self, words: Words) -> "Callable[[], None]":
        """What mounts an export: it may block for as long as the server is silent, so it is for a child to do."""
        address, port, path = words.text(), words.number(), words.next()
        target, how = checked_target(words.next()), words.next()
        flags = Libc.MS_NOSUID | Libc.MS_NODEV | (0 if how == b"rw" else Libc.MS_RDONLY)
        self.mounts.append(target)
        self.remote.add(target)
        return lambda: mount_nfs(address, port, path, target, flags)

    def find_disks(self, words: Words) -> bytes:
        """The devices of the disks with these serials. Where one is missing the kernel looks at the bus anew: a clone has
        disks that its template never had."""
        serials = words.some()
        found = disks()
        if not set(serials) <= set(found):
            found = self._rescan(set(serials))
        missing = [shown(serial) for serial in serials if serial not in found]
        if missing:
            raise Refused("no-disk", "the guest's kernel does not find the disk %s" % ", ".join(missing))
        return join(*[b"/dev/" + found[serial] for serial in serials])

    def _rescan(self, wanted: "set[bytes]") -> "dict[bytes, bytes]":
        """The driver is there already, as a rule, and the disk too when the kernel is done; else wait for its events."""
        events, deadline = kernel_events(), time.monotonic() + DISK_PATIENCE
        try:
            write_file("/sys/bus/pci/rescan", b"1", flags=0)
            while True:
                found, left = disks(), deadline - time.monotonic()
                if wanted <= set(found) or left <= 0:
                    return found
                events.settimeout(left)
                try:
                    events.recv(8192)
                except OSError:
                    pass
        finally:
            events.close()

    def mount_scratch(self, words: Words) -> bytes:
        """An empty disk at its place, which is the payload's user's own."""
        device, target = words.next(), checked_target(words.next())
        account = Account(words)
        try:
            os.makedirs(target, exist_ok=True)
            if b"\text4\n" not in read_file("/proc/filesystems"):
                load_modules(("ext4",))
            flags = Libc.MS_NOSUID | Libc.MS_NODEV | Libc.MS_NOATIME
            libc().mount(device, target, b"ext4", flags, b"noinit_itable,errors=remount-ro")
            self.mounts.append(target)
            os.rmdir(target + b"/lost+found")
            os.chown(target, account.uid, account.gid)
            os.chmod(target, 0o700)
        except OSError as exc:
            raise Refused("refused", "%s: cannot mount the scratch disk: %s" % (shown(target), exc.strerror))
        return b""

    def mount_packed(self, words: Words) -> "Callable[[], None]":
        """What lays a packed folder at its place; for a child to do, which is the user for a while."""
        name, device, inside, cwd = words.next(), words.next(), words.next(), words.next()
        account = Account(words)
        self.add_account(account)
        cwd = cwd or account.home.encode("utf-8", "surrogateescape")
        self.make_place(cwd, account)
        return lambda: mount_packed(name, device, checked_target(os.path.join(cwd, inside)), account)

    def add_account(self, account: Account) -> None:
        self.user = account
        if account.key in self.known or account.is_plain_root():
            return
        account.check()
        passwd = read_file("/etc/passwd", MIB).decode("utf-8", "surrogateescape")
        user = free_name(passwd, account.name, account.uid)
        rewrite("/etc/passwd", lambda text: with_user(text, account), 0o644)
        rewrite("/etc/group", lambda text: with_groups(text, account, user), 0o644)
        if os.path.exists("/etc/shadow"):
            rewrite("/etc/shadow", lambda text: with_shadow(text, user), 0o640)
        home = account.home
        if home.startswith("/") and not os.path.exists(home):
            os.makedirs(os.path.dirname(home) or "/", exist_ok=True)
            os.mkdir(home, 0o700)
            os.chown(home, account.uid, account.gid)
        self.known.add(account.key)

    def make_place(self, path: bytes, account: Account) -> None:
        """The working directory, with those above it, the payload's own where they are missing: outside it is there."""
        missing = []
        while path.startswith(b"/") and not os.path.lexists(path):
            missing.append(path)
            path = os.path.dirname(path)
        try:
            for folder in reversed(missing):
                os.mkdir(folder, 0o755)
                os.chown(folder, account.uid, account.gid)
        except (OSError, ValueError):
            pass  # entering it says what is wrong

    def box(self) -> "Cgroup | Family":
        """Where a payload's processes are kept together."""
        if not self.cgroup:
            return Family()
        ready, self.spare = self.spare or Cgroup(self.cgroup), None
        return ready

    def take_zygote(self) -> "Zygote | None":
        zygote, self.zygote = self.zygote, None
        return zygote

    def after_payload(self) -> None:
        """Beside the hot path: the next payload's box."""
        if self.cgroup and self.spare is None:
            self.spare = Cgroup(self.cgroup)

    def give(self, fd: int, account: Account, group: "int | None" = None) -> None:
        """Make a pipe or terminal the user's own, so that /dev/stdout and /dev/tty can be opened by name."""
        if account.uid:
            os.fchown(fd, account.uid, account.gid if group is None else group)

    def leave_agent(self) -> None:
        """In the child: as easy prey for the OOM killer as anybody."""
        write_file("/proc/self/oom_score_adj", b"0", flags=0)

    def become(self, account: Account) -> None:
        """In the child: from the agent to the user."""
        gid, uid = account.gid, account.uid
        os.setgroups([gid] + [number for number, _ in account.groups if number != gid])
        os.setresgid(gid, gid, gid)
        os.setresuid(uid, uid, uid)

    def release(self) -> None:
        """Unmount what was mounted, write everything out. With a file server among it this may block: see `has_remote`.
        Raises Refused where a server did not take all of what was written."""
        trouble = None
        for target in reversed(self.mounts):
            try:
                if target in self.remote:
                    trouble = self._flush(target) or trouble
                    unmount_whole(target)
                else:
                    libc().unmount(target)
            except OSError as exc:
                say(str(exc.strerror))
        self.forget_mounts()
        os.sync()
        if trouble:
            raise Refused("nfs-flush", trouble)

    def _flush(self, target: bytes) -> str:
        """Write out what a file server has not been sent yet; what went wrong, or "". Where root is nobody to the server,
        the folder is opened as the payload's user."""
        try:
            fd = open_folder(target, self.user)
        except OSError as exc:
            return "%s: cannot be opened to write out what is left: %s" % (shown(target), exc.strerror)
        try:
            libc().sync(fd)
            return ""
        except OSError as exc:
            return "%s: the file server did not take all that was written: %s" % (shown(target), exc.strerror)
        finally:
            os.close(fd)

    def has_remote(self) -> bool:
        return bool(self.remote)

    def forget_mounts(self) -> None:
        self.mounts, self.remote = [], set()

    def power_off(self) -> None:
        if not self.remote:
            os.sync()  # else it may wait for a server for ever
        libc().power_off()

    def warm(self) -> None:
        """Go once through what every clone will do, so that a template holds it ready."""
        import tarfile

        import fcntl
        import resource
        import termios

        assert tarfile and fcntl and resource and termios
        for name in WARM:
            for folder in ("/usr/bin/", "/bin/"):
                if read_file(folder + name, 4 * MIB):
                    break
        for folder in PLACES:
            os.path.lexists(folder)
        os.spawnv(os.P_WAIT, "/bin/sh", ["sh", "-c", "true; env true; exit 0"])
        load_modules(PACKED_MODULES)
        self.host_keys = host_keys_since(time.time() - time.monotonic(), SSH)
        self.after_payload()
        self._keep_features()
        self.identify(Words(NOBODY + [now()]))
        if self.zygote is None and self.cgroup:
            self.zygote = Zygote(self, self.box())
            # Once more: what the fork has left shared is copied now, not by each clone.
            self.identify(Words(NOBODY + [now()]))


# Files that every payload gets; see `features` of the machine room.
FEATURES = {
    b"machinefeatures": (b"total_cpu",),
    b"jobfeatures": (b"allocated_cpu", b"grace_secs_job", b"job_id", b"jobstart_secs", b"max_rss_bytes"),
}


# The names of a guest that waits for its own.
NOBODY = [b"belljar-000000000000", b"0" * 32, b"0" * 32, b"", b"", b"", b"", b"00" * 64]


# Read into the page cache of a template, so that a clone finds them in memory.
WARM = (
    "sh dash bash env true false cat ls id echo sleep date uname hostname pwd mkdir rm cp mv ln touch chmod head tail wc"
    " grep sed awk sort tar gzip dd mktemp basename dirname python3 nproc df free ps tee tr cut seq test"
).split(" ")


# Looked up before, so that a payload's way to them is not read from the disk.
PLACES = (
    "/tmp",
    "/home",
    "/root",
    "/var/tmp",
    "/mnt",
    "/usr/local/bin",
    "/usr/local/sbin",
    "/usr/sbin",
    "/sbin",
    "/dev/shm",
)


def checked_target(target: bytes) -> bytes:
    if not target.startswith(b"/") or os.path.normpath(target) == b"/":
        raise Refused("refused", "%s: not a place for a share" % shown(target))
    return target


def load_modules(names: "Iterable[str]") -> None:
    """As the kernel would by itself, where it is told how. What is built in, or is not there, is no mistake."""
    for program in MODPROBES:
        if os.path.exists(program):
            for name in names:
                os.spawnv(os.P_WAIT, program, ["modprobe", "-q", name])
            return


def disks() -> "dict[bytes, bytes]":
    """serial -> kernel's name of each disk that has a serial."""
    found = {}
    for name in os.listdir(b"/sys/block"):
        serial = read_file("/sys/block/%s/serial" % shown(name)).strip()
        if serial:
            found[serial] = name
    return found


def host_keys_since(boot: float, folder: str) -> "list[str]":
    """The keys of an ssh server that were made since this moment. Those are the template's, and all its clones would share
    them; older ones came with the image, and are its owner's choice."""
    found = []
    for leaf in sorted(os.listdir(folder)) if os.path.isdir(folder) else ():
        path = folder + "/" + leaf
        if leaf.startswith("ssh_host_") and leaf.endswith("_key"):
            facts = os.lstat(path)
            if stat.S_ISREG(facts.st_mode) and facts.st_mtime >= boot:
                found.append(path)
    return found


def renew_host_keys(old: "list[str]", folder: str) -> None:
    """Other keys in the place of these, for the server that runs too. Only kinds that are made at once: an emulated guest
    may take a minute for an RSA key, and who speaks to a server of today speaks Ed25519."""
    if not old:
        return
    new = []  # type: list[str]
    for kind in KEY_KINDS:
        path = "%s/ssh_host_%s_key" % (folder, kind)
        if path in old or (kind == KEY_KINDS[0] and not new):
            for leaf in (path + ".new", path + ".new.pub"):
                if os.path.lexists(leaf):
                    os.unlink(leaf)
            status = os.spawnv(os.P_WAIT, SSH_KEYGEN, ["ssh-keygen", "-q", "-t", kind, "-N", "", "-f", path + ".new"])
            if status:
                raise Refused("refused", "ssh-keygen ended with %d: no host keys of its own" % status)
            new.append(path)
    for path in old:
        for leaf in (path, path + ".pub", path + "-cert.pub"):
            if os.path.lexists(leaf):
                os.unlink(leaf)
    for path in new:
        for end in ("", ".pub"):
            os.rename(path + ".new" + end, path + end)
    for path in SSHD_PIDS:
        number = read_file(path, 16).strip()
        if number.isdigit() and read_file("/proc/%d/comm" % int(number), 16).strip() == b"sshd":
            restart_sshd(int(number), path)
            break


def service_of(cgroups: bytes) -> str:
    """The systemd service a process belongs to, by /proc/PID/cgroup; empty where it is none."""
    for line in cgroups.decode("utf-8", "replace").splitlines():
        leaf = line.rpartition("/")[2]
        if leaf.endswith(".service") and leaf.startswith(("ssh", "openssh")):
            return leaf
    return ""


def restart_sshd(pid: int, pid_file: str) -> None:
    """Have it read its keys, and return when it listens again. One of systemd's may have its sockets from systemd, and would not
    get them again by itself; any other writes its pid when it listens."""
    unit = service_of(read_file("/proc/%d/cgroup" % pid))
    if unit:
        status = os.spawnvp(os.P_WAIT, "systemctl", ["systemctl", "restart", unit])
        if status:
            raise Refused("refused", "the ssh server (%s) did not start again with its own keys: %d" % (unit, status))
        return
    written = libc().watch_writes(os.path.dirname(pid_file).encode())
    try:
        before = os.stat(pid_file)
        kill_quietly(pid, signal.SIGHUP)
        deadline = time.monotonic() + SSHD_PATIENCE
        while True:
            try:
                now = os.stat(pid_file)
                if (now.st_ino, now.st_mtime_ns) != (before.st_ino, before.st_mtime_ns) and now.st_size:
                    return
            except FileNotFoundError:
                pass
            if not select.select([written], [], [], max(0.0, deadline - time.monotonic()))[0]:
                return say(
                    "sshd was told to read its keys anew and has not said within %d s that it did" % SSHD_PATIENCE
                )
            os.read(written, 4096)
    finally:
        os.close(written)


def mount_packed(name: bytes, device: bytes, target: bytes, account: Account) -> None:
    """In a child: the folder in the disk, over what is at *target* already, and changes above both, in the guest's own
    disk. Raises Refused."""
    base, upper = PACKED + name, UPPER + name
    try:
        load_modules([module for module in PACKED_MODULES if b"\t%s\n" % module.encode() not in filesystems()])
        for folder in (base + b"/disk", base + b"/below", upper + b"/changes", upper + b"/work"):
            os.makedirs(folder, mode=0o711)
        libc().mount(device, base + b"/disk", b"squashfs", Libc.MS_RDONLY | Libc.MS_NODEV, b"")
        lower = base + b"/disk/" + ROOT.encode()
        with_rights_of(account, lambda: make_writable_place(target))
        target = os.path.realpath(target)
        if os.listdir(target):
            libc().mount(target, base + b"/below", b"none", Libc.MS_BIND, b"")
            lower += b":" + base + b"/below"
        facts = os.stat(base + b"/disk/" + ROOT.encode())
        os.chown(upper + b"/changes", account.uid, account.gid)
        os.chmod(upper + b"/changes", stat.S_IMODE(facts.st_mode))
        os.utime(upper + b"/changes", ns=(facts.st_atime_ns, facts.st_mtime_ns))
        mount_overlay(target, b"lowerdir=%s,upperdir=%s/changes,workdir=%s/work" % (lower, upper, upper))
    except OSError as exc:
        if exc.errno == errno.ENODEV:
            raise Refused("no-overlay", "the guest's kernel has no squashfs or overlay file system")
        raise Refused("refused", "%s: cannot lay the packed folder there: %s" % (shown(target), exc.strerror))


def mount_overlay(target: bytes, layers: bytes) -> None:
    for options in OVERLAY_OPTIONS:
        try:
            return libc().mount(b"belljar", target, b"overlay", 0, layers + options)
        except OSError as exc:
            if exc.errno != errno.EINVAL or not options:
                raise


def make_writable_place(target: bytes) -> None:
    os.makedirs(target, exist_ok=True)
    if not os.access(target, os.W_OK | os.X_OK, effective_ids=True):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def with_rights_of(account: Account, work: "Callable[[], None]") -> None:
    """In a child: what the account may not do is refused to us too."""
    before = os.getgroups()
    os.setgroups([account.gid] + [number for number, _ in account.groups if number != account.gid])
    os.setegid(account.gid)
    os.seteuid(account.uid)
    try:
        work()
    finally:
        os.seteuid(0)
        os.setegid(0)
        os.setgroups(before)


def filesystems() -> bytes:
    return read_file("/proc/filesystems")


def nfs_options(version: str, address: str, port: int) -> bytes:
    """The options of an NFS mount, as the kernel takes them without mount.nfs. hard: a server that is away for a while
    makes the payload wait, and never fail."""
    if not 0 < port < 1 << 16 or not address or address.strip("0123456789abcdef.:"):
        raise Refused("bad-call", "not an address and a port")
    protocol = "tcp6" if ":" in address else "tcp"
    said = (version, address, port, protocol)
    return ("vers=%s,addr=%s,port=%d,proto=%s,sec=sys,hard" % said).encode("ascii")


def mount_nfs(address: str, port: int, path: bytes, target: bytes, flags: int) -> None:
    """In a child: mount by the newest version that both sides speak. Raises Refused."""
    source = ("[%s]:" if ":" in address else "%s:") % address
    try:
        os.makedirs(target, exist_ok=True)
    except OSError as exc:
        raise Refused("refused", "%s: %s" % (shown(target), exc.strerror))
    trouble, has_loaded = 0, False
    for version in NFS_VERSIONS:
        options = nfs_options(version, address, port)
        trouble = try_mount(source.encode("ascii") + path, target, flags, options)
        if trouble == errno.ENODEV and not has_loaded:
            has_loaded = True
            load_modules(NFS_MODULES)
            trouble = try_mount(source.encode("ascii") + path, target, flags, options)
        if trouble not in NO_SUCH_VERSION:
            break
    if not trouble:
        return
    server = "%s at %s port %d" % (shown(path), address, port)
    if trouble == errno.ENODEV or (trouble in NO_SUCH_VERSION and b"\tnfs4\n" not in read_file("/proc/filesystems")):
        raise Refused("no-nfs", "the guest's kernel has no NFS 4 file system")
    kind = "nfs-refused" if trouble in REFUSALS else "nfs-silent"
    raise Refused(kind, "%s: cannot mount %s: %s" % (shown(target), server, os.strerror(trouble)))


def try_mount(source: bytes, target: bytes, flags: int, options: bytes) -> int:
    """0, or the error's number."""
    try:
        libc().mount(source, target, b"nfs", flags, options)
        return 0
    except OSError as exc:
        return exc.errno or errno.EIO


def unmount_whole(target: bytes) -> None:
    """At once, so that the server knows that this client has gone; lazily where something still stands on it."""
    try:
        libc().unmount(target, 0)
    except OSError as exc:
        if exc.errno != errno.EBUSY:
            raise
        libc().unmount(target)


def open_folder(path: bytes, user: "Account | None") -> int:
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    try:
        return os.open(path, flags)
    except PermissionError:
        if user is None:
            raise
    os.setegid(user.gid)
    os.seteuid(user.uid)
    try:
        return os.open(path, flags)
    finally:
        os.seteuid(0)
        os.setegid(0)


def rewrite(path: str, change: "Callable[[str], str]", mode: int) -> None:
    """Change a text file of the system; only its end where that is enough."""
    old = read_file(path, 16 * MIB).decode("utf-8", "surrogateescape")
    new = change(old)
    if new.startswith(old):
        if new != old:
            write_file(path, new[len(old) :].encode("utf-8", "surrogateescape"), mode, os.O_APPEND)
        return
    facts, draft = os.stat(path), path + ".belljar"
    write_file(draft, new.encode("utf-8", "surrogateescape"), mode)
    os.chmod(draft, stat.S_IMODE(facts.st_mode))
    os.chown(draft, facts.st_uid, facts.st_gid)
    os.rename(draft, path)


def kernel_events() -> "Any":
    """A socket that hears of every device that comes or goes."""
    import _socket as socket

    events = socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC, 15)  # NETLINK_KOBJECT_UEVENT
    events.bind((0, 1))
    return events


def hello_of(boot_nonce: bytes, system: str, has_9p: bool) -> bytes:
    """The words of a HELLO."""
    texts = (VERSION, boot_nonce.decode("ascii"), system, os.uname().release, "%d.%d.%d" % sys.version_info[:3])
    said = [b"%d" % PROTOCOL] + [text.encode("utf-8", "replace").replace(b"\0", b"?") for text in texts]
    return join(*(said + [b"9p" if has_9p else b""]))


def now() -> bytes:
    """The time in microseconds."""
    return b"%d" % int(time.time() * 1000000)


class Rehearsal:
    """An ordinary process on the host: the payload really runs, everything else is only said to have happened."""

    quiet = 0.0

    def __init__(self) -> None:
        self.boot_nonce = os.urandom(16).hex().encode("ascii")
        self.jobs = ""
        self.zygote = None  # type: Zygote | None
        self.kept = {}  # type: dict[bytes, int]

    def prepare(self) -> None:
        libc().adopt_orphans()

    def describe(self) -> bytes:
        return hello_of(self.boot_nonce, "rehearsal", False)

    def identify(self, words: Words) -> bytes:
        name, machine_id, nonce, mac = words.next(), words.next(), words.next(), words.next()
        return join(name, machine_id, nonce, mac, os.urandom(32).hex().encode("ascii"), now())

    def set_clock(self, words: Words) -> bytes:
        return now()

    def mount(self, words: Words) -> bytes:
        raise Refused("no-9p", "a rehearsal mounts nothing")

    def mount_virtiofs(self, words: Words) -> bytes:
        raise Refused("no-virtiofs", "a rehearsal mounts nothing")

    def prepare_for(self, words: Words) -> bytes:
        return b""

    def renew_keys(self) -> "Callable[[], None]":
        return lambda: None

    def find_disks(self, words: Words) -> bytes:
        raise Refused("no-disk", "a rehearsal has no disks")

    def mount_scratch(self, words: Words) -> bytes:
        raise Refused("refused", "a rehearsal mounts nothing")

    def mount_packed(self, words: Words) -> "Callable[[], None]":
        raise Refused("no-overlay", "a rehearsal mounts nothing")

    def mount_nfs(self, words: Words) -> "Callable[[], None]":
        raise Refused("no-nfs", "a rehearsal mounts nothing")

    def has_remote(self) -> bool:
        return False

    def forget_mounts(self) -> None:
        pass

    def add_account(self, account: Account) -> None:
        account.check()

    def make_place(self, path: bytes, account: Account) -> None:
        pass

    def box(self) -> "Family":
        return Family()

    def take_zygote(self) -> "Zygote | None":
        zygote, self.zygote = self.zygote, None
        return zygote

    def after_payload(self) -> None:
        pass

    def give(self, fd: int, account: Account, group: "int | None" = None) -> None:
        pass

    def leave_agent(self) -> None:
        pass

    def become(self, account: Account) -> None:
        pass

    def release(self) -> None:
        if self.jobs:
            import shutil

            shutil.rmtree(self.jobs, ignore_errors=True)
            self.jobs = ""

    def power_off(self) -> None:
        self.release()
        os._exit(0)

    def warm(self) -> None:
        self.zygote = self.zygote or Zygote(self, self.box())


# -- what keeps a payload's processes together ---------------------------------------------------------------------------


class Cgroup:
    """A control group (version 2). Whatever a process of it forks stays in it."""

    count = 0
    is_patient = False  # what is left may end by itself

    def __init__(self, parent: str) -> None:
        Cgroup.count += 1
        self.path = "%s/%d.%d" % (parent, os.getpid(), Cgroup.count)
        os.mkdir(self.path)
        self.procs = os.open(self.path + "/cgroup.procs", os.O_RDWR | os.O_CLOEXEC)
        self.events = os.open(self.path + "/cgroup.events", os.O_RDONLY | os.O_CLOEXEC)
        self.then = None  # type: Callable[[], None] | None

    def join(self) -> None:
        os.write(self.procs, b"0")

    def clear(self, agent: "Agent", pid: int, then: "Callable[[], None]") -> None:
        """Kill all that is left, unless patient; call *then* once nothing is."""
        if self._is_empty():
            return then()
        self.then = then
        agent.watch(self.events, select.EPOLLPRI, lambda events: self._changed(agent))
        self._changed(agent)

    def _changed(self, agent: "Agent") -> None:
        then = self.then
        if then is None:
            return
        if self._is_empty():
            self.then = None
            agent.unwatch(self.events)
            then()
        elif not self.is_patient:
            self._kill()

    def hurry(self, agent: "Agent") -> None:
        """No patience any more."""
        self.is_patient = False
        self._changed(agent)

    def _is_empty(self) -> bool:
        return b"populated 0" in os.pread(self.events, 256, 0)

    def _kill(self) -> None:
        try:
            write_file(self.path + "/cgroup.kill", b"1", flags=0)
        except OSError:  # older than Linux 5.14: what is frozen cannot fork away from us
            try:
                write_file(self.path + "/cgroup.freeze", b"1", flags=0)
            except OSError:
                pass
            for pid in os.pread(self.procs, MIB, 0).split():
                kill_quietly(int(pid), signal.SIGKILL)

    def has_oom_kill(self) -> bool:
        for line in read_file(self.path + "/memory.events", 512).splitlines():
            if line.startswith(b"oom_kill "):
                return int(line.split()[1]) > 0
        return False

    def discard(self) -> None:
        os.close(self.procs)
        os.close(self.events)
        try:
            os.rmdir(self.path)
        except OSError as exc:
            say("%s: %s" % (self.path, exc.strerror))


class Family:
    """Without control groups: the payload's session, and the orphans that come to us. Where several payloads run,
    an orphan with a session of its own belongs to the one that ends last."""

    live = []  # type: list[Family]
    is_patient = False  # what is left may end by itself

    def __init__(self) -> None:
        self.pid = 0
        self.then = None  # type: Callable[[], None] | None
        Family.live.append(self)

    def join(self) -> None:
        pass

    def clear(self, agent: "Agent", pid: int, then: "Callable[[], None]") -> None:
        self.pid, self.then = pid, then
        agent.on_child = self._look_again
        self._look_again()

    @staticmethod
    def _look_again() -> None:
        for family in list(Family.live):
            if family.then is not None and not family._kill():
                then, family.then = family.then, None
                then()

    def _kill(self) -> bool:
        """Kill what is left; False when nothing is. The end of each is told to us by SIGCHLD."""
        rows = processes()
        others = set(family.pid for family in Family.live if family.then is None)
        doomed = [pid for pid, row in rows.items() if row[1] == self.pid]
        if not others:
            doomed += [pid for pid in rows if is_below(os.getpid(), pid, rows)]
        for pid in () if self.is_patient else doomed:
            kill_quietly(pid, signal.SIGKILL)
        return bool(doomed)

    def hurry(self, agent: "Agent") -> None:
        self.is_patient = False
        self._look_again()

    def has_oom_kill(self) -> bool:
        return False

    def discard(self) -> None:
        Family.live.remove(self)


def processes() -> "dict[int, tuple[int, int]]":
    """pid -> (parent, session) of every process that is no zombie."""
    found = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            words = read_file("/proc/%s/stat" % entry, 1024).rpartition(b")")[2].split()
            if len(words) > 3 and words[0] not in (b"Z", b"X"):
                found[int(entry)] = (int(words[1]), int(words[3]))
    return found


def is_below(ancestor: int, pid: int, rows: "dict[int, tuple[int, int]]") -> bool:
    while pid in rows:
        pid = rows[pid][0]
        if pid == ancestor:
            return True
    return False


def kill_quietly(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def place(words: "list[bytes]", account: Account, world: "Guest | Rehearsal") -> None:
    """Files of a payload, before it starts: path, mode, "u" or "r" (whose), and "f" with the content or "d"."""
    for at in range(0, len(words), 4):
        path, mode, content = words[at], int(words[at + 1]), words[at + 3]
        if not path.startswith(b"/"):
            raise Refused("refused", "%s: not an absolute path" % shown(path))
        kept = world.kept.pop(path, -1)
        if kept >= 0:
            is_as_made = words[at + 1 : at + 3] == [b"420", b"r"] and content[:1] == b"f"
            if is_as_made:
                os.pwrite(kept, with_nul(content[1:]), 0)
            os.close(kept)
            if is_as_made:
                continue
        folder = path if content[:1] == b"d" else os.path.dirname(path)
        if not os.path.isdir(folder):
            os.makedirs(folder, 0o755)
        flags = os.O_RDONLY | os.O_DIRECTORY
        if content[:1] == b"f":
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        fd = os.open(path, flags | os.O_CLOEXEC, 0o600)
        try:
            if content[:1] == b"f":
                write_all(fd, with_nul(content[1:]))
            if words[at + 2] == b"u":
                world.give(fd, account)
            os.fchmod(fd, mode)
        finally:
            os.close(fd)


def write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


# -- a payload's process: what the child does ----------------------------------------------------------------------------


class Environment:
    """Looks like a dictionary to execve, but keeps order and repeated names."""

    def __init__(self, names: "list[bytes]", contents: "list[bytes]") -> None:
        self.names, self.contents = names, contents

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, name: bytes) -> bytes:
        return dict(zip(self.names, self.contents))[name]

    def keys(self) -> "list[bytes]":
        return self.names

    def values(self) -> "list[bytes]":
        return self.contents


class Trouble(Exception):
    """Why the child could not become the payload."""

    def __init__(self, code: int, kind: str, message: str) -> None:
        Exception.__init__(self, message)
        self.code, self.kind, self.message = code, kind, message


class Job:
    """A `start` call, taken apart. What only the child needs is left in words until `read_rest`."""

    def __init__(self, words: Words) -> None:
        self.words = words
        self.stdio = words.text()  # three of s: stream, n: null, c: closed; o, as the third: where the second goes
        window = words.next()  # "" without a terminal, else its rows and columns, 0 where they are not known
        self.terminal = [int(size) for size in window.split(b" ")] if window else None
        self.script = words.next()  # "", or the name of the script that comes as a stream
        self.builtin = words.next()  # "", or "put" (argv: path, name), or "get" (argv: path, "all" or "changed", and what to skip), or "collect" (argv: paths)
        self.program = words.next()  # "", or what is executed with argv as it is
        self.lingers = words.next() == b"1"  # after TERM, what its leader leaves behind may end by itself
        self.umask = words.number()
        cwd = words.next()
        self.account = Account(words)
        self.cwd = cwd or self.account.home.encode("utf-8", "surrogateescape")
        self.path = b""  # of the script, once it is there
        self.began = 0  # when the first payload did, in the clock that files are stamped with

    def read_rest(self) -> None:
        limits, self.argv, pairs = self.words.some(3), self.words.some(), self.words.some(2)
        if self.words.at != len(self.words.words):
            raise ValueError("more words than an order has")
        self.rlimits = [(limits[at], limits[at + 1], limits[at + 2]) for at in range(0, len(limits), 3)]
        self.env = Environment(pairs[0::2], pairs[1::2])


def run_child(
    job: Job, world: "Guest | Rehearsal", box: "Cgroup | Family", files: "list[int]", trouble: int
) -> "NoReturn":
    """From the fork to the payload's first instruction. Does not return."""
    try:
        stand_alone(world, box)
    except BaseException as exc:
        report(trouble, "failed", "%s: %s" % (type(exc).__name__, exc))
        os._exit(FAILED)
    become_payload(job, world, files, trouble)


def stand_alone(world: "Guest | Rehearsal", box: "Cgroup | Family") -> None:
    """A session and a box of one's own; the agent's signals are not ours."""
    signal.set_wakeup_fd(-1)
    os.setsid()
    box.join()
    world.leave_agent()


def become_payload(job: Job, world: "Guest | Rehearsal", files: "list[int]", trouble: int) -> "NoReturn":
    code = FAILED
    try:
        job.read_rest()
        take_stdio(job, files)
        limit(job.rlimits)
        os.umask(job.umask)
        world.become(job.account)
        enter(job.cwd)
        if job.builtin:
            code = run_builtin(job, trouble)
        else:
            execute(job)
    except Trouble as exc:
        code = exc.code
        report(trouble, exc.kind, exc.message)
    except BaseException as exc:
        report(trouble, "failed", "%s: %s" % (type(exc).__name__, exc))
    finally:
        os._exit(code)


# An order that asks for nothing.
NOTHING = [b"sss", b"", b"", b"", b"", b"", b"18", b"", b"n", b"0", b"0", b"g", b"/", b"/bin/sh", b"0"]
NOTHING += [b"1", b"CPU", b"-1", b"-1", b"1", b"sh", b"1", b"PATH", b"/bin"]


class Zygote:
    """A child forked before its payload is known, with its session, box and pipes: a template holds one, so that the
    payload of a clone need not wait for a fork. It is told its order by a pipe, and becomes what is asked."""

    def __init__(self, world: "Guest | Rehearsal", box: "Cgroup | Family") -> None:
        self.box = box
        pipes = [os.pipe() for _ in range(3)]
        self.inner = [pipes[0][0], pipes[1][1], pipes[2][1]]
        self.outer = [pipes[0][1], pipes[1][0], pipes[2][0]]
        self.trouble, trouble = os.pipe()
        orders, self.orders = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            self._wait(world, orders, trouble)
        os.close(orders)
        os.close(trouble)

    def _wait(self, world: "Guest | Rehearsal", orders: int, trouble: int) -> "NoReturn":
        """In the child: all is ready but the order."""
        try:
            stand_alone(world, self.box)
            for fd in self.outer + [self.orders]:  # else our own end would keep the payload's stdin open
                os.close(fd)
            Job(Words(NOTHING)).read_rest()  # the pages this writes to are our own from now on
            parts = []
            while True:
                part = os.read(orders, 64 * KIB)
                if not part:
                    break
                parts.append(part)
            if not parts:
                os._exit(0)  # nobody needs us
            words = b"".join(parts).split(b"\0")
            job = Job(Words(words[1:]))
            job.path = words[0]
            files = [self._descriptor(index, kind) for index, kind in enumerate(job.stdio)]
        except BaseException as exc:
            report(trouble, "failed", "%s: %s" % (type(exc).__name__, exc))
            os._exit(FAILED)
        become_payload(job, world, files, trouble)

    def _descriptor(self, index: int, kind: str) -> int:
        if kind == "n":
            return os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
        if kind == "o":
            return 1  # put in its place just before
        return self.inner[index] if kind == "s" else -1

    def go(self, job: Job) -> None:
        """Hand over the order. Raises OSError when the child is gone: then nothing has happened."""
        data = memoryview(join(job.path, *job.words.words))
        while data:
            data = data[os.write(self.orders, data) :]
        os.close(self.orders)

    def discard(self) -> None:
        """Without an order it ends by itself."""
        for fd in self.inner + self.outer + [self.trouble, self.orders]:
            close_quietly(fd)


def report(fd: int, kind: str, message: str) -> None:
    os.write(fd, (kind + "\0" + message).encode("utf-8", "backslashreplace")[:4096])


def take_stdio(job: Job, files: "list[int]") -> None:
    """Put the ends where the payload expects them; -1 is a descriptor that is to be closed."""
    for number, fd in enumerate(files):
        if fd >= 0:
            os.dup2(fd, number)
        else:
            os.close(number)
    if job.terminal:
        import fcntl
        import termios

        fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def limit(rlimits: "list[tuple[bytes, bytes, bytes]]") -> None:
    """Limits as outside. A guest's kernel may allow fewer open files than the host's."""
    if not rlimits:
        return
    import resource

    for limit_name, least, most in rlimits:
        name, soft, hard = limit_name.decode("ascii"), int(least), int(most)
        number = getattr(resource, "RLIMIT_" + name, None)
        if number is None:
            continue
        try:
            if name == "NOFILE":
                limit_files(number, soft, hard)
            else:
                resource.setrlimit(number, (soft, hard))
        except (ValueError, OSError) as exc:
            raise Trouble(FAILED, "rlimit", "limit %s to %d, %d: %s" % (name, soft, hard, exc))


def limit_files(number: int, soft: int, hard: int) -> None:
    """A guest's kernel may allow fewer open files than the host's: then as many as it allows."""
    import resource

    try:
        if soft < 0 or hard < 0:
            raise ValueError("no kernel allows any number")
        resource.setrlimit(number, (soft, hard))
    except (ValueError, OSError):
        most = int(read_file("/proc/sys/fs/nr_open") or b"1048576")
        soft, hard = [most if value < 0 or value > most else value for value in (soft, hard)]
        resource.setrlimit(number, (soft, hard))


def enter(cwd: bytes) -> None:
    try:
        os.chdir(cwd)
    except (OSError, ValueError) as exc:
        raise Trouble(
            FAILED, "no-cwd", "%s: cannot be the working directory: %s" % (shown(cwd), getattr(exc, "strerror", exc))
        )


def execute(job: Job) -> None:
    """Become the program: by its path, else the first that can be run in the payload's own PATH. Raises Trouble."""
    if job.path:
        job.argv[:1] = [job.path]
    name = job.program or (job.argv[0] if job.argv else b"")
    if not name:
        raise Trouble(NOT_FOUND, "not-found", "an empty command")
    if b"/" in name:
        candidates = [name]
    else:
        path = job.env[b"PATH"] if b"PATH" in job.env.names else b"/usr/local/bin:/usr/bin:/bin"
        candidates = [(folder or b".") + b"/" + name for folder in path.split(b":")]
    refusal = None  # type: OSError | None
    for candidate in candidates:
        try:
            run_program(candidate, job)
        except OSError as exc:
            if exc.errno == errno.ENOENT and os.path.lexists(candidate):
                raise Trouble(NOT_EXECUTABLE, "not-executable", "%s: its interpreter is missing" % shown(candidate))
            if exc.errno == errno.ENOENT or (exc.errno == errno.ENOTDIR and b"/" not in name):
                continue
            refusal = refusal or exc
            if exc.errno != errno.EACCES:
                break
        except ValueError as exc:
            raise Trouble(NOT_EXECUTABLE, "not-executable", "%s: %s" % (shown(name), exc))
    if refusal is not None:
        raise Trouble(NOT_EXECUTABLE, "not-executable", "%s: %s" % (shown(name), refusal.strerror))
    raise Trouble(NOT_FOUND, "not-found", "%s: not found in the guest" % shown(name))


def run_program(path: bytes, job: Job) -> None:
    try:
        os.execve(path, job.argv, job.env)  # type: ignore[arg-type]
    except OSError as exc:
        if exc.errno != errno.ENOEXEC:
            raise
    # A file without a format the kernel knows is a script for sh: so do shells.
    os.execve(b"/bin/sh", [b"/bin/sh", path] + job.argv[1:], job.env)  # type: ignore[arg-type]


def run_builtin(job: Job, trouble: int) -> int:
    """Copy files as the user: the kernel itself checks what this user may do. The exit code is 0 or 1."""
    for entry in os.listdir("/proc/self/fd"):
        if int(entry) > 2 and int(entry) != trouble:
            close_quietly(int(entry))  # no exec closes them: the channel, other payloads' pipes
    path = job.argv[0]
    try:
        if job.builtin == b"put":
            unpack(lambda size: os.read(0, min(size, CHUNK)), path, job.argv[1])
        elif job.builtin == b"collect":
            Gatherer(write_to_stdout).gather(job.argv)
        else:
            pack(path, write_to_stdout, job.argv[2:], job.began if job.argv[1] == b"changed" else 0)
    except TransferError as exc:
        report(trouble, exc.kind, exc.message)
        return 1
    except OSError as exc:
        report(trouble, "space" if exc.errno == errno.ENOSPC else "broken", "%s: %s" % (shown(path), exc.strerror))
        return 1
    return 0


def write_to_stdout(data: bytes) -> None:
    write_all(1, data)


# -- streams between the channel and a payload's pipes -------------------------------------------------------------------


class Outflow:
    """A pipe of the payload, read as far as the host gives credit."""

    def __init__(self, agent: "Agent", process: "Process", number: int, fd: int) -> None:
        self.agent, self.process, self.number, self.fd = agent, process, number, fd
        self.credit = WINDOW
        self.is_last = False  # nobody writes any more: what is in the pipe is all there will be
        os.set_blocking(fd, False)
        agent.watch(fd, select.EPOLLIN, self.pump)

    def pump(self, events: int = 0) -> None:
        """One read; until nothing is left once nobody writes any more."""
        while self.fd >= 0:
            if not self.credit or self.agent.is_full():
                self.agent.unwatch(self.fd)
                if self.credit:
                    self.agent.waiting.append(self)
                return
            try:
                data = os.read(self.fd, min(self.credit, MAX_DATA))
            except BlockingIOError:
                if self.is_last:
                    self.finish()
                return
            except OSError:  # a terminal whose last user is gone
                data = b""
            if not data:
                return self.finish()
            self.credit -= len(data)
            self.agent.send(DATA, self.number, data)
            if not self.is_last:
                return

    def resume(self) -> None:
        if self.fd >= 0:
            self.agent.watch(self.fd, select.EPOLLIN, self.pump)
            if self.is_last:
                self.pump()

    def grant(self, amount: int) -> None:
        was_dry, self.credit = not self.credit, self.credit + amount
        if self.credit > MAX_CREDIT:
            raise WireError("stream %d: too much credit" % self.number)
        if was_dry:
            self.resume()

    def drain(self) -> None:
        self.is_last = True
        self.pump()

    def finish(self) -> None:
        if self.fd >= 0:
            self.agent.send(EOF, self.number)
            self.drop()
            self.process.advance()

    def drop(self) -> None:
        """Nobody reads on: the payload gets SIGPIPE at its next write."""
        if self.fd >= 0:
            self.agent.unwatch(self.fd)
            os.close(self.fd)
            self.fd = -1


class Inflow:
    """Bytes for a pipe of the payload. What the payload has not read yet costs the host its credit."""

    def __init__(self, agent: "Agent", number: int, fd: int, is_terminal: bool = False) -> None:
        self.agent, self.number, self.fd, self.is_terminal = agent, number, fd, is_terminal
        self.queue = deque()  # type: deque[memoryview]
        self.credit, self.owed = WINDOW, 0
        self.is_ended = False
        os.set_blocking(fd, False)

    def feed(self, data: bytes) -> None:
        self.credit -= len(data)
        if self.credit < 0 or self.is_ended:
            raise WireError("stream %d: data without credit or after its end" % self.number)
        if self.fd >= 0 and data:
            self.queue.append(memoryview(data))
            if len(self.queue) == 1:
                self.pump()

    def end(self) -> None:
        self.is_ended = True
        if self.fd >= 0 and not self.queue:
            self.finish()

    def pump(self, events: int = 0) -> None:
        try:
            while self.queue:
                written = os.write(self.fd, self.queue[0])
                self._owe(written)
                if written < len(self.queue[0]):
                    self.queue[0] = self.queue[0][written:]
                else:
                    self.queue.popleft()
        except BlockingIOError:
            self.agent.watch(self.fd, select.EPOLLOUT, self.pump)
            return
        except OSError:  # the payload closed its end
            self.agent.send(RESET, self.number)
            return self.drop()
        self.agent.unwatch(self.fd)
        if self.is_ended:
            self.finish()

    def _owe(self, count: int) -> None:
        self.owed += count
        if self.owed >= WINDOW // 4:
            self.credit += self.owed
            self.agent.send(CREDIT, self.number, U32.pack(self.owed))
            self.owed = 0

    def finish(self) -> None:
        if self.is_terminal:
            try:
                os.write(self.fd, b"\4")  # what a person types to say that nothing more comes
            except OSError:
                pass
        self.drop()

    def drop(self) -> None:
        if self.fd >= 0:
            self.agent.unwatch(self.fd)
            os.close(self.fd)
            self.fd = -1
        self.queue.clear()


class ScriptFlow(Inflow):
    """A script too large for a call: goes to its file, then the payload starts."""

    def __init__(self, agent: "Agent", number: int, fd: int, then: "Callable[[], None]") -> None:
        Inflow.__init__(self, agent, number, fd)
        self.then = then

    def pump(self, events: int = 0) -> None:
        while self.queue:
            data = self.queue.popleft()
            while data:
                written = os.write(self.fd, data)
                self._owe(written)
                data = data[written:]

    def finish(self) -> None:
        self.drop()
        self.then()


class Process:
    """A payload, or a file copy: one child, its streams, its box. Everything of it is dead and every byte of it sent
    before its EXIT is."""

    def __init__(self, agent: "Agent", number: int, job: Job) -> None:
        self.agent, self.number, self.job = agent, number, job
        self.pid = 0
        self.inflows = {}  # type: dict[int, Inflow]
        self.outflows = {}  # type: dict[int, Outflow]
        self.zygote = None if job.terminal or job.builtin else agent.world.take_zygote()
        self.box = self.zygote.box if self.zygote else agent.world.box()
        self.trouble = -1
        self.master = -1
        self.end = None  # type: tuple[int, Any] | None
        self.was_told = False  # TERM was sent to all of it
        self.is_empty = False  # no process of it is left
        self.is_silent = False  # its conversation is over
        self.is_over = False

    # -- the way in

    def begin(self) -> None:
        """Start it, once its script is there."""
        if not self.job.script:
            return self.launch()
        name = os.path.basename(self.job.script.rstrip(b"/"))
        self.job.path = self._script_folder() + b"/" + (name if name not in (b"", b".", b"..") else b"script")
        fd = os.open(self.job.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o700)
        os.fchmod(fd, 0o700)
        self.agent.world.give(fd, self.job.account)
        number = 4 * self.number + SCRIPT
        self.inflows[number] = ScriptFlow(self.agent, number, fd, self.launch_or_refuse)

    def _script_folder(self) -> bytes:
        if not self.agent.world.jobs:
            import tempfile

            self.agent.world.jobs = tempfile.mkdtemp(prefix="belljar-rehearsal-")
        self.agent.folders += 1
        folder = ("%s/%d.%d" % (self.agent.world.jobs, os.getpid(), self.agent.folders)).encode()
        os.mkdir(folder, 0o700)
        account = self.job.account
        if account.uid and isinstance(self.agent.world, Guest):
            os.chown(folder, account.uid, account.gid)
        return folder

    def launch_or_refuse(self) -> None:
        try:
            self.launch()
        except OSError as exc:
            self.refuse("failed", exc.strerror or str(exc))

    def refuse(self, kind: str, message: str) -> None:
        """It never came to be: an EXIT says why."""
        self.drop_flows()
        if not self.is_silent:
            self._tell(FAILED << 8, 0.0, 0.0, 0, kind + "\0" + message)
        self.close()

    def launch(self) -> None:
        """Fork, or let the child go on that is there already. The parent keeps the far ends of the pipes."""
        if self.zygote is not None:
            zygote, self.zygote = self.zygote, None
            if self._release(zygote):
                return
        files, inner = self._terminal() if self.job.terminal else self._pipes()
        trouble, trouble_inner = os.pipe()
        inner.append(trouble_inner)
        try:
            pid = os.fork()
        except OSError:
            os.close(trouble)
            raise
        if not pid:
            run_child(self.job, self.agent.world, self.box, files, trouble_inner)
        for fd in inner:
            os.close(fd)
        self.pid, self.trouble = pid, trouble
        os.set_blocking(trouble, False)
        self.agent.children[pid] = self

    def _release(self, zygote: Zygote) -> bool:
        """The zygote becomes the payload; False when it died before its time."""
        base = 4 * self.number
        try:
            for fd in zygote.inner:
                self.agent.world.give(fd, self.job.account)
            zygote.go(self.job)
        except OSError:
            zygote.discard()
            self.box = self.agent.world.box()
            return False
        for fd in zygote.inner:
            os.close(fd)
        for index, (kind, fd) in enumerate(zip(self.job.stdio, zygote.outer)):
            if kind != "s":
                os.close(fd)
            elif index == STDIN:
                self.inflows[base] = Inflow(self.agent, base, fd)
            else:
                self.outflows[base + index] = Outflow(self.agent, self, base + index, fd)
        self.pid, self.trouble = zygote.pid, zygote.trouble
        os.set_blocking(self.trouble, False)
        self.agent.children[self.pid] = self
        return True

    def _pipes(self) -> "tuple[list[int], list[int]]":
        """The child's three descriptors, and those of them the parent closes afterwards."""
        files, inner = [], []
        base = 4 * self.number
        for index, kind in enumerate(self.job.stdio):
            if kind in ("c", "o"):
                files.append(STDOUT if kind == "o" else -1)
                continue
            if kind == "n":
                fd = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
            else:
                reader, writer = os.pipe()
                if index == STDIN:
                    fd = reader
                    self.inflows[base] = Inflow(self.agent, base, writer)
                else:
                    fd = writer
                    self.outflows[base + index] = Outflow(self.agent, self, base + index, reader)
                self.agent.world.give(fd, self.job.account)
            files.append(fd)
            inner.append(fd)
        return files, inner

    def _terminal(self) -> "tuple[list[int], list[int]]":
        base = 4 * self.number
        self.master, slave = os.openpty()
        if self.job.terminal and self.job.terminal[0]:
            self.resize(*self.job.terminal)
        self.agent.world.give(slave, self.job.account, 5)
        self.inflows[base] = Inflow(self.agent, base, os.dup(self.master), is_terminal=True)
        self.outflows[base + STDOUT] = Outflow(self.agent, self, base + STDOUT, os.dup(self.master))
        return [slave] * 3, [slave]

    # -- while it runs

    def signal(self, number: int) -> None:
        """To its process group, or with LEADER to itself alone. What has ended is past hearing."""
        alone, number = number & LEADER, number & ~LEADER
        is_there = self.end is None or self.box.is_patient
        if self.pid and is_there and 0 < number <= 64:
            if self.end is not None and number == signal.SIGKILL:
                return self.box.hurry(self.agent)
            if alone:
                return kill_quietly(self.pid, number)
            self.was_told = self.was_told or number == signal.SIGTERM
            try:
                os.killpg(self.pid, number)
            except ProcessLookupError:
                if self.end is None:
                    kill_quietly(self.pid, number)  # its child has not come to its setsid yet

    def resize(self, rows: int, columns: int) -> None:
        import fcntl
        import termios

        if self.master >= 0:
            fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    # -- the way out

    def ended(self, status: int, usage: "Any") -> None:
        """The main process is gone. What it left behind goes now, or in its own time where that was asked for."""
        self.end = (status, usage)
        for flow in self.inflows.values():
            flow.drop()
        self.box.is_patient = self.job.lingers and self.was_told
        self.box.clear(self.agent, self.pid, self.emptied)

    def emptied(self) -> None:
        self.is_empty = True
        for flow in list(self.outflows.values()):
            flow.drain()
        self.advance()

    def advance(self) -> None:
        """Over, once all is dead and sent."""
        if not self.is_empty or self.is_over or any(flow.fd >= 0 for flow in self.outflows.values()):
            return
        if not self.is_silent:
            assert self.end is not None
            status, usage = self.end
            self._tell(status, usage.ru_utime, usage.ru_stime, usage.ru_maxrss * KIB, self._trouble_text())
        self.close()

    def _tell(self, status: int, user: float, system: float, peak: int, trouble: str) -> None:
        end = END.pack(status, user, system, peak, self.box.has_oom_kill())
        self.agent.send(EXIT, self.number, end + (trouble or "\0").encode("utf-8", "replace"))

    def _trouble_text(self) -> str:
        try:
            return os.read(self.trouble, 4096).decode("utf-8", "replace")
        except BlockingIOError:
            return ""

    def abandon(self) -> None:
        """Nobody listens any more: kill it, drop what it says."""
        self.is_silent = True
        self.drop_flows()
        if not self.pid:
            self.close()
        elif self.end is None:
            self.signal(signal.SIGKILL)
        else:
            self.box.hurry(self.agent)
        self.advance()

    def drop_flows(self) -> None:
        for flow in list(self.inflows.values()) + list(self.outflows.values()):
            flow.drop()

    def close(self) -> None:
        if self.is_over:
            return
        self.is_over = True
        for fd in (self.trouble, self.master):
            if fd >= 0:
                os.close(fd)
        if self.zygote is not None:
            self.zygote.discard()
        self.agent.later.append(self.box.discard)
        self.agent.later.append(self.agent.world.after_payload)
        self.agent.gone(self)


# -- the agent ---------------------------------------------------------------------------------------------------------


class Errand:
    """Work that may block, in a child: whoever asked for it is answered when it is done, or out of time."""

    def __init__(
        self, agent: "Agent", numbers: "list[int]", seconds: int, late: "tuple[str, str]", work: "Callable[[], None]"
    ) -> None:
        self.agent, self.numbers, self.late = agent, numbers, late
        self.deadline = time.monotonic() + seconds
        self.reading, writing = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            signal.set_wakeup_fd(-1)
            os._exit(self._run(writing, work))
        os.close(writing)
        agent.errands.append(self)
        agent.watch(self.reading, select.EPOLLIN, self._done)
        signal.alarm(max(1, seconds))

    @staticmethod
    def _run(writing: int, work: "Callable[[], None]") -> int:
        said = b"done"
        try:
            work()
        except Refused as exc:
            said = ("%s\0%s" % (exc.kind, exc.message[:2000])).encode("utf-8", "replace")
        except BaseException as exc:
            said = ("refused\0%s: %s" % (type(exc).__name__, exc)).encode("utf-8", "replace")[:2000]
        os.write(writing, said)
        return 0

    def _done(self, events: int) -> None:
        said = os.read(self.reading, 4096)
        self._close()
        kind, _, message = said.decode("utf-8", "replace").partition("\0")
        for number in self.numbers:
            if said == b"done":
                self.agent.send(REPLY, number)
            else:
                self.agent.refuse(number, kind or "refused", message or "a child of the agent was killed")

    def look_at_the_clock(self) -> None:
        """Out of time: the answer is given without the child, which may be where no signal reaches it."""
        if time.monotonic() < self.deadline:
            return
        self.abandon()
        for number in self.numbers:
            self.agent.refuse(number, *self.late)

    def _close(self) -> None:
        self.agent.unwatch(self.reading)
        os.close(self.reading)
        self.agent.errands.remove(self)

    def abandon(self) -> None:
        """Nobody waits for it any more."""
        kill_quietly(self.pid, signal.SIGKILL)
        self._close()


class Agent:
    """One thread, one epoll: the channel, the children, their pipes."""

    MOST_OUT = 512 * KIB  # with so much unsent the payloads' pipes are left alone
    MOST_HEARD = 4 * MIB  # with so much unsent the host itself is not heard
    READS = 32  # of the channel, before others have their turn

    def __init__(self, fd: int, world: "Guest | Rehearsal", *, is_port: bool) -> None:
        self.fd, self.world, self.is_port = fd, world, is_port
        self.parser = Parser(TO_AGENT)
        self.poll = select.epoll()
        self.ready = {}  # type: dict[int, Callable[[int], None]]
        self.out = deque()  # type: deque[bytes | memoryview]
        self.out_size = 0
        self.waiting = []  # type: list[Outflow]
        self.processes = {}  # type: dict[int, Process]
        self.dying = []  # type: list[Process]
        self.children = {}  # type: dict[int, Process]
        self.on_child = None  # type: Callable[[], None] | None
        self.later = deque()  # type: deque[Callable[[], None]]
        self.ending = []  # type: list[int]
        self.errands = []  # type: list[Errand]
        self.flush_patience = FLUSH_PATIENCE
        self.folders = 0
        self.is_over = False
        self.mask = select.EPOLLIN
        self.calls = {
            b"identify": world.identify,
            b"set_clock": world.set_clock,
            b"mount": world.mount,
            b"mount_virtiofs": world.mount_virtiofs,
            b"prepare": world.prepare_for,
            b"find_disks": world.find_disks,
            b"mount_scratch": world.mount_scratch,
            b"add_account": self._add_account,
            b"place": self._place,
        }
        self.hello = frame(HELLO, 0, world.describe())
        os.set_blocking(fd, False)
        self.poll.register(fd, self.mask)
        self.ready[fd] = self._hear
        self.began, self.has_put = 0, False
        self._catch_signals()

    def _catch_signals(self) -> None:
        """Payloads begin with every signal at its default: a handler, unlike SIG_IGN, is not inherited by execve."""
        for number in range(1, signal.NSIG):
            if number in (signal.SIGKILL, signal.SIGSTOP) or 32 <= number < signal.SIGRTMIN:
                continue
            quiet = number in (signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ, signal.SIGALRM)
            signal.signal(number, ignore if quiet else signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        self.wake, wake_inner = os.pipe()
        os.set_blocking(self.wake, False)
        os.set_blocking(wake_inner, False)
        signal.set_wakeup_fd(wake_inner)
        self.watch(self.wake, select.EPOLLIN, self._reap)

    def run(self) -> None:
        """Until the channel is gone for good."""
        while not self.is_over:
            for fd, events in self.poll.poll():
                action = self.ready.get(fd)
                if action is not None:
                    action(events)
            self.flush()
            while self.later:
                self.later.popleft()()

    # -- what to wait for

    def watch(self, fd: int, events: int, action: "Callable[[int], None]") -> None:
        if fd in self.ready:
            self.poll.modify(fd, events)
        else:
            self.poll.register(fd, events)
        self.ready[fd] = action

    def unwatch(self, fd: int) -> None:
        if self.ready.pop(fd, None) is not None:
            self.poll.unregister(fd)

    # -- speaking

    def send(self, kind: int, number: int, body: bytes = b"") -> None:
        self.out.append(frame(kind, number, body))
        self.out_size += HEADER.size + len(body)

    def refuse(self, number: int, kind: str, message: str) -> None:
        text = "%s\0%s" % (kind, message[:8192].replace("\0", "?"))
        self.send(ERROR, number, text.encode("utf-8", "replace"))

    def is_full(self) -> bool:
        return self.out_size >= self.MOST_OUT

    def flush(self) -> None:
        """Write what can be written; small frames go together, for each write wakes the host."""
        try:
            while self.out:
                data = self.out.popleft()
                if self.out and len(data) < MAX_DATA // 2:
                    parts, size = [data], len(data)
                    while self.out and size < MAX_DATA:
                        size += len(self.out[0])
                        parts.append(self.out.popleft())
                    data = b"".join(parts)
                try:
                    count = os.write(self.fd, data)
                except BlockingIOError:
                    count = 0
                self.out_size -= count
                if count < len(data):
                    self.out.appendleft(memoryview(data)[count:])
                    if not count:
                        break
        except OSError:
            return self._hung_up()
        if self.waiting and self.out_size < self.MOST_OUT // 2:
            waiting, self.waiting = self.waiting, []
            for flow in waiting:
                flow.resume()
            if self.out_size:
                return self.flush()
        self._listen()

    def _listen(self, edge: int = 0) -> None:
        hears = select.EPOLLIN if self.out_size < self.MOST_HEARD else 0
        mask = hears | (select.EPOLLOUT if self.out else 0) | edge
        if mask != self.mask and not self.is_over:
            self.poll.modify(self.fd, mask)
            self.mask = mask

    # -- hearing

    def _hear(self, events: int) -> None:
        if not events & ~select.EPOLLOUT:
            return
        for _ in range(self.READS):
            room = self.parser.room()
            try:
                count = os.readv(self.fd, [room])
            except BlockingIOError:
                return
            except OSError as exc:
                if self.is_port and exc.errno in (errno.ENODEV, errno.EIO):
                    self.is_over = True
                count = 0
            if not count:
                return self._hung_up()
            self.parser.filled(count)
            self._take_all()
            if count < 4096 or self.out_size > self.MOST_HEARD:  # a port gives a page at a time
                return

    def _take_all(self) -> None:
        while True:
            try:
                found = self.parser.take()
                if found is None:
                    return
                self._take(*found)
            except WireError as exc:
                self.refuse(0, "protocol", str(exc))
                self.parser.forget()
                self._end_conversation()

    def _take(self, kind: int, number: int, body: bytes) -> None:
        if kind == CALL:
            self._call(number, body)
        elif kind in STREAM_FRAMES:
            self._stream(kind, number, body)
        elif kind == SIGNAL:
            if number in self.processes:
                self.processes[number].signal(body[0])
        elif kind == RESIZE:
            if number in self.processes:
                self.processes[number].resize(*WINDOW_SIZE.unpack(body))
        elif kind == PING:
            self.send(PONG, number, body)
        elif kind == GREETING:
            self._end_conversation()
            self.began, self.has_put = 0, False
            self.out.clear()
            answer = greeting(body) + self.hello
            self.out.append(answer)
            self.out_size = len(answer)

    def _stream(self, kind: int, number: int, body: bytes) -> None:
        """Frames for a stream that is gone crossed its end on the way: they mean nothing."""
        process = self.processes.get(number >> 2)
        if process is None:
            return
        if number in process.inflows:
            inflow = process.inflows[number]
            if kind == DATA:
                self._feed(process, inflow, body)
            elif kind == EOF:
                inflow.end()
            elif kind == RESET:
                inflow.drop()
            return
        outflow = process.outflows.get(number)
        if outflow is not None and kind == CREDIT:
            outflow.grant(U32.unpack(body)[0])
        elif outflow is not None and kind == RESET:
            outflow.drop()
            process.advance()

    def _feed(self, process: Process, inflow: Inflow, body: bytes) -> None:
        try:
            inflow.feed(body)
        except OSError as exc:  # only a script's file can fail: the guest is full
            process.refuse("failed", "cannot store the script: %s" % exc.strerror)

    def _call(self, number: int, body: bytes) -> None:
        words = Words(unstuffed(body).split(b"\0"))
        name = words.next()
        try:
            if not 0 < number < 1 << 30:
                raise WireError("call number %d" % number)
            answer = self._do(name, number, words)
            if answer is not None:
                self.send(REPLY, number, answer)
        except WireError:
            raise
        except Refused as exc:
            self.refuse(number, exc.kind, exc.message)
        except OSError as exc:
            what = os.fsencode(exc.filename) if exc.filename else name
            self.refuse(number, "refused", "%s: %s" % (shown(what), exc.strerror or exc))
        except Exception as exc:
            self.refuse(number, "bad-call", "%s: %s: %s" % (shown(name), type(exc).__name__, exc))

    def _do(self, name: bytes, number: int, words: Words) -> "bytes | None":
        """The answer to a call; None when it comes later."""
        if name == b"start":
            self._start(number, words)
            return b""
        if name in self.calls:
            return self.calls[name](words)
        if name == b"settle":
            self._settle()
            return b""
        if name == b"mount_nfs":
            self._mount_nfs(number, words)
            return None
        if name == b"mount_packed":
            late = ("refused", "the packed folder was not mounted within %d s" % PACKED_PATIENCE)
            Errand(self, [number], PACKED_PATIENCE, late, self.world.mount_packed(words))
            return None
        if name == b"renew_keys":
            late = ("refused", "the guest had no ssh host keys of its own within %d s" % KEYS_PATIENCE)
            Errand(self, [number], KEYS_PATIENCE, late, self.world.renew_keys())
            return None
        if name == b"end_payload":
            self.flush_patience = int(words.words[1]) if len(words.words) > 1 else FLUSH_PATIENCE
            self.ending.append(number)
            self._abandon_all()
            self._check_ending()
            return None
        if name == b"power_off":
            self.flush()
            self.world.power_off()
            return b""
        raise Refused("bad-call", "no call is named %s" % shown(name))

    def _mount_nfs(self, number: int, words: Words) -> None:
        seconds = words.number()
        late = ("nfs-silent", "the file server did not answer the mount within %d s" % seconds)
        Errand(self, [number], seconds, late, self.world.mount_nfs(words))

    def _add_account(self, words: Words) -> bytes:
        self.world.add_account(Account(words))
        return b""

    def _place(self, words: Words) -> bytes:
        files = words.some(4)
        account = Account(words)
        self.world.add_account(account)
        place(files, account, self.world)
        return b""

    def _start(self, number: int, words: Words) -> None:
        if number in self.processes:
            raise WireError("process %d is there already" % number)
        files = words.some(4)
        words.words, words.at = words.words[words.at :], 0
        job = Job(words)
        self.world.add_account(job.account)
        place(files, job.account, self.world)
        self.world.make_place(job.cwd, job.account)
        if not job.builtin and not self.began:
            self.began = next_stamp() if self.has_put else stamp()
        self.has_put = self.has_put or job.builtin == b"put"
        job.began = self.began
        process = Process(self, number, job)
        self.processes[number] = process
        try:
            process.begin()
        except BaseException:
            process.drop_flows()
            process.close()
            raise

    def _settle(self) -> None:
        """Become what a template is made of: nothing runs, nothing is open, everything was done once."""
        import gc

        self._abandon_all()
        self.world.warm()
        gc.collect()
        if hasattr(gc, "freeze"):
            gc.freeze()
        os.sync()
        self._reap(0)  # else each clone would begin with it
        self.parser.forget()
        # The kernel still has work of its own to do (groups removed, a child that ended). Left undone it would be every
        # clone's first act: 20 of the 55 ms from its start to our answer.
        select.select([], [], [], self.world.quiet)

    # -- endings

    def _reap(self, events: int) -> None:
        try:
            os.read(self.wake, 4096)
        except BlockingIOError:
            pass
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if not pid:
                break
            process = self.children.pop(pid, None)
            if process is not None:
                process.ended(status, usage)
        if self.on_child is not None:
            self.on_child()
        for errand in list(self.errands):
            errand.look_at_the_clock()

    def gone(self, process: Process) -> None:
        if self.processes.get(process.number) is process:
            del self.processes[process.number]
        if process in self.dying:
            self.dying.remove(process)
        self._check_ending()

    def _abandon_all(self) -> None:
        for process in list(self.processes.values()):
            del self.processes[process.number]
            self.dying.append(process)
            process.abandon()

    def _check_ending(self) -> None:
        if self.ending and not self.processes and not self.dying:
            ending, self.ending = self.ending, []
            if self.world.has_remote():
                text = "a file server did not take what was left to write within %d s" % self.flush_patience
                Errand(self, ending, self.flush_patience, ("nfs-flush", text), self.world.release)
                self.world.forget_mounts()
                return
            self.world.release()
            for number in ending:
                self.send(REPLY, number)

    def _end_conversation(self) -> None:
        self.ending = []
        for errand in list(self.errands):
            errand.abandon()
        self._abandon_all()

    def _hung_up(self) -> None:
        """The host closed its end. A port may be opened again; a socket never."""
        self._end_conversation()
        self.parser = Parser(TO_AGENT)
        self.out.clear()
        self.out_size = 0
        self.waiting = []
        if not self.is_port:
            self.is_over = True
        elif not self.is_over:
            self._listen(select.EPOLLET)  # a closed port is "hung up" for as long as it lasts: only hear of changes


def stamp() -> int:
    """The moment a file that is written now is stamped with, in nanoseconds; a microsecond before, for a float is not
    exact, and stamps are milliseconds apart."""
    return int(time.clock_gettime(COARSE_CLOCK) * 1e9) - 1000


def next_stamp() -> int:
    """The stamp after the present one: what was written before bears an older one. Some milliseconds away."""
    now = stamp()
    while stamp() == now:
        select.select([], [], [], 0.0005)
    return stamp()


def ignore(number: int, stack: object) -> None:
    """A signal handler."""


def find_port(name: str) -> str:
    """The device of our virtio-serial port, as soon as its driver has it. No udev is needed."""
    path = lookup_port(name)
    events = None if path else kernel_events()
    while not path:
        path = lookup_port(name)  # again: it may have come before we listened
        if not path:
            assert events is not None
            events.recv(8192)
    return path


def lookup_port(name: str) -> str:
    folder = "/sys/class/virtio-ports"
    for entry in os.listdir(folder) if os.path.isdir(folder) else ():
        is_ours = read_file("%s/%s/name" % (folder, entry), 256).strip() == name.encode("ascii")
        if is_ours and os.path.exists("/dev/" + entry):
            return "/dev/" + entry
    return ""


def main(argv: "list[str]") -> int:
    """As the guest's service without arguments; `--rehearse FD` as an ordinary process over an open socket."""
    if argv[:1] == ["--rehearse"] and len(argv) == 2:
        fd, world = int(argv[1]), Rehearsal()  # type: int, Guest | Rehearsal
        os.set_inheritable(fd, False)
        world.prepare()
    elif not argv:
        world = Guest()
        world.prepare()  # first: a port's name is there a moment before it can be opened
        fd = os.open(find_port(PORT), os.O_RDWR | os.O_CLOEXEC)
    else:
        say("usage: agent.py [--rehearse FD]")
        return 2
    agent = Agent(fd, world, is_port=isinstance(world, Guest))
    agent.run()
    for process in agent.dying:
        kill_quietly(process.pid, signal.SIGKILL)
    if not world.has_remote():
        world.release()
    return 0 if isinstance(world, Rehearsal) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
