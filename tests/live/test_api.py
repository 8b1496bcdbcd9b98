"""The Python door, as a stranger uses it: the page's examples, run as they stand, and what they promise."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
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
