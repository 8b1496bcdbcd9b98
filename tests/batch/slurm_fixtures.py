"""A Slurm with belljar installed as its guide says, and jobs of ordinary users on it."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.batch.lab.site import Site
from tests.batch.lab.slurm import Slurm

IMAGE = "debian12"
VM = f"--comment=vm={IMAGE}"
SETTINGS = """grace = 3
retry_delay = 1
retries = 3
queue_images = ["night=debian12"]
"""
PARTITIONS = (
    "batch Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=2",
    "night Nodes=ALL MaxTime=60 DefaultTime=30 State=UP",
)


@dataclass(frozen=True)
class Ended:
    """A job that is over: what Slurm says of it, and its two files."""

    job: str
    state: str
    exit: str  # CODE:SIGNAL
    out: bytes
    err: bytes
    record: dict[str, str]


class Cluster:
    """Slurm and belljar on one machine. Jobs are submitted from the user's home."""

    def __init__(
        self, name: str, settings: str = SETTINGS, sections: dict[str, str] | None = None, **lab: object
    ) -> None:
        self.site = Site(name)
        self.site.configure(settings, **(sections or {}))
        self.lab = Slurm(self.site.top / "slurm", partitions=PARTITIONS, **lab)  # type: ignore[arg-type]

    def up(self) -> Cluster:
        self.lab.up()
        self.belljar("batch", "install", "slurm", "--folder", str(self.lab.etc), "--prefix", str(self.site.top))
        return self

    def close(self) -> None:
        self.lab.down()
        self.site.close()

    def belljar(self, *words: str, user: str | None = None, check: bool = True) -> bytes:
        done = self.site.command(*words, user=user, check=check, env=self.lab.env)
        return done.stdout if check else done.stdout + done.stderr

    def reconfigure(self, settings: str = SETTINGS, **sections: str) -> None:
        """Other settings of the site, for slurmctld's plugin too, which it reads again when that is a second newer."""
        self.site.configure(settings, **sections)
        self.belljar("batch", "install", "slurm", "--folder", str(self.lab.etc), "--prefix", str(self.site.top))
        later = time.time() + 1
        os.utime(self.lab.etc / "job_submit.lua", (later, later))

    @contextmanager
    def other_settings(self, settings: str = SETTINGS, **sections: str) -> Iterator[None]:
        """`reconfigure` for a while."""
        try:
            self.reconfigure(settings, **sections)
            yield
        finally:
            self.reconfigure()

    # ------------------------------------------------------------------ jobs

    def script(self, text: str, name: str = "job.sh", user: str = "bjalice") -> Path:
        """A script in the user's home. Without an interpreter it is sh's."""
        path = self.site.home(user) / name
        path.write_text(text if text.startswith("#!") else f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        os.chown(path, self.site.home(user).stat().st_uid, -1)
        return path

    def sbatch(self, text: str, *options: str, args: tuple[str, ...] = (), user: str = "bjalice", **more: object):  # type: ignore[no-untyped-def]
        """`sbatch`, whatever becomes of it; output goes to JOB.out and JOB.err in the user's home."""
        path = self.script(text, user=user)
        files = ("--output=%A.%a.out", "--error=%A.%a.err") if any(o.startswith("--array") for o in options) else (
            "--output=%j.out", "--error=%j.err")  # fmt: skip
        env = {**self.lab.env, **more.pop("env", {})}  # type: ignore[dict-item]
        words = ("sbatch", "--parsable", *files, *options, str(path), *args)
        return self.site.run(*words, user=user, check=False, env=env, **more)  # type: ignore[arg-type]

    def submit(self, text: str, *options: str, **more: object) -> str:
        """The new job's id."""
        done = self.sbatch(text, *options, **more)  # type: ignore[arg-type]
        assert done.returncode == 0, done.stderr
        return str(done.stdout.decode().strip())

    def end(self, job: str, user: str = "bjalice", timeout: float = 240) -> Ended:
        record = self.lab.ended(job, timeout)
        out, err = (self.read(f"{job}.{kind}", user) for kind in ("out", "err"))
        return Ended(job, record["JobState"], record["ExitCode"], out, err, record)

    def read(self, name: str, user: str = "bjalice") -> bytes:
        path = self.site.home(user) / name
        return path.read_bytes() if path.exists() else b""

    def run(self, text: str, *options: str, timeout: float = 240, **more: object) -> Ended:
        """Submit, and wait for the end."""
        return self.end(self.submit(text, *options, **more), timeout=timeout)  # type: ignore[arg-type]

    def started(self, job: str, sign: bytes = b"started", user: str = "bjalice", timeout: float = 120) -> None:
        """Until the payload has said so."""
        self.lab.until(lambda: sign in self.read(f"{job}.out", user), f"job {job} said {sign!r}", timeout)

    def clean(self) -> None:
        """Nothing is left of any machine. What ends right now has its moment."""
        self.lab.until(lambda: not self.site.leftovers(), f"no leftovers: {self.site.leftovers()}", 15)

    def as_user(self, *words: str, user: str = "bjalice", check: bool = True) -> str:
        done = self.site.run(*words, user=user, check=check, env=self.lab.env)
        return done.stdout.decode() + ("" if check else done.stderr.decode())


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """Two nodes, two cpus each."""
    made = Cluster(f"slurm-{request.module.__name__.rpartition('_')[2]}", nodes=2)
    try:
        yield made.up()
    finally:
        made.close()


def words(*argv: str) -> str:
    return shlex.join(argv)
