"""Single mounts: packed folders, exports of a file server, and what a disk is called. Which there are, shares.py knows."""

import errno
import os
import stat

from belljar.agent.guest.accounts import Account
from belljar.agent.guest.libc import Libc, libc
from belljar.agent.guest.system import Refused, filesystems, load_modules, read_file, shown
from belljar.agent.transfer.tar import ROOT

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable

PACKED, UPPER = b"/run/belljar/packed/", b"/var/lib/belljar/packed/"
PACKED_MODULES = ("squashfs", "overlay")
# The newest kernel's way first; the last one is every kernel's.
OVERLAY_OPTIONS = (b",redirect_dir=on,xino=auto,volatile", b",redirect_dir=on", b"")
NFS_VERSIONS = ("4.2", "4.1", "4.0")
NFS_MODULES = ("nfs", "nfsv4", "rpcsec_gss_krb5")  # the last one is looked for by every mount, with sec=sys too
NO_SUCH_VERSION = (errno.EPROTONOSUPPORT, errno.EINVAL)
REFUSALS = (errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOTDIR, errno.EPROTONOSUPPORT, errno.EINVAL, errno.ESTALE)


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
    """In a child: the folder in the disk, over what is at *target* already, and changes above both, in the guest's own
    disk. Raises Refused."""
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


def nfs_options(version: str, address: str, port: int) -> bytes:
    """The options of an NFS mount, as the kernel takes them without mount.nfs. hard: a server that is away for a while
    makes the payload wait, and never fail."""
    if not 0 < port < 1 << 16 or not address or address.strip("0123456789abcdef.:"):
        raise Refused("bad-call", "not an address and a port")
    protocol = "tcp6" if ":" in address else "tcp"
    said = (version, address, port, protocol)
    return ("vers=%s,addr=%s,port=%d,proto=%s,sec=sys,hard" % said).encode("ascii")


def mount_nfs(address: str, port: int, path: bytes, target: bytes, flags: int) -> None:
    """In a child: mount by the newest version that both sides speak. Raises Refused."""
    source = ("[%s]:" if ":" in address else "%s:") % address
    try:
        os.makedirs(target, exist_ok=True)
    except OSError as exc:
        raise Refused("refused", "%s: %s" % (shown(target), exc.strerror))
    trouble, has_loaded = 0, False
    for version in NFS_VERSIONS:
        options = nfs_options(version, address, port)
        trouble = try_mount(source.encode("ascii") + path, target, flags, options)
        if trouble == errno.ENODEV and not has_loaded:
            has_loaded = True
            load_modules(NFS_MODULES)
            trouble = try_mount(source.encode("ascii") + path, target, flags, options)
        if trouble not in NO_SUCH_VERSION:
            break
    if not trouble:
        return
    server = "%s at %s port %d" % (shown(path), address, port)
    if trouble == errno.ENODEV or (trouble in NO_SUCH_VERSION and b"\tnfs4\n" not in read_file("/proc/filesystems")):
        raise Refused("no-nfs", "the guest's kernel has no NFS 4 file system")
    kind = "nfs-refused" if trouble in REFUSALS else "nfs-silent"
    raise Refused(kind, "%s: cannot mount %s: %s" % (shown(target), server, os.strerror(trouble)))


def try_mount(source: bytes, target: bytes, flags: int, options: bytes) -> int:
    """0, or the error's number."""
    try:
        libc().mount(source, target, b"nfs", flags, options)
        return 0
    except OSError as exc:
        return exc.errno or errno.EIO


def unmount_whole(target: bytes) -> None:
    """At once, so that the server knows that this client has gone; lazily where something still stands on it."""
    try:
        libc().unmount(target, 0)
    except OSError as exc:
        if exc.errno != errno.EBUSY:
            raise
        libc().unmount(target)


def open_folder(path: bytes, user: "Account | None") -> int:
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    try:
        return os.open(path, flags)
    except PermissionError:
        if user is None:
            raise
    os.setegid(user.gid)
    os.seteuid(user.uid)
    try:
        return os.open(path, flags)
    finally:
        os.seteuid(0)
        os.setegid(0)
