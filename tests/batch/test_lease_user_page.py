"""The page for users of leases, followed: its commands one after the other in one shell, against a real service, Slurm and guests."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.batch.lab.lease import LeaseSite, free_port
from tests.batch.lab.page import fits, steps
from tests.live.conftest import ROOT

pytestmark = pytest.mark.slow
PAGE = (ROOT / "docs/operate/lease/user.md").read_text()
MOST_WORDS = 700
ASKED = ("meta-data/instance-id", "meta-data/public-keys/0/openssh-key", "user-data")
IN_GUEST = r"""
ask() { exec 3<>/dev/tcp/169.254.169.254/80; printf '%s\r\n' "$1 HTTP/1.0" "${@:2}" '' >&3; cat <&3; echo "|"; }
ask "GET /latest/meta-data/instance-id"
token=$(ask "PUT /latest/api/token" "X-aws-ec2-metadata-token-ttl-seconds: 60" | tail -n 1 | tr -d '|')
for path; do ask "GET /latest/$path" "X-aws-ec2-metadata-token: $token"; done
"""


@pytest.fixture
def site() -> Iterator[LeaseSite]:
    site = LeaseSite()
    site.network, site.ec2 = "user", f"127.0.0.1:{free_port()}"
    with site.running():
        yield site


def test_the_page_is_short() -> None:
    assert len(PAGE.split()) <= MOST_WORDS


@pytest.mark.timeout(900)
def test_a_newcomer_who_follows_the_page_gets_what_it_says(site: LeaseSite, tmp_path: Path) -> None:
    page = PAGE.replace("https://head.example.org:8444", f"http://{site.ec2}")
    found, (python,) = list(steps(page)), re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    ask = f"belljar lease ssh -i first.pem $id -- bash -s {' '.join(ASKED)} <<< {shlex.quote(IN_GUEST)}"
    done = shell(
        site,
        tmp_path,
        [*(one.commands for one in found[:-1]), f"printf '%s' $id > id; {ask}", found[-1].commands],
    )
    for step, printed in zip(found[:-1], done, strict=False):
        assert step.expected is None or fits(step.expected, printed), f"{step.commands}\n{printed}"
    *_, inside, last = done
    id = (tmp_path / "id").read_text()
    public = subprocess.check_output(["ssh-keygen", "-y", "-f", tmp_path / "first.pem"], text=True).split()[1]
    without, *answers = inside.split("|")
    assert "401" in without.splitlines()[0] and id not in without, inside  # HttpTokens=required
    assert answers[0].rstrip().endswith(id) and public in answers[1] and "hello from user data" in answers[2], inside
    assert found[-1].expected and fits(found[-1].expected, last), last
    assert "lease:ends-at" in last and "hello from user data" in last  # a tag, and the console
    (tmp_path / "page.py").write_text(python)
    (printed,) = shell(site, tmp_path, [f"set -a; . ./lease.env; set +a; {sys.executable} page.py"])
    assert re.fullmatch(r"i-[0-9a-f]{17} running\n", printed), printed
    site.until_nothing_is_left()


def shell(site: LeaseSite, home: Path, commands: list[str]) -> list[str]:
    """What each printed. `belljar` is that of the tests, at the site's door."""
    tools = home / "bin"
    tools.mkdir(exist_ok=True)
    (tools / "belljar").write_text(
        f'#!/bin/sh\nlease=$1 verb=$2; shift 2\nexec {site.folder}/belljar $lease $verb --door {site.door} "$@"\n'
    )
    (tools / "belljar").chmod(0o755)
    env = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")} | {
        "PATH": f"{tools}:{Path(sys.executable).parent}:{os.environ['PATH']}", "HOME": str(home), "AWS_PAGER": "", "AWS_EC2_METADATA_DISABLED": "true",
    }  # fmt: skip
    mark = "-- the next fence --"
    text = f"\necho '{mark}'\n".join(commands)
    done = subprocess.run(
        ["bash", "-e", "-c", text], cwd=home, env=env, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{site.story()}"
    return [part.lstrip("\n") for part in done.stdout.split(f"{mark}\n")]
