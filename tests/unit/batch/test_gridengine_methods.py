"""Suspend, resume and terminate on processes of the test's own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from belljar.batch import Call, Settings, load
from belljar.batch.gridengine import methods
from belljar.errors import BadOption
from belljar.host.processes import is_stopped

# A stand-in for the wrapper: stops at TSTP after some work, says what it gets. argv makes it look like one.
# Handlers write past Python's own buffer: a signal may come while that is being written.
WRAPPER = """
import os, signal, sys, time
def say(text):
    os.write(1, text + b"\\n")
def pause(*_):
    time.sleep(0.3); say(b"paused"); os.kill(os.getpid(), signal.SIGSTOP)
signal.signal(signal.SIGTSTP, pause)
signal.signal(signal.SIGCONT, lambda *_: say(b"goes on"))
def term(*_):
    say(b"term")
    if sys.argv[1] == "obedient": os._exit(0)
signal.signal(signal.SIGTERM, term)
say(b"ready")
while True: signal.pause()
"""


class Started:
    def __init__(self, *argv: str) -> None:
        self.child = subprocess.Popen(argv, stdout=subprocess.PIPE, start_new_session=True, text=True)
        self.pid = self.child.pid

    def line(self) -> str:
        assert self.child.stdout is not None
        return self.child.stdout.readline().strip()

    def close(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.child.wait(10)
        assert self.child.stdout is not None
        self.child.stdout.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    made: list[Started] = []

    def start_one(*argv: str) -> Started:
        made.append(Started(*argv))
        return made[-1]

    yield start_one
    for one in made:
        one.close()


@pytest.fixture
def wrapper(start: Any, tmp_path: Path) -> Any:
    path = tmp_path / "wrap-gridengine"
    path.write_text(WRAPPER)

    def start_wrapper(kind: str = "obedient") -> Started:
        one: Started = start(sys.executable, str(path), kind)
        assert one.line() == "ready"
        return one

    return start_wrapper


def stopped(pid: int) -> bool:
    """A STOP takes its moment."""
    deadline = time.monotonic() + 5
    while not is_stopped(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    return is_stopped(pid)


def run(name: str, words: list[str], grace: float = 0.0) -> int:
    settings, nobody = lambda: Settings(grace=grace), lambda: pytest.fail("a method asks for nothing else")
    return load("gridengine").hook(name)(Call(name, tuple(words), {}, settings, nobody, nobody, nobody))


def sleeper(start: Any) -> Any:
    # No shell: one that is in a vfork when its group is stopped waits for the child, and is not seen as stopped itself.
    code = "import os, signal\nsignal.signal(15, lambda *_: os.write(1, b'term\\n'))\nos.write(1, b'ready\\n')\n"
    one = start(sys.executable, "-c", code + "while True: signal.pause()")
    assert one.line() == "ready"
    return one


def test_a_job_in_no_machine_is_stopped_and_goes_on(start: Any) -> None:
    job = sleeper(start)
    assert run("suspend", [str(job.pid)]) == 0
    assert stopped(job.pid)
    assert run("resume", [str(job.pid)]) == 0
    assert not is_stopped(job.pid)


def test_a_job_in_no_machine_is_killed_at_once(start: Any) -> None:
    job = sleeper(start)
    begin = time.monotonic()
    assert run("terminate", [str(job.pid)]) == 0
    assert job.child.wait(5) == -signal.SIGKILL
    assert time.monotonic() - begin < 5 and job.line() == ""


def test_the_wrapper_halts_its_machine_before_it_is_stopped(wrapper: Any) -> None:
    job = wrapper()
    run("suspend", [str(job.pid)])
    assert job.line() == "paused" and is_stopped(job.pid)
    run("resume", [str(job.pid)])
    assert job.line() == "goes on" and not is_stopped(job.pid)


def test_the_wrapper_gets_term_and_may_end_by_itself(wrapper: Any) -> None:
    job = wrapper()
    run("terminate", [str(job.pid)])
    assert job.line() in ("term", "goes on") and job.child.wait(5) == 0


def test_a_wrapper_that_is_stopped_or_stubborn_ends_all_the_same(wrapper: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(methods, "LAST_WORDS", 0.2)
    job = wrapper("stubborn")
    os.kill(job.pid, signal.SIGSTOP)
    begin = time.monotonic()
    run("terminate", [str(job.pid)], grace=1.0)
    assert job.child.wait(5) == -signal.SIGKILL
    assert 1 < time.monotonic() - begin < 5
    assert "term" in (job.line(), job.line())


@pytest.mark.parametrize("name", ["suspend", "resume", "terminate"])
def test_a_job_that_is_gone_is_no_trouble(name: str, start: Any) -> None:
    job = start("/bin/true")
    job.child.wait(10)
    assert run(name, [str(job.pid)]) == 0


@pytest.mark.parametrize(
    "argv", [[], ["$job_pid"], ["1"], ["0"], ["-5"], ["12", "/x", "13"], ["12", "--grace", "x"], ["12;id"]]
)
def test_a_line_that_names_no_process_is_refused(argv: list[str]) -> None:
    with pytest.raises(BadOption):
        run("terminate", argv)


def test_an_unknown_method_is_refused() -> None:
    with pytest.raises(BadOption):
        run("explode", ["12"])
