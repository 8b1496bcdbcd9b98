"""Everything that is mounted for a payload: shares, disks and exports come, are remembered, and are written out and unmounted."""

import errno
import os
import time

from belljar.agent.guest.accounts import Account
from belljar.agent.guest.libc import Libc, libc
from belljar.agent.guest.mounts import NFS_MODULES, checked_target, disks, mount_nfs, open_folder, unmount_whole
from belljar.agent.guest.system import (
    Refused,
    filesystems,
    kernel_events,
    load_modules,
    read_file,
    say,
    shown,
    write_file,
)
from belljar.agent.wire import Words, join

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable, TypeVar

    T = TypeVar("T")

MOUNT_PATIENCE = 5.0  # seconds for a 9p device whose driver is still being loaded
PLUG_PATIENCE = 15.0  # seconds for a virtiofs device that was plugged in while nobody looked
DISK_PATIENCE = 10.0  # seconds for a disk that the bus shows, until its driver is loaded
VIRTIOFS_MODULES = ("virtiofs",)
NINEP = b"trans=virtio,version=9p2000.L,msize=512000,cache=mmap,access=client"


class Mounts:
    """What is mounted for a payload, and unmounted after it. *user* is whose payload it is."""

    def __init__(self) -> None:
        self.mounts = []  # type: list[bytes]
        self.remote = set()  # type: set[bytes]
        self.user = None  # type: Account | None

    def mount(self, words: Words) -> bytes:
        """Mount a 9p share. cache=mmap: what the host changes is seen at once, and shared mappings work."""
        tag, target, how = words.next(), words.next(), words.next()
        checked_target(target)
        try:
            os.makedirs(target, exist_ok=True)
            flags = Libc.MS_NOSUID | Libc.MS_NODEV | (0 if how == b"rw" else Libc.MS_RDONLY)
            missing = (errno.ENOENT, errno.EBUSY)  # while its driver is loaded
            awaited(lambda: libc().mount(tag, target, b"9p", flags, NINEP), missing, MOUNT_PATIENCE)
        except OSError as exc:
            if exc.errno == errno.ENODEV:
                raise Refused("no-9p", "the guest's kernel has no 9p file system")
            raise Refused("refused", "%s: cannot mount the share: %s" % (shown(target), exc.strerror))
        self.mounts.append(target)
        return b""

    def mount_virtiofs(self, words: Words) -> bytes:
        """Mount a folder by virtiofs. The server looks at the host's files each time it is asked."""
        tag, target, how = words.next(), checked_target(words.next()), words.next()
        flags = Libc.MS_NOSUID | Libc.MS_NODEV | (0 if how == b"rw" else Libc.MS_RDONLY)
        try:
            os.makedirs(target, exist_ok=True)
            if b"\tvirtiofs\n" not in filesystems():
                load_modules(VIRTIOFS_MODULES)
            # A tag that the kernel does not know is EINVAL to it. A clone's device was plugged in while its guest stood still.
            plugged = lambda: libc().mount(tag, target, b"virtiofs", flags, b"")  # noqa: E731
            awaited(plugged, (errno.EINVAL,), PLUG_PATIENCE, rescan=True)
        except OSError as exc:
            if exc.errno == errno.ENODEV:
                raise Refused("no-virtiofs", "the guest's kernel has no virtiofs file system")
            raise Refused("refused", "%s: cannot mount the share: %s" % (shown(target), exc.strerror))
        self.mounts.append(target)
        return b""

    def prepare_for(self, words: Words) -> bytes:
        """Before a template is saved: what its clones would otherwise each load anew."""
        modules = {b"nfs": NFS_MODULES, b"virtiofs": VIRTIOFS_MODULES}.get(words.next())
        if modules is None:
            raise Refused("bad-call", "nothing is known to prepare for that")
        load_modules(modules)
        return b""

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

        def look() -> "dict[bytes, bytes]":
            found = disks()
            missing = [shown(serial) for serial in serials if serial not in found]
            if missing:
                raise OSError(errno.ENXIO, ", ".join(missing))
            return found

        try:
            found = awaited(look, (errno.ENXIO,), DISK_PATIENCE, rescan=True)
        except OSError as exc:
            raise Refused("no-disk", "the guest's kernel does not find the disk %s" % exc.strerror)
        return join(*[b"/dev/" + found[serial] for serial in serials])

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


def awaited(attempt: "Callable[[], T]", missing: "tuple[int, ...]", patience: float, rescan: bool = False) -> "T":
    """What *attempt* returns. Where it fails by one of the *missing* errors a driver or a device is still to come: with *rescan* the
    kernel is told to look at the bus anew, and then each of its events is waited for, and it is tried again. Raises OSError."""
    events, deadline = None, time.monotonic() + patience
    try:
        while True:
            try:
                return attempt()
            except OSError as exc:
                left = deadline - time.monotonic()
                if exc.errno not in missing or left <= 0:
                    raise
            if events is None:
                events = kernel_events()  # listen first, then look once more
                if rescan:
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
