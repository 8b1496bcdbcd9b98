"""Files as tar streams, for both sides: the way out. The way in is untar.py.

The member "r" is the file or folder itself, "r/..." what is in it. Modes, times (to the nanosecond), symbolic and
hard links and holes are kept; owners are not: files belong to whoever unpacks them. Sockets, pipes and devices stay. A copy
that does not work is Refused, as missing, refused, unsafe, broken or space.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from _collections_abc import Callable, Iterable
from contextlib import suppress

from belljar.agent.guest.system import Refused, shown
from belljar.agent.wire import KIB, MIB

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
REGULAR, HARD_LINK, SYMBOLIC_LINK, FOLDER = b"0", b"1", b"2", b"5"  # types of a member

Write = Callable[[bytes], object]
Headers = dict[str, str]
Parts = list[tuple[int, int]]  # (offset, length) of what is stored of a file with holes


class Exchange:
    """A disk that host and guest both have, for the content of large files: the stream then tells only where on it that lies.
    A guest goes around its page cache (O_DIRECT), which under emulation is ten times as quick as through it."""

    def __init__(self, fd: int, is_direct: bool) -> None:
        self.fd, self.is_direct = fd, is_direct
        self.left, self.end = 0, os.lseek(fd, 0, os.SEEK_END)

    def put(self, file: int, parts: Parts) -> int:
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

        done, is_direct = 0, self.is_direct
        view = memoryview(mmap.mmap(-1, STEP))  # begins on a page, as O_DIRECT wants
        while done < length:
            size = min(STEP, length - done)
            whole = -(-size // BLOCK) * BLOCK
            try:
                set_direct(file, is_direct)
                if os.preadv(source, [view[:whole]], begin + done) < size:
                    raise Refused("broken", "a file became shorter while it was copied")
                view[size:whole] = bytes(whole - size)
                written = os.pwritev(target, [view[:whole]], start + done)
                done += written - written % BLOCK
            except OSError as exc:
                if exc.errno != errno.EINVAL or not is_direct:
                    raise
                is_direct = False  # a file system without O_DIRECT: a shared folder's, say


def has_large(path: bytes) -> bool:
    """Is there a file for which an `Exchange` is worth its while?"""
    try:
        if not os.path.isdir(path):
            return os.stat(path).st_size >= BESIDE
        files = (os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names)
        return any(os.lstat(file).st_size >= BESIDE for file in files)
    except OSError:
        return False


def set_direct(fd: int, on: bool) -> None:
    """Go around the page cache, or not. Raises OSError, EINVAL, if the file system cannot."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT if on else flags & ~os.O_DIRECT)


class Packer:
    """Writes a tar stream, without *skip*'s paths and what did not change *since*. Special files are left out."""

    def __init__(
        self, write: Write, skip: Iterable[bytes] = (), since: int = 0, exchange: Exchange | None = None
    ) -> None:
        self.write, self.since, self.exchange = write, since, exchange
        self.skip = {f"{ROOT}/{name_of(path)}" for path in skip}
        self.linked: dict[tuple[int, int], str] = {}

    def pack(self, source: bytes) -> None:
        """All of *source*. Raises Refused."""
        try:
            status = os.stat(source)  # a link that was named stands for what it points to
            if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
                raise Refused("refused", f"{shown(source)}: neither a file nor a folder")
            self._member(source, ROOT, status, 0)
        except OSError as exc:
            if exc.filename is None:
                raise
            is_missing = exc.filename == source and exc.errno in (errno.ENOENT, errno.ENOTDIR)
            kind = "missing" if is_missing else "refused"
            raise Refused(kind, f"{shown(exc.filename)}: {exc.strerror}") from exc
        self.write(bytes(2 * BLOCK))

    def _member(self, path: bytes, name: str, status: os.stat_result, depth: int) -> None:
        if name in self.skip:
            return
        if stat.S_ISDIR(status.st_mode):
            self._folder(path, name, status, depth)
        elif status.st_ctime_ns < self.since:
            pass
        elif stat.S_ISREG(status.st_mode):
            self._file(path, name, status)
        elif stat.S_ISLNK(status.st_mode):
            self._header(name, status, SYMBOLIC_LINK, link=name_of(os.readlink(path)))

    def _folder(self, path: bytes, name: str, status: os.stat_result, depth: int) -> None:
        if depth >= DEEPEST:
            raise Refused("refused", f"{shown(path)}: more than {DEEPEST} folders deep")
        self._header(name, status, FOLDER)
        for entry in os.listdir(path):
            inner = path.rstrip(b"/") + b"/" + entry
            with suppress(FileNotFoundError):  # it went away meanwhile
                self._member(inner, f"{name}/{name_of(entry)}", os.lstat(inner), depth + 1)

    def _file(self, path: bytes, name: str, status: os.stat_result) -> None:
        key = (status.st_dev, status.st_ino)
        if status.st_nlink > 1 and key in self.linked:
            return self._header(name, status, HARD_LINK, link=self.linked[key])
        # Not blocking: the name may have become a pipe since we looked.
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (os.O_NOFOLLOW if name != ROOT else 0)
        fd = os.open(path, flags)
        if status.st_nlink > 1:
            self.linked[key] = name
        try:
            status = os.fstat(fd)
            untold = b"" if status.st_size else self._untold(fd, path)
            if untold:
                self._header(name, status, REGULAR, size=len(untold))
                self.write(untold + bytes(-len(untold) % BLOCK))
            else:
                self._content(fd, path, name, status)
        finally:
            os.close(fd)

    def _untold(self, fd: int, path: bytes) -> bytes:
        """What is in a file that has no size: nothing, mostly; the kernel's own files tell none, whatever they hold."""
        content = bytearray()
        try:
            while part := os.read(fd, CHUNK):
                content += part
                if len(content) > MOST_UNTOLD:
                    what = f"{shown(path)}: tells no size and has more than {MOST_UNTOLD} bytes"
                    raise Refused("refused", what)
        except OSError as exc:
            raise Refused("refused", f"{shown(path)}: {exc.strerror}") from exc
        return bytes(content)

    def _content(self, fd: int, path: bytes, name: str, status: os.stat_result) -> None:
        size = status.st_size
        parts = data_parts(fd, size) if size >= HOLES_FROM and status.st_blocks * BLOCK < size else [(0, size)]
        stored = sum(length for _, length in parts)
        begin = self.exchange.put(fd, parts) if self.exchange is not None and stored >= BESIDE else -1
        if begin >= 0:
            return self._sparse_header(name, status, parts, 0, {PLACE: str(begin)})
        if parts == [(0, size)] or stored >= 1 << 33:  # tarfile misreads larger sparse members
            self._header(name, status, REGULAR, size=size)
            parts, stored = [(0, size)], size
        else:
            self._sparse_header(name, status, parts, stored, {})
        for begin, length in parts:
            at, end = begin, begin + length
            while at < end:
                data = self._read(fd, path, at, min(end - at, CHUNK))
                self.write(data)
                at += len(data)
        self.write(bytes(-stored % BLOCK))

    def _read(self, fd: int, path: bytes, offset: int, size: int) -> bytes:
        data = os.pread(fd, size, offset)
        if not data:
            raise Refused("broken", f"{shown(path)}: became shorter while it was read")
        return data

    def _sparse_header(self, name: str, status: os.stat_result, parts: Parts, stored: int, more: Headers) -> None:
        """GNU sparse format 1.0: the map of the parts goes before the data."""
        chart = "".join([f"{len(parts)}\n", *(f"{offset}\n{length}\n" for offset, length in parts)]).encode("ascii")
        chart += bytes(-len(chart) % BLOCK)
        sparse = {"major": "1", "minor": "0", "name": name, "realsize": str(status.st_size)}
        more = {"GNU.sparse." + key: value for key, value in sparse.items()} | more
        self._header(name, status, REGULAR, size=len(chart) + stored, more=more)
        self.write(chart)

    def _header(
        self, name: str, status: os.stat_result, kind: bytes, size: int = 0, link: str = "", more: Headers | None = None
    ) -> None:
        import tarfile

        member = tarfile.TarInfo(name)
        member.type, member.size, member.linkname = kind, size, link
        member.mode = stat.S_IMODE(status.st_mode)
        seconds, nanoseconds = divmod(abs(status.st_mtime_ns), 10**9)
        sign = "-" if status.st_mtime_ns < 0 else ""
        member.pax_headers = {"mtime": f"{sign}{seconds}.{nanoseconds:09}", **(more or {})}
        self.write(member.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape"))


class Gatherer(Packer):
    """Packs for people to look at: whatever cannot be read is left out, what shrinks meanwhile is filled up."""

    def gather(self, paths: list[bytes]) -> None:
        """One archive of all these, each under its own path. Raises BrokenPipeError when nobody takes more."""
        for path in map(os.path.normpath, paths):
            try:
                status = os.stat(path)
            except OSError:
                continue
            self._member(path, name_of(path).strip("/") or ".", status, 0)
        self.write(bytes(2 * BLOCK))

    def _member(self, path: bytes, name: str, status: os.stat_result, depth: int) -> None:
        try:
            super()._member(path, name, status, depth)
        except BrokenPipeError:
            raise
        except (OSError, Refused):
            pass

    def _read(self, fd: int, path: bytes, offset: int, size: int) -> bytes:
        try:
            return os.pread(fd, size, offset) or bytes(size)
        except OSError:
            return bytes(size)


def name_of(path: bytes) -> str:
    """As tarfile has names."""
    return path.decode("utf-8", "surrogateescape")


def data_parts(fd: int, size: int) -> Parts:
    """What is stored of a file; where it has holes, with an empty part at its size, as GNU tar has it."""
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
    return parts if parts == [(0, size)] else [*parts, (size, 0)]


def parts_by_reading(fd: int, size: int) -> Parts:
    """What is not nothing but zeros, to a chunk. A file with holes is read twice so, and sent without."""
    parts: Parts = []
    zeros = bytes(CHUNK)
    for at in range(0, size, CHUNK):
        data = os.pread(fd, min(CHUNK, size - at), at)
        if data != zeros[: len(data)]:
            begin = parts.pop()[0] if parts and sum(parts[-1]) == at else at
            parts.append((begin, min(at + CHUNK, size) - begin))
    return parts
