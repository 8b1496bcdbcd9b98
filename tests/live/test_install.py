"""`scripts/install` under running jobs, in namespaces of its own: nothing of this host is changed, and only its processes are seen.
pip is a stand-in that copies the source tree."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.live.conftest import LONGEST, ROOT, STORE

PIP = """#!/bin/sh
while [ "$1" != --target ]; do shift; done
mkdir -p "$2" && cp -r src/belljar "$2/" && cp -r {libraries} "$2/"
"""
CHANGED, EMPTY = ("etc", "usr/local"), ("/var/lib", "/var/log", "/var/tmp", "/run")
NEEDED = ("h11",)


class Host:
    """A host of which only processes and those folders are its own."""

    def __init__(self, top: Path) -> None:
        self.top, self.source, self.prefix = top, top / "source", top / "prefix"
        self.store = top / "store"
        self.store.mkdir()
        mounts = [f"mount --bind {STORE} {self.store}"]
        for name in CHANGED:
            over = top / "over" / name
            (over / "upper").mkdir(parents=True), (over / "work").mkdir()
            os.chmod(over / "upper", 0o755)
            mounts.append(
                f"mount -t overlay -o lowerdir=/{name},upperdir={over}/upper,workdir={over}/work overlay /{name}"
            )
        mounts += [f"mount -t tmpfs none {name}" for name in EMPTY]
        words = " && ".join([*mounts, "rm -rf /etc/belljar", "echo ready", "exec sleep 3000"])
        self._init = subprocess.Popen(
            ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", words],
            stdout=subprocess.PIPE,
        )
        assert self._init.stdout is not None and self._init.stdout.readline() == b"ready\n"
        pid = self._init.pid
        (self._pid,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        for name in ("src", "scripts", "packaging"):
            shutil.copytree(ROOT / name, self.source / name, ignore=shutil.ignore_patterns("__pycache__"))
        pip = self.source / ".venv/bin/pip"
        pip.parent.mkdir(parents=True)
        packages = next((ROOT / ".venv/lib").glob("python3*/site-packages"))
        libraries = " ".join(str(packages / one) for one in NEEDED if (packages / one).exists())
        pip.write_text(PIP.format(libraries=libraries))
        pip.chmod(0o755)

    def argv(self, *words: str) -> list[str]:
        return ["nsenter", "-t", self._pid, "-m", "-p", *words]

    def __call__(self, *words: str, code: int = 0) -> str:
        done = subprocess.run(
            self.argv(*words), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LONGEST, check=False
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    def install(self) -> str:
        return self(str(self.source / "scripts/install"), str(self.prefix), "")

    def remove(self, *more: str, code: int = 0) -> str:
        return self(str(self.source / "scripts/install"), "--remove", str(self.prefix), *more, code=code)

    def versions(self) -> list[Path]:
        return sorted(self.prefix.glob("lib-*"))

    def close(self) -> None:
        self._init.send_signal(signal.SIGKILL)
        self._init.communicate(timeout=30)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    made = Host(tmp_path)
    yield made
    made.close()


@pytest.mark.slow
def test_an_upgrade_goes_under_running_jobs_and_an_uninstallation_names_them(host: Host, tmp_path: Path) -> None:
    host.install()
    (old,) = host.versions()
    folders = [f"BELLJAR_PATHS_{name}={tmp_path / name}" for name in ("RUN", "SCRATCH", "LOGS")]
    job = subprocess.Popen(
        host.argv(
            "env", *folders, f"BELLJAR_PATHS_STORE={host.store}", str(host.prefix / "bin/belljar"), "run", "--collect",
            "/etc/hostname", "--", "sh", "-c", "echo up; read line; exit 7",
        ),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert job.stdin is not None and job.stdout is not None and job.stdout.readline() == b"up\n"

    late = host.source / "src/belljar/guest/files.py"  # first used when a payload has ended
    text = late.read_text()
    late.write_text("raise ModuleNotFoundError('of the new version')\n")
    assert "stays: processes run from it" in host.install()
    assert old in host.versions() and len(host.versions()) == 2
    (id,) = os.listdir(tmp_path / "RUN/machines")
    told = host.remove(code=1)
    assert f"machine {id}" in told and host.versions()

    _, problem = job.communicate(b"\n", timeout=LONGEST)
    assert (job.returncode, problem) == (7, b"")
    late.write_text(text)
    host.install()
    assert old not in host.versions() and len(host.versions()) == 1

    host("mkdir", "-p", "/etc/belljar", "/var/log/belljar")
    told = host.remove()
    assert all(
        f"stays: {one}" in told for one in ("/etc/belljar", "/var/lib/belljar", "/var/log/belljar", "user belljar")
    )
    assert not host.prefix.exists()
    assert "removed: /var/lib/belljar" in host.remove("--purge")
    host("sh", "-c", "! ls -d /etc/belljar /var/*/belljar /usr/local/bin/belljar && ! getent passwd belljar")
