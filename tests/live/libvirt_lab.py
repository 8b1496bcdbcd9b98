"""A libvirt daemon of the tests' own: configuration, state and sockets under one folder, in a mount namespace of its own.

Nothing of the host's libvirt is touched, and none needs to run.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

import pytest

PROGRAMS = ("libvirtd", "virsh", "unshare")
STARTING = 60.0  # seconds; the first start asks QEMU what it can do
PLACES = {"etc": "/etc/libvirt", "run": "/run/libvirt", "lib": "/var/lib/libvirt", "log": "/var/log/libvirt", "cache": "/var/cache/libvirt"}  # fmt: skip
ENDING = 5.0
USER = "libvirt-qemu"  # libvirt wants it to exist, though no guest runs as it
DAEMON_CONF = """unix_sock_dir = "{folder}/sock"
auth_unix_rw = "none"
auth_unix_ro = "none"
log_outputs = "2:file:{folder}/daemon.log"
"""
QEMU_CONF = """security_driver = "none"
user = "root"
group = "root"
cgroup_controllers = [ ]
namespaces = [ ]
remember_owner = 0
stdio_handler = "file"
"""


def check() -> None:
    """Root alone can have a libvirt of its own. What is not installed is no reason to go on without."""
    if os.geteuid() != 0:
        pytest.skip("a libvirt of the tests' own is run by root")
    lacks = [name for name in PROGRAMS if shutil.which(name, path=os.environ["PATH"] + ":/usr/sbin:/sbin") is None]
    if find_spec("libvirt") is None:
        lacks.append("libvirt-python")
    if lacks:
        pytest.fail(f"not installed: {', '.join(lacks)}; `scripts/prepare dev` does that")


class Daemon:
    """One libvirtd, which may be ended, stopped and started again over the same state."""

    _keepers: tuple[subprocess.Popen[bytes], ...] = ()  # those that were started here

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in (*PLACES, "sock"):
            (folder / name).mkdir()
        (folder / "libvirtd.conf").write_text(DAEMON_CONF.format(folder=folder))
        (folder / "etc/qemu.conf").write_text(QEMU_CONF)
        for name in ("passwd", "group"):
            text = Path("/etc", name).read_text()
            known = any(line.startswith(f"{USER}:") for line in text.splitlines())
            extra = (
                "" if known else f"{USER}:x:64055:64055::/:/bin/false\n" if name == "passwd" else f"{USER}:x:64055:\n"
            )
            (folder / name).write_text(text + extra)
        mounts = [f"mkdir -p {target}; mount --bind {folder}/{name} {target}" for name, target in PLACES.items()]
        mounts += [f"mount --bind {folder}/{name} /etc/{name}" for name in ("passwd", "group")]
        daemon = f"exec /usr/sbin/libvirtd -f {folder}/libvirtd.conf -p {folder}/pid"
        script = "\n".join(["#!/bin/sh", "set -e", *mounts, daemon, ""])
        (folder / "inside").write_text(script)
        (folder / "inside").chmod(0o755)

    @property
    def driver(self) -> str:
        return f"libvirt:qemu+unix:///system?socket={self.folder}/sock/libvirt-sock"

    @property
    def uri(self) -> str:
        return self.driver.removeprefix("libvirt:")

    @property
    def settings(self) -> dict[str, str]:
        """For the environment of a `belljar`."""
        return {
            "BELLJAR_MACHINE_HYPERVISOR": self.driver,
            "BELLJAR_QEMU_USER": "root",
            "BELLJAR_NETWORK_EGRESS": "open",  # libvirt has no guard
            "BELLJAR_LIBVIRT_LOG_FOLDER": str(self.folder / "log/qemu"),
        }

    @property
    def pid(self) -> int:
        return int((self.folder / "pid").read_text())

    def start(self) -> None:
        """It answers when this returns."""
        with open(self.folder / "start.log", "ab") as log:
            words = [sys.executable, str(Path(__file__)), str(self.folder)]
            process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/", start_new_session=True, close_fds=True
            )
        self._keepers = (*self._keepers, process)
        deadline = time.monotonic() + STARTING
        while not self.answers():
            assert process.poll() is None, (self.folder / "start.log").read_text() + self.log()
            assert time.monotonic() < deadline, "libvirtd does not answer"
            time.sleep(0.05)

    def answers(self) -> bool:
        try:
            with socket.socket(socket.AF_UNIX) as line:
                line.connect(str(self.folder / "sock/libvirt-sock"))
        except OSError:
            return False
        done = subprocess.run(["virsh", "-q", "-c", self.uri, "list", "--name"], capture_output=True, check=False)
        return done.returncode == 0

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def end(self) -> None:
        with suppress(OSError, ValueError):
            os.kill(self.pid, signal.SIGKILL)
        (self.folder / "pid").unlink(missing_ok=True)
        (self.folder / "sock/libvirt-sock").unlink(missing_ok=True)

    def close(self) -> None:
        """End it, and wait for its keepers, which end when all that it started has ended."""
        self.end()
        for keeper in self._keepers:
            try:
                keeper.wait(ENDING)
            except subprocess.TimeoutExpired:
                keeper.kill()
                keeper.wait()

    def restart(self) -> None:
        self.end()
        self.start()

    def virsh(self, *words: str) -> str:
        done = subprocess.run(
            ["virsh", "-q", "-c", self.uri, *words], capture_output=True, check=False, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def names(self) -> list[str]:
        """The domains it knows."""
        return self.virsh("list", "--all", "--name").split()

    def log(self) -> str:
        path = self.folder / "daemon.log"
        return path.read_text(errors="replace")[-4000:] if path.exists() else ""


@contextmanager
def running() -> Iterator[Daemon]:
    """A daemon in a folder with a short path: those of its sockets have a limit."""
    check()
    folder = Path(tempfile.mkdtemp(prefix="lv", dir="/tmp"))
    folder.chmod(0o711)
    daemon = Daemon(folder)
    try:
        daemon.start()
        yield daemon
    finally:
        daemon.close()
        shutil.rmtree(folder, ignore_errors=True)


def keep(folder: str) -> None:
    """The daemon, with a parent that reaps its orphans at once: an init that is slow to do so delays each domain's end,
    for libvirt waits until the process is gone."""
    import ctypes

    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
    subprocess.Popen(["unshare", "--mount", "--propagation", "private", f"{folder}/inside"])
    with suppress(ChildProcessError):
        while True:
            os.wait()


if __name__ == "__main__":
    keep(*sys.argv[1:])
