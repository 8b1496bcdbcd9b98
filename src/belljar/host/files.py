"""Whole-file writes, private folders and capped reads. A reader never sees half a file."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from belljar.errors import HostError, NoSpace, UnsafeFolder

PRIVATE_FILE, PRIVATE_FOLDER = 0o600, 0o700


def write_whole(path: Path, data: bytes, *, mode: int = PRIVATE_FILE, durable: bool = False) -> None:
    """Put *data* at *path* in one step: the old content or the new one, never a part. Durable: on disk when it returns."""
    with no_space_as_error(path):
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, mode)
        try:
            try:
                write_all(descriptor, data)
                if durable:
                    os.fsync(descriptor)
            finally:
                os.close(descriptor)
            os.rename(draft, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(draft)
            raise
        if durable:
            sync_folder(path.parent)


@contextmanager
def named_when_whole(path: Path, *, mode: int = PRIVATE_FILE) -> Iterator[int]:
    """A descriptor to write a file by that gets its name, in the place of what had it, when the block is left in good order.
    Where the file system can have files without a name, nothing of it is left when we are killed. Raises OSError."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        descriptor = os.open(path.parent, os.O_WRONLY | os.O_TMPFILE | os.O_CLOEXEC, mode)
    except OSError as exc:
        if exc.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            raise
        descriptor, has_name = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode), True
    else:
        has_name = False
    try:
        yield descriptor
        if not has_name:
            # With a folder's descriptor, which an absolute path ignores: without, Python links the link and not the file.
            os.link(f"/proc/self/fd/{descriptor}", draft, src_dir_fd=descriptor)
            has_name = True
        os.rename(draft, path)
        has_name = False
    finally:
        os.close(descriptor)
        if has_name:
            with suppress(OSError):
                os.unlink(draft)


def write_all(descriptor: int, data: bytes) -> None:
    """`os.write` until everything is written."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def sync_file(path: Path) -> None:
    """Have a file's bytes on disk, whoever wrote them."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Make renames and removals in *folder* durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_capped(path: Path, limit: int) -> bytes:
    """The file's bytes. A file larger than *limit* is an UnsafeFolder error: it is not what we wrote."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with open(descriptor, "rb", buffering=0) as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise UnsafeFolder(f"{path}: not a regular file")
        data = file.read(limit + 1) or b""
    if len(data) > limit:
        raise UnsafeFolder(f"{path}: larger than {limit} bytes")
    return data


def read_json(path: Path, limit: int = 1 << 20) -> dict[str, Any]:
    """A JSON object from a file of at most *limit* bytes. Raises ValueError when it is something else."""
    try:
        value = json.loads(read_capped(path, limit))
    except RecursionError as exc:
        raise ValueError(f"{path}: nested too deeply") from exc
    if not isinstance(value, dict):
        raise ValueError(f"{path}: not a JSON object")
    return value


def private_folder(path: Path, *, mode: int = PRIVATE_FOLDER) -> Path:
    """Make *path* a folder of ours that nobody else can write to, parents too; refuse one that is not.

    A folder in a place where everybody may write (/tmp) could have been put there by somebody else.
    """
    with no_space_as_error(path):
        try:
            _make(path, mode)
            os.chmod(path, mode)  # mkdir obeys the umask
        except FileExistsError:
            pass
        except NotADirectoryError as exc:
            raise UnsafeFolder(f"{path}: a part of this path is not a folder") from exc
        except PermissionError as exc:
            raise UnsafeFolder(
                f"{path}: cannot be made by uid {os.geteuid()}", hint="Set `paths.*` to a folder of your own."
            ) from exc
    check_ours(path)
    return path


def _make(path: Path, mode: int) -> None:
    """mkdir with parents; these too are nobody else's to write to, however wide the umask."""
    try:
        os.mkdir(path, mode)
    except FileNotFoundError:
        with suppress(FileExistsError):
            _make(path.parent, 0o755)
        os.mkdir(path, mode)


def check_ours(path: Path) -> None:
    """Raise UnsafeFolder unless *path* belongs to us (or root) and nobody else may write to it, or put another in its
    place: a stranger's folder on the way to it, in a place where everybody may write, could."""
    child = path
    for parent in path.parents:
        facts = os.stat(parent)
        if (
            facts.st_mode & stat.S_ISVTX
            and facts.st_mode & stat.S_IWOTH
            and os.lstat(child).st_uid not in (os.geteuid(), 0)
        ):
            raise UnsafeFolder(f"{child}: belongs to uid {os.lstat(child).st_uid}, not to uid {os.geteuid()}")
        child = parent
    facts = os.lstat(path)
    if stat.S_ISLNK(facts.st_mode):
        raise UnsafeFolder(f"{path}: a symbolic link where belljar keeps its own files")
    if facts.st_uid not in (os.geteuid(), 0):
        raise UnsafeFolder(f"{path}: belongs to uid {facts.st_uid}, not to uid {os.geteuid()}")
    if facts.st_mode & 0o022 and not facts.st_mode & stat.S_ISVTX:
        raise UnsafeFolder(f"{path}: others may write to it (mode {stat.S_IMODE(facts.st_mode):04o})")


def only_root_writes(path: Path, *, highest_uid: int = 0) -> bool:
    """Does this path, without links, and each folder on the way belong to root (or to a system user, up to *highest_uid*),
    with nobody else to change it or to put another in its place?"""
    for part in (path, *path.parents):
        try:
            facts = os.lstat(part)
        except OSError:
            return False
        is_shared = facts.st_mode & 0o022 and not (stat.S_ISDIR(facts.st_mode) and facts.st_mode & stat.S_ISVTX)
        if facts.st_uid > highest_uid or is_shared or stat.S_ISLNK(facts.st_mode):
            return False
    return True


@contextmanager
def no_space_as_error(path: Path) -> Iterator[None]:
    """Turn ENOSPC, EDQUOT, EFBIG and EROFS into belljar's own words."""
    try:
        yield
    except OSError as exc:
        if exc.errno in (errno.ENOSPC, errno.EDQUOT):
            raise NoSpace(f"{path}: {os.strerror(exc.errno)}") from exc
        if exc.errno == errno.EFBIG:
            raise NoSpace(
                f"{path}: {os.strerror(exc.errno)}", hint="Raise the limit on the size of files (`ulimit -f`)."
            ) from exc
        if exc.errno == errno.EROFS:
            raise HostError(
                f"{path}: {os.strerror(exc.errno)}", hint="Set `paths.*` to a folder that can be written to."
            ) from exc
        raise


def free_bytes(path: Path) -> int:
    """Bytes an ordinary user may still write on the file system of *path* (or of its nearest existing parent)."""
    while not path.exists():
        path = path.parent
    facts = os.statvfs(path)
    return facts.f_bavail * facts.f_frsize


def remove_tree(path: Path) -> None:
    """Remove a folder of ours with all it holds. What is missing, or what another process removes meanwhile, is success."""
    import shutil

    def failed(_act: object, _path: str, why: tuple[type[BaseException], BaseException, object]) -> None:
        if not isinstance(why[1], FileNotFoundError):
            raise why[1]

    shutil.rmtree(path, onerror=failed)
