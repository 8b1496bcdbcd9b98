"""The pages for administrators are followed on a fresh node, command by command, from `make install` to the test job."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from tests.batch.lab.page import fits, steps
from tests.live.conftest import ROOT, STORE
from tests.roots import Room

PAGES = {"gridengine": "docs/batch/gridengine.md", "slurm": "docs/batch/slurm.md"}
MOST_WORDS = 700


@pytest.mark.parametrize("system", PAGES)
def test_a_page_is_short(system: str) -> None:
    assert len((ROOT / PAGES[system]).read_text().split()) <= MOST_WORDS


@pytest.mark.slow
@pytest.mark.parametrize("system", PAGES)
@pytest.mark.skipif(os.geteuid() != 0, reason="a room wants root")
def test_a_newcomer_who_follows_the_page_gets_what_it_says(system: str) -> None:
    with Room(Path("/"), host="fresh", binds={ROOT: str(ROOT), STORE: "/var/lib/belljar"}) as room:
        done = room.run(
            sys.executable,
            "-m",
            "tests.batch.lab.fresh",
            system,
            PAGES[system],
            cwd=str(ROOT),
            check=False,
            timeout=580,
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
