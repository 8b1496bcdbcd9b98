"""A site that leases machines: a Slurm, a lease service, and the `belljar` command as owners on that host call it."""

from __future__ import annotations

import json
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.batch.lab.slurm import Slurm
from tests.live.conftest import Belljar
from tests.roots import STATE

from belljar.host.locks import locked

IMAGE = "debian12-ssh"
PATIENCE = 120.0
SETTINGS = """
[lease]
address = "127.0.0.1"
listen = "127.0.0.1"
port = {port}
ec2_listen = ""
jobs = "{folder}/jobs"
door = "{folder}/door"
pilot = "{folder}/belljar"
images = ["debian12*"]
types = {{ small = "1/512M/8G" }}
networks = {{ none = "none" }}
cycle = 1
grace = 3
staging = 120
barrier = 30
silence = 5
heartbeat = 1
unseen = 5
margin = 10
notice = 5
overhead = "256M"
{more}

[policy.all]
users = ["*"]
"""


class LeaseSite:
    """Begun by `up`. *more*: lines of [lease]."""

    def __init__(self, nodes: int = 1, more: str = "") -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="bj-lease-", dir="/tmp"))
        self.folder.chmod(0o755)
        self.lab = Slurm(self.folder / "slurm", nodes=nodes)
        self.belljar = Belljar(self.folder)
        self.more = more
        self.log = self.folder / "service.log"
        self._service: subprocess.Popen[bytes] | None = None

    def up(self) -> LeaseSite:
        with_server(self.belljar)
        self.lab.up()
        names = [name for name in self.belljar.env if name.startswith("BELLJAR_")]
        exports = "".join(f"export {name}={shlex.quote(self.belljar.env[name])}\n" for name in names)
        wrapper = self.folder / "belljar"
        wrapper.write_text(f'#!/bin/sh\n{exports}exec {sys.executable} -I -m belljar "$@"\n')
        wrapper.chmod(0o755)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        (self.folder / "lease.toml").write_text(SETTINGS.format(port=port, folder=self.folder, more=self.more))
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.folder / "id"], check=True)
        self.start()
        return self

    def start(self) -> None:
        """The service; what it says is in `log`."""
        words = ("lease", "serve", str(self.folder / "lease.toml"), "--state", str(self.folder / "state"))
        env = {**self.belljar.env, **self.lab.env}
        with open(self.log, "ab") as log:
            self._service = subprocess.Popen(self.belljar.argv(*words), env=env, stdout=log, stderr=log)
        self.until(lambda: (self.folder / "door").exists() and self.knocks(), "the service answers")

    def knocks(self) -> bool:
        with socket.socket(socket.AF_UNIX) as door:
            return door.connect_ex(str(self.folder / "door")) == 0

    def kill_service(self) -> None:
        assert self._service is not None
        self._service.send_signal(signal.SIGKILL)
        self._service.wait()
        (self.folder / "door").unlink(missing_ok=True)

    def __call__(self, *words: str, check: bool = True, timeout: float = PATIENCE) -> str:
        """`belljar lease`, by its door."""
        verb, *others = words
        done = self.belljar("lease", verb, "--door", str(self.folder / "door"), *others, timeout=timeout)
        assert not check or done.returncode == 0, f"{done.stderr.decode()}\n{self.story()}"
        return (done.stdout if check else done.stdout + done.stderr).decode()

    def run(self, *words: str) -> str:
        """A new lease's id."""
        answer = json.loads(self("run", *words, "--key", str(self.folder / "id.pub"), "--format", "json"))
        return str(answer["lease"])

    def status(self, lease: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        found = json.loads(self("status", lease, "--format", "json"))
        return found["leases"][0], found["machines"]

    def ssh(self, machine: str, *command: str) -> str:
        return self("ssh", "-i", str(self.folder / "id"), machine, "--", *command)

    def is_running(self, lease: str) -> bool:
        found, machines = self.status(lease)
        assert found["state"] in ("requested", "queued", "claiming", "active"), f"{found}\n{self.story()}"
        return {one["state"] for one in machines} == {"running"}

    def state(self, lease: str) -> str:
        return str(self.status(lease)[0]["state"])

    def until(self, what: Callable[[], object], text: str, limit: float = PATIENCE) -> None:
        end = time.monotonic() + limit
        while not what():
            assert time.monotonic() < end, f"waited {limit:.0f} s until {text}\n{self.story()}"
            time.sleep(0.2)

    def until_nothing_is_left(self) -> None:
        """No machine, no job, no file with a key."""
        self.until(lambda: not self.belljar.leftovers() and not self.jobs(), "nothing is left")

    def jobs(self) -> list[str]:
        return self.lab.text("squeue", "-h", "-o", "%A").split()

    def pilots(self) -> list[int]:
        """Processes."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    words = (entry / "cmdline").read_bytes().split(b"\0")
                except OSError:
                    continue
                if (
                    b"pilot" in words
                    and any(str(self.folder).encode() in word for word in words)
                    and b"python" in words[0]
                ):
                    found.append(int(entry.name))
        return found

    def story(self) -> str:
        """What the service and the pilots said."""
        texts = [self.log.read_text()[-6000:]] if self.log.exists() else []
        texts += [f"{one.name}:\n{one.read_text()[-3000:]}" for one in sorted((self.folder / "jobs").glob("*.log"))]
        return "\n".join(texts)

    def close(self) -> None:
        if self._service is not None and self._service.poll() is None:
            self._service.terminate()
            self._service.wait(20)
        self.lab.down()
        self.belljar.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def with_server(belljar: Belljar) -> None:
    """The image is in the store: Debian with an ssh server."""
    STATE.mkdir(parents=True, exist_ok=True)
    with locked(STATE / f"{IMAGE}.lock", timeout=1800, what="the image with an ssh server"):
        if IMAGE not in belljar("image", "list").stdout.decode().split():
            words = ("--name", IMAGE, "--packages", "openssh-server")
            done = belljar("image", "build", "debian", *words, timeout=1800)
            assert done.returncode == 0, done.stderr.decode()
