"""Everything that is mounted for a payload: shares, disks and packed folders come, are remembered, and are written out and
unmounted."""

import errno
import os
import stat
import time

from belljar.agent.guest.accounts import Account
from belljar.agent.guest.system import (
    Libc,
    Refused,
    filesystems,
    kernel_events,
    libc,
    load_modules,
    read_file,
    say,
    shown,
    write_file,
)  # fmt: skip
from belljar.agent.transfer.tar import ROOT
from belljar.agent.wire import Words, join

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable, TypeVar

    T = TypeVar("T")

PACKED, UPPER = b"/run/belljar/packed/", b"/var/lib/belljar/packed/"
PACKED_MODULES = ("squashfs", "overlay")
# The newest kernel's way first; the last one is every kernel's.
OVERLAY_OPTIONS = (b",redirect_dir=on,xino=auto,volatile", b",redirect_dir=on", b"")
# Options; errors of a device whose driver is still being loaded, or whose tag the kernel does not know yet; seconds for it; does the
# kernel have to look at its bus anew? cache=mmap: what the host changes is seen at once, and shared mappings work.
SHARES = {
    b"9p": (
        b"trans=virtio,version=9p2000.L,msize=512000,cache=mmap,access=client", (errno.ENOENT, errno.EBUSY), 5.0, False,
    ),
    b"virtiofs": (b"", (errno.EINVAL,), 15.0, True),
}  # fmt: skip
DISK_PATIENCE = 10.0  # seconds for a disk that the bus shows, until its driver is loaded


class Mounts:
    """What is mounted for a payload, and unmounted after it."""

    def __init__(self) -> None:
        self.mounts = []  # type: list[bytes]
        self.calls = {
            b"mount": self.mount, b"prepare": self.prepare_for, b"find_disks": self.find_disks,
            b"mount_scratch": self.mount_scratch,
        }  # type: dict[bytes, Callable[[Words], bytes]]  # fmt: skip

    def mount(self, words: Words) -> bytes:
        """Mount a folder of the host's. A clone's device may have been plugged in while its guest stood still."""
        kind = checked_kind(words.next())
        options, missing, patience, is_plugged = SHARES[kind]
        tag, target, how = words.next(), checked_target(words.next()), words.next()
        flags = Libc.MS_NOSUID | Libc.MS_NODEV | (0 if how == b"rw" else Libc.MS_RDONLY)
        try:
            os.makedirs(target, exist_ok=True)
            if b"\t%s\n" % kind not in filesystems():
                load_modules((kind.decode("ascii"),))
            awaited(lambda: libc().mount(tag, target, kind, flags, options), missing, patience, rescan=is_plugged)
        except OSError as exc:
            if exc.errno == errno.ENODEV:
                raise Refused("no-filesystem", "the guest's kernel has no %s file system" % shown(kind))
            raise Refused("refused", "%s: cannot mount the share: %s" % (shown(target), exc.strerror))
        self.mounts.append(target)
        return b""

    def prepare_for(self, words: Words) -> bytes:
        """Before a template is saved: what its clones would otherwise each load anew."""
        load_modules((checked_kind(words.next()).decode("ascii"),))
        return b""

    def find_disks(self, words: Words) -> bytes:
        """The devices of the disks with these serials."""
        return join(*devices_of(words.some()))

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
        """Unmount all, write everything out."""
        for target in reversed(self.mounts):
            try:
                libc().unmount(target)
            except OSError as exc:
                say(str(exc.strerror))
        self.mounts = []
        os.sync()


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


def devices_of(serials: "list[bytes]") -> "list[bytes]":
    """Where the disks with these serials are. A clone's kernel must look at its bus for them. Raises Refused."""

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
    return [b"/dev/" + found[serial] for serial in serials]


def checked_kind(kind: bytes) -> bytes:
    if kind not in SHARES:
        raise Refused("bad-call", "no share is of the kind %s" % shown(kind))
    return kind


def checked_target(target: bytes) -> bytes:
    if not target.startswith(b"/") or os.path.normpath(target) == b"/":
        raise Refused("refused", "%s: not a place for a share" % shown(target))
    return target


def disks() -> "dict[bytes, bytes]":
    """serial -> kernel's name of each disk that has a serial."""
    found = {}
    for name in os.listdir(b"/sys/block"):
        serial = read_file("/sys/block/%s/serial" % shown(name)).strip()
        if serial:
            found[serial] = name
    return found


def mount_packed(name: bytes, device: bytes, target: bytes, account: Account) -> None:
    """In a child: the disk's folder over what is at *target*; changes go to the guest's own disk. Raises Refused."""
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
