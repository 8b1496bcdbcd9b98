"""Runs QEMU as a child that cannot outlive us: setpriv gives it a death signal and takes every privilege away.

It inherits exactly the descriptors it is given, writes what it has to say into a capped log, ignores the signals of
the terminal and the batch system (those are for the supervisor), and its end is an event, not a guess.
"""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import signal
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from belljar.errors import CommandMissing, HostError, NoMemory
from belljar.host.commands import SEARCH_PATH, which
from belljar.host.files import PRIVATE_FILE, write_all

LOG_LIMIT = 1 << 20  # a guest can make QEMU complain without end
TAIL = 8 << 10
# One heap for all threads: each further one reserves 64 MiB, and a job's limit on virtual memory counts what is reserved.
ENVIRONMENT = {"PATH": SEARCH_PATH, "LC_ALL": "C", "HOME": "/nonexistent", "MALLOC_ARENA_MAX": "1"}

# Sent by batch systems and terminals to the whole process group or session: the supervisor answers them, QEMU must not.
# (The vCPU threads of KVM unblock the one they use themselves.)
NOT_FOR_QEMU = frozenset(
    (
        signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGPIPE,
        signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF, signal.SIGXCPU, signal.SIGXFSZ, signal.SIGTSTP,
        signal.SIGTTIN, signal.SIGTTOU, signal.SIGWINCH, signal.SIGURG, signal.SIGIO,
    )
)  # fmt: skip

# What 9p needs to act for any guest user on a share that root offers read-write.
SHARE_CAPABILITIES = ("chown", "dac_override", "dac_read_search", "fowner", "fsetid")


def confined(
    argv: Sequence[str], owner: tuple[int, int], *, capabilities: Iterable[str] = (), groups: Iterable[int] = ()
) -> list[str]:
    """The command line that runs *argv* as *owner* with no way to gain rights, and kills it when we die."""
    words = [_setpriv(), "--pdeathsig=KILL", "--no-new-privs"]
    if os.geteuid() == 0:
        kept = "".join(f",+{name}" for name in capabilities)
        words += [f"--reuid={owner[0]}", f"--regid={owner[1]}"]
        wanted = ",".join(str(gid) for gid in groups)
        words += [f"--groups={wanted}" if wanted else "--clear-groups"]
        words += [f"--bounding-set=-all{kept}", f"--inh-caps=-all{kept}", "--ambient-caps=-all"]
    return [*words, "--", *argv]


def kvm_groups() -> tuple[int, ...]:
    """The group that may use /dev/kvm, where not everybody may."""
    try:
        facts = os.stat("/dev/kvm")
    except OSError:
        return ()
    return () if facts.st_mode & stat.S_IROTH and facts.st_mode & stat.S_IWOTH else (facts.st_gid,)


def _setpriv() -> str:
    found = which("setpriv")
    if found is None:
        raise CommandMissing("setpriv: no such program on this host", hint="Install util-linux.")
    return found


Spawn = Callable[[Sequence[str], Iterable[int], int], int]  # command line, descriptors, stderr; the process's id


class Child:
    """A running process of ours. `on_end` is called once, in the event loop, with the wait status."""

    def __init__(
        self,
        argv: Sequence[str],
        fds: Iterable[int],
        log: Path,
        on_end: Callable[[int], None],
        start: Spawn | None = None,
    ) -> None:
        """Must be called on the thread that lives as long as the process may: the death signal is tied to it. *start* in
        place of `spawn` sees to that itself."""
        self._loop = asyncio.get_running_loop()
        self._on_end = on_end
        self._tail = bytearray()
        self._written = 0
        self.status: int | None = None
        self.usage: tuple[float, float, int] | None = None
        self._log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, PRIVATE_FILE)
        self._said, theirs = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            os.set_blocking(theirs, True)
            self.pid = (start or spawn)(argv, fds, theirs)
        except BaseException:
            os.close(self._said)
            os.close(self._log)
            raise
        finally:
            os.close(theirs)
        self._pidfd = os.pidfd_open(self.pid)
        self._loop.add_reader(self._said, self._hear)
        self._loop.add_reader(self._pidfd, self._ended)

    def send(self, number: int) -> None:
        """Signal it. Signalling what ended is success."""
        if self._pidfd >= 0:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def said(self) -> str:
        """The end of what it wrote to stderr."""
        return self._tail.decode(errors="replace").strip()

    def _hear(self) -> None:
        try:
            data = os.read(self._said, 1 << 16)
        except BlockingIOError:
            return
        if not data:
            self._loop.remove_reader(self._said)
            return
        self._tail = (self._tail + data)[-TAIL:]
        with suppress(OSError):  # a full disk must not stop the machine
            write_all(self._log, data[: max(LOG_LIMIT - self._written, 0)])
        self._written += len(data)

    def _ended(self) -> None:
        pid, status, usage = os.wait4(self.pid, os.WNOHANG)
        if pid == 0:
            return
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._pidfd = -1
        self._hear()  # its last words
        self._loop.remove_reader(self._said)
        os.close(self._said)
        os.close(self._log)
        self.status = status
        self.usage = (usage.ru_utime, usage.ru_stime, usage.ru_maxrss * 1024)
        self._on_end(status)


def spawn(argv: Sequence[str], fds: Iterable[int], stderr: int) -> int:
    """Start the program with *fds* under their own numbers, and nothing else of ours."""
    wanted = set(fds)
    actions: list[tuple[int, ...] | tuple[int, int, str, int, int]] = [
        (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDWR, 0),
        (os.POSIX_SPAWN_DUP2, stderr, 1),
        (os.POSIX_SPAWN_DUP2, stderr, 2),
    ]
    actions += [(os.POSIX_SPAWN_CLOSE, fd) for fd in _inheritable() - wanted]
    try:
        with _inherited(wanted), _no_core_files():
            return os.posix_spawn(argv[0], list(argv), ENVIRONMENT, file_actions=actions, setsigmask=NOT_FOR_QEMU)
    except FileNotFoundError as exc:
        raise CommandMissing(f"{argv[0]}: no such program on this host") from exc
    except OSError as exc:
        kind = NoMemory if exc.errno in (errno.ENOMEM, errno.EAGAIN) else HostError
        # Too many descriptors are EBADF here: the child cannot have the numbers it is to inherit.
        hint = "Raise the limit on open files (`ulimit -n`)." if exc.errno in (errno.EBADF, errno.EMFILE) else None
        raise kind(f"{argv[0]}: cannot be started: {exc.strerror}", hint=hint) from exc


@contextmanager
def _inherited(fds: Iterable[int]) -> Iterator[None]:
    """Children started inside get these descriptors. (dup2 onto itself would do, in the child alone, from glibc 2.29.)"""
    try:
        for fd in fds:
            os.set_inheritable(fd, True)
        yield
    finally:
        for fd in fds:
            os.set_inheritable(fd, False)


@contextmanager
def _no_core_files() -> Iterator[None]:
    """What we spawn writes no core file: a guest's memory has no business in somebody's working folder."""
    soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_CORE, (soft, hard))


def _inheritable() -> set[int]:
    """Descriptors above 2 that our own parent left open for us: not QEMU's business."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if int(name) > 2 and os.get_inheritable(int(name)):
                found.add(int(name))
    return found
