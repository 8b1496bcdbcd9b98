"""The few calls of the C library that Python does not have."""

import os

from belljar.agent.guest.system import shown


class Libc:
    """The few calls Python does not have. Loaded at first use: ctypes is slow to import."""

    MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOATIME, MS_BIND, MNT_DETACH = 1, 2, 4, 1024, 4096, 2
    PR_SET_CHILD_SUBREAPER, IN_CLOSE_WRITE = 36, 8

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


_libc = None  # type: Libc | None


def libc() -> Libc:
    global _libc
    if _libc is None:
        _libc = Libc()
    return _libc
