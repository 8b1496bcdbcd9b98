"""The pages for administrators are followed on a fresh node, command by command, from `make install` to the test job.

Slurm and Grid Engine are the real ones. OpenPBS and Torque are in no distribution: their pages run against stand-ins
(lab/pbs_server.py, lab/mom.py). Where a real one is installed on this host,

    BELLJAR_OPENPBS=/opt/pbs BELLJAR_TORQUE=/opt/torque pytest -m slow tests/batch/test_pages.py

runs them against that: the variable names the prefix it was configured with, everything in it as `make install` left it
(Torque's home is /var/spool/torque then, OpenPBS wants PostgreSQL). Its daemons run in a network and a host name of
their own; what they write to /etc and /var is gone with the test.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from tests.batch.lab.page import fits, steps
from tests.live.conftest import ROOT, STORE
from tests.roots import Room

PAGES = {system: f"docs/batch/{system}.md" for system in ("gridengine", "openpbs", "slurm", "torque")}
PAGES |= {"bait": "docs/batch/bait/guide.md", "lease": "docs/operate/lease/site.md"}
OWN_STORE = ("bait", "lease")  # their pages build an image of their own, so their store is not that of all tests
MOST_WORDS = 700
REAL = ("BELLJAR_OPENPBS", "BELLJAR_TORQUE")  # prefixes


@pytest.mark.parametrize("system", PAGES)
def test_a_page_is_short(system: str) -> None:
    assert len((ROOT / PAGES[system]).read_text().split()) <= MOST_WORDS


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("system", PAGES)
@pytest.mark.skipif(os.geteuid() != 0, reason="a room wants root")
def test_a_newcomer_who_follows_the_page_gets_what_it_says(system: str, tmp_path: Path) -> None:
    store = tmp_path if system in OWN_STORE else STORE
    with Room(Path("/"), host="fresh", binds={ROOT: str(ROOT), store: "/var/lib/belljar"}) as room:
        done = room.run(
            sys.executable,
            "-m",
            "tests.batch.lab.fresh",
            system,
            PAGES[system],
            cwd=str(ROOT),
            check=False,
            timeout=1100,
            **{name: value for name, value in os.environ.items() if name in REAL},
        )
    print(done.stdout.decode())
    assert done.returncode == 0, done.stderr.decode()


def test_a_page_is_read_as_it_is_written() -> None:
    page = "```sh\na\nb\n```\n\nprose\n\n```text\n...\nx ...\n```\n## Two, as an ordinary user\n```sh\nc\n```\n## Three\n```text\nno\n```\n"
    first, second = steps(page)
    assert (first.commands, first.as_user, first.expected) == ("a\nb\n", False, "...\nx ...\n")
    assert (second.commands, second.as_user, second.expected) == ("c\n", True, None)
    assert fits("...\nx ...\n", "q\nr\nx yz\n") and fits("...\nx ...\n", "x \n")
    assert not fits("x ...\n", "x y\nz\n") and not fits("a...c\n", "ac")
