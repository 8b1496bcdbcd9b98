"""Files from tar streams, for both sides: the way in. The stream is not trusted. The way out, and the format, is tar.py."""

from __future__ import annotations

import errno
import os
import stat
from _collections_abc import Callable

from belljar.agent.guest.system import Refused, shown, write_all
from belljar.agent.transfer.tar import BLOCK, CHUNK, DEEPEST, MOST_METADATA, PLACE, ROOT, Exchange

TYPE_CHECKING = False
if TYPE_CHECKING:
    from tarfile import TarInfo
    from typing import Any


def unpack(
    read: Callable[[int], bytes], target: bytes, name: bytes, mask: int = 0o7777, exchange: Exchange | None = None
) -> None:
    """Make *target* from a tar stream; where *target* is a folder already and a file comes, make it inside as *name*.
    The stream is not trusted: nothing outside of *target* is written or linked to, no link is followed on the way, a
    special file is never replaced, and a stream without its end is an error. *mask*: of the modes that files may get."""
    unpacker = Unpacker(TarSource(read), target, name, mask, exchange)
    try:
        unpacker.unpack()
    except Refused:
        raise
    except OSError as exc:
        kind = "space" if exc.errno in (errno.ENOSPC, errno.EDQUOT) else "refused"
        raise Refused(kind, f"{shown(unpacker.target)}: {exc.strerror}") from exc
    except Exception as exc:  # tarfile has many ways to stumble over a hostile stream
        raise Refused("broken", f"not a tar stream: {type(exc).__name__}: {exc}") from exc
    finally:
        unpacker.close()


class TarSource:
    """What tarfile reads from: forward only, and no more at once than a header may have."""

    def __init__(self, read: Callable[[int], bytes]) -> None:
        self.raw = read
        self.position = 0
        self.metadata = 0
        self.extended = 0  # of an extended header, which newer tarfiles read in parts; a header of one block ends it
        self.is_ended = False

    def read(self, size: int) -> bytes:
        self.metadata += size
        self.extended = 0 if size == BLOCK else self.extended + size
        if size < 0 or self.extended > MOST_METADATA or self.metadata > 16 * MOST_METADATA:
            raise Refused("unsafe", "a tar header that is too large")
        whole = bytearray()
        while len(whole) < size and (data := self.raw(size - len(whole))):
            whole += data
        self.position += len(whole)
        self.is_ended = size == BLOCK and whole == bytes(BLOCK)
        return bytes(whole)

    def some(self, most: int) -> bytes:
        data = self.raw(min(most, CHUNK))
        if not data:
            raise Refused("broken", "the stream ended in the middle of a file")
        self.position += len(data)
        return data

    def read_rest(self) -> None:
        """The writer's last blocks; it must not find us gone."""
        while self.raw(BLOCK):
            self.metadata += BLOCK
            if self.metadata > MOST_METADATA:
                raise Refused("broken", "a tar stream that goes on after its end")

    def tell(self) -> int:
        return self.position

    def seek(self, position: int) -> None:
        if position < self.position:
            raise Refused("unsafe", "a tar stream that points backwards")
        while self.position < position:
            self.some(position - self.position)


class Unpacker:
    def __init__(self, source: TarSource, target: bytes, name: bytes, mask: int, exchange: Exchange | None) -> None:
        self.source, self.name, self.mask, self.exchange = source, name, mask, exchange
        self.target = os.path.realpath(target)  # links in its own path are followed once, before the stream is read
        self.top = -1
        self.leaf = b""
        self.open: list[tuple[bytes, int, tuple[int, int] | None]] = []  # (name, fd, (mode, mtime) to set)

    def unpack(self) -> None:
        import tarfile

        if self.target == b"/":
            raise Refused("refused", "/: not a place to copy to; name a folder in it")
        folder, self.leaf = os.path.split(self.target)
        os.makedirs(folder, exist_ok=True)
        self.top = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        archive = tarfile.TarFile(fileobj=self.source, mode="r", encoding="utf-8", errors="surrogateescape")  # type: ignore[arg-type]
        is_first = True
        while (member := archive.next()) is not None:
            archive.members = []  # type: ignore[attr-defined]  # tarfile would remember them all
            self.source.metadata = 0
            parts = self._parts(member.name)
            if is_first != (len(parts) == 1):
                raise Refused("unsafe", "a tar stream whose members are out of order")
            is_first = False
            self._member(member, parts)
        if is_first or not self.source.is_ended:
            raise Refused("broken", "the stream ended early")
        self.source.read_rest()
        self._close_down_to(0)

    def close(self) -> None:
        self._close_down_to(0)
        if self.top >= 0:
            os.close(self.top)

    def _parts(self, name: str) -> list[bytes]:
        """The member's path below the target, the leaf first."""
        whole = name.encode("utf-8", "surrogateescape")
        parts = whole.split(b"/")
        if parts[0] != ROOT.encode() or any(p in (b"", b".", b"..") or b"\0" in p for p in parts) or len(whole) > 8192:
            raise Refused("unsafe", f"a tar stream that names {shown(whole[:200])}")
        if len(parts) > DEEPEST + 1:
            raise Refused("unsafe", f"a tar stream more than {DEEPEST} folders deep")
        return [self.leaf, *parts[1:]]

    def _member(self, member: TarInfo, parts: list[bytes]) -> None:
        if len(parts) == 1 and not member.isdir() and os.path.isdir(self.target):
            if not self.name or b"/" in self.name or self.name in (b".", b".."):
                raise Refused("refused", f"{shown(self.target)}: is a folder")
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
            os.utime(leaf, ns=times_of(member), dir_fd=folder, follow_symlinks=False)
        elif member.islnk():
            self._hard_link(folder, leaf, member)
        elif member.isreg():
            self._make_file(folder, leaf, member)
        else:
            raise Refused("unsafe", f"a tar stream with a special file: {shown(leaf)}")

    def _enter(self, parts: list[bytes]) -> int:
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

    def _make_folder(self, folder: int, leaf: bytes, member: TarInfo) -> None:
        final: tuple[int, int] | None = (member.mode & self.mask, times_of(member)[0])
        try:
            os.mkdir(leaf, 0o700, dir_fd=folder)
        except FileExistsError:
            final = None  # what was there keeps its mode
        fd = os.open(leaf, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
        self.open.append((leaf, fd, final))

    def _make_file(self, folder: int, leaf: bytes, member: TarInfo) -> None:
        self._clear(folder, leaf)
        fd = os.open(leaf, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder)
        try:
            parts: Any = [(0, member.size)] if member.sparse is None else member.sparse
            at, place = 0, self._place_of(member)
            for offset, length in parts:
                if offset < at or length < 0 or offset + length > member.size:
                    raise Refused("unsafe", "a tar stream with a wrong map of holes")
                at = offset + length
                if self.exchange is not None and place >= 0:
                    place = self.exchange.get(fd, offset, length, place)
                else:
                    self._fill(fd, offset, length)
            if member.sparse is not None:
                os.ftruncate(fd, member.size)
            os.fchmod(fd, member.mode & self.mask)
            os.utime(fd, ns=times_of(member))
        finally:
            os.close(fd)

    def _place_of(self, member: TarInfo) -> int:
        """Where on the exchange the content lies; -1: it is in the stream."""
        place = member.pax_headers.get(PLACE)
        if place is None:
            return -1
        if self.exchange is None or member.sparse is None or not (place.isdigit() and len(place) < 16):
            raise Refused("unsafe", "a tar stream with content where there is no place for it")
        return int(place)

    def _fill(self, fd: int, offset: int, length: int) -> None:
        os.lseek(fd, offset, os.SEEK_SET)
        while length:
            data = self.source.some(length)
            write_all(fd, data)
            length -= len(data)

    def _hard_link(self, folder: int, leaf: bytes, member: TarInfo) -> None:
        parts = self._parts(member.linkname)
        if len(parts) == 1:
            raise Refused("unsafe", "a tar stream with a link to its own root")
        here = os.dup(self.top)
        try:
            for part in parts[:-1]:
                inner = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=here)
                os.close(here)
                here = inner
            if not stat.S_ISREG(os.stat(parts[-1], dir_fd=here, follow_symlinks=False).st_mode):
                raise Refused("unsafe", "a tar stream with a hard link to something that is not a file")
            self._clear(folder, leaf)
            os.link(parts[-1], leaf, src_dir_fd=here, dst_dir_fd=folder, follow_symlinks=False)
        finally:
            os.close(here)

    def _clear(self, folder: int, leaf: bytes) -> None:
        """Make room for a file. Only files and links are replaced."""
        try:
            mode = os.stat(leaf, dir_fd=folder, follow_symlinks=False).st_mode
        except FileNotFoundError:
            return
        if not stat.S_ISREG(mode) and not stat.S_ISLNK(mode):
            raise Refused("refused", f"{shown(leaf)}: neither a file nor a link, so it is not replaced")
        os.unlink(leaf, dir_fd=folder)


def times_of(member: TarInfo) -> tuple[int, int]:
    """Access and modification time in nanoseconds; a Packer's extended header has them exactly, with nine digits."""
    text = member.pax_headers.get("mtime", "")
    moment = int(text[:-10] + text[-9:]) if text[-10:-9] == "." else 0
    return moment, moment
