"""Ends jobs without a machine whose announced end does not come.

Grid Engine sends the notice of `qsub -notify` to its own running terminate method too, and starts no other one when
that dies of it. The job would then run on, and no `qdel` would reach it."""

from __future__ import annotations

import os
import select
import signal
from contextlib import suppress

Notice = tuple[int, float]  # (signal, seconds until the end)
LATE = 5.0  # seconds for an announced end to be late
IGNORED = ("HUP", "INT", "QUIT", "TERM", "USR1", "USR2", "XCPU", "PIPE")


def stand_by(notice: Notice) -> None:
    """Start a guard that is no child of this process, holds none of its streams and ends with it. It kills our process
    group when the notice came and the end did not. Where it cannot be started, the job goes without."""
    number, job, group = notice[0], os.getpid(), os.getpgrp()
    signal.pthread_sigmask(signal.SIG_BLOCK, [number])  # one that comes now is the guard's to see as well
    with suppress(OSError):
        child = os.fork()
        if child == 0:
            try:  # nothing of the job's is held when it begins
                os.setsid()
                os.chdir("/")
                os.closerange(0, os.sysconf("SC_OPEN_MAX"))
                descriptor = os.pidfd_open(job)
                for other in {getattr(signal, f"SIG{name}") for name in IGNORED} - {number}:
                    signal.signal(other, signal.SIG_IGN)
                if os.fork() == 0:
                    _guard(descriptor, group, notice)
            finally:
                os._exit(0)
        os.waitpid(child, 0)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])


def _guard(descriptor: int, group: int, notice: Notice) -> None:
    number, seconds = notice
    reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(writer)
    signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
    ended, _, _ = select.select([descriptor, reader], [], [])
    if descriptor not in ended and not select.select([descriptor], [], [], seconds + LATE)[0]:
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
