"""Slurm of later releases of Debian: the tests of this folder run there again, in a root of that suite with its own Slurm,
Python and QEMU."""

from __future__ import annotations

import os
import re

import pytest
from tests.live.conftest import ROOT, STORE
from tests.roots import Room, root

PACKAGES = ("e2fsprogs", "iproute2", "munge", "nftables", "passwd", "python3-pytest", "python3-pytest-timeout", "qemu-system-x86",
            "qemu-utils", "slurm-client", "slurmctld", "slurmd")  # fmt: skip
FILES = (
    "test_slurm_jobs.py",
    "test_slurm_control.py",
    "test_slurm_site.py",
    "test_slurm_guide.py",
    "test_slurm_native.py",
)
LONGEST = 3000.0

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(LONGEST + 1800),
    pytest.mark.skipif(os.geteuid() != 0, reason="chroots want root"),
]


@pytest.mark.parametrize(("suite", "release"), [("trixie", b"24.11"), ("sid", b"26.05")])
def test_the_slurm_of_another_debian(suite: str, release: bytes) -> None:
    with Room(root(suite, PACKAGES), net=True, host="slurm", binds={ROOT: str(ROOT), STORE: str(STORE)}) as room:
        room.path("/etc/hosts").write_text("127.0.0.1 localhost slurm\n")
        assert release in room.run("slurmd", "-V").stdout
        done = room.run(
            "python3", "-m", "pytest", "-p", "no:cacheprovider", "-m", "not slow", *(f"tests/batch/{one}" for one in FILES),
            cwd=str(ROOT), check=False, timeout=LONGEST, BELLJAR_TEST_STORE=str(STORE), PYTHONDONTWRITEBYTECODE="1",
        )  # fmt: skip
    said = done.stdout.decode(errors="replace")
    assert done.returncode == 0, said[-20000:] + done.stderr.decode(errors="replace")[-2000:]
    assert re.search(r"\d+ passed|\[100%\]", said) and "skipped" not in said, said[-2000:]
