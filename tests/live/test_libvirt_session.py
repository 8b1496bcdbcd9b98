"""Jobs by `qemu:///session`: the libvirt of an ordinary user, whom libvirt wants to find in the user database.

The first call starts its daemon, as the user's own process. The user is in a database of the tests' own, in a mount
namespace of each command's.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tests.live import libvirt_lab
from tests.live.conftest import ROOT, STORE, Belljar, command_line
from tests.live.test_libvirt import QUICK, SOON, is_a_node_fault, outcome

PLACE = Path("/var/tmp")
KILL, STOP = signal.SIGKILL, signal.SIGSTOP
LAUNCHER = """#!{python} -IS
import sys
sys.path.append("{lib}")
from belljar.cli import entry
entry()
"""
AS_USER = """#!/bin/sh
set -e
mount --bind {folder}/passwd /etc/passwd
mount --bind {folder}/group /etc/group
cd {home}
exec setpriv --reuid {uid} --regid {uid} --clear-groups "$@"
"""


class Session(Belljar):
    """`belljar` called by an ordinary user whose machines are his own libvirt's."""

    def __init__(self, folder: Path, uid: int) -> None:
        self.uid, self.home = uid, folder / "home"
        self._top = folder
        super().__init__(folder)
        own = PLACE / f"belljar-{uid}"
        self.run_folder, self.scratch = own / "run", own / "scratch"
        self.logs = self.home / ".local/share/belljar/logs"
        self.state = self.home / ".cache/libvirt"
        self.env = {
            "PATH": "/usr/bin:/bin",
            "HOME": str(self.home),
            "BELLJAR_PATHS_SITE_STORE": str(STORE),
            "BELLJAR_MACHINE_HYPERVISOR": "libvirt:qemu:///session",
            "BELLJAR_NETWORK_EGRESS": "open",
        }

    def argv(self, *words: str | bytes) -> list[str | bytes]:
        return self.as_user(str(self._top / "belljar"), *words)

    def as_user(self, *words: str | bytes) -> list[str | bytes]:
        return ["unshare", "--mount", "--propagation", "private", str(self._top / "as-user"), *words]

    @property
    def daemon(self) -> int:
        return int((self.state / "libvirtd.pid").read_text())

    def names(self) -> list[str]:
        """The domains the daemon knows."""
        words = self.as_user("virsh", "-q", "-c", "qemu:///session", "list", "--all", "--name")
        done = subprocess.run(words, env=self.env, capture_output=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout.decode().split()

    def end(self) -> None:
        self.close()
        for name in ("libvirtd.pid", "virtlogd.pid"):
            with suppress(OSError, ValueError):
                os.kill(int((self.state / name).read_text()), KILL)
        for folder in (self._top, PLACE / f"belljar-{self.uid}"):
            shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    """A user with belljar and the binding of libvirt, which he can read, and a home."""
    libvirt_lab.check()
    uid = 59_000 + os.getpid() % 1_000
    folder = PLACE / f"bjs{uid}"  # short: the daemon's sockets are below it
    shutil.copytree(ROOT / "src/belljar", folder / "lib/belljar", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("libvirt", "libvirtmod"):
        found = find_spec(name)
        assert found is not None and found.origin is not None
        shutil.copy(found.origin, folder / "lib")
    (folder / "home").mkdir(mode=0o700)
    os.chown(folder / "home", uid, uid)
    for name, line in (("passwd", f"jo:x:{uid}:{uid}::{folder}/home:/bin/sh"), ("group", f"jo:x:{uid}:")):
        (folder / name).write_text(Path("/etc", name).read_text() + line + "\n")
    (folder / "belljar").write_text(LAUNCHER.format(python=os.path.realpath(sys.executable), lib=folder / "lib"))
    (folder / "as-user").write_text(AS_USER.format(folder=folder, home=folder / "home", uid=uid))
    subprocess.run(
        ["chmod", "-R", "go+rX", str(folder / "lib"), str(folder / "passwd"), str(folder / "group")], check=True
    )
    for name in ("belljar", "as-user"):
        (folder / name).chmod(0o755)
    folder.chmod(0o755)
    session = Session(folder, uid)
    try:
        yield session
    finally:
        session.end()


@pytest.fixture
def belljar(session: Session) -> Iterator[Session]:
    yield session
    session.close()
    session.keepers.clear()


def nothing_is_left(belljar: Session) -> None:
    assert belljar.leftovers() == []
    assert list(Path("/var/lock").glob(f"LCK..*bjs{belljar.uid}_*")) == []
    deadline = time.monotonic() + SOON
    while (names := belljar.names()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert names == []


def logs(folder: Path) -> set[Path]:
    """libvirt's own, of machines. Daemons that were killed have left some, until later machines start."""
    return set(folder.glob("belljar-*"))


def next_job_works(belljar: Session, **options: Any) -> None:
    done = belljar.run("--", "echo", "next", **options)
    assert (done.returncode, done.stdout) == (0, b"next\n"), done.stderr
    nothing_is_left(belljar)


def running(belljar: Session, *words: str, **options: Any) -> subprocess.Popen[bytes]:
    keeper = belljar.popen("run", *words, "--", "sh", "-c", "echo up; exec sleep 1000", **options)
    assert keeper.stdout is not None and keeper.stdout.readline() == b"up\n", keeper.communicate(timeout=60)
    return keeper


def test_a_job_by_the_users_own_libvirt_is_the_same_job(belljar: Session) -> None:
    home = belljar.home
    (home / "shared").mkdir()
    (home / "in").write_bytes(b"\0in\xff")
    for path in (home / "shared", home / "in"):
        os.chown(path, belljar.uid, belljar.uid)
    before = logs(belljar.state / "qemu/log")
    script = (
        "cat in; echo err >&2; echo written > /mnt/file; id -u; df --output=target /scratch | tail -1;"
        " cat /sys/class/net/e*/operstate; exit 7"
    )
    done = belljar.run(
        "--report", "r", "--network", "user", "--share", "shared:/mnt:rw", "--scratch", "64M", "--in", "in:in",
        "--", "sh", "-c", script,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (7, b"err\n")
    assert done.stdout == b"\0in\xff%d\n/scratch\nup\n" % belljar.uid
    assert (home / "shared/file").stat().st_uid == belljar.uid
    told = outcome(home / "r")
    assert (told["start"], told["class"]) == ("cold", "payload")
    nothing_is_left(belljar)
    assert logs(belljar.state / "qemu/log") <= before


@pytest.mark.slow
def test_a_daemon_that_is_slow_to_be_done_with_a_machine_leaves_no_log_of_it(belljar: Session) -> None:
    before = logs(belljar.state / "qemu/log")
    keeper = running(belljar)
    os.kill(belljar.daemon, STOP)
    try:
        keeper.terminate()
        with pytest.raises(subprocess.TimeoutExpired):
            keeper.wait(4)
    finally:
        os.kill(belljar.daemon, signal.SIGCONT)
    assert keeper.wait(60) == -signal.SIGTERM
    nothing_is_left(belljar)
    assert logs(belljar.state / "qemu/log") <= before


def test_its_qemu_and_its_daemon_are_the_users(belljar: Session) -> None:
    keeper = running(belljar)
    try:
        (guest,) = belljar.domains()
        assert {os.stat(f"/proc/{pid}").st_uid for pid in (guest, belljar.daemon)} == {belljar.uid}
        assert "libvirtd\0" in command_line(belljar.daemon)
        done = belljar("doctor", "--only", "libvirt")
        assert done.returncode == 0 and b"answers at qemu:///session" in done.stdout, done.stdout
    finally:
        keeper.terminate()
        assert keeper.wait(60) == -signal.SIGTERM
    nothing_is_left(belljar)


@pytest.mark.parametrize("number", [KILL, pytest.param(STOP, marks=pytest.mark.slow)])
def test_a_session_daemon_that_is_lost_is_a_node_fault_and_the_next_job_has_a_new_one(
    belljar: Session, number: signal.Signals
) -> None:
    keeper = running(belljar, "--report", "r", env=QUICK)
    os.kill(belljar.daemon, number)
    _, err = keeper.communicate(timeout=90)
    is_a_node_fault(keeper, err, belljar.home / "r")
    with suppress(ProcessLookupError):
        os.kill(belljar.daemon, KILL)  # one that hangs is its user's to end
    next_job_works(belljar)


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["qemu", "virtlogd", "belljar"])
def test_whatever_else_is_killed_ends_the_job_or_is_not_missed(belljar: Session, victim: str) -> None:
    keeper = running(belljar, "--report", "r", env=QUICK)
    (guest,) = belljar.domains()
    if victim == "virtlogd":
        os.kill(int((belljar.state / "virtlogd.pid").read_text()), KILL)
        keeper.terminate()
        assert keeper.wait(60) == -signal.SIGTERM
    elif victim == "qemu":
        os.kill(guest, KILL)
        assert keeper.wait(60) == 125 and outcome(belljar.home / "r")["class"] != "payload"
    else:
        keeper.kill()
        keeper.wait(10)
        assert belljar("reap").returncode == 0
    next_job_works(belljar)


@pytest.mark.slow
def test_roots_session_is_the_systems_libvirt(tmp_path: Path) -> None:
    """libvirt knows no other; QEMU runs as the user the direct driver would choose, whatever that daemon's is."""
    with libvirt_lab.running() as daemon:
        conf = daemon.folder / "etc/qemu.conf"
        conf.write_text(conf.read_text().replace('"root"', f'"{libvirt_lab.USER}"'))
        daemon.restart()
        settings = daemon.settings | {"BELLJAR_MACHINE_HYPERVISOR": daemon.driver.replace("system", "session")}
        root = Belljar(tmp_path, settings=settings)
        try:
            done = root.run("--", "id", "-u")
            assert (done.returncode, done.stdout) == (0, b"0\n"), done.stderr
            assert root.leftovers() == [] and daemon.names() == [] and logs(daemon.folder / "log/qemu") == set()
        finally:
            root.close()
