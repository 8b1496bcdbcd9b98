"""Work in a child that gave up root's rights for a user's: what lies in that user's folders is the user's to write.

The child can get nothing back, and what it reports is a few capped bytes that the parent reads as a stranger's.
"""

from __future__ import annotations

import os
import pwd
import select
import signal
import sys
from collections.abc import Callable

from belljar.errors import CommandFailed, HostError, printable
from belljar.records import dataclass, replace

LARGEST_REPORT = 1 << 20


@dataclass(frozen=True)
class User:
    """The user the child becomes."""

    uid: int
    gid: int
    name: str
    home: str
    groups: tuple[int, ...] = ()  # beside the own one; asking for them may take a directory server

    def with_groups(self) -> User:
        """With all that the user database gives, for work that needs them."""
        return replace(self, groups=tuple(os.getgrouplist(self.name, self.gid)))


def user_of(name: str) -> User:
    """By name or uid. Raises HostError for somebody this host does not know."""
    try:
        entry = pwd.getpwuid(int(name)) if name.isascii() and name.isdecimal() else pwd.getpwnam(name)
    except (KeyError, ValueError, OverflowError) as exc:
        raise HostError(f"{name[:80]!r}: no such user on this host", hint="Check this node's user database.") from exc
    return User(entry.pw_uid, entry.pw_gid, entry.pw_name, entry.pw_dir)


def become(user: User) -> None:
    """Be this user for good, with the groups named and no others; a process that is not root can only stay who it is."""
    if os.geteuid() != 0:
        if user.uid != os.geteuid():
            raise HostError(f"uid {os.geteuid()} cannot become {user.name}", hint="Run this as root.")
        return
    if user.uid != 0:
        os.setgroups(sorted({user.gid, *user.groups}))
        os.setresgid(user.gid, user.gid, user.gid)
        os.setresuid(user.uid, user.uid, user.uid)
        if os.getresuid() != (user.uid,) * 3:
            raise HostError(f"could not become {user.name}", hint="Look at the limits of this host's processes.")
    os.environ.update(HOME=user.home, USER=user.name, LOGNAME=user.name)
    for name in [name for name in os.environ if name.startswith("XDG_")]:
        del os.environ[name]


def as_user(user: User, work: Callable[[], bytes], *, timeout: float, what: str) -> bytes:
    """What *work* returned in a child that became *user*. Raises CommandFailed when it failed, returned too much or was not
    done after *timeout* seconds; then the child is killed, and if the kernel holds it, left."""
    with open(os.memfd_create("report"), "rb", buffering=0) as report:
        sys.stdout.flush()
        sys.stderr.flush()
        child = os.fork()
        if child == 0:
            _work(user, work, report.fileno())
        status = None
        try:
            status = _reap(child, timeout)
        finally:
            if status is None:
                os.kill(child, signal.SIGKILL)
                _reap(child, 0.5)
        answer = os.pread(report.fileno(), LARGEST_REPORT + 2, 0)
    if status is None:
        raise CommandFailed(f"{what} as {user.name}: not done after {timeout:g} s")
    if status != 0 or not answer.startswith(b"+"):
        why = printable(answer[1:].decode(errors="replace"))[:300]
        raise CommandFailed(f"{what} as {user.name}: {why or f'ended with {status}'}")
    if len(answer) > LARGEST_REPORT + 1:
        raise CommandFailed(f"{what} as {user.name}: reported more than {LARGEST_REPORT >> 10} KiB")
    return answer[1:]


def _work(user: User, work: Callable[[], bytes], report: int) -> None:
    """The child's whole life: `+` and what *work* returns, or `-` and why not."""
    code = 1
    try:
        try:
            become(user)
            answer = b"+" + work()[: LARGEST_REPORT + 1]
            code = 0
        except Exception as exc:
            answer = b"-" + f"{exc}".encode(errors="replace")[:400]
        os.write(report, answer)
    finally:
        os._exit(code)


def _reap(child: int, timeout: float) -> int | None:
    """Its exit status; None when it is still there after *timeout*: in the kernel's hands, and no use to wait for."""
    descriptor = os.pidfd_open(child)
    try:
        poller = select.poll()
        poller.register(descriptor, select.POLLIN)
        return os.waitpid(child, 0)[1] if poller.poll(timeout * 1000) else None
    finally:
        os.close(descriptor)
