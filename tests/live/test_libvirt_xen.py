"""libvirt's own driver for Xen reads what belljar writes for Xen's guests. There is no Xen: a stand-in answers in its place,
so this tells that the documents are understood, and nothing about guests that run."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.live import libvirt_lab

GOLDEN = Path(__file__).parents[1] / "unit/hypervisor/libvirt/golden"
STAND_IN = Path(__file__).parent / "xen_stand_in.c"
DRIVERS = Path("/usr/lib/x86_64-linux-gnu/libvirt/connection-driver")
DRIVER = "libvirt_driver_libxl.so"
HEADERS = Path("/usr/include/libxl.h")
STARTING = 60.0  # seconds
CONF = 'unix_sock_dir = "{folder}"\nauth_unix_rw = "none"\nauth_unix_ro = "none"\nlog_outputs = "2:file:{folder}/log"\n'
# No other driver is loaded, and nothing of the host's libvirt is touched.
INSIDE = """#!/bin/sh
set -e
for place in /run/libvirt /var/lib/libvirt /etc/libvirt /var/log/libvirt; do mkdir -p $place; mount -t tmpfs none $place; done
mount --bind {folder}/drivers {drivers}
LD_PRELOAD={folder}/stand_in.so exec /usr/sbin/libvirtd -f {folder}/conf -p {folder}/pid
"""


@pytest.fixture(scope="module")
def xen() -> Iterator[str]:
    """The URI of a libvirt that takes this host for one of Xen's."""
    libvirt_lab.check()
    lacks = [str(path) for path in (DRIVERS / DRIVER, HEADERS) if not path.exists()]
    if lacks:
        pytest.fail(f"not there: {', '.join(lacks)}; `scripts/prepare dev` installs what brings them")
    folder = Path(tempfile.mkdtemp(prefix="xen", dir="/tmp"))
    (folder / "drivers").mkdir()
    shutil.copy(DRIVERS / DRIVER, folder / "drivers")
    compiler = ["gcc", "-shared", "-fPIC", "-O1", "-o", str(folder / "stand_in.so"), str(STAND_IN), "-ldl"]
    done = subprocess.run(compiler, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    (folder / "conf").write_text(CONF.format(folder=folder))
    (folder / "inside").write_text(INSIDE.format(folder=folder, drivers=DRIVERS))
    words = ["unshare", "--mount", "--propagation", "private", "sh", str(folder / "inside")]
    with open(folder / "said", "wb") as said:
        daemon = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=said, stderr=said)
    uri = f"xen+unix:///system?socket={folder}/libvirt-sock"
    try:
        deadline = time.monotonic() + STARTING
        while virsh(uri, "version").returncode:
            assert daemon.poll() is None and time.monotonic() < deadline, (folder / "said").read_text()
            time.sleep(0.1)
        yield uri
    finally:
        daemon.kill()
        daemon.wait(10)
        shutil.rmtree(folder)


def virsh(uri: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["virsh", "-q", "-c", uri, *words], capture_output=True, text=True, timeout=STARTING, check=False
    )


@pytest.mark.parametrize("name", ["xen-pv", "xen-pvh", "xen-hvm", "xen-hvm-bios"])
def test_xens_driver_understands_every_kind_of_guest(xen: str, name: str) -> None:
    """`BELLJAR_GOLDEN=write` renews what it made of them."""
    done = virsh(xen, "domxml-to-native", "xen-xl", str(GOLDEN / f"{name}.xml"))
    assert done.returncode == 0, done.stderr
    text = done.stdout.strip() + "\n"
    if os.environ.get("BELLJAR_GOLDEN") == "write":
        (GOLDEN / f"{name}.xl").write_text(text)
    assert text == (GOLDEN / f"{name}.xl").read_text()


def test_its_driver_refuses_what_is_no_guest_of_xens(xen: str) -> None:
    done = virsh(xen, "domxml-to-native", "xen-xl", str(GOLDEN / "kvm.xml"))
    assert done.returncode != 0 and done.stderr
