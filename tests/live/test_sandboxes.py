"""Sandboxes as harnesses use them, without a harness: commands, faults, and cancels at every moment."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.live.conftest import LONGEST, ROOT, STORE, Belljar
from tests.live.container_lab import Layout, busybox, file, folder, layer

PASSWD = "root:x:0:0::/:/bin/sh\nworker:x:1234:5678::/app:/bin/sh\n"
APPLETS = ("sh", "cat", "cmp", "echo", "id", "mkfifo", "printf", "pwd", "rm", "sleep")
LIFE = r"""(7, '1 2\n/srv\nroot\n', '')
(0, 'started\n', '')
(0, 'got hello\n', '')
b'so far\n' not finished after 2 s
(1, '', '') nobody

(127, '', 'no-such-program: not found in the guest\n')
TaskFailure
"""


def lab(belljar: Belljar, program: str, *more: str) -> str:
    words = [sys.executable, "-m", "tests.live.sandbox_lab", program, *more]
    done = subprocess.run(words, env=belljar.env, cwd=ROOT, capture_output=True, text=True, timeout=2 * LONGEST)
    assert done.returncode == 0, done.stdout + done.stderr
    assert belljar.leftovers() == []
    return done.stdout


def test_commands_have_exact_ends_and_what_they_start_goes_on(belljar: Belljar) -> None:
    assert lab(belljar, "life") == LIFE


def test_a_machine_that_is_killed_is_the_infrastructures_fault(belljar: Belljar) -> None:
    assert lab(belljar, "lost") == "InfrastructureFailure\nUnfit\n"


@pytest.mark.slow
def test_whenever_it_is_cancelled_nothing_is_left(belljar: Belljar) -> None:
    assert lab(belljar, "cancelled") == "nothing left\n"


CONTAINER = r"""(0, 'from the image 1\n/app\n0\n', '')
(0, '/tmp\n1234\n', '')
1
['sh', '-c', 'exec sleep 1000']
"""


@pytest.mark.slow
def test_a_container_s_image_is_one_of_a_sandbox(belljar: Belljar, tmp_path: Path) -> None:
    users = layer(
        folder("etc"), folder("tmp", mode=0o1777), folder("app"), file("etc/passwd", PASSWD), file("etc/group")
    )
    layout = Layout(tmp_path / "layout")
    config = {
        "Cmd": ["sh", "-c", "exec sleep 1000"],
        "Env": ["PATH=/bin", "FROM_IMAGE=from the image"],
        "WorkingDir": "/app",
    }
    layout.image("box", [busybox(*APPLETS), users], config)
    belljar.env |= {"BELLJAR_PATHS_STORE": str(tmp_path / "store"), "BELLJAR_PATHS_SITE_STORE": str(STORE)}
    assert lab(belljar, "container", f"oci:{layout.path}:box") == CONTAINER
