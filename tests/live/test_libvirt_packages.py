"""The packages that docs/batch/libvirt.md names, and no others, in a fresh root of Debian: a job runs by the libvirt they bring."""

from __future__ import annotations

import os
import re
import time

import pytest
from tests.live.conftest import ROOT, STORE
from tests.roots import Room, root

BELLJARS_OWN = ("python3", "qemu-system-x86", "qemu-utils")  # what a host with belljar has
PATIENCE = 60.0  # seconds for a daemon to listen

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(os.geteuid() != 0, reason="chroots want root"),
]


def named() -> tuple[list[str], list[str]]:
    """The packages of the page, and the command that follows their installation."""
    page = (ROOT / "docs/batch/libvirt.md").read_text()
    found = re.search(r"^apt install --no-install-recommends (.*)\n(dpkg-statoverride .*)$", page, re.MULTILINE)
    assert found, "docs/batch/libvirt.md names no packages"
    return found[1].split(), found[2].split()


@pytest.mark.parametrize("suite", ["bookworm", "trixie"])
def test_the_packages_of_the_page_are_enough(suite: str) -> None:
    packages, command = named()
    made = root(suite, [*BELLJARS_OWN, *packages])
    with Room(made, net=True, host="bjlibvirt", binds={ROOT: "/checkout", STORE: "/store"}) as room:
        room.run(*command)
        for daemon in ("virtlogd", "libvirtd"):  # as their units do where systemd runs
            room.run(daemon, "--daemon")
        deadline = time.monotonic() + PATIENCE
        while not room.path("/run/libvirt/libvirt-sock").exists():
            assert time.monotonic() < deadline, "libvirtd does not listen"
            time.sleep(0.1)
        env = {
            "PYTHONPATH": "/checkout/src", "PYTHONDONTWRITEBYTECODE": "1", "BELLJAR_PATHS_STORE": "/store",
            "BELLJAR_MACHINE_HYPERVISOR": "libvirt:qemu:///system", "BELLJAR_LIBVIRT_START_TIMEOUT": "300s",
        }  # fmt: skip
        told = room.run("python3", "-m", "belljar", "doctor", "--only", "libvirt", timeout=300, **env).stdout
        assert b"answers at qemu:///system" in told, told
        done = room.run("python3", "-m", "belljar", "run", "--", "echo", "hello", timeout=600, **env)
        assert done.stdout == b"hello\n"
