"""The bait with a real Slurm and real guests: each job gets a machine on a bridge, with slurmd and munge from Debian's packages, that
joins as a node of its own."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.batch.lab.pool import QUEUE, PooledSlurm, read
from tests.batch.lab.site import Site
from tests.live.conftest import STORE, Belljar
from tests.live.net_lab import Lab, ip

from belljar.batch import NodeState

pytestmark = pytest.mark.slow  # builds an image with slurmd, and waits for real nodes to come and go

IMAGE, ADDRESS, BAIT = "slurm-node", "10.99.0.1", "bait1"
NETWORK = {
    "BELLJAR_NETWORK_BRIDGES": "br0", "BELLJAR_NETWORK_BRIDGE_ADDRESSES": "10.99.0.10-10.99.0.40/24",
    "BELLJAR_HOST_CPUS_PER_CPU": "0",
}  # fmt: skip
SETTINGS = """[bait]
name = "{bait}"
also = ["bait2"]
queue = "{queue}"
images = ["{image}"]
networks = {{ open = "br0" }}
shares = ["{homes}:{homes}:rw"]
conf = "{conf}"
key = "{key}"
hosts = ["{address} {head}"]
max_cpus = 8
min_memory = "64M"
min_disk = "64M"
cycle = 1
gone_after = 5
"""
PATIENCE = 240.0


class Worker:
    """The host: Slurm, a bait, and belljar in folders of its own, in one network namespace with a bridge."""

    def __init__(self, net: Lab, site: Site, folder: Path, lines: str = "", **conf: str) -> None:
        self.net, self.site, self.state = net, site, folder / "bait"
        for words in (
            ("link", "add", "br0", "type", "bridge"), ("addr", "add", f"{ADDRESS}/24", "dev", "br0"), ("link", "set", "br0", "up"),
        ):  # fmt: skip
            ip("-n", net.host, *words)
        self.belljar = Belljar(folder, settings=NETWORK)
        self.slurm = PooledSlurm(net, site, ADDRESS, lines, Prolog=str(folder / "prolog"), SlurmdTimeout="30", **conf)
        self.daemon: subprocess.Popen[bytes] | None = None
        self.log, self.file = folder / "bait.log", folder / "bait.toml"
        key = self.slurm.lab.folder / "munge/key/munge.key"
        self.file.write_text(
            SETTINGS.format(
                bait=BAIT, queue=QUEUE, image=IMAGE, homes=site.homes, conf=self.slurm.lab.conf, key=key, address=ADDRESS,
                head=os.uname().nodename.partition(".")[0],
            )
        )  # fmt: skip
        words = map(str, self.belljar.argv("bait", "arrive", "$SLURM_JOB_ID", "--state", str(self.state)))
        line = " ".join(one if one.startswith("$") else shlex.quote(one) for one in words)
        exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in self.exported().items())
        (folder / "prolog").write_text(f"#!/bin/sh\n{exports}case $SLURMD_NODENAME in bait*) exec {line};; esac\n")
        (folder / "prolog").chmod(0o755)

    def exported(self) -> dict[str, str]:
        """What a hook of Slurm's has to set: it is given next to nothing."""
        own = {name: value for name, value in self.belljar.env.items() if name.startswith(("BELLJAR_", "PATH"))}
        return {**own, "SLURM_CONF": str(self.slurm.lab.conf)}

    def argv(self, *words: str) -> list[str]:
        """In the namespace, with its own /sys: there the bridge is looked for."""
        return self.net.inside(self.net.host, *map(str, self.belljar.argv(*words)))

    def start(self) -> None:
        with open(self.log, "ab") as log:
            words = self.argv("bait", "run", str(self.file), "--state", str(self.state), "--format", "json")
            env = {**self.belljar.env, "SLURM_CONF": str(self.slurm.lab.conf)}
            self.daemon = subprocess.Popen(words, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        until(lambda: (self.state / "arrivals.sock").exists() or self.daemon.poll() is not None, "the bait to start")

    def kill(self, number: int = signal.SIGKILL) -> int:
        assert self.daemon is not None
        self.daemon.send_signal(number)
        return self.daemon.wait(60)

    def json(self, *words: str) -> Any:
        done = self.belljar("bait", *words, "--state", str(self.state), "--format", "json")
        return json.loads(done.stdout)

    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{")]

    def states(self, job: str) -> list[str]:
        return [one["state"] for one in self.events() if one["event"] == "job" and one["job"] == job]

    def closed(self, *jobs: str) -> None:
        """Nothing of these jobs is left: no machine, no node."""
        until(
            lambda: all(self.states(job)[-1:] == ["closed"] for job in jobs),
            f"jobs {jobs} to be closed\n{self.said()}",
            PATIENCE,
        )
        assert set(self.slurm.nodes()) == {BAIT, "bait2"} and self.json("jobs")["jobs"] == []

    def said(self) -> str:
        return read(self.log).decode()[-4000:] + self.slurm.lab.tail()

    def close(self) -> None:
        if self.daemon is not None and self.daemon.poll() is None:
            self.kill()
        self.slurm.down()
        self.belljar.close()


def until(is_so: Callable[[], Any], what: str, seconds: float = 60) -> Any:
    end = time.monotonic() + seconds
    while not (found := is_so()):
        assert time.monotonic() < end, f"waited {seconds:g} s for {what}"
        time.sleep(0.2)
    return found


@pytest.fixture(scope="module")
def image() -> None:
    """A worker's image: Debian with slurmd and munge. It has no key."""
    belljar = Belljar(STORE.parent / "building")
    if IMAGE not in belljar("image", "list").stdout.decode():
        done = belljar(
            "image", "build", "debian", "--name", IMAGE, "--packages", "slurmd", "slurm-client", "munge", timeout=1800
        )
        assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def worker(image: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    net, site = Lab(), Site("bait")
    made = Worker(net, site, tmp_path_factory.mktemp("bait"))
    try:
        made.slurm.up()
        made.start()
        yield made
    finally:
        made.close()
        site.close()
        net.close()


def test_a_job_runs_on_a_node_that_is_made_for_it(worker: Worker) -> None:
    waits = "until [ -e seen ]; do sleep 0.2; done"  # a job that ends between two looks is never seen to run
    says = "hostname; id -un; echo $SLURM_JOB_ID $SLURMD_NODENAME $1; exit 7"
    job = worker.slurm.submit(f"{waits}; {says}", args=("an arg",))
    until(lambda: "running" in worker.states(job), f"job {job} to run\n{worker.said()}", PATIENCE)
    (worker.site.home("bjalice") / "seen").touch()
    worker.slurm.lab.ended(job, PATIENCE)
    record = worker.slurm.lab.job(job)
    assert (record["JobState"], record["ExitCode"]) == ("FAILED", "7:0"), worker.said()
    node = record["NodeList"]
    assert node.startswith("vm") and record["BatchHost"] == node
    out = (worker.site.home("bjalice") / f"{job}.out").read_text()
    assert out == f"{node}\nbjalice\n{job} {node} an arg\n"
    worker.closed(job)
    assert [one for one in worker.states(job) if one != "image-wait"] == [
        "arrived", "stopped", "vm-requested", "vm-booting", "vm-ready", "migrating", "running", "finished", "closed",
    ]  # fmt: skip
    assert worker.belljar.leftovers() == []
    key = (worker.slurm.lab.folder / "munge/key/munge.key").read_bytes()
    for folder in (worker.belljar.folder, worker.state):
        assert not [path for path in folder.rglob("*") if path.is_file() and key[:16] in path.read_bytes()]


def test_a_bait_and_a_slurmctld_that_are_killed_go_on_where_they_were(worker: Worker) -> None:
    job = worker.slurm.submit("date +%s >> runs; sleep 20; exit 5", "--no-requeue")
    for state in ("vm-booting", "running"):
        until(lambda state=state: state in worker.states(job), f"job {job} to be {state}\n{worker.said()}", PATIENCE)
        worker.kill()
        worker.start()
    runs = worker.site.home("bjalice") / "runs"
    began = lambda: float(read(runs) or "inf")  # noqa: E731 - the file is there before its line is
    # It writes its state down some seconds after a job has begun; killed before, it would start the job anew, bait or no bait.
    until(lambda: time.time() - began() > 8, "slurmctld to know of the job's start")
    worker.slurm.lab.stop("slurmctld", signal.SIGKILL)
    worker.slurm.lab.start_slurmctld()
    (node,) = worker.json("nodes")["nodes"]
    assert node["job"] == job and node["node"] == f"vm{node['machine']}x"
    record = worker.slurm.lab.ended(job, PATIENCE)
    assert (record["JobState"], record["ExitCode"], record["Restarts"]) == ("FAILED", "5:0", "1"), worker.said()
    assert record["Requeue"] == "0"
    assert len(runs.read_text().splitlines()) == 1
    worker.closed(job)
    assert worker.belljar.leftovers() == []


def test_a_job_whose_machine_is_killed_runs_again_on_another(worker: Worker) -> None:
    job = worker.slurm.submit("echo $SLURMD_NODENAME >> nodes; sleep 5; exit 0")
    until(lambda: len(nodes_of(worker)) == 1, f"the job to begin\n{worker.said()}", PATIENCE)
    (pid,) = worker.belljar.domains()
    os.kill(pid, signal.SIGKILL)
    record = worker.slurm.lab.ended(job, PATIENCE)
    assert record["JobState"] == "COMPLETED" and len(set(nodes_of(worker))) == 2, worker.said()
    worker.closed(job)
    assert {"lost", "reprocess"} & set(worker.states(job)) and worker.belljar.leftovers() == []


def nodes_of(worker: Worker) -> list[str]:
    return read(worker.site.home("bjalice") / "nodes").decode().split()


def test_what_nobody_can_make_is_held_with_the_reason_and_a_cancelled_job_leaves_nothing(worker: Worker) -> None:
    wrong = worker.slurm.submit("true", "--comment=vm=windows")
    until(lambda: worker.states(wrong)[-1:] == ["closed"], f"job {wrong} to be refused\n{worker.said()}", PATIENCE)
    record = worker.slurm.lab.job(wrong)
    assert record["JobState"] == "PENDING" and record["Priority"] == "0"
    why = "belljar: image windows: not among the images that may become nodes here (slurm-node)"
    assert why in worker.slurm.lab.text("scontrol", "show", "job", wrong)
    job = worker.slurm.submit("sleep 600")
    until(lambda: "vm-booting" in worker.states(job), f"job {job} to have a machine\n{worker.said()}", PATIENCE)
    worker.slurm.run(worker.slurm.pool.client.cancel(job), worker.slurm.pool.client.cancel(wrong))
    worker.closed(job)
    assert worker.belljar.leftovers() == []


def test_a_closed_bait_takes_no_job_and_an_open_one_does(worker: Worker) -> None:
    assert worker.belljar("bait", "close", "--reason", "disk swap", "--state", str(worker.state)).returncode == 0
    until(lambda: worker.slurm.nodes()[BAIT].state is NodeState.OUT, "the bait to close", 60)
    assert "belljar: disk swap" in worker.slurm.nodes()[BAIT].reason
    assert worker.json("status")["status"]["state"] == "closed-admin"
    assert worker.belljar("bait", "open", "--state", str(worker.state)).returncode == 0
    until(lambda: worker.slurm.nodes()[BAIT].state is NodeState.IDLE, "the bait to open", 60)


def test_a_job_of_two_nodes_has_both_and_srun_reaches_them(worker: Worker) -> None:
    array = worker.slurm.submit("exit $SLURM_ARRAY_TASK_ID", "--array=3-4", "--output=/dev/null", "--error=/dev/null")
    job = worker.slurm.submit("srun --ntasks-per-node=1 hostname | sort; exit 4", "--nodes=2")
    record = worker.slurm.lab.ended(job, PATIENCE)
    assert record["ExitCode"] == "4:0" and record["NumNodes"] == "2", worker.said()
    names = (worker.site.home("bjalice") / f"{job}.out").read_text().split()
    problem = (worker.site.home("bjalice") / f"{job}.err").read_text()
    assert sorted(record["NodeList"].split(",")) == names and len(names) == 2, problem
    for task in (3, 4):
        assert worker.slurm.lab.ended(f"{array}_{task}", PATIENCE)["ExitCode"] == f"{task}:0"
    worker.closed(job, f"{array}_3", f"{array}_4")
    assert worker.belljar.leftovers() == []
