"""A Grid Engine with belljar installed as its guide says, and a second queue beside it that knows nothing of belljar.

Test modules import `cell`.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.batch.lab.gridengine import CELL, ROOT, GridEngine, until
from tests.batch.lab.site import Site

IMAGE = "debian12"
IN_MACHINE = ("-q", "all.q", "-l", f"vm_image={IMAGE}")
WITH_BELLJAR, WITHOUT = ("-q", "all.q"), ("-q", "plain.q")
SETTINGS = """grace = 3
retry_delay = 2
retries = 2
node_faults = 0
allow = ["* debian*", "user:bjbob special"]
max_cpus = 4
"""


@dataclass(frozen=True)
class Ended:
    """A job that is over: its last row of the accounting, and its two files."""

    job: str
    row: dict[str, str]
    rows: list[dict[str, str]]
    out: bytes
    err: bytes

    @property
    def exit(self) -> int:
        return int(self.row["exit_status"].split()[0])

    @property
    def failed(self) -> int:
        return int(self.row["failed"].split()[0])


class Cell:
    """The site, its Grid Engine, and jobs on it."""

    def __init__(self, name: str, settings: str = SETTINGS) -> None:
        self.site = Site(name)
        self.site.configure(settings)
        self.lab = GridEngine(self.site, slots=4)
        try:
            self.lab.add_queue("plain.q")
            self.install()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self.lab.close()
        self.site.close()

    def install(self) -> None:
        folder = str(ROOT / CELL / "common")
        self.belljar(
            "batch", "install", "gridengine", "--queue", "all.q", "--folder", folder, "--prefix", str(self.site.top)
        )

    def belljar(self, *words: str, user: str = "", check: bool = True) -> subprocess.CompletedProcess[bytes]:
        """The command on the node."""
        return self.lab.run(
            str(self.site.belljar), "--config", str(self.site.config), *words, user=user, check=check, timeout=120
        )

    # -- jobs ----------------------------------------------------------------------------------------------------------

    def script(self, text: str, name: str = "job.sh", user: str = "bjalice") -> str:
        path = self.site.home(user) / name
        path.write_text(text if text.startswith("#!") else f"#!/bin/bash\n{text}\n")
        path.chmod(0o755)
        os.chown(path, path.parent.stat().st_uid, -1)
        return str(path)

    def submit(self, text: str, *options: str, args: tuple[str, ...] = (), user: str = "bjalice", **env: str) -> str:
        """A script's job; its output goes to o.JOB[.TASK] and e.JOB[.TASK] in the home."""
        return self.qsub(*options, self.script(text, user=user), *args, user=user, **env)

    def qsub(self, *words: str, user: str = "bjalice", **env: str) -> str:
        home = self.site.home(user)
        is_array = "-t" in words
        files = (
            "-o",
            f"{home}/o.$JOB_ID" + (".$TASK_ID" if is_array else ""),
            "-e",
            f"{home}/e.$JOB_ID" + (".$TASK_ID" if is_array else ""),
        )
        return self.lab.submit("-cwd", *files, *words, user=user, **env)

    def out(self, job: str, user: str = "bjalice", kind: str = "o") -> bytes:
        path = self.site.home(user) / f"{kind}.{job}"
        return path.read_bytes() if path.exists() else b""

    def started(self, job: str, sign: bytes = b"started", timeout: float = 90, user: str = "bjalice") -> None:
        """The payload has said *sign*."""
        until(lambda: sign in self.out(job, user), f"{sign!r} of job {job}", timeout=timeout)

    def ended(self, job: str, *, timeout: float = 120, rows: int = 1, user: str = "bjalice") -> Ended:
        number, _, task = job.partition(".")
        until(lambda: self.lab.state(number) == "", f"the end of job {job}", timeout=timeout, every=0.3)
        found = self.lab.account(number, task=task, rows=rows)
        return Ended(job, found[-1], found, self.out(job, user), self.out(job, user, "e"))

    def run(self, text: str, *options: str, timeout: float = 120, **more: Any) -> Ended:
        return self.ended(self.submit(text, *options, **more), timeout=timeout, user=more.get("user", "bjalice"))

    def both(self, text: str, *options: str, **more: Any) -> tuple[Ended, Ended]:
        """The same job in a machine and without belljar."""
        first = self.submit(text, *options, *IN_MACHINE, **more)
        second = self.submit(text, *options, *WITHOUT, **more)
        return self.ended(first), self.ended(second)

    # -- what is seen of them --------------------------------------------------------------------------------------------

    def error_reason(self, job: str) -> str:
        found = re.search(r"(?m)^error reason\s+\d+:\s*(.*)$", self.lab.detail(job))
        return found[1] if found else ""

    def context(self, job: str) -> str:
        found = re.search(r"(?m)^context:\s*(.*)$", self.lab.detail(job))
        return found[1] if found else ""

    def pids(self, job: str) -> dict[str, int]:
        """The wrapper ("wrap") and QEMU ("qemu") of a running job."""
        name = job if "." in job else f"{job}.1"
        folder = self.lab.spool / "execd/bjge/active_jobs" / name
        pid = int((folder / "job_pid").read_text())
        threads = Path(f"/proc/{pid}/task").iterdir()
        children = [one for thread in threads for one in (thread / "children").read_text().split()]
        qemu = [int(one) for one in children if "qemu" in Path(f"/proc/{one}/comm").read_text()]
        return {"wrap": pid, **({"qemu": qemu[0]} if qemu else {})}

    def clean(self) -> None:
        """Nothing of any machine is left over. What ends right now has its moment."""
        until(lambda: not self.site.leftovers(), f"no leftovers: {self.site.leftovers()}", timeout=15)


def make(request: pytest.FixtureRequest) -> Iterator[Cell]:
    made = Cell("ge-" + request.module.__name__.rpartition("_")[2])
    try:
        yield made
    finally:
        made.close()


cell = pytest.fixture(scope="module")(make)
