"""Machines of container images, and the guide to them followed command by command."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.batch.lab.page import follow
from tests.live.conftest import LONGEST, ROOT, Belljar
from tests.unit.image.container_parts import Container, folder, layer, link

BUSYBOX = Path("/bin/busybox").read_bytes()  # Debian's static one
APPLETS = ("sh", "id", "mount", "mkdir", "mknod", "grep")
# As Alpine's root: applets are absolute links, and a user of its own.
ALPINE = (
    ("bin/", folder()), ("bin/busybox", BUSYBOX), *((f"bin/{name}", link("/bin/busybox")) for name in APPLETS),
    ("etc/passwd", b"root:x:0:0:root:/root:/bin/sh\nweb:x:1234:1234::/srv:/bin/sh\n"), ("etc/group", b"web:x:1234:\n"),
    ("srv/", folder(uid=1234, gid=1234)), ("mnt/", folder()),
)  # fmt: skip
SETTINGS = {
    "User": "web",
    "WorkingDir": "/srv",
    "Env": ["GREETING=hello"],
    "Entrypoint": ["sh", "-c"],
    "Cmd": ['echo "$GREETING"; id -u; pwd'],
}
AS_ROOT = """
set -e
mount -t tmpfs none /mnt && mkdir /mnt/lower /mnt/upper /mnt/work /mnt/all
mount -t overlay -o lowerdir=/mnt/lower,upperdir=/mnt/upper,workdir=/mnt/work overlay /mnt/all
/run/belljar/modprobe fuse && test -c /dev/fuse
mknod /mnt/null c 1 3 && test -c /mnt/null
grep -c overlay /proc/filesystems
"""


@pytest.mark.slow
def test_a_saved_image_runs_its_own_command_as_its_own_user_and_any_as_root(belljar: Belljar, tmp_path: Path) -> None:
    """What containers lack is there: mounts, modules of the kernel, devices."""
    Container([layer(*ALPINE)], SETTINGS).docker_archive(tmp_path / "image.tar")
    with open(tmp_path / "image.tar", "rb") as saved:
        done = belljar("image", "import", "-", "--name", "container-of-a-test", stdin=saved)
    assert done.returncode == 0, done.stderr.decode()
    try:
        done = belljar.run("--image", "container-of-a-test")
        assert (done.returncode, done.stdout) == (0, b"hello\n1234\n/srv\n"), done.stderr.decode()
        words = ("--user", "0", "--entrypoint", "--", AS_ROOT)
        done = belljar.run("--image", "container-of-a-test", *words)
        assert (done.returncode, done.stdout) == (0, b"1\n"), done.stderr.decode()
        (shown,) = [image for image in belljar.json("image", "list") if "container-of-a-test" in image["names"]]
        outcomes = [machine["outcome"] for machine in belljar.json("ps", "-a")]
        assert {outcome["image_manifest"] for outcome in outcomes} == {shown["facts"]["manifest"]}
    finally:
        belljar("image", "remove", "container-of-a-test", "--force")
    assert belljar.leftovers() == []


def test_the_guide_to_containers_is_as_its_page_says(belljar: Belljar, tmp_path: Path) -> None:
    command = tmp_path / "bin/belljar"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m belljar "$@"\n')
    command.chmod(0o755)
    env = {**belljar.env, "PATH": f"{command.parent}:{belljar.env['PATH']}"}

    def run(commands: str, as_user: bool) -> str:
        done = subprocess.run(
            ["sh", "-euc", commands], cwd=tmp_path, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, timeout=LONGEST, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"$ {commands}{done.stdout}exit {done.returncode}"
        return done.stdout

    assert len(follow(ROOT / "docs/jobs/containers.md", run)) == 1
    assert belljar.leftovers() == []
