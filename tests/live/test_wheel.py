"""The wheel and the sdist in an empty virtual environment, by a user without root, up to a machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.live.conftest import LONGEST, ROOT
from tests.live.test_users import PLACE, User

UID = 65_200 + os.getpid() % 200


def as_user(*words: str, home: Path) -> None:
    argv = ["setpriv", f"--reuid={UID}", f"--regid={UID}", "--clear-groups", *words]
    env = {**os.environ, "HOME": str(home), "TMPDIR": str(home)}
    done = subprocess.run(argv, cwd=home, env=env, capture_output=True, text=True, timeout=LONGEST)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(params=["wheel", pytest.param("sdist", marks=pytest.mark.slow)])
def user(request: pytest.FixtureRequest) -> Iterator[User]:
    """Its `belljar` is in a virtual environment of the system's Python, which has nothing else."""
    home = PLACE / f"belljar-test-home-{UID}"
    home.mkdir(mode=0o755)
    command = [sys.executable, "-m", "hatchling", "build", "-t", request.param, "-d", str(home)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=LONGEST)
    os.chown(home, UID, UID)
    (package,) = home.glob("belljar-*")
    as_user("/usr/bin/python3", "-m", "venv", str(home / "venv"), home=home)
    as_user(str(home / "venv/bin/pip"), "install", "--quiet", "--no-cache-dir", str(package), home=home)
    made = User(UID, home / "venv/bin/belljar", home)
    yield made
    made.close()
    shutil.rmtree(home)
    shutil.rmtree(PLACE / f"belljar-{UID}", ignore_errors=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="another user's part wants root")
def test_a_user_without_root_gets_a_machine(user: User) -> None:
    done = user.run("--", "uname", "-s")
    assert (done.returncode, done.stdout) == (0, b"Linux\n"), done.stderr
    assert (user.home / "venv/share/man/man1/belljar-run.1").exists()
    assert (user.home / "venv/share/bash-completion/completions/belljar").exists()
