"""The first page for users, followed command by command, in a folder of a test's own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.batch.lab.page import follow
from tests.live.conftest import LONGEST, ROOT, Belljar


def test_the_first_ten_minutes_are_as_the_page_says(belljar: Belljar, tmp_path: Path) -> None:
    home, command = tmp_path / "home", tmp_path / "bin" / "belljar"
    home.mkdir()
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m belljar "$@"\n')
    command.chmod(0o755)
    env = {**belljar.env, "PATH": f"{command.parent}:{belljar.env['PATH']}"}

    def run(commands: str, as_user: bool) -> str:
        done = subprocess.run(
            ["sh", "-euc", commands], cwd=home, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, timeout=LONGEST, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"$ {commands}{done.stdout}exit {done.returncode}"
        return done.stdout

    print("\n".join(follow(ROOT / "docs/jobs/index.md", run)))
    assert belljar.leftovers() == []
