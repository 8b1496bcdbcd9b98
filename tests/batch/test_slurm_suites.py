"""Slurm of later releases of Debian: the tests of this folder run there again, in a root of that suite with its own Slurm,
Python and QEMU."""

from __future__ import annotations

import os
import sysconfig

import pytest
from tests.batch.lab.worker import IMAGE, MPI_IMAGE, ready
from tests.live.conftest import ROOT, STORE, Belljar
from tests.roots import Room, root

PACKAGES = ("e2fsprogs", "iproute2", "munge", "nftables", "passwd", "python3-pytest", "python3-pytest-timeout", "qemu-system-x86",
            "qemu-utils", "slurm-client", "slurmctld", "slurmd")  # fmt: skip
FILES = (
    "test_slurm_site.py",
    "test_slurm_guide.py",
    "test_slurm_jobs.py",
    "test_slurm_native.py",
    "test_slurm_control.py",
)
OF_WORKER_NODES = ("test_slurm_bait.py", "test_slurm_mpi.py", "test_slurm_cloud.py")
LONGEST = 3000.0
# A resolver gives no address where a network has none but its loopback's.
NETWORK = """ip link add v0 type veth peer name v1
ip addr add 10.78.0.1/24 dev v0; ip link set v0 up; ip link set v1 up
echo '127.0.0.1 localhost slurm' >/etc/hosts"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(LONGEST + 1800),
    pytest.mark.skipif(os.geteuid() != 0, reason="chroots want root"),
]


@pytest.mark.parametrize(("suite", "release"), [("trixie", b"24.11"), ("sid", b"26.05")])
def test_the_slurm_of_another_debian(suite: str, release: bytes) -> None:
    passes_there(suite, release, FILES, "not slow")


@pytest.mark.parametrize(("suite", "release", "guests"), [("trixie", b"24.11", "trixie"), ("sid", b"26.05", "trixie")])
def test_worker_nodes_with_the_slurm_of_another_debian(suite: str, release: bytes, guests: str) -> None:
    """Machines of the same release, and of the one that the newest slurmctld still accepts."""
    ready(Belljar(STORE.parent / "building"), *(f"{one.rpartition('-')[0]}-{guests}" for one in (IMAGE, MPI_IMAGE)))
    passes_there(suite, release, OF_WORKER_NODES, "batch", BELLJAR_BAIT_SUITE=guests)


def passes_there(suite: str, release: bytes, files: tuple[str, ...], marked: str, **env: str) -> None:
    ours = {"BELLJAR_TEST_STORE": str(STORE), "BELLJAR_TEST_STATE": "/var/tmp/belljar-state",
            "PYTHONPATH": f"{ROOT}/src:{sysconfig.get_path('purelib')}", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "PYTHONDONTWRITEBYTECODE": "1", **env}  # fmt: skip
    words = ("python3", "-m", "pytest", "-rP", "-p", "pytest_timeout", "-p", "no:cacheprovider", "-m", marked)
    with Room(root(suite, PACKAGES), net=True, host="slurm", binds={ROOT: str(ROOT), STORE: str(STORE)}) as room:
        room.run("sh", "-ec", NETWORK)
        assert release in room.run("slurmd", "-V").stdout
        done = room.run(
            *words, *(f"tests/batch/{one}" for one in files), cwd=str(ROOT), check=False, timeout=LONGEST, **ours
        )
    said = done.stdout.decode(errors="replace")
    print(said[-20000:])  # `pytest -s` shows what was measured there
    assert done.returncode == 0, said[-20000:] + done.stderr.decode(errors="replace")[-2000:]
    assert " skipped" not in said, said[-2000:]
