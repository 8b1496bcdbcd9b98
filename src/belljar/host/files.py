"""Whole-file writes, private folders and capped reads. A reader never sees half a file."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import accumulate
from pathlib import Path

from belljar.errors import BadSetting, HostError, NoSpace, UnsafeFolder
from belljar.hints import Any

PRIVATE_FILE, PRIVATE_FOLDER = 0o600, 0o700
LEAST_SECRET = 16  # bytes
MOST_LINKS = 40  # as the kernel
LAST_SYSTEM_UID, OVERFLOW_UID = 999, 65534
ALL_USERS = ["0", "0", "4294967295"]  # the map of the host's own user namespace: user_namespaces(7)
ON_THE_WAY = "Remove it or correct its owner and mode, or set `paths.*` to folders below one that is yours or root's."


def write_whole(path: Path, data: bytes, *, mode: int = PRIVATE_FILE, durable: bool = False) -> None:
    """Put *data* at *path*, all or nothing, with this *mode* whatever the umask. Durable: on disk when it returns."""
    with no_space_as_error(path):
        with named_when_whole(path, mode=mode) as descriptor:
            if mode & ~0o700:
                os.fchmod(descriptor, mode)
            write_all(descriptor, data)
            if durable:
                os.fsync(descriptor)
        if durable:
            sync(path.parent)


@contextmanager
def named_when_whole(path: Path, *, mode: int = PRIVATE_FILE) -> Iterator[int]:
    """A descriptor to write a file by, which gets its name when the block ends well. Whoever is killed meanwhile leaves no draft,
    where the file system has files without a name. Raises OSError."""
    draft, flags = path.with_name(f".{path.name}.{os.getpid()}"), os.O_WRONLY | os.O_CLOEXEC
    try:
        descriptor, has_name = os.open(path.parent, flags | os.O_TMPFILE, mode), False
    except OSError as exc:
        if exc.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            raise
        descriptor, has_name = os.open(draft, flags | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, mode), True
    try:
        yield descriptor
        if not has_name:
            with suppress(FileNotFoundError):  # of a process that had our number, and was killed between these lines
                os.unlink(draft)
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


@contextmanager
def opened(path: Path | str, flags: int, *, mode: int = PRIVATE_FILE, dir_fd: int | None = None) -> Iterator[int]:
    """A descriptor for the time of a block."""
    descriptor = os.open(path, flags | os.O_CLOEXEC, mode, dir_fd=dir_fd)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def write_all(descriptor: int, data: bytes) -> None:
    """`os.write` until everything is written."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def append_line(path: Path, data: bytes, *, mode: int = PRIVATE_FILE, durable: bool = False) -> bytes:
    """Add a line, on a line of its own, though the one before was left torn by a full disk. Others may do so at the same time.
    Returns what was written. Raises NoSpace when that is not whole."""
    with no_space_as_error(path):
        with opened(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, mode=mode) as descriptor:
            size = os.fstat(descriptor).st_size
            is_torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
            line = b"\n" * is_torn + data + b"\n"
            write_all(descriptor, line)
            if durable:
                os.fsync(descriptor)
    return line


def sync(path: Path) -> None:
    """Have a file's bytes, or the names in a folder, on disk, whoever wrote them."""
    with opened(path, os.O_RDONLY) as descriptor:
        os.fsync(descriptor)


def copy_tree(source: Path | str, target: Path | str) -> None:
    """Folders and files below *source*, nothing else, with modes and times. (Without shutil: every job comes here.)"""
    os.makedirs(target, PRIVATE_FOLDER, exist_ok=True)
    with os.scandir(source) as entries:
        for entry in entries:
            copy = os.path.join(target, entry.name)
            if entry.is_dir(follow_symlinks=False):
                copy_tree(entry.path, copy)
            elif entry.is_file(follow_symlinks=False):
                with open(entry.path, "rb") as file, open(copy, "wb", opener=private) as written:
                    while os.sendfile(written.fileno(), file.fileno(), None, 1 << 24):
                        pass
            else:
                continue
            known = entry.stat()
            os.chmod(copy, stat.S_IMODE(known.st_mode))
            os.utime(copy, ns=(known.st_atime_ns, known.st_mtime_ns))


def private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, PRIVATE_FILE)


@contextmanager
def short_path(folder: Path) -> Iterator[str]:
    """A name for a folder, short enough for a socket's address (108 bytes), however deep the folder lies."""
    with opened(folder, os.O_PATH | os.O_DIRECTORY) as descriptor:
        yield f"/proc/self/fd/{descriptor}"


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


def read_secret(path: Path) -> bytes:
    """Without blanks around it. Raises BadSetting where others may read it, or anybody could guess it."""
    try:
        data, mode = path.read_bytes().strip(), path.stat().st_mode
    except OSError as exc:
        raise BadSetting(f"{path}: {exc.strerror}", hint="Name a file with a secret.") from exc
    if mode & 0o077:
        raise BadSetting(f"{path}: others may read it", hint=f"`chmod 600 {path}`, then think about a new secret.")
    if len(data) < LEAST_SECRET:
        raise BadSetting(f"{path}: {len(data)} bytes are not a secret", hint="`openssl rand -hex 32` makes one.")
    return data


def read_named(path: str, most: int) -> bytes:
    """A file that a person named, or what a pipe says; one byte more than *most* where it is larger. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with open(descriptor, "rb") as file:
        mode = os.fstat(descriptor).st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode)):
            raise OSError(errno.EINVAL, "not a file")
        os.set_blocking(descriptor, True)
        return file.read(most + 1)


def sha256_of(path: Path) -> str:
    """Hexadecimal digest of a whole file."""
    from hashlib import file_digest

    with open(path, "rb") as file:
        return file_digest(file, "sha256").hexdigest()


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
    """Make *path*, with its parents, a folder that we alone may write to. No stranger's link or folder is followed."""
    made = missing = ""
    with no_space_as_error(path):
        try:
            for missing in _way_to(path):
                with suppress(FileExistsError):  # another process of ours was quicker
                    os.mkdir(missing, 0o755)
                    made = missing
            if made:
                os.chmod(path, mode)  # mkdir obeys the umask
        except NotADirectoryError as exc:
            raise UnsafeFolder(f"{path}: a part of this path is not a folder") from exc
        except PermissionError as exc:
            raise UnsafeFolder(
                f"{path}: cannot be made by uid {os.geteuid()}",
                hint=f"Set `paths.*` to a folder of your own, or as root: `install -d -m 700 -o {os.geteuid()} {missing or path}`.",
            ) from exc
    if made:
        check_ours(path)
    else:
        _check_folder(path)  # the way to it was judged just now
    return path


def check_ours(path: Path) -> None:
    """Raise UnsafeFolder unless *path* is ours or root's, and no other may change it. Or FileNotFoundError."""
    if missing := _way_to(path):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), missing[0])
    _check_folder(path)


def _check_folder(path: Path) -> None:
    status = os.lstat(path)
    if status.st_uid not in (os.geteuid(), 0):
        raise UnsafeFolder(f"{path}: belongs to uid {status.st_uid}, not to uid {os.geteuid()}")
    if status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX:
        raise UnsafeFolder(f"{path}: others may write to it (mode {stat.S_IMODE(status.st_mode):04o})")


def check_settled(path: Path) -> None:
    """Raise UnsafeFolder where a stranger could change this file, or put another in its place. Links are followed."""
    _way_to(path.with_name(f".{path.name}"))  # to its neighbour: the last of a way is not a link
    real = Path(os.path.realpath(path))
    if not _way_to(real) and (mode := os.stat(real).st_mode) & 0o022:
        raise UnsafeFolder(f"{real}: others may write to it (mode {stat.S_IMODE(mode):04o})")


def is_missing(path: Path) -> bool:
    """Could it be made? Raises UnsafeFolder where a stranger could lead us elsewhere."""
    return bool(_way_to(path))


def _way_to(path: Path) -> list[str]:
    """Go there from the top, so that what was judged cannot be another's any more when the next is looked at. Returns the
    folders that are not there yet. Raises UnsafeFolder where a stranger could lead us elsewhere."""
    here, rest, links = "/", [part for part in reversed(path.absolute().parts) if part != "/"], 0
    above = os.lstat(here)
    while rest:
        name = rest.pop()
        child = os.path.dirname(here) if name == ".." else os.path.join(here, name)
        is_public = bool(above.st_mode & stat.S_IWOTH) and stat.S_ISDIR(above.st_mode)
        if is_public and not above.st_mode & stat.S_ISVTX:
            mode = f"{stat.S_IMODE(above.st_mode):04o}"
            raise UnsafeFolder(f"{here}: everybody may write to it (mode {mode}) and replace {child}", hint=ON_THE_WAY)
        try:
            status = os.lstat(child)
        except PermissionError as exc:
            mode = f"{stat.S_IMODE(above.st_mode):04o}, of uid {above.st_uid}"
            raise HostError(f"{here}: uid {os.geteuid()} may not enter it (mode {mode})", hint=ON_THE_WAY) from exc
        except FileNotFoundError:
            return list(accumulate([child, *reversed(rest)], os.path.join))
        if name != "..":
            _judge(child, status, path, is_public=is_public)
        if stat.S_ISLNK(status.st_mode):
            links += 1
            if not rest or links > MOST_LINKS:  # the last one is our own, and no link
                raise UnsafeFolder(f"{child}: a symbolic link where belljar keeps its own files")
            target = os.readlink(child)
            rest += [part for part in reversed(target.split("/")) if part not in ("", ".")]
            here, above = ("/", os.lstat("/")) if target.startswith("/") else (here, above)
        else:
            here, above = child, status
    return []


def _judge(child: str, status: os.stat_result, path: Path, *, is_public: bool) -> None:
    """One step of the way to *path*. Where not everybody may write, the site's own accounts may own folders, too."""
    if status.st_uid in (os.geteuid(), 0) or (not is_public and _is_the_sites(status.st_uid)):
        return
    what = "a symbolic link that " if stat.S_ISLNK(status.st_mode) else ""
    hint = ON_THE_WAY if child != str(path) else None
    raise UnsafeFolder(f"{child}: {what}belongs to uid {status.st_uid}, not to uid {os.geteuid()}", hint=hint)


def _is_the_sites(uid: int) -> bool:
    """A system account, or nobody of this user namespace: of a container's host, or of a file server."""
    if uid != OVERFLOW_UID:
        return uid <= LAST_SYSTEM_UID
    return os.geteuid() != 0 or Path("/proc/self/uid_map").read_text().split() != ALL_USERS


def only_root_writes(path: Path, *, highest_uid: int = 0) -> bool:
    """Can nobody but root, or system users up to *highest_uid*, change this path or replace a part of it?"""
    for part in (path, *path.parents):
        try:
            status = os.lstat(part)
        except OSError:
            return False
        is_shared = status.st_mode & 0o022 and not (stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX)
        if status.st_uid > highest_uid or is_shared or stat.S_ISLNK(status.st_mode):
            return False
    return True


@contextmanager
def no_space_as_error(path: Path) -> Iterator[None]:
    """Turn ENOSPC, EDQUOT, EFBIG and EROFS into belljar's own words."""
    try:
        yield
    except OSError as exc:
        what = f"{path}: {exc.strerror}"
        if exc.errno in (errno.ENOSPC, errno.EDQUOT):
            raise NoSpace(what) from exc
        if exc.errno == errno.EFBIG:
            raise NoSpace(what, hint="Raise the limit on the size of files (`ulimit -f`).") from exc
        if exc.errno == errno.EROFS:
            raise HostError(what, hint="Set `paths.*` to a folder that can be written to.") from exc
        raise


def is_still_there(path: Path, descriptor: int) -> bool:
    """Is this open file the one that has the name?"""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def free_bytes(path: Path) -> int:
    """Bytes an ordinary user may still write on the file system of *path* (or of its nearest existing parent)."""
    while not path.exists():
        path = path.parent
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize


def remove_tree(path: Path | str, *, dir_fd: int | None = None) -> None:
    """Remove a folder of ours with all it holds. What is missing is success. (Without shutil, as `copy_tree`.)"""
    with suppress(FileNotFoundError):
        with opened(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=dir_fd) as folder:
            for entry in list(os.scandir(folder)):
                if entry.is_dir(follow_symlinks=False):
                    remove_tree(entry.name, dir_fd=folder)
                    continue
                with suppress(FileNotFoundError):
                    os.unlink(entry.name, dir_fd=folder)
        os.rmdir(path, dir_fd=dir_fd)
