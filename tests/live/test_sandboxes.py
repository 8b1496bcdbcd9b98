"""Sandboxes as harnesses use them, without a harness: commands, faults, and cancels at every moment."""

from __future__ import annotations

import subprocess
import sys

from tests.live.conftest import LONGEST, ROOT, Belljar

LIFE = r"""(7, '1 2\n/srv\nroot\n', '')
(0, 'started\n', '')
(0, 'got hello\n', '')
b'so far\n' not finished after 2 s
(1, '', '') nobody

(127, '', 'no-such-program: not found in the guest\n')
TaskFailure
"""


def lab(belljar: Belljar, program: str) -> str:
    words = [sys.executable, "-m", "tests.live.sandbox_lab", program]
    done = subprocess.run(words, env=belljar.env, cwd=ROOT, capture_output=True, text=True, timeout=2 * LONGEST)
    assert done.returncode == 0, done.stdout + done.stderr
    assert belljar.leftovers() == []
    return done.stdout


def test_commands_have_exact_ends_and_what_they_start_goes_on(belljar: Belljar) -> None:
    assert lab(belljar, "life") == LIFE


def test_a_machine_that_is_killed_is_the_infrastructures_fault(belljar: Belljar) -> None:
    assert lab(belljar, "lost") == "InfrastructureFailure\nUnfit\n"


def test_whenever_it_is_cancelled_nothing_is_left(belljar: Belljar) -> None:
    assert lab(belljar, "cancelled") == "nothing left\n"
