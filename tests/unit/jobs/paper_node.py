"""A node on paper: settings with `paths.node`, two users whose machines are made by claiming them, a batch system that
answers what the test says."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import belljar.cli.batch.batch  # noqa: F401 - it reads which systems there are, before tests put another there
from belljar.assembly import Runtime
from belljar.batch import Settings
from belljar.batch.job.terms import Ending, Job, Surroundings, Verdict
from belljar.batch.slurm.site import SITE
from belljar.errors import NotInAJob
from belljar.host.privileges import User, as_user
from belljar.machine.life.claim import claim
from belljar.model import MIB, Account, MachineSpec, Outcome, Payload, Request, RunPayload

ALICE = User(65534, 65534, "nobody", "/nonexistent")
BOB = User(2, 2, "bin", "/bin")

# A supervisor that lives: it claims a machine and sleeps; with a word, deaf to what it is asked.
KEEPER = """
import json, os, signal, sys, time
sys.path[:] = json.loads(sys.argv[1])
from pathlib import Path
from tests.unit.jobs.paper_node import request_for
from belljar.machine import Folders
from belljar.machine.life.claim import claim
run, scratch, store, logs = map(Path, json.loads(sys.argv[2]))
life = claim(request_for(sys.argv[3], sys.argv[4]), Folders(run, scratch, store, logs), lambda point: None)
print("ready", flush=True)
time.sleep(600)
"""


def request_for(id: str, requester: str, alias: str = "") -> Request:
    payload = Payload((b"true",), Account("nobody", 65534, 65534, "nogroup"))
    labels = (("alias", alias), ("queue", "night")) if alias else (("queue", "night"),)
    spec = MachineSpec("debian12", 1, 64 * MIB)
    return Request(
        id, spec, RunPayload(payload), name=requester, requester=requester, created=time.time(), labels=labels
    )


@dataclass
class PaperDialect:
    """A batch system that says what `said` holds; its commands are `true`, `false` and `echo`."""

    name: str = "slurm"
    said: bytes | None = b""  # None: the system cannot be reached
    given: dict[str, list[str]] = field(default_factory=dict)  # devices of each job
    closed: Path | None = None  # this file is made when the node is closed, and goes when it is opened

    def read(self, here: Surroundings) -> Job:
        raise NotInAJob("paper")

    def tell(self, job: Job, verdict: Verdict, outcome: Outcome, tries: int, settings: Settings) -> Ending:
        return Ending()

    def count(self, job: Job) -> tuple[str, ...]:
        return ()

    def counted(self, job: Job, printed: bytes) -> Job:
        return job

    def devices(self, env: Mapping[str, str]) -> dict[str, list[str]]:
        return self.given

    def alive(self) -> tuple[str, ...]:
        return ("/bin/false",) if self.said is None else ("/bin/echo", self.said.decode())

    def living(self, printed: bytes) -> frozenset[str]:
        if printed.strip() == b"nonsense":
            raise ValueError("no list of jobs")
        return frozenset(printed.decode().split())

    def close_node(self, node: str, reason: str) -> tuple[tuple[str, ...], ...]:
        return (("/bin/sh", "-c", 'printf %s "$2" >"$1"', "-", str(self.closed), f"{node}: {reason}"),)

    def open_node(self, node: str) -> tuple[tuple[str, ...], ...]:
        return (("rm", "-f", str(self.closed)),)

    def why_closed(self, node: str) -> tuple[str, ...]:
        return ("/bin/sh", "-c", 'cat "$1" 2>/dev/null || true', "-", str(self.closed))

    def closed_by_us(self, printed: bytes) -> bool:
        return b"belljar:" in printed

    def epilog(self, env: Mapping[str, str], argv: tuple[str, ...]) -> tuple[str, str]:
        if not argv:
            raise NotInAJob("no job")
        return argv[0], argv[1]


@dataclass
class Node:
    """`runtime` is root's, with the site's settings."""

    folder: Path
    dialect: PaperDialect = field(default_factory=PaperDialect)
    keepers: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.node = self.folder / "node"
        self.node.mkdir(mode=0o711)
        self.node.chmod(0o711)
        self.config = self.folder / "site.toml"
        self.configure()
        self.dialect.closed = self.folder / "closed"

    def configure(self, batch: str = "") -> None:
        # Root's own folders are the test's too; a user's lie below the node's, for a site gives none of them by name.
        self.config.write_text(f'[paths]\nnode = "{self.node}"\n[batch]\n{batch}\n')
        self.config.chmod(0o644)

    @property
    def runtime(self) -> Runtime:
        return Runtime(str(self.config))

    def prolog(self, user: User) -> None:
        from belljar.jobs.node import make_folder

        make_folder(self.runtime, user)

    def ended(
        self,
        user: User,
        id: str,
        requester: str,
        outcome: Mapping[str, Any] | None,
        *,
        alias: str = "",
        abandoned: bool = False,
    ) -> None:
        """A machine of this user's that ended with this outcome; abandoned: its supervisor died and left it."""
        self.prolog(user)
        folders = self.runtime.of_user(user.uid, user.home).folders

        def make() -> bytes:
            life = claim(request_for(id, requester, alias), folders, lambda point: None)
            if outcome is not None:
                (life.folder / "outcome.json").write_text(json.dumps({"id": id, "ended": time.time(), **outcome}))
            if not abandoned:
                (life.folder / "lock").unlink()
                life.folder.rename(folders.ended(id))
            life.release()
            return b""

        as_user(user, make, timeout=10, what="make a machine")

    def living(self, user: User, id: str, requester: str) -> subprocess.Popen[bytes]:
        """A machine whose supervisor lives and does not answer."""
        self.prolog(user)
        folders = self.runtime.of_user(user.uid, user.home).folders
        paths = json.dumps([str(one) for one in (folders.run, folders.scratch, folders.store, folders.logs)])
        keeper = subprocess.Popen(
            [sys.executable, "-c", KEEPER, json.dumps(sys.path), paths, id, requester],
            user=user.uid, group=user.gid, extra_groups=[], stdout=subprocess.PIPE, cwd="/",
        )  # fmt: skip
        self.keepers.append(keeper)
        assert keeper.stdout is not None
        assert keeper.stdout.readline() == b"ready\n"
        return keeper

    def close(self) -> None:
        for keeper in self.keepers:
            keeper.kill()
            keeper.wait()
            assert keeper.stdout is not None
            keeper.stdout.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def make_node() -> Node:
    """In a folder that every user may enter."""
    folder = Path(tempfile.mkdtemp(prefix="belljar-node-", dir="/var/tmp"))
    folder.chmod(0o755)
    return Node(folder)


def paper_system(node: Node) -> SimpleNamespace:
    """Slurm, that talks as the node's dialect does."""
    return SimpleNamespace(
        name="slurm",
        title="Slurm",
        dialect=node.dialect,
        site=SITE,
        node_variable="SLURMD_NODENAME",
        untried="",
    )
