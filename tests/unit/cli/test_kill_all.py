"""`belljar kill-all`: by the mark on the command line, and by nothing else."""

import errno
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from belljar.cli import main
from belljar.cli.host import reap as kill_all
from belljar.host import processes

Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a process that sleeps, with any words on its command line."""
    running: list[subprocess.Popen[bytes]] = []

    def start(*words: str) -> subprocess.Popen[bytes]:
        code = "import sys,time; print(flush=True); time.sleep(600)"
        process = subprocess.Popen([sys.executable, "-IS", "-c", code, *words], stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()  # it runs
        running.append(process)
        return process

    yield start
    for process in running:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def only(*processes: subprocess.Popen[bytes]) -> Callable[[], Iterator[int]]:
    """The test's own processes in the place of all of this host."""
    return lambda: iter([process.pid for process in processes])


def test_marked_processes_are_killed_and_others_are_not(
    start: Start, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = [start("-name", "guest=belljar-0123456789ab"), start("-name", "guest=belljar-template-x,debug-threads=on")]
    others = [start("-name", "guest=other"), start("guest=belljar-0123456789ab"), start("-name", "xguest=belljar-1")]
    monkeypatch.setattr("belljar.host.processes.all_pids", only(*ours, *others))
    assert main(["kill-all", "--format", "json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert [one["machine"] for one in said] == ["0123456789ab", "template-x"]
    assert {one["result"] for one in said} == {"killed"}
    assert [process.wait(timeout=10) for process in ours] == [-signal.SIGKILL] * 2
    assert [process.poll() for process in others] == [None] * 3


def test_a_dry_run_kills_nothing(
    start: Start, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    process = start("-name", "guest=belljar-0123456789ab")
    monkeypatch.setattr("belljar.host.processes.all_pids", only(process))
    assert main(["kill-all", "-n"]) == 0
    assert "would be killed" in capsys.readouterr().out
    assert process.poll() is None


def test_root_comes_before_all_else_and_then_the_ends_of_what_it_killed(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads as real ones; the kernel's answer to them is played, for whoever runs this."""
    first, second, asked = start("-name", "guest=belljar-0"), start("-name", "guest=belljar-1"), []
    monkeypatch.setattr("belljar.host.processes.all_pids", only(first, second))
    monkeypatch.setattr(os, "geteuid", lambda: 0)

    def noted(thread: int, policy: int, param: os.sched_param) -> None:
        asked.append((thread, policy, param.sched_priority))

    monkeypatch.setattr(os, "sched_setscheduler", noted)
    assert main(["kill-all"]) == 0
    us, them = os.getpid(), [first.pid, second.pid]
    assert [one for one in asked if one[0] in (us, *them)] == [
        (us, os.SCHED_RR, 2), *((pid, os.SCHED_RR, 1) for pid in them), (us, os.SCHED_OTHER, 0),
    ]  # fmt: skip
    assert {one[0] for one in asked} >= {thread.native_id for thread in threading.enumerate()}


def test_whom_the_kernel_refuses_that_kills_all_the_same(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    process = start("-name", "guest=belljar-0123456789ab")
    monkeypatch.setattr("belljar.host.processes.all_pids", only(process))

    def refused(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setscheduler", refused)
    assert main(["kill-all"]) == 0
    assert process.wait(timeout=10) == -signal.SIGKILL


def test_afterwards_it_is_one_of_many_again(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("belljar.host.processes.all_pids", only(start("-name", "guest=belljar-0123456789ab")))
    before = os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, 0)
    assert main(["kill-all"]) == 0
    assert (os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, 0)) == before


def test_a_user_kills_only_their_own(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    process = start("-name", "guest=belljar-0123456789ab")
    monkeypatch.setattr("belljar.host.processes.all_pids", only(process))
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert main(["kill-all"]) == 0
    assert process.poll() is None


def test_it_works_when_settings_home_and_folders_are_broken(
    start: Start, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    process = start("-name", "guest=belljar-0123456789ab")
    monkeypatch.setattr("belljar.host.processes.all_pids", only(process))
    for name, value in {"HOME": "/nonexistent", "BELLJAR_MACHINE_CPUS": "none", "XDG_RUNTIME_DIR": "/proc/1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(sys.modules, "belljar.assembly", None)  # half an upgrade: it cannot be imported
    monkeypatch.setitem(sys.modules, "belljar.config", None)
    assert main(["--config", "/nonexistent", "kill-all"]) == 0
    assert process.wait(timeout=10) == -signal.SIGKILL


def test_a_process_the_kernel_holds_is_reported(
    start: Start, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    process = start("-name", "guest=belljar-0123456789ab")
    monkeypatch.setattr("belljar.host.processes.all_pids", only(process))
    monkeypatch.setattr("belljar.host.processes.kill_and_wait", lambda pids, timeout: list(pids))
    assert main(["kill-all"]) == 1
    assert "still there after 10 s" in capsys.readouterr().out


def test_a_process_that_vanishes_while_we_look_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("belljar.host.processes.all_pids", lambda: iter([2**22 + 1, 1]))
    assert [one for one in processes.with_option(b"-name", kill_all.MARK) if one[1] == 2**22 + 1] == []


def test_the_mark_that_is_looked_for_is_the_one_that_qemu_is_given() -> None:
    from belljar.hypervisor.qemu.cmdline import MARK

    assert kill_all.MARK.search(f"{MARK}0123456789ab,debug-threads=on".encode())
