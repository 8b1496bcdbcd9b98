"""The Python door, as a stranger uses it: the page's examples, run as they stand, and what they promise."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.live.conftest import LONGEST, ROOT, Belljar


def python(belljar: Belljar, *words: str, **options: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, *words], env=belljar.env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, **options,
    )  # fmt: skip


def said(process: subprocess.Popen[bytes]) -> str:
    out, _ = process.communicate(timeout=LONGEST)
    assert process.returncode == 0, out.decode()
    return out.decode()


def test_the_examples_of_the_page_are_true(belljar: Belljar) -> None:
    code = (
        "import doctest, sys; flags = doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL\n"
        "failed, tried = doctest.testfile(sys.argv[1], module_relative=False, optionflags=flags)\n"
        "print(tried); sys.exit(bool(failed))"
    )
    assert int(said(python(belljar, "-c", code, str(ROOT / "docs/jobs/api.md")))) > 15
    assert belljar.leftovers() == []


def test_an_executor_runs_each_task_in_a_fresh_clone(belljar: Belljar) -> None:
    assert 3.0 < float(said(python(belljar, str(ROOT / "examples/executor/pi_by_machines.py")))) < 3.3
    assert len(belljar.json("ps", "-a")) == 4 and belljar.leftovers() == []


def test_a_task_that_raises_tells_why_and_its_machine_is_gone(belljar: Belljar, tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text("def broken(n):\n    raise ZeroDivisionError(n)\n")
    (tmp_path / "main.py").write_text(
        "import sys; sys.path[:0] = sys.argv[1:]\n"
        "from machine_executor import MachineExecutor\nimport belljar.api, task\n"
        "with MachineExecutor() as executor:\n    error = executor.submit(task.broken, 7).exception()\n"
        "print(type(error) is belljar.api.Failed, b'ZeroDivisionError: 7' in error.completed.stderr)\n"
    )
    words = (str(tmp_path / "main.py"), str(tmp_path), str(ROOT / "examples/executor"))
    assert said(python(belljar, *words)) == "True True\n"
    assert belljar.leftovers() == []


def test_a_machine_that_is_run_ends_with_a_program_that_is_killed(belljar: Belljar) -> None:
    code = "import belljar.api as b\nb.run(['sh', '-c', 'echo up; exec sleep 1000'], name='job')"
    asker = python(belljar, "-c", code)
    deadline = time.monotonic() + LONGEST
    while b"up" not in belljar("logs", "--stdout", "job").stdout:
        assert time.monotonic() < deadline
    os.kill(asker.pid, signal.SIGKILL)
    asker.communicate()
    assert belljar("wait", "job", "--timeout", str(LONGEST)).returncode == 128 + signal.SIGTERM
    assert belljar.leftovers() == []


def test_a_cancelled_run_returns_when_its_machine_is_gone(belljar: Belljar) -> None:
    """While it starts, and while its payload runs; the second cancel changes nothing."""
    code = (
        "import asyncio, belljar.api as b\n"
        "async def main():\n"
        "    for has_begun in (False, True):\n"
        "        run = asyncio.create_task(b.arun(['sleep', '1000'], name='job'))\n"
        "        async for event in b.aevents():\n"
        "            if event.get('state') == ('running' if has_begun else 'preparing'): break\n"
        "        run.cancel(); await asyncio.sleep(0); run.cancel()\n"
        "        print(*await asyncio.gather(run, return_exceptions=True), len(b.machines()))\n"
        "asyncio.run(main())"
    )
    assert said(python(belljar, "-c", code)) == " 0\n 0\n"
    assert belljar.leftovers() == []
