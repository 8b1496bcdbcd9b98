"""The Executor with real machines: its page's examples, what tasks do to themselves, and a parent that is killed."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest
from tests.live.conftest import LONGEST, ROOT, Belljar
from tests.live.test_api import python, said

pytestmark = pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="the default image has Python 3.11")

TASKS = """
import os, signal, sys
from belljar.api import Executor

def in_two(n): return bytes(n << 20), os.uname().nodename
def printed(n): sys.stdout.write("x" * n); return sys.stdin.read()
def eaten(): return len([b"x" * (1 << 20) for _ in range(4000)])
def ended(n): os._exit(n)
def killed(): os.kill(os.getpid(), signal.SIGKILL)
def told(future):
    error = future.exception()
    return type(error).__name__, str(error).partition(": ")[2]

with Executor(2, memory="256M") as executor:
    large, other = executor.map(in_two, [33, 1])
    print(len(large[0]) >> 20, large[1] != other[1] != os.uname().nodename)
    for task in ((ended, 0), (ended, 3), (killed,), (eaten,)):
        print(*told(executor.submit(*task)))
    print(repr(executor.submit(printed, 10 << 20).result()), executor.submit(len, bytes(33 << 20)).result() >> 20)
print(*told(Executor(1, python="python9").submit(len, "")))
"""
TOLD = """33 True
Failed the task ended its process, with exit code 0, before it had returned
Failed the payload ended with exit code 3
Failed the payload was ended by signal 9
Failed the guest ran out of memory and its kernel killed the payload
'' 33
PythonUnfit the payload could not be started: python9: not found in the guest
"""


def test_the_examples_of_its_page_are_true(belljar: Belljar) -> None:
    code = (
        "import doctest, sys; flags = doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL\n"
        "failed, tried = doctest.testfile(sys.argv[1], module_relative=False, optionflags=flags)\n"
        "print(tried); sys.exit(bool(failed))"
    )
    assert int(said(python(belljar, "-c", code, str(ROOT / "docs/jobs/executor.md")))) > 5
    assert belljar.leftovers() == []


def test_pi_is_found_by_four_machines(belljar: Belljar) -> None:
    assert 3.0 < float(said(python(belljar, str(ROOT / "examples/executor/pi_by_machines.py")))) < 3.3
    assert len(belljar.json("ps", "-a")) == 4 and belljar.leftovers() == []


def test_whatever_a_task_does_to_itself_the_others_go_on(belljar: Belljar, tmp_path: Path) -> None:
    (tmp_path / "tasks.py").write_text(TASKS)
    assert said(python(belljar, str(tmp_path / "tasks.py"))) == TOLD
    assert belljar.leftovers() == []


def test_a_parent_that_is_killed_leaves_nothing(belljar: Belljar) -> None:
    code = "import time, belljar.api as b\nb.Executor(1, name='job').submit(lambda: (print('up', flush=True), time.sleep(1000)))"
    asker = python(belljar, "-c", code)
    deadline = time.monotonic() + LONGEST
    while b"up" not in belljar("logs", "--stdout", "job").stdout:
        assert time.monotonic() < deadline and asker.poll() is None
    os.kill(asker.pid, signal.SIGKILL)
    asker.communicate()
    assert belljar("wait", "job", "--timeout", str(LONGEST)).returncode == 128 + signal.SIGTERM
    assert belljar.leftovers() == []


def test_a_program_that_ends_does_its_tasks_first_and_terminated_ones_leave_nothing(belljar: Belljar) -> None:
    code = (
        "import time, belljar.api as b\n"
        "last = b.Executor(1)\nlast.submit(abs, -7).add_done_callback(lambda future: print(future.result()))\n"
        "first = b.Executor(1, name='job')\nfuture = first.submit(time.sleep, 1000)\n"
        "for event in b.events():\n"
        "    if event.get('state') == 'running' and b.find(event['machine']).view.name == 'job': break\n"
        "first.terminate_workers(); first.shutdown()\nprint(repr(future.exception()))"
    )
    words = said(python(belljar, "-c", code)).split("\n")
    assert sorted(words) == ["", "7", 'CancelledError("the task\'s machine was stopped")']
    assert belljar.leftovers() == []


def test_tasks_wait_while_the_host_has_room_for_one_machine_only(belljar: Belljar) -> None:
    code = "import belljar.api as b\nwith b.Executor(3) as executor:\n    print(list(executor.map(abs, range(-3, 0))))"
    belljar.env["BELLJAR_HOST_CPUS_PER_CPU"] = str(1 / (os.cpu_count() or 1))
    assert said(python(belljar, "-c", code)) == "[3, 2, 1]\n"
    assert len(belljar.json("ps", "-a")) == 3 and belljar.leftovers() == []
