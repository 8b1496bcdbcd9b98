"""kill -9 at a moment nobody chose: of belljar, of QEMU, of both. Afterwards nothing is left, and the next job works."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time

import pytest
from tests.live.conftest import Belljar, marked_processes

ROUNDS = 6


# test_faults.py kills belljar at every point of a machine's life.
@pytest.mark.parametrize("victim", [pytest.param("belljar", marks=pytest.mark.slow), "qemu", "the process group"])
def test_whatever_is_killed_whenever_nothing_is_left(belljar: Belljar, victim: str) -> None:
    seed = time.time_ns()
    chance = random.Random(seed)
    for number in range(ROUNDS):
        keeper = belljar.popen(
            "run", "--", "sh", "-c", "echo up; head -c 1M /dev/zero; sleep 0.2", start_new_session=True
        )
        after = chance.uniform(0.02, 1.0)
        try:
            keeper.wait(after)
        except subprocess.TimeoutExpired:
            kill(belljar, keeper, victim)
        keeper.communicate(timeout=60)
        assert keeper.returncode in (0, -9, 125), f"round {number}, seed {seed}: {keeper.returncode}"
        reaped = belljar("reap")
        assert reaped.returncode == 0, reaped.stderr
        assert belljar.leftovers() == [], f"round {number}, seed {seed}, killed after {after:.3f} s"
    done = belljar.run("--", "echo", "next")
    assert (done.returncode, done.stdout) == (0, b"next\n"), done.stderr


def kill(belljar: Belljar, keeper: subprocess.Popen[bytes], victim: str) -> None:
    if victim == "belljar":
        keeper.kill()
    elif victim == "the process group":
        os.killpg(keeper.pid, signal.SIGKILL)
    else:
        ours = set(belljar.machines())
        for pid, machine in marked_processes():
            if machine in ours:
                os.kill(pid, signal.SIGKILL)
