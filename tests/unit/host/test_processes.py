"""Processes by pidfd; ends by signal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from belljar.host import processes


def test_the_killed_are_gone_when_the_call_returns_and_the_missing_do_not_matter() -> None:
    sleepers = [subprocess.Popen(["sleep", "600"]) for _ in range(3)]
    assert processes.kill_and_wait([child.pid for child in sleepers] + [2**22 - 7]) == []
    assert [child.wait() for child in sleepers] == [-signal.SIGKILL] * 3


def test_a_process_is_known_by_pid_and_start_time() -> None:
    assert processes.start_time(os.getpid()) == processes.start_time(os.getpid())
    assert processes.start_time(2**22 - 7) is None


def test_a_command_line_is_read_to_the_byte() -> None:
    odd = b"a\nb\xff'\""
    child = subprocess.Popen(["sh", "-c", "echo up; read x", odd], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None and child.stdout.readline() == b"up\n"
        assert processes.command_line(child.pid)[-1] == odd
    finally:
        child.communicate()
    assert processes.command_line(child.pid) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGSEGV, signal.SIGUSR1, signal.SIGRTMIN])
def test_dying_by_a_signal_looks_like_it_even_when_it_was_caught_and_blocked(number: int) -> None:
    catch = (
        ""
        if number == signal.SIGKILL
        else f"signal.signal({number:d}, lambda *a: None); signal.pthread_sigmask(signal.SIG_BLOCK, {{{number:d}}});"
    )
    code = f"import signal; from belljar.host.processes import die_by; {catch} die_by({number:d})"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -number


def test_a_signal_that_kills_nobody_ends_with_its_shell_code() -> None:
    code = "from belljar.host.processes import die_by; import signal; die_by(signal.SIGWINCH)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 128 + signal.SIGWINCH


def test_a_process_that_is_becoming_another_program_is_not_taken_for_gone() -> None:
    for _ in range(20):
        child = subprocess.Popen(["sh", "-c", "exec env true=1 sh -c 'exec sleep 600'"])
        try:
            while (words := processes.command_line(child.pid))[-1] != b"600":
                assert words
        finally:
            child.kill()
            child.wait()


def test_a_process_that_stands_still_is_told_from_one_that_runs() -> None:
    process = subprocess.Popen(["sleep", "1000"])
    try:
        assert not processes.is_stopped(process.pid)
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        assert processes.is_stopped(process.pid)
    finally:
        process.kill()
        process.wait()
    assert not processes.is_stopped(process.pid)
