"""Jobs over two hosts with a bait each: a real Slurm, real guests on a bridge, two daemons with a state, folders and addresses of their
own each. All nodes of a job come, or none."""

from __future__ import annotations

import os
import shlex
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.batch.lab.site import Site
from tests.batch.lab.worker import BAIT, PATIENCE, Installed, Worker, until
from tests.live.net_lab import Lab

pytestmark = pytest.mark.slow  # builds an image with slurmd, and waits for real nodes to come and go

SECOND = "bait2"


class Beside(Worker):
    """A second host, of the same Slurm and bridge."""

    def __init__(self, first: Worker, folder: Path) -> None:
        self.net, self.site, self.slurm = first.net, first.site, first.slurm
        self.belljar = Installed(first.site, folder)
        self.belljar.env["BELLJAR_NETWORK_BRIDGE_ADDRESSES"] = "10.99.0.41-10.99.0.60/24"
        self.state, self.log, self.file = folder / "bait", folder / "bait.log", folder / "bait.toml"
        self.daemon = None
        alone = first.file.read_text().replace(f'also = ["{SECOND}"]\n', "join = 60\n")
        first.file.write_text(alone)
        self.file.write_text(alone.replace(f'name = "{BAIT}"', f'name = "{SECOND}"'))

    def arrival(self) -> str:
        """What a prolog on this host runs."""
        words = self.belljar.argv("bait", "arrive", "$SLURM_JOB_ID", "--state", str(self.state))
        line = " ".join(one if one.startswith("$") else shlex.quote(one) for one in map(str, words))
        return "".join(f"export {name}={shlex.quote(value)}; " for name, value in self.exported().items()) + line

    def close(self) -> None:
        if self.daemon is not None and self.daemon.poll() is None:
            self.kill()
        self.belljar.close()


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Worker, Beside]]:
    net, site = Lab(), Site("baits")
    folder = tmp_path_factory.mktemp("baits")
    first = Worker(net, site, folder)
    second = Beside(first, tmp_path_factory.mktemp("second"))
    prolog = folder / "prolog"
    case = f"case $SLURMD_NODENAME in {SECOND}) {second.arrival()}; exit $?;; esac\n"
    prolog.write_text(prolog.read_text().replace("#!/bin/sh\n", f"#!/bin/sh\n{case}", 1))
    try:
        first.slurm.up()
        for host in (first, second):
            host.start()
        yield first, second
    finally:
        second.close()
        first.close()
        site.close()
        net.close()


def wide(first: Worker, text: str) -> str:
    return first.slurm.submit(text, "--nodes=2", "--ntasks-per-node=1")


def ended(first: Worker, second: Beside, job: str) -> dict[str, str]:
    """Its record; on neither host anything of it is left."""
    record = first.slurm.lab.ended(job, PATIENCE)
    first.closed(job)
    second.closed(job)
    assert first.belljar.leftovers() == [] == second.belljar.leftovers()
    return record


def test_a_job_of_two_nodes_has_a_machine_on_each_host(hosts: tuple[Worker, Beside]) -> None:
    first, second = hosts
    job = wide(first, "until [ -e seen ]; do sleep 0.2; done; srun hostname | sort; exit 6")
    until(lambda: "running" in first.states(job), f"job {job} to run\n{first.said()}\n{second.said()}", PATIENCE)
    until(lambda: "running" in second.states(job), f"its part to run\n{second.said()}", PATIENCE)
    machines = [host.belljar.domains() for host in hosts]
    assert [len(one) for one in machines] == [1, 1] and machines[0] != machines[1]
    nodes = {f"vm{one['machine']}x" for host in hosts for one in host.json("nodes")["nodes"]}
    (first.site.home("bjalice") / "seen").touch()
    record = ended(first, second, job)
    assert (record["ExitCode"], record["NumNodes"], record["Restarts"]) == ("6:0", "2", "1"), first.said()
    assert sorted(nodes) == first.written(f"{job}.out").split() == sorted(record["NodeList"].split(","))


def test_the_other_bait_and_its_machine_are_killed_while_it_boots(hosts: tuple[Worker, Beside]) -> None:
    first, second = hosts
    job = wide(first, "echo $SLURM_JOB_NUM_NODES >> runs; srun hostname | sort")
    until(lambda: second.belljar.domains(), f"its part to boot\n{first.said()}\n{second.said()}", PATIENCE)
    second.kill()
    (pid,) = second.belljar.domains()
    os.kill(pid, signal.SIGKILL)
    second.start()
    record = ended(first, second, job)
    assert record["ExitCode"] == "0:0" and first.written("runs") == "2\n", first.said()
    assert len(first.written(f"{job}.out").split()) == 2
    assert first.states(job).count("vm-requested") == 2, first.states(job)
    assert any(one.get("why", "").startswith("elsewhere: bait2: ") for one in first.events())


@pytest.mark.parametrize("at", ["vm-requested", "vm-booting", "vm-ready", "running"])
def test_both_baits_are_killed_at_once(hosts: tuple[Worker, Beside], at: str) -> None:
    first, second = hosts
    job = wide(first, f"echo >> {at}; sleep 8; srun hostname | sort; exit 3")
    until(lambda: at in second.states(job) or at in first.states(job), f"{at}\n{first.said()}", PATIENCE)
    for host in hosts:
        host.kill()
    for host in hosts:
        host.start()
    record = ended(first, second, job)
    assert (record["ExitCode"], record["Restarts"]) == ("3:0", "1"), first.said()
    assert first.written(at) == "\n" and len(first.written(f"{job}.out").split()) == 2


def test_a_host_whose_bait_is_gone_costs_the_job_its_time_and_no_more(hosts: tuple[Worker, Beside]) -> None:
    first, second = hosts
    second.kill()
    job = wide(first, "srun hostname | sort")
    until(lambda: "reprocess" in first.states(job), f"the leader to give up\n{first.said()}", PATIENCE)
    why = next(one["why"] for one in first.events() if one.get("state") == "reprocess" and one["job"] == job)
    assert why == "elsewhere: bait2: no machine joined within 60 s"
    second.start()
    record = ended(first, second, job)
    assert record["ExitCode"] == "0:0" and len(first.written(f"{job}.out").split()) == 2
