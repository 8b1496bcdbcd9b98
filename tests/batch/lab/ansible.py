"""The Ansible role played on this very host, which is a room: python -m tests.batch.lab.ansible VARIABLES...

Each of VARIABLES is JSON; the role is played once with each, and the recap's counts are printed as JSON, one line a play. With
`belljar_batch: slurm`, a Slurm without belljar is there."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

from tests.batch.lab.fresh import slurm
from tests.batch.lab.slurm import PATH

ROOT = Path(__file__).resolve().parents[3]
PLAYBOOK = [{"hosts": "all", "roles": ["belljar"]}]
ENV = {
    "PATH": PATH, "LANG": "C.UTF-8", "HOME": "/root", "ANSIBLE_ROLES_PATH": str(ROOT / "packaging/ansible/roles"),
    "ANSIBLE_PYTHON_INTERPRETER": "/usr/bin/python3", "ANSIBLE_NOCOLOR": "1",
}  # fmt: skip


def play(variables: str) -> dict[str, int]:
    """The counts; tasks that failed are printed to stderr."""
    Path("/root/play.yml").write_text(json.dumps(PLAYBOOK))
    words = [
        str(ROOT / ".venv/bin/ansible-playbook"),
        "-i",
        "localhost,",
        "-c",
        "local",
        "-e",
        variables,
        "/root/play.yml",
    ]
    done = subprocess.run(
        words, env=ENV, cwd="/root", stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    recap = re.search(r"^localhost\s.*", done.stdout, re.MULTILINE)
    assert recap is not None, done.stdout + done.stderr
    print(done.stdout if "changed=0" not in recap[0] else "", file=sys.stderr)
    return {name: int(count) for name, count in re.findall(r"(\w+)=(\d+)", recap[0])}


def main(*plays: str) -> None:
    os.umask(0o022)
    with slurm() if '"slurm"' in plays[0] else nullcontext():
        for variables in plays:
            print(json.dumps(play(variables)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
