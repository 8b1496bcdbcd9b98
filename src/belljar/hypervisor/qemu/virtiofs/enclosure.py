"""What virtiofsd runs in: namespaces of its own, and in them one folder of the host. A program, and imports nothing of ours.

    python -IS enclosure.py MARK PARENT UID GID ro|rw CAPABILITIES FOLDER PLACE READY PROGRAM WORD...

It becomes UID and GID, which root alone can; then it goes into new user, mount, process, network and IPC namespaces. In
them the user is who he was, and nobody else is known; root knows everybody, and can make no device. FOLDER, as that user
reaches it, is laid over the folder PLACE, for `ro` as a mount that cannot be written to, folders mounted below it included. Then
PROGRAM is started under the name MARK, with CAPABILITIES of that user namespace, which are none outside of it: `all`, or a
set of bits.

READY is a pipe. It is closed when PROGRAM runs; before that it says in one line, after a letter, why it never will:
`F` the folder, `N` the namespaces, `M` the mount that cannot be written to, `P` the program.
This process stays and ends as PROGRAM does; when it is killed, or PARENT ends, all that runs in the namespaces is killed.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import struct
import sys
from collections.abc import Callable
from contextlib import suppress

UTS, IPC, USER, PID, NET, MOUNTS = 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000, 0x00020000
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 1 << 18
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE = 47, 2
SECCOMP_MODE_FILTER = 2
CAPSET, MOUNT_SETATTR, SETGROUPS = 126, 442, 116  # numbers of x86_64
AUDIT_ARCH_X86_64 = 0xC000003E
CAPABILITY_VERSION = 0x20080522
AT_FDCWD, AT_RECURSIVE = -100, 0x8000
MOUNT_ATTR_RDONLY = 1
MANY_FILES = 1 << 20
FAILED = 70

libc = ctypes.CDLL(None, use_errno=True)


class Impossible(Exception):
    """A letter, and why."""


def main(words: list[str]) -> int:
    mark, parent, uid, gid, how, wanted, folder, place, ready, program, *rest = words
    os.set_inheritable(int(ready), False)
    try:
        allow_many_files()
        become(int(uid), int(gid))
        enclose(int(uid), int(gid))
        child = os.fork()  # the first in the new process namespace: all the others end with it
        if child == 0:
            lay(folder, place, readonly=how == "ro")
            keep_capabilities(wanted)
            setgroups_does_nothing()
            die_with(0)  # its parent is not in its namespace, and has no number there
            attempt("P", program, lambda: os.execv(program, [mark, *rest]))
    except Impossible as exc:
        with suppress(OSError):
            os.write(int(ready), " ".join(map(str, exc.args)).encode(errors="replace")[:1000])
        return FAILED
    os.close(int(ready))
    die_with(int(parent))
    for fd in range(3, 256):  # the listening socket among them: it is the program's alone
        with suppress(OSError):
            os.close(fd)
    status = os.waitpid(child, 0)[1]
    return os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)


def allow_many_files() -> None:
    """virtiofsd keeps each file open that its guest knows."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max(hard, MANY_FILES) if os.geteuid() == 0 and hard != resource.RLIM_INFINITY else hard
    for most in (wanted, hard):
        with suppress(ValueError, OSError):
            return resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def become(uid: int, gid: int) -> None:
    call("N", "no new privileges", libc.prctl, PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(gid, gid, gid)
        os.setresuid(uid, uid, uid)
        libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)  # else its files in /proc are root's


def enclose(uid: int, gid: int) -> None:
    """New namespaces, in which the numbers of users mean what they mean here."""
    if uid == 0:
        uids, gids = (identical(read(f"/proc/self/{kind}_map")) for kind in ("uid", "gid"))
        with helper() as says:
            unshare(USER)
            says(uids, gids)
    else:
        unshare(USER)
        write("/proc/self/setgroups", "deny")
        write("/proc/self/uid_map", f"{uid} {uid} 1")
        write("/proc/self/gid_map", f"{gid} {gid} 1")
    unshare(MOUNTS | PID | NET | IPC | UTS)


def identical(known: str) -> str:
    """The map that gives everybody whom this namespace knows his own number."""
    ranges = (line.split() for line in known.splitlines())
    return "".join(f"{first} {first} {count}\n" for first, _, count in ranges)


class helper:
    """A process that stays outside, for only somebody outside may write the map of many users."""

    def __enter__(self) -> Callable[[str, str], None]:
        reader, self._writer = os.pipe()
        pid = os.getpid()
        self._child = os.fork()
        if self._child == 0:
            os.close(self._writer)
            code = FAILED
            try:
                uids, _, gids = read(reader).partition("\0")
                if uids and gids:
                    write(f"/proc/{pid}/uid_map", uids)
                    write(f"/proc/{pid}/gid_map", gids)
                    code = 0
            finally:
                os._exit(code)
        os.close(reader)
        return self._tell

    def _tell(self, uids: str, gids: str) -> None:
        os.write(self._writer, f"{uids}\0{gids}".encode())
        self._end()
        if self._status:
            raise Impossible("N", "the users of a new user namespace cannot be set")

    def _end(self) -> None:
        if self._writer >= 0:
            os.close(self._writer)
            self._writer = -1
            self._status = os.waitpid(self._child, 0)[1]

    def __exit__(self, *_: object) -> None:
        self._end()


def lay(folder: str, place: str, *, readonly: bool) -> None:
    """The folder, and what is mounted below it, at *place*. It is opened in the namespace whose mounts it is to be among."""
    source = attempt("F", folder, lambda: os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
    call("N", "the mounts of the host", libc.mount, None, b"/", None, MS_REC | MS_PRIVATE, None)
    name = f"/proc/self/fd/{source}".encode()
    call("N", "a mount of the folder", libc.mount, name, os.fsencode(place), None, MS_BIND | MS_REC, None)
    os.close(source)
    if readonly:
        wanted = struct.pack("QQQQ", MOUNT_ATTR_RDONLY, 0, 0, 0)
        words = (MOUNT_SETATTR, AT_FDCWD, os.fsencode(place), AT_RECURSIVE, wanted, len(wanted))
        call("M", "the mount", libc.syscall, *map(as_long, words))


def keep_capabilities(wanted: str) -> None:
    """Of the user namespace, for a program that is not started by its root."""
    last = int(read("/proc/sys/kernel/cap_last_cap"))
    kept = (1 << (last + 1)) - 1
    kept &= kept if wanted == "all" else int(wanted, 16)
    low, high = kept & 0xFFFFFFFF, kept >> 32
    sets = struct.pack("6I", low, low, low, high, high, high)
    head = struct.pack("Ii", CAPABILITY_VERSION, 0)
    call("N", "capabilities", libc.syscall, *map(as_long, (CAPSET, head, sets)))
    for number in (bit for bit in range(last + 1) if kept >> bit & 1):
        call("N", "capabilities", libc.prctl, PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, number, 0, 0)


def setgroups_does_nothing() -> None:
    """virtiofsd ends when it cannot drop its further groups, which a user's namespace forbids: it is told it could."""
    rows = (
        (0x20, 0, 0, 4),  # the architecture
        (0x15, 0, 3, AUDIT_ARCH_X86_64),
        (0x20, 0, 0, 0),  # the call's number
        (0x15, 0, 1, SETGROUPS),
        (0x06, 0, 0, 0x00050000),  # an error of number 0
        (0x06, 0, 0, 0x7FFF0000),
    )
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *row) for row in rows))
    program = struct.pack("HxxxxxxQ", len(rows), ctypes.addressof(code))
    call("N", "a filter", libc.prctl, PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.c_char_p(program), 0, 0)


def die_with(parent: int) -> None:
    """SIGKILL when the parent ends; at once where it has. Asked last, for new rights take it back."""
    libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def unshare(flags: int) -> None:
    call("N", "namespaces", libc.unshare, flags)


def call(letter: str, what: str, function: Callable[..., int], *words: object) -> None:
    if function(*words) != 0:
        raise Impossible(letter, f"{what}: {os.strerror(ctypes.get_errno())}")


def attempt(letter: str, what: str, function: Callable[[], int]) -> int:
    try:
        return function()
    except OSError as exc:
        raise Impossible(letter, f"{what}: {exc.strerror}") from exc


def as_long(value: object) -> object:
    """Words of a bare system call are as wide as pointers."""
    return ctypes.c_long(value) if isinstance(value, int) else value


def read(what: str | int) -> str:
    with open(what, encoding="ascii") as file:
        return file.read()


def write(path: str, text: str) -> None:
    try:
        with open(path, "wb", buffering=0) as file:
            file.write(text.encode("ascii"))
    except OSError as exc:
        raise Impossible("N", f"{path}: {exc.strerror}") from exc


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
