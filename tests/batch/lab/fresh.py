"""A fresh node with a batch system on it, in a room over this host's own files, and a page of docs/ followed there.

python -m tests.batch.lab.fresh slurm docs/batch/slurm.md     # in the room: what is written is gone with it
"""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.batch.lab.page import follow
from tests.batch.lab.slurm import PATH, Slurm

CHECKOUT, USER = Path(__file__).resolve().parents[3], "alice"
LONGEST = 300.0  # seconds for one step


@contextmanager
def slurm() -> Iterator[Mapping[str, str]]:
    """One node and its slurmctld, with settings in the usual place."""
    lab = Slurm(Path("/srv/slurm"), node="CPUs=2 RealMemory=4000", KillWait="30")
    Path("/etc/hosts").write_text(f"127.0.0.1 localhost {os.uname().nodename}\n")
    lab.etc.mkdir(parents=True)
    subprocess.run(["mount", "--bind", lab.etc, "/etc/slurm"], check=True)
    try:
        lab.up()
        yield {}
    finally:
        lab.down()


SYSTEMS = {"slurm": slurm}


def run(commands: str, as_user: bool, env: Mapping[str, str]) -> str:
    """Both streams of some lines of shell. Raises AssertionError where one of them fails."""
    whole = {"PATH": PATH, "LANG": "C.UTF-8", "HOME": "/root", **env}
    words: dict[str, object] = {"cwd": CHECKOUT}
    if as_user:
        entry = pwd.getpwnam(USER)
        whole.update(HOME=entry.pw_dir, USER=USER, LOGNAME=USER)
        words = {"cwd": entry.pw_dir, "user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}
    done = subprocess.run(
        ["sh", "-euc", commands], env=whole, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, timeout=LONGEST, check=False, **words,
    )  # type: ignore[call-overload]  # fmt: skip
    assert done.returncode == 0, f"$ {commands}{done.stdout}exit {done.returncode}"
    return str(done.stdout)


def main(system: str, page: str) -> None:
    os.umask(0o022)
    subprocess.run(["useradd", "--create-home", "--shell", "/bin/bash", USER], check=True)
    with SYSTEMS[system]() as env:
        print("\n".join(follow(Path(page), lambda commands, as_user: run(commands, as_user, env))))


if __name__ == "__main__":
    main(*sys.argv[1:])
