"""Files as tar streams, for both sides: the way out. The way in is untar.py.

The member "r" is the file or folder itself, "r/..." what is in it. Modes, times (to the nanosecond), symbolic and
hard links and holes are kept; owners are not: files belong to whoever unpacks them. Sockets, pipes and devices stay.
"""

import errno
import os
import stat

from belljar.agent.guest.system import shown
from belljar.agent.wire import KIB, MIB

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable, Iterable

ROOT = "r"
BLOCK = 512
CHUNK = 256 * KIB
MOST_METADATA = MIB  # one name or extended header
DEEPEST = 200
BESIDE = 32 * MIB  # of content, from which it goes by an `Exchange`
PLACE = "BELLJAR.place"  # of an extended header: where on the exchange the content lies
STEP = 4 * MIB  # copied at once there
HOLES_FROM = MIB  # smaller files are sent with their zeros
MOST_UNTOLD = 16 * MIB  # of a file that does not tell its size, such as those of /proc; it is held in memory
MOSTLY = 4  # times what it takes: a file as large has its holes looked for by reading; a smaller one may be compressed


class TransferError(Exception):
    """A copy that did not work: `kind` is missing, refused, unsafe, broken or space."""

    def __init__(self, kind: str, message: str) -> None:
        Exception.__init__(self, message)
        self.kind, self.message = kind, message


class Exchange:
    """A disk that host and guest both have, for the content of large files: the stream then tells only where on it that lies.
    A guest goes around its page cache (O_DIRECT), which under emulation is ten times as quick as through it."""

    def __init__(self, fd: int, is_direct: bool) -> None:
        self.fd, self.is_direct = fd, is_direct
        self.left, self.end = 0, os.lseek(fd, 0, os.SEEK_END)

    def put(self, file: int, parts: "list[tuple[int, int]]") -> int:
        """Copy these parts of a file to the disk. Returns where they begin, -1 where there is no room for them."""
        begin = self.left
        if begin + sum(length + BLOCK for _, length in parts) > self.end:
            return -1
        for offset, length in parts:
            self._copy(file, file, offset, self.fd, self.left, length)
            self.left += -(-length // BLOCK) * BLOCK
        return begin

    def get(self, file: int, offset: int, length: int, begin: int) -> int:
        """Copy so much of the disk into a file. Returns where the next part begins."""
        self._copy(file, self.fd, begin, file, offset, length)
        return begin + -(-length // BLOCK) * BLOCK

    def _copy(self, file: int, source: int, begin: int, target: int, start: int, length: int) -> None:
        """Whole blocks; who cuts the file to its size comes later."""
        import mmap

        done, is_direct = 0, self.is_direct and set_direct(file, True)
        view = memoryview(mmap.mmap(-1, STEP))  # begins on a page, as O_DIRECT wants
        while done < length:
            want = min(STEP, length - done)
            whole = -(-want // BLOCK) * BLOCK
            try:
                os.lseek(source, begin + done, os.SEEK_SET)
                if os.readv(source, [view[:whole]]) < want:
                    raise TransferError("broken", "a file became shorter while it was copied")
                view[want:whole] = bytes(whole - want)
                os.lseek(target, start + done, os.SEEK_SET)
                written = os.writev(target, [view[:whole]])
                done += written - written % BLOCK
            except OSError as exc:
                if exc.errno != errno.EINVAL or not is_direct:
                    raise
                is_direct = set_direct(file, False) and False  # a file system without O_DIRECT: 9p, say


def has_large(path: bytes) -> bool:
    """Is there a file for which an `Exchange` is worth its while?"""
    try:
        if not os.path.isdir(path):
            return os.stat(path).st_size >= BESIDE
        files = (os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names)
        return any(os.lstat(file).st_size >= BESIDE for file in files)
    except OSError:
        return False


def set_direct(fd: int, on: bool) -> bool:
    """Go around the page cache, or not. False where that cannot be had."""
    import fcntl

    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT if on else flags & ~os.O_DIRECT)
        return True
    except OSError:
        return False


class Packer:
    """Writes a tar stream, without *skip*'s paths and what did not change *since*."""

    def __init__(
        self,
        write: "Callable[[bytes], object]",
        skip: "Iterable[bytes]" = (),
        since: int = 0,
        exchange: "Exchange | None" = None,
    ) -> None:
        import tarfile

        self.tarfile, self.write, self.exchange = tarfile, write, exchange
        self.skip = {ROOT + "/" + path.decode("utf-8", "surrogateescape") for path in skip}
        self.since = since
        self.skipped = []  # type: list[bytes]
        self.linked = {}  # type: dict[tuple[int, int], str]

    def pack(self, source: bytes) -> "list[bytes]":
        """All of *source*. Returns special files, which are left out."""
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
        try:
            entries = os.listdir(path)
        except FileNotFoundError:
            if name == ROOT:
                raise
            entries = []  # it went away meanwhile
        for entry in entries:
            inner = path.rstrip(b"/") + b"/" + entry
            try:
                inner_facts = os.lstat(inner)
            except FileNotFoundError:
                continue  # it went away meanwhile
            self._member(inner, name + "/" + entry.decode("utf-8", "surrogateescape"), inner_facts, depth + 1)

    def _file(self, path: bytes, name: str, facts: os.stat_result) -> None:
        key = (facts.st_dev, facts.st_ino)
        if facts.st_nlink > 1 and key in self.linked:
            self._header(name, facts, self.tarfile.LNKTYPE, link=self.linked[key])
            return
        # Not blocking: the name may have become a pipe since we looked.
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (os.O_NOFOLLOW if name != ROOT else 0)
        try:
            fd = os.open(path, flags)
        except FileNotFoundError:
            if name == ROOT:
                raise
            return  # it went away meanwhile
        if facts.st_nlink > 1:
            self.linked[key] = name
        try:
            facts = os.fstat(fd)
            untold = b"" if facts.st_size else self._untold(fd, path)
            if untold:
                self._header(name, facts, self.tarfile.REGTYPE, size=len(untold))
                self.write(untold + bytes(-len(untold) % BLOCK))
            else:
                self._content(fd, path, name, facts)
        finally:
            os.close(fd)

    def _untold(self, fd: int, path: bytes) -> bytes:
        """What is in a file that has no size: nothing, mostly; the kernel's own files tell none, whatever they hold."""
        parts, left = [], MOST_UNTOLD  # type: list[bytes], int
        try:
            while left >= 0:
                data = os.read(fd, min(CHUNK, left + 1))
                if not data:
                    return b"".join(parts)
                parts.append(data)
                left -= len(data)
        except OSError as exc:
            raise TransferError("refused", "%s: %s" % (shown(path), exc.strerror))
        raise TransferError("refused", "%s: tells no size and has more than %d bytes" % (shown(path), MOST_UNTOLD))

    def _content(self, fd: int, path: bytes, name: str, facts: os.stat_result) -> None:
        size = facts.st_size
        parts = data_parts(fd, size) if size >= HOLES_FROM and facts.st_blocks * BLOCK < size else [(0, size)]
        stored = sum(length for _, length in parts)
        if self.exchange is not None and stored >= BESIDE:
            begin = self.exchange.put(fd, parts)
            if begin >= 0:
                return self._sparse_header(name, facts, parts, 0, {PLACE: "%d" % begin})
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
            data = self._read(fd, path, offset, min(length, CHUNK))
            self.write(data)
            offset += len(data)
            length -= len(data)

    def _read(self, fd: int, path: bytes, offset: int, size: int) -> bytes:
        data = os.pread(fd, size, offset)
        if not data:
            raise TransferError("broken", "%s: became shorter while it was read" % shown(path))
        return data

    def _sparse_header(
        self, name: str, facts: os.stat_result, parts: "list[tuple[int, int]]", stored: int, more: "dict[str, str] | None" = None
    ) -> None:  # fmt: skip
        """GNU sparse format 1.0: the map of the parts goes before the data."""
        lines = ["%d\n" % len(parts)] + ["%d\n%d\n" % part for part in parts]
        chart = "".join(lines).encode("ascii")
        chart += bytes(-len(chart) % BLOCK)
        told = {"major": "1", "minor": "0", "name": name, "realsize": "%d" % facts.st_size}
        extra = {"GNU.sparse." + key: value for key, value in told.items()}
        extra.update(more or {})
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

    def _read(self, fd: int, path: bytes, offset: int, size: int) -> bytes:
        try:
            return os.pread(fd, size, offset) or bytes(size)
        except OSError:
            return bytes(size)


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
    if parts == [(0, size)] and os.fstat(fd).st_blocks * BLOCK * MOSTLY <= size:
        parts = parts_by_reading(fd, size)  # squashfs, say, keeps holes, and does not tell where
    if parts != [(0, size)]:
        parts.append((size, 0))
    return parts


def parts_by_reading(fd: int, size: int) -> "list[tuple[int, int]]":
    """(offset, length) of what is not nothing but zeros, to a chunk. A file with holes is read twice so, and sent without."""
    parts, zeros = [], bytes(CHUNK)  # type: list[tuple[int, int]], bytes
    for at in range(0, size, CHUNK):
        data = os.pread(fd, min(CHUNK, size - at), at)
        if data and data == zeros[: len(data)]:
            continue
        begin = parts.pop()[0] if parts and sum(parts[-1]) == at else at
        parts.append((begin, min(at + CHUNK, size) - begin))
    return parts
