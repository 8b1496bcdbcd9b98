"""Processes by pidfd, found by what their command line says. A pid alone is nobody's name."""

from __future__ import annotations

import os
import re
import select
import signal
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, suppress
from itertools import pairwise
from pathlib import Path

from belljar.hints import NoReturn

PROC = Path("/proc")
EXEC_LOOKS = 500  # some 20 ms; an execve takes less than one
GONE = (FileNotFoundError, ProcessLookupError)
KERNEL_THREAD = 0x00200000  # PF_KTHREAD, include/linux/sched.h


def boot_id() -> str:
    """The kernel's name for this boot: what was journaled under another one has no processes any more."""
    return (PROC / "sys/kernel/random/boot_id").read_text().strip()


def start_time(pid: int) -> int | None:
    """Clock ticks after boot at which this process began; None when there is none. (pid, start time) is a name."""
    words = _stat(pid)
    return int(words[19]) if words else None


def began(pid: int) -> float | None:
    """Seconds since the epoch at which this process began; None when there is none."""
    ticks = start_time(pid)
    boot = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    return None if ticks is None else boot + ticks / os.sysconf("SC_CLK_TCK")


def cpu_times(pid: int) -> tuple[float, float]:
    """Seconds that a running process spent as itself and in the kernel; zeros when it is gone."""
    words, tick = _stat(pid), os.sysconf("SC_CLK_TCK")
    return (int(words[11]) / tick, int(words[12]) / tick) if words else (0.0, 0.0)


def _stat(pid: int) -> list[bytes]:
    """What proc(5) tells of it from its state on; nothing when it is gone."""
    with suppress(*GONE):
        return (PROC / str(pid) / "stat").read_bytes().rpartition(b") ")[2].split()
    return []


def peer_uid(connection: socket.socket) -> int:
    """For the process at the other end of a unix socket, from the kernel's pid, uid and gid of it."""
    return memoryview(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)).cast("i")[1]


def owner(pid: int) -> int | None:
    """Its real uid, which a program that runs with another's rights does not change. None: there is no such process."""
    with suppress(*GONE, PermissionError):
        lines = (PROC / str(pid) / "status").read_bytes().splitlines()
        return next((int(line.split()[1]) for line in lines if line.startswith(b"Uid:")), None)
    return None


def is_stopped(pid: int) -> bool:
    """Does it stand still since a SIGSTOP or its like?"""
    return _stat(pid)[:1] == [b"T"]


def command_line(pid: int) -> list[bytes]:
    """argv of a process; empty when it is gone, is a zombie, or is hidden from us."""
    words = b""
    with suppress(*GONE, PermissionError):
        for _ in range(EXEC_LOOKS):
            words = (PROC / str(pid) / "cmdline").read_bytes()
            if words or not _is_between_programs(pid):
                break
            os.sched_yield()
    return words.split(b"\0")[:-1]


def _is_between_programs(pid: int) -> bool:
    """Inside execve a process has no command line for a moment. Neither have zombies and threads of the kernel."""
    words = _stat(pid)
    return bool(words) and words[0] not in (b"Z", b"X") and not int(words[6]) & KERNEL_THREAD


def has_no_parent(pid: int) -> bool:
    """Was the process left to init?"""
    return _stat(pid)[1:2] == [b"1"]


def all_pids() -> Iterator[int]:
    for entry in os.listdir(PROC):
        if entry.isdigit():
            yield int(entry)


def with_option(option: bytes, pattern: re.Pattern[bytes]) -> Iterator[tuple[re.Match[bytes], int, int]]:
    """Every process with this option on its command line, whose value fits the pattern: how it fits, pid, owner's uid."""
    for pid in all_pids():
        for word, value in pairwise(command_line(pid)):
            if word == option and (match := pattern.search(value)) and (uid := owner(pid)) is not None:
                yield match, pid, uid
                break


def kill_and_wait(
    pids: Iterable[int], *, timeout: float = 5.0, still: Callable[[int], bool] = lambda pid: True
) -> list[int]:
    """SIGKILL them all, each as soon as *pids* names it, then wait for their ends together: a zombie has ended. Returns those that
    outlived *timeout*, and those we may not kill. *still*: is it the one that was meant? Asked when its number cannot become
    another's any more."""
    poller, pending, refused = select.poll(), dict[int, int](), list[int]()
    with ExitStack() as opened:
        for pid in pids:
            try:
                descriptor = os.pidfd_open(pid)
                opened.callback(os.close, descriptor)
                if still(pid):
                    signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                    poller.register(descriptor, select.POLLIN)
                    pending[descriptor] = pid
            except ProcessLookupError:
                pass
            except PermissionError:
                refused.append(pid)
        deadline = time.monotonic() + timeout
        while pending and (left := deadline - time.monotonic()) > 0:
            for descriptor, _ in poller.poll(left * 1000):
                poller.unregister(descriptor)
                del pending[descriptor]
    return [*refused, *pending.values()]


def die_by(number: int) -> NoReturn:
    """End this process by this signal, without a core file, as if nobody had caught it."""
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    signal.signal(number, signal.SIG_DFL) if number not in (signal.SIGKILL, signal.SIGSTOP) else None
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    os.kill(os.getpid(), number)
    os._exit(128 + number)  # a signal whose default is to be ignored (CHLD, CONT, URG, WINCH) cannot kill
