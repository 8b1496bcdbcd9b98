"""A site that leases machines: a batch system, a lease service, and the `belljar` command as owners on that host call it.

`LeaseSite` has a Slurm; gridengine_lease.py beside this has a Grid Engine."""

from __future__ import annotations

import json
import pwd
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from tests.batch.lab.slurm import Slurm
from tests.live.conftest import Belljar
from tests.roots import STATE

from belljar.host.locks import locked

IMAGE = "debian12-ssh"
PATIENCE = 120.0
SETTINGS = """
[lease]
address = "{address}"
listen = "{address}"
port = {port}
ec2_listen = "{ec2}"
jobs = "{folder}/jobs"
door = "{door}"
pilot = "{folder}/belljar"
images = ["debian12*"]
types = {{ small = "1/512M/8G" }}
networks = {{ {network} = "{network}", private = "private" }}
cycle = 1
grace = 3
staging = 120
barrier = 30
silence = 5
heartbeat = 1
unseen = 5
margin = 10
notice = {notice}
overhead = "256M"
{more}

[policy.all]
users = ["*"]
{policy}
"""


class Leasing:
    """Begun by `up`. *more*: lines of [lease]; *policy*: of the policy of everybody; *address*: the service's, where nodes reach it."""

    def __init__(self, more: str = "", policy: str = "", address: str = "127.0.0.1") -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="bj-lease-", dir="/tmp"))
        self.folder.chmod(0o755)
        self.belljar = Belljar(self.folder)
        self.more, self.policy, self.address, self.door = more, policy, address, self.folder / "door"
        self.network, self.ec2 = "none", ""  # what machines get; ADDRESS:PORT
        self.notice = 5  # seconds
        self.log = self.folder / "service.log"
        self._service: subprocess.Popen[bytes] | None = None

    # -- what each batch system has its own of -------------------------------------------------------------------------

    def begin(self) -> None:
        """The batch system is up."""
        raise NotImplementedError

    def launch(self, *words: str) -> subprocess.Popen[bytes]:
        """The service, its words in `log`."""
        raise NotImplementedError

    def jobs(self) -> list[str]:
        raise NotImplementedError

    def command(self) -> tuple[dict[str, str], str]:
        """Variables and words of `belljar` as nodes have it."""
        own = {name: value for name, value in self.belljar.env.items() if name.startswith("BELLJAR_")}
        return own, f"{sys.executable} -I -m belljar"

    def left(self) -> list[str]:
        return self.belljar.leftovers()

    # -- what they have in common --------------------------------------------------------------------------------------

    def up(self) -> Self:
        with_server(self.belljar)
        self.begin()
        variables, command = self.command()
        exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in variables.items())
        wrapper = self.folder / "belljar"
        wrapper.write_text(f'#!/bin/sh\n{exports}exec {command} "$@"\n')
        wrapper.chmod(0o755)
        facts = {"address": self.address, "port": free_port(), "folder": self.folder, "door": self.door}
        facts |= {"network": self.network, "ec2": self.ec2, "notice": self.notice}
        text = SETTINGS.format(**facts, more=self.more, policy=self.policy)
        (self.folder / "lease.toml").write_text(text)
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.folder / "id"], check=True)
        self.start()
        return self

    @contextmanager
    def running(self) -> Iterator[Self]:
        """It is up, and gone afterwards."""
        try:
            yield self.up()
        finally:
            self.close()

    def start(self) -> None:
        """The service; what it says is in `log`."""
        words = ("lease", "serve", str(self.folder / "lease.toml"), "--state", str(self.folder / "state"))
        self._service = self.launch(*words)
        self.until(lambda: self.door.exists() and self.knocks(), "the service answers")

    def knocks(self) -> bool:
        with socket.socket(socket.AF_UNIX) as door:
            return door.connect_ex(str(self.door)) == 0

    def kill_service(self) -> None:
        assert self._service is not None
        self._service.send_signal(signal.SIGKILL)
        self._service.wait()
        self.door.unlink(missing_ok=True)

    def __call__(self, *words: str, check: bool = True, timeout: float = PATIENCE) -> str:
        """`belljar lease`, by its door."""
        verb, *others = words
        done = self.belljar("lease", verb, "--door", str(self.door), *others, timeout=timeout)
        assert not check or done.returncode == 0, f"{done.stderr.decode()}\n{self.story()}"
        return (done.stdout if check else done.stdout + done.stderr).decode()

    def knock(self, user: str, **asked: Any) -> dict[str, Any]:
        """What the service answers to that user of this host."""
        script = (
            "import socket, sys; door = socket.socket(socket.AF_UNIX); door.settimeout(30); door.connect(sys.argv[1]);"
            "door.sendall(sys.argv[2].encode() + b'\\n'); print(door.makefile().readline())"
        )
        account = pwd.getpwnam(user)
        words = (sys.executable, "-IS", "-c", script, str(self.door), json.dumps(asked))
        done = subprocess.run(
            words, user=account.pw_uid, group=account.pw_gid, extra_groups=(), cwd="/", capture_output=True, timeout=60
        )
        assert done.returncode == 0, done.stderr.decode()
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer

    def run(self, *words: str) -> str:
        """A new lease's id."""
        answer = json.loads(self("run", *words, "--key", str(self.folder / "id.pub"), "--format", "json"))
        return str(answer["lease"])

    def leased(self, *words: str) -> str:
        """A new lease for an hour, whose machines run."""
        return self.run(IMAGE, "--time", "1h", "--wait", "120s", *words)

    def give_back(self, lease: str) -> None:
        """It is released, and nothing is left."""
        self("release", lease)
        self.until(lambda: self.state(lease) == "released", "the lease is released")
        self.until_nothing_is_left()

    def status(self, lease: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        found = json.loads(self("status", lease, "--format", "json"))
        return found["leases"][0], found["machines"]

    def ssh(self, machine: str, *command: str) -> str:
        return self("ssh", "-i", str(self.folder / "id"), machine, "--", *command)

    def tried(self, machine: str, *command: str) -> str:
        """What it prints; "" where it is not reached."""
        words = ("ssh", "-i", str(self.folder / "id"), machine, "--", *command)
        done = self.belljar("lease", words[0], "--door", str(self.door), *words[1:], timeout=PATIENCE)
        return done.stdout.decode() if done.returncode == 0 else ""

    def is_running(self, lease: str) -> bool:
        found, machines = self.status(lease)
        assert found["state"] in ("requested", "queued", "claiming", "active"), f"{found}\n{self.story()}"
        return {one["state"] for one in machines} == {"running"}

    def state(self, lease: str) -> str:
        return str(self.status(lease)[0]["state"])

    def leases(self) -> list[str]:
        """Those that have not ended."""
        found = json.loads(self("status", "--format", "json"))["leases"]
        return [one["id"] for one in found if one["state"] in ("requested", "queued", "claiming", "active", "draining")]

    def until(self, what: Callable[[], object], text: str, limit: float = PATIENCE) -> None:
        end = time.monotonic() + limit
        while not what():
            assert time.monotonic() < end, f"waited {limit:.0f} s until {text}\n{self.story()}"
            time.sleep(0.2)

    def until_nothing_is_left(self) -> None:
        """No machine, no job, no file with a key."""
        self.until(
            lambda: not self.left() and not self.jobs() and not self.pilots() and not self.keys(), "nothing is left"
        )

    def keys(self) -> list[Path]:
        """Job files, which have one each."""
        return [one for one in (self.folder / "jobs").glob("belljar-r-*") if one.suffix != ".log"]

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
        self.end_service()
        self.belljar.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def end_service(self) -> None:
        if self._service is not None and self._service.poll() is None:
            self._service.terminate()
            self._service.wait(20)


class LeaseSite(Leasing):
    """With a Slurm of its own, *slurm* says which. All are root."""

    def __init__(self, nodes: int = 1, more: str = "", policy: str = "", **slurm: Any) -> None:
        super().__init__(more, policy)
        self.lab = Slurm(self.folder / "slurm", nodes=nodes, **slurm)

    def begin(self) -> None:
        self.lab.up()

    def launch(self, *words: str) -> subprocess.Popen[bytes]:
        with open(self.log, "ab") as log:
            env = {**self.belljar.env, **self.lab.env}
            return subprocess.Popen(self.belljar.argv(*words), env=env, stdout=log, stderr=log)

    def jobs(self) -> list[str]:
        return self.lab.text("squeue", "-h", "-o", "%A").split()

    def close(self) -> None:
        self.end_service()
        self.lab.down()
        super().close()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def with_server(belljar: Belljar) -> None:
    """The image is in the store: Debian with an ssh server."""
    STATE.mkdir(parents=True, exist_ok=True)
    with locked(STATE / f"{IMAGE}.lock", timeout=1800, what="the image with an ssh server"):
        if IMAGE not in belljar("image", "list").stdout.decode().split():
            words = ("--name", IMAGE, "--packages", "openssh-server")
            done = belljar("image", "build", "debian", *words, timeout=1800)
            assert done.returncode == 0, done.stderr.decode()
