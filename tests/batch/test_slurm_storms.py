"""Under Slurm: one poison job among fifty, and hundreds of jobs killed at random."""

from __future__ import annotations

import contextlib
import os
import random
import time
from pathlib import Path

import pytest
from tests.batch.slurm_fixtures import SETTINGS, VM, Cluster

NEVER_BOOTS = "BELLJAR_QEMU_BOOT_TIMEOUT=0.05,BELLJAR_MACHINE_START=cold"
POINTS = (
    "after-claim", "after-overlay", "after-spawn", "after-boot", "after-qmp", "after-agent", "payload-sent", "payload-started",
    "payload-ended", "status-written", "before-stop", "after-stop", "before-release",
)  # fmt: skip
KILLS = int(os.environ.get("BELLJAR_KILLS", "500"))
SEED = int(os.environ.get("BELLJAR_SEED", "0")) or int(time.time())


def works(cluster: Cluster) -> None:
    """The next job runs as if nothing had happened, and nothing of the others is left."""
    after = cluster.run("echo well; exit 3", VM)
    assert (after.state, after.exit, after.out) == ("FAILED", "3:0", b"well\n"), (after.err, cluster.lab.tail())
    cluster.clean()


def is_held(cluster: Cluster, job: str) -> bool:
    record = cluster.lab.job(job)
    return record["JobState"] == "PENDING" and record["Priority"] == "0"


# -- one job that cannot start -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_one_poison_job_among_fifty_costs_its_own_bound(cluster: Cluster) -> None:
    with cluster.site.leaving_qemu_open():
        poison = cluster.submit("echo never", VM, f"--export=ALL,{NEVER_BOOTS}")
        jobs = [cluster.submit(f"echo job {number}", VM) for number in range(50)]
        ends = [cluster.end(job, timeout=600) for job in jobs]
        assert {(end.state, end.exit) for end in ends} == {("COMPLETED", "0:0")}
        assert [end.out for end in ends] == [b"job %d\n" % number for number in range(50)]
        cluster.lab.until(lambda: is_held(cluster, poison), "the poison job is held", 120)
        assert cluster.lab.job(poison)["Restarts"] == "3"
        cluster.lab.run("scancel", poison)
        works(cluster)


# -- death at random -----------------------------------------------------------------------------------------------------


@pytest.mark.torture
@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_hundreds_of_jobs_killed_at_random(cluster: Cluster) -> None:
    """Each job dies in one of four ways at a random moment of its life, from before its machine to after its end."""
    chance = random.Random(SEED)
    print(f"{KILLS} kills, seed {SEED}")
    for begin in range(0, KILLS, 50):
        jobs = [cluster.submit("echo ran; sleep 2", VM) for _ in range(min(50, KILLS - begin))]
        for job in jobs:
            cluster.lab.until(lambda job=job: cluster.lab.state(job) != "PENDING", f"job {job} starts", 300)
            time.sleep(chance.uniform(0, 3.0))  # the moment itself is what varies
            kill(cluster, job, chance.choice(("scancel", "scancel -f KILL", "wrapper", "qemu")))
        for job in jobs:
            cluster.lab.ended(job, 300)
        cluster.clean()
        works(cluster)
    assert all("DRAIN" not in cluster.lab.node(node)["State"] for node in cluster.lab.nodes)


def kill(cluster: Cluster, job: str, how: str) -> None:
    if how == "scancel":
        cluster.lab.run("scancel", job, check=False)
    elif how.startswith("scancel -f"):
        cluster.lab.run("scancel", "--full", "--signal=KILL", job, check=False)
    else:
        for pid in processes(job):
            line = command_line(pid)
            if ("qemu-system" in line) == (how == "qemu") and ("wrap-slurm" in line or how == "qemu"):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, 9)
    if how == "qemu":  # the job itself goes on to a requeue, which is not what is looked at here
        cluster.lab.run("scancel", job, check=False)


def processes(job: str) -> list[int]:
    """The wrapper of a job, and its QEMU."""
    wrappers = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if f"SLURM_JOB_ID={job}\0".encode() in (entry / "environ").read_bytes():
                    wrappers.append(int(entry.name))
            except OSError:
                continue
    children = []
    for pid in wrappers:
        try:
            children += [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        except OSError:
            continue
    return wrappers + children


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""


# -- settings of a node that are wrong -----------------------------------------------------------------------------------


def test_a_mistake_in_a_nodes_settings_closes_it_with_its_place_and_loses_no_job(cluster: Cluster) -> None:
    cluster.site.configure(SETTINGS, machine="memory = -1")
    try:
        plain = cluster.run("echo plain")
        jobs = [cluster.submit("echo at last", VM) for _ in range(4)]
        cluster.lab.until(
            lambda: all(is_drained(cluster, node) for node in cluster.lab.nodes), "both nodes are closed", 120
        )
        assert (plain.state, plain.out) == ("COMPLETED", b"plain\n")
        assert all("belljar.toml:" in cluster.lab.node(node)["Reason"] for node in cluster.lab.nodes)
    finally:
        cluster.site.configure(SETTINGS)
    for node in cluster.lab.nodes:
        for _ in range(2):
            cluster.site.command("batch", "node", "slurm", "test", "--node", node, env=cluster.lab.env)
    for job in jobs:
        if is_held(cluster, job):
            cluster.as_user("scontrol", "release", job)
        end = cluster.end(job)
        assert (end.state, end.out) == ("COMPLETED", b"at last\n")
    works(cluster)


def is_drained(cluster: Cluster, node: str) -> bool:
    return "DRAIN" in cluster.lab.node(node)["State"]
