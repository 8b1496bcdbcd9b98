"""A host with a bait of Grid Engine's: qmaster, execd and belljar in one set of namespaces, with a bridge. Its machines are real: Debian
with execd from its packages."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.batch.lab.gridengine import CELL, ENV, HOST, QUEUE, ROOT, GridEngine
from tests.batch.lab.pool import read
from tests.batch.lab.site import Site
from tests.batch.lab.worker import ADDRESS, PATIENCE, Installed, Worker, until
from tests.live.conftest import Belljar

from belljar.pool import NodeView
from belljar.pool.gridengine.nodes import GridEnginePool

IMAGE, BAIT = "gridengine-node-bookworm", f"{QUEUE}@{HOST}"
NODES_QUEUE = "belljar"  # of machines
NODES = {f"vm{last}": f"10.99.0.{last}" for last in range(10, 18)}
SETTINGS = """[bait]
system = "gridengine"
name = "{bait}"
queue = "{queue}"
images = ["{image}"]
networks = {{ open = "br0" }}
shares = ["{homes}:{homes}:rw"]
conf = "{conf}"
hosts = ["{address} {head}"]
nodes = {nodes}
max_cpus = 4
min_memory = "64M"
min_disk = "64M"
cycle = 1
{more}
"""


def ready(belljar: Belljar) -> None:
    """The worker's image is in the store: Debian with Grid Engine's execd and commands."""
    if IMAGE not in belljar("image", "list").stdout.decode().split():
        words = ("--suite", "bookworm", "--name", IMAGE, "--packages", "gridengine-exec", "gridengine-client")
        done = belljar("image", "build", "debian", *words, timeout=1800)
        assert done.returncode == 0, done.stderr


class BridgedCell(GridEngine):
    """A cell whose host is on a bridge, and that knows the names of machines which may come."""

    def _make_folders(self) -> None:
        super()._make_folders()
        known = "".join(f"{address} {name}\n" for name, address in NODES.items())
        (self.top / "hosts").write_text(f"127.0.0.1 localhost\n{ADDRESS} {HOST} {HOST}.lab\n{known}")

    def _open_namespaces(self) -> None:
        super()._open_namespaces()
        for line in ("ip link add br0 type bridge", f"ip addr add {ADDRESS}/24 dev br0", "ip link set br0 up",
                     "mount -t sysfs sysfs /sys"):  # fmt: skip
            self.run(*line.split())


class GridEngineWorker(Worker):
    """The host."""

    def __init__(self, site: Site, folder: Path, *, more: str = "") -> None:
        self.site, self.state, self.log, self.file = site, folder / "bait", folder / "bait.log", folder / "bait.toml"
        self.belljar = Installed(site, folder)
        ready(self.belljar)
        self.daemon: subprocess.Popen[bytes] | None = None
        self.cell = BridgedCell(site)
        nodes = [f"{address} {name}" for name, address in NODES.items()]
        self.file.write_text(
            SETTINGS.format(
                bait=BAIT, queue=NODES_QUEUE, image=IMAGE, homes=site.homes, conf=ROOT / CELL / "common/bootstrap",
                address=ADDRESS, head=HOST, nodes=nodes, more=more,
            )
        )  # fmt: skip
        self.cell.add_queue(NODES_QUEUE)
        self.cell.config("-rattr", "queue", "hostlist", "NONE", NODES_QUEUE)
        self._prolog = folder / "prolog"
        self.set_prolog()
        self.cell.set_queue(prolog=f"root@{self._prolog} $job_id $ja_task_id")

    def set_prolog(self, timeout: str = "60s") -> None:
        """*timeout*: how long it waits for the bait."""
        own = {name: value for name, value in self.belljar.env.items() if name.startswith(("BELLJAR_", "PATH"))}
        line = shlex.join(
            [
                "env",
                "-i",
                *(f"{name}={value}" for name, value in own.items()),
                *map(str, self.belljar.argv("bait", "arrive")),
            ]
        )
        task = "case $2 in 0|undefined) job=$1;; *) job=$1.$2;; esac"
        words = f'"$job" --timeout {timeout} --state {self.state} >>{self._prolog}.log 2>&1'
        self._prolog.write_text(f"#!/bin/sh\n{task}\n{line} {words} && exit 99\nexit 1\n")
        self._prolog.chmod(0o755)

    def argv(self, *words: str) -> list[str]:
        return [*self.cell._entry(""), *map(str, self.belljar.argv(*words))]

    def start(self) -> None:
        with open(self.log, "ab") as log:
            words = self.argv("bait", "run", str(self.file), "--state", str(self.state), "--format", "json")
            env = {**self.belljar.env, **ENV}
            self.daemon = subprocess.Popen(words, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        until(lambda: (self.state / "arrivals.sock").exists() or self.daemon.poll() is not None, "the bait to start")

    # -- jobs ----------------------------------------------------------------------------------------------------------

    def submit(
        self, text: str, *options: str, args: Sequence[str] = (), user: str = "bjalice", memory: str = "400M"
    ) -> str:
        home = self.site.home(user)
        script = home / "job.sh"
        script.write_text(f"#!/bin/sh\n{text}\n")
        script.chmod(0o755)
        return self.cell.submit("-cwd", "-q", QUEUE, "-l", f"h_vmem={memory}", *options, str(script), *args, user=user)

    def ended(self, job: str, *, task: str = "") -> dict[str, str]:
        """What the accounting has of its last start; it has the bait's, too."""
        until(lambda: not self.cell.state(job), f"job {job} to end\n{self.said()}", PATIENCE)

        def elsewhere() -> list[dict[str, str]]:
            return [row for row in self.cell.account(job, task=task) if row["hostname"].partition(".")[0] in NODES]

        rows: list[dict[str, str]] = until(elsewhere, f"job {job} in the accounting\n{self.said()}")
        return rows[-1]

    def reached(self, job: str, state: str) -> None:
        until(lambda: state in self.states(job), f"job {job} to be {state}\n{self.said()}", PATIENCE)

    # -- what is left --------------------------------------------------------------------------------------------------

    def nodes(self) -> dict[str, NodeView]:
        return GridEnginePool(NODES_QUEUE).nodes(self.cell.run(*GridEnginePool(NODES_QUEUE).query_nodes()).stdout)

    def closed(self, *jobs: str) -> None:
        """Nothing of these jobs is left: no machine, no host of any kind, nothing in the queue's own settings."""
        until(
            lambda: all(self.states(job)[-1:] == ["closed"] for job in jobs), f"jobs {jobs} to be closed\n{self.said()}", PATIENCE
        )  # fmt: skip
        for kind in ("-sel", "-sh", "-ss"):
            assert self.hosts(kind) == [HOST], kind
        assert "belljar_" not in self.cell.config("-sul")
        queue = self.cell.config("-sq", NODES_QUEUE)
        assert not [name for name in NODES if name in queue], queue
        assert self.belljar.leftovers() == [] and self.json("jobs")["jobs"] == []

    def hosts(self, kind: str) -> list[str]:
        return self.cell.config(kind).split()

    def said(self) -> str:
        told = read(self.log).decode()[-5000:] + self.cell.run("qstat", "-f", "-u", "*").stdout.decode()
        return told + read(self.cell.spool / "qmaster/messages").decode(errors="replace")[-3000:]

    def close(self) -> None:
        if self.daemon is not None and self.daemon.poll() is None:
            self.kill()
        self.cell.close()
        self.belljar.close()
