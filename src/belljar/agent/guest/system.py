"""Small words of the operating system: files, processes, events of the kernel, the C library, and how a call is refused."""

from __future__ import annotations

import _socket
import os
import select
import time
from contextlib import suppress

from belljar.agent.wire import KIB

MODPROBES = ("/run/belljar/modprobe", "/sbin/modprobe", "/usr/sbin/modprobe")
COARSE_CLOCK = 5  # CLOCK_REALTIME_COARSE, by which file systems stamp


class Refused(Exception):
    """A call that cannot be done: goes back to the host as an ERROR."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind, self.message = kind, message


def shown(path: bytes) -> str:
    """A file name for a message."""
    return path.decode("utf-8", "backslashreplace")


def say(message: str) -> None:
    """One line on the guest's console."""
    with suppress(OSError):
        os.write(2, f"belljar-agent: {message}\n".encode("utf-8", "replace"))


def read_file(path: str, most: int = 64 * KIB) -> bytes:
    """The first bytes of a file; empty when there is none. Python makes a buffer of *most* bytes each time."""
    with suppress(OSError):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.read(fd, most)
        finally:
            os.close(fd)
    return b""


def write_file(path: str, data: bytes, mode: int = 0o644, flags: int = os.O_TRUNC) -> None:
    """In place, at one go: nobody else runs yet when the agent writes."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | flags, mode)
    try:
        os.write(fd, data)
    finally:
        os.close(fd)


def write_quietly(path: str, data: bytes) -> bool:
    """To a file of the kernel's. False where this kernel has none, or does not take it."""
    try:
        write_file(path, data, flags=0)
        return True
    except OSError:
        return False


def write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def close_quietly(fd: int) -> None:
    with suppress(OSError):
        os.close(fd)


def kill_quietly(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def processes() -> dict[int, tuple[int, int]]:
    """pid -> (parent, session) of every process that is not a zombie."""
    rows = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            words = read_file(f"/proc/{entry}/stat", 1024).rpartition(b")")[2].split()
            if len(words) > 3 and words[0] not in (b"Z", b"X"):
                rows[int(entry)] = (int(words[1]), int(words[3]))
    return rows


def is_below(ancestor: int, pid: int, rows: dict[int, tuple[int, int]]) -> bool:
    while pid in rows:
        pid = rows[pid][0]
        if pid == ancestor:
            return True
    return False


def load_filesystem(name: str, *modules: str) -> None:
    """With the modules that this takes, as the kernel would by itself, where it is told how. What it does not have is not a
    mistake yet."""
    is_there = b"\t%s\n" % name.encode() in read_file("/proc/filesystems")
    program = "" if is_there else next(filter(os.path.exists, MODPROBES), "")
    for module in modules or (name,) if program else ():
        os.spawnv(os.P_WAIT, program, ["modprobe", "-q", module])


def kernel_events() -> _socket.socket:
    """A socket that gets a message for every device that comes or goes."""
    events = _socket.socket(_socket.AF_NETLINK, _socket.SOCK_DGRAM | _socket.SOCK_CLOEXEC, 15)  # NETLINK_KOBJECT_UEVENT
    events.bind((0, 1))
    return events


def now() -> bytes:
    """The time in microseconds."""
    return b"%d" % (time.time_ns() // 1000)


def stamp() -> int:
    """What a file written now is stamped with, in nanoseconds."""
    return time.clock_gettime_ns(COARSE_CLOCK)


def next_stamp() -> int:
    """The stamp after the present one: what was written before bears an older one. Some milliseconds away."""
    present = stamp()
    while stamp() == present:
        select.select([], [], [], 0.0005)
    return stamp()


class Libc:
    """The few calls that Python does not have. ctypes is slow to import, so it comes with the first of them."""

    MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_NOATIME, MS_BIND, MNT_DETACH = 1, 2, 4, 32, 1024, 4096, 2
    PR_SET_CHILD_SUBREAPER = 36

    library: object = None

    def _call(self, name: str, what: str, *words: bytes | int) -> None:
        import ctypes

        self.library = self.library or ctypes.CDLL(None, use_errno=True)
        if getattr(self.library, name)(*(ctypes.c_ulong(word) if type(word) is int else word for word in words)):
            number = ctypes.get_errno()
            raise OSError(number, f"{what}: {os.strerror(number)}")

    def mount(self, source: bytes, target: bytes, kind: bytes, flags: int, options: bytes) -> None:
        self._call("mount", f"mount {shown(target)}", source, target, kind, flags, options)

    def unmount(self, target: bytes) -> None:
        self._call("umount2", f"unmount {shown(target)}", target, self.MNT_DETACH)

    def adopt_orphans(self) -> None:
        self._call("prctl", "prctl", self.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


libc = Libc()
