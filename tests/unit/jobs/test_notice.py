"""The guard of a job that runs without a machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from belljar.jobs.batch import notice

STARTER = """
import os, signal, sys
from belljar.jobs.batch import notice
notice.LATE = float(sys.argv[1])
notice.stand_by((signal.SIGUSR2, 0.0))
os.execv(sys.executable, [sys.executable, "-c", sys.argv[2]])
"""
JOB = r"""
import os, signal, sys
signal.signal(signal.SIGUSR2, lambda *_: os.write(1, b"noticed\n"))
os.write(1, b"up\n")
sys.stdin.read()
"""


class Running:
    def __init__(self, late: str) -> None:
        words = [sys.executable, "-c", STARTER, late, JOB]
        self.child = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        assert self.line() == b"up\n"
        self.guard = guard_of(self.child.pid)
        self.guard_ends = os.pidfd_open(self.guard)

    def line(self) -> bytes:
        assert self.child.stdout is not None
        return self.child.stdout.readline()

    def announce(self) -> None:
        """To all of the job, as Grid Engine does; the job has heard it first."""
        os.kill(self.child.pid, signal.SIGUSR2)
        assert self.line() == b"noticed\n"
        os.kill(self.guard, signal.SIGUSR2)

    def guard_is_gone(self) -> bool:
        import select

        poller = select.poll()
        poller.register(self.guard_ends, select.POLLIN)
        return bool(poller.poll(10_000))


def guard_of(job: int) -> int:
    """The process that is not the job, but was started by its command line."""
    mark = f"OF_THIS_TEST={os.environ['OF_THIS_TEST']}".encode()
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            is_other = entry.name.isdigit() and int(entry.name) != job
            is_ours = is_other and mark in (entry / "environ").read_bytes().split(b"\0")
            if is_ours and b"stand_by" in (entry / "cmdline").read_bytes():
                return int(entry.name)
    raise AssertionError("there is no guard")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[Running]]:
    monkeypatch.setenv("OF_THIS_TEST", str(tmp_path))
    found: list[Running] = []
    yield found
    for one in found:
        one.child.kill()
        one.child.communicate(timeout=10)
        assert one.guard_is_gone(), "a guard outlived its job"
        os.close(one.guard_ends)


def test_an_announced_end_comes(started: list[Running]) -> None:
    job = Running("0.1")
    started.append(job)
    job.announce()
    assert job.child.wait(10) == -signal.SIGKILL


def test_a_job_that_ends_by_itself_takes_its_guard_along(started: list[Running]) -> None:
    job = Running("60")
    started.append(job)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        os.kill(job.guard, number)
    job.announce()
    assert job.child.communicate(timeout=10)[0] == b"" and job.child.returncode == 0
    assert job.guard_is_gone()


def test_the_job_has_no_child_and_its_guard_none_of_its_files(started: list[Running]) -> None:
    job = Running("60")
    started.append(job)
    assert Path(f"/proc/{job.child.pid}/task/{job.child.pid}/children").read_text() == ""
    assert os.getpgid(job.guard) != os.getpgid(job.child.pid)
    held = {os.readlink(entry) for entry in Path(f"/proc/{job.guard}/fd").iterdir()}
    own = {os.readlink(f"/proc/{job.child.pid}/fd/{number}") for number in (0, 1)}
    assert not held & own
    status = Path(f"/proc/{job.child.pid}/status").read_text()
    assert "SigBlk:\t0000000000000000" in status


def test_a_job_whose_guard_cannot_be_had_goes_without(monkeypatch: pytest.MonkeyPatch) -> None:
    def fork() -> int:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", fork)
    notice.stand_by((signal.SIGUSR2, 1.0))
    assert signal.SIGUSR2 not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
