"""The page about ARC CE, followed on a fresh node with the real A-REX of Debian 12 and the real Slurm."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from tests.live.conftest import ROOT, STORE
from tests.roots import Room

MOST_WORDS = 500
PAGES = ("docs/batch/arc-ce.md", "docs/batch/htcondor-ce.md", "docs/operate/windows.md")


@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_short(page: str) -> None:
    assert len((ROOT / page).read_text().split()) <= MOST_WORDS


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(os.geteuid() != 0, reason="a room wants root")
def test_a_grid_job_runs_in_a_machine_as_the_page_says(tmp_path: Path) -> None:
    with Room(Path("/"), host="fresh", binds={ROOT: str(ROOT), STORE: "/var/lib/belljar"}, upper=tmp_path) as room:
        done = room.run(sys.executable, "-m", "tests.batch.lab.arc", cwd=str(ROOT), check=False, timeout=1700)
    print(done.stdout.decode())
    assert done.returncode == 0, done.stderr.decode()
