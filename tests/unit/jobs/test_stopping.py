"""A loop's clock while its process is stopped, by TSTP or by STOP without a word before."""

import asyncio
import os
import signal
import subprocess
import sys
import time

import pytest

from belljar.jobs import attend
from belljar.jobs.attend import StoppableLoop

SCRIPT = """
import asyncio, sys, time
from belljar.jobs import attend
attend.UNLIKELY = 0.3
loop = attend.StoppableLoop()

async def main():
    begin = time.monotonic()
    print("up", flush=True)
    await asyncio.sleep(1.0)
    print(time.monotonic() - begin, flush=True)

loop.run_until_complete(main())
loop.close()
"""


def test_a_deadline_does_not_pass_while_the_process_is_stopped() -> None:
    with subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"up\n"
        os.kill(process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        time.sleep(2.0)  # what is tested is time
        os.kill(process.pid, signal.SIGCONT)
        took = float(process.stdout.readline())
    assert 2.9 < took < 8


def test_without_a_stop_the_clock_is_the_hosts() -> None:
    loop = StoppableLoop()
    try:
        begin = loop.time()
        loop.run_until_complete(asyncio.sleep(0.05))
        assert loop.stopped == 0.0 and loop.time() - begin >= 0.05
    finally:
        loop.close()


def test_what_is_left_out_by_hand_is_not_left_out_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attend, "UNLIKELY", 0.05)
    loop = StoppableLoop()

    async def stop() -> None:
        begin = time.monotonic()
        time.sleep(0.2)  # noqa: ASYNC251 - stands for SIGSTOP
        loop.leave_out(begin, time.monotonic())

    try:
        loop.run_until_complete(stop())
        loop.run_until_complete(asyncio.sleep(0))
        assert 0.2 <= loop.stopped < 0.25
    finally:
        loop.close()
