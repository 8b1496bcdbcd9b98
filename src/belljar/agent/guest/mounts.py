"""Everything that is mounted for a payload: shares, disks and packed folders come, are remembered, and are written out and
unmounted."""

from __future__ import annotations

import errno
import os
import stat
import time
from _collections_abc import Callable
from contextlib import suppress

from belljar.agent.guest.accounts import Account
from belljar.agent.guest.network import RESCAN
from belljar.agent.guest.system import Refused, kernel_events, libc, load_filesystem, read_file, shown, write_quietly
from belljar.agent.transfer.tar import ROOT
from belljar.agent.wire import Words, join

PACKED, UPPER = b"/run/belljar/packed/", b"/var/lib/belljar/packed/"
# The newest kernel's way first; the last one is every kernel's.
OVERLAY_OPTIONS = (b",redirect_dir=on,xino=auto,volatile", b",redirect_dir=on", b"")
PATIENCE = 15.0  # seconds for a device that the bus shows, until its driver is loaded
# Of a device without its driver yet, a tag that is not known yet, a disk that is not there yet.
MISSING = (errno.ENOENT, errno.EBUSY, errno.EINVAL, errno.ENXIO)


LongCall = tuple[int, Callable[[], bytes | None]]  # seconds for it, and what may block


class Mounts:
    def __init__(self) -> None:
        self.mounts: list[bytes] = []
        self.calls: dict[bytes, Callable[[Words], bytes | LongCall | None]] = {
            b"mount": self.mount, b"mount_scratch": self.mount_scratch,
            # Before a template is saved: what its clones would otherwise each load anew.
            b"prepare": lambda words: load_filesystem(words.text(), *words.text().split()),
            b"find_disks": lambda words: join(*devices_of(words.some())),
        }  # fmt: skip

    def mount(self, words: Words) -> None:
        """Mount a folder of the host's. A clone's device may have been plugged in while its guest stood still."""
        kind, tag, target, how = words.next(), words.next(), checked_target(words.next()), words.next()
        options, modules = words.next(), words.text().split()
        flags = libc.MS_NOSUID | libc.MS_NODEV | (0 if how == b"rw" else libc.MS_RDONLY)
        try:
            os.makedirs(target, exist_ok=True)
            load_filesystem(kind.decode("ascii"), *modules)
            awaited(lambda: libc.mount(tag, target, kind, flags, options), PATIENCE)
        except OSError as exc:
            if exc.errno == errno.ENODEV:
                raise Refused("no-filesystem", f"the guest's kernel has no {shown(kind)} file system") from exc
            raise
        self.mounts.append(target)

    def mount_scratch(self, words: Words) -> None:
        """An empty disk at its place, which is the payload's user's own."""
        device, target = words.next(), checked_target(words.next())
        account = Account(words)
        os.makedirs(target, exist_ok=True)
        load_filesystem("ext4")
        flags = libc.MS_NOSUID | libc.MS_NODEV | libc.MS_NOATIME
        libc.mount(device, target, b"ext4", flags, b"noinit_itable,errors=remount-ro")
        self.mounts.append(target)
        os.rmdir(target + b"/lost+found")
        os.chown(target, account.uid, account.gid)
        os.chmod(target, 0o700)

    def release(self) -> None:
        """Unmount all, write everything out."""
        for target in reversed(self.mounts):
            with suppress(OSError):  # the guest has unmounted it
                libc.unmount(target)
        self.mounts = []
        os.sync()


def awaited(attempt: Callable[[], None], patience: float) -> None:
    """Attempt it. Where it fails by one of the MISSING errors a driver or a device is still to come: the kernel is told to
    look at the bus anew, then each of its events is waited for, and it is tried again. Raises OSError."""
    events, deadline = None, time.monotonic() + patience
    try:
        while True:
            try:
                return attempt()
            except OSError as exc:
                left = deadline - time.monotonic()
                if exc.errno not in MISSING or left <= 0:
                    raise
            if events is None:
                events = kernel_events()  # listen first, then look once more
                write_quietly(RESCAN, b"1")
            else:
                events.settimeout(left)
                with suppress(OSError):
                    events.recv(8192)
    finally:
        if events is not None:
            events.close()


def devices_of(serials: list[bytes]) -> list[bytes]:
    """Where the disks with these serials are. A clone's kernel must look at its bus for them. Raises Refused."""
    names: dict[bytes, bytes] = {}

    def look() -> None:
        names.update(disks())
        missing = [shown(serial) for serial in serials if serial not in names]
        if missing:
            raise OSError(errno.ENXIO, ", ".join(missing))

    try:
        awaited(look, PATIENCE)
    except OSError as exc:
        raise Refused("no-disk", f"the guest's kernel does not find the disk {exc.strerror}") from exc
    return [b"/dev/" + names[serial] for serial in serials]


def checked_target(target: bytes) -> bytes:
    if not target.startswith(b"/") or os.path.normpath(target) == b"/":
        raise Refused("refused", f"{shown(target)}: not a place for a share")
    return target


def disks() -> dict[bytes, bytes]:
    """serial -> kernel's name of each disk that has a serial."""
    serials = {read_file(f"/sys/block/{name}/serial").strip(): name for name in os.listdir("/sys/block")}
    return {serial: name.encode() for serial, name in serials.items() if serial}


def mount_packed(name: bytes, device: bytes, target: bytes, account: Account) -> None:
    """In a child: the disk's folder over what is at *target*; changes go to the guest's own disk. Raises Refused."""
    base, upper = PACKED + name, UPPER + name
    try:
        load_filesystem("squashfs")
        load_filesystem("overlay")
        for folder in (base + b"/disk", base + b"/below", upper + b"/changes", upper + b"/work"):
            os.makedirs(folder, mode=0o711)
        libc.mount(device, base + b"/disk", b"squashfs", libc.MS_RDONLY | libc.MS_NODEV, b"")
        lower = base + b"/disk/" + ROOT.encode()
        packed = os.stat(lower)
        make_place_as(account, target)
        target = os.path.realpath(target)
        if os.listdir(target):
            libc.mount(target, base + b"/below", b"none", libc.MS_BIND, b"")
            lower += b":" + base + b"/below"
        os.chown(upper + b"/changes", account.uid, account.gid)
        os.chmod(upper + b"/changes", stat.S_IMODE(packed.st_mode))
        os.utime(upper + b"/changes", ns=(packed.st_atime_ns, packed.st_mtime_ns))
        mount_overlay(target, b"lowerdir=%s,upperdir=%s/changes,workdir=%s/work" % (lower, upper, upper))
    except OSError as exc:
        if exc.errno == errno.ENODEV:
            raise Refused("no-overlay", "the guest's kernel has no squashfs or overlay file system") from exc
        raise Refused("refused", f"{shown(target)}: cannot lay the packed folder there: {exc.strerror}") from exc


def mount_overlay(target: bytes, layers: bytes) -> None:
    for options in OVERLAY_OPTIONS:
        try:
            return libc.mount(b"belljar", target, b"overlay", 0, layers + options)
        except OSError as exc:
            if exc.errno != errno.EINVAL or not options:
                raise


def make_place_as(account: Account, target: bytes) -> None:
    """In a child: what the account may not do is refused to us too. Raises OSError."""
    before = os.getgroups()
    os.setgroups(account.group_ids)
    os.setegid(account.gid)
    os.seteuid(account.uid)
    try:
        os.makedirs(target, exist_ok=True)
        if not os.access(target, os.W_OK | os.X_OK, effective_ids=True):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    finally:
        os.seteuid(0)
        os.setegid(0)
        os.setgroups(before)
