"""No storm, no black hole: bounded tries, a node that is closed and opened again, and belljar killed at every point."""

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


def test_a_machine_that_never_boots_costs_its_own_bound_and_is_held_with_the_reason(cluster: Cluster) -> None:
    job = cluster.submit("echo never", VM, f"--export=ALL,{NEVER_BOOTS}")
    cluster.lab.until(lambda: is_held(cluster, job), f"job {job} is held", 120)
    record = cluster.lab.job(job)
    assert record["JobState"] == "PENDING" and record["Restarts"] == "3", record
    assert "vm=debian12" in record["Comment"] and "try 3 of 3: waited" in record["Comment"]
    assert all(cluster.lab.node(node)["State"].startswith(("IDLE", "MIXED", "ALLOC")) for node in cluster.lab.nodes)
    cluster.lab.run("scancel", job)
    works(cluster)


@pytest.mark.slow
def test_one_poison_job_among_fifty_costs_its_own_bound(cluster: Cluster) -> None:
    poison = cluster.submit("echo never", VM, f"--export=ALL,{NEVER_BOOTS}")
    jobs = [cluster.submit(f"echo job {number}", VM) for number in range(50)]
    ends = [cluster.end(job, timeout=600) for job in jobs]
    assert {(end.state, end.exit) for end in ends} == {("COMPLETED", "0:0")}
    assert [end.out for end in ends] == [b"job %d\n" % number for number in range(50)]
    cluster.lab.until(lambda: is_held(cluster, poison), "the poison job is held", 120)
    assert cluster.lab.job(poison)["Restarts"] == "3"
    cluster.lab.run("scancel", poison)
    works(cluster)


# -- a node that cannot start any ----------------------------------------------------------------------------------------


@pytest.fixture
def broken_node(cluster: Cluster) -> str:
    """On the first node QEMU is missing: TaskProlog tells each job there so."""
    node = cluster.lab.nodes[0]
    script = cluster.site.top / "task-prolog"
    script.write_text(
        f'#!/bin/sh\n[ "$SLURMD_NODENAME" = {node} ] && echo export BELLJAR_QEMU_BINARY=/no/such/qemu\nexit 0\n'
    )
    script.chmod(0o755)
    conf = cluster.lab.conf
    before = conf.read_text()
    conf.write_text(before + f"TaskProlog={script}\n")
    cluster.lab.run("scontrol", "reconfigure")
    try:
        yield node  # type: ignore[misc]
    finally:
        conf.write_text(before)
        cluster.lab.run("scontrol", "reconfigure")


@pytest.mark.slow
def test_a_node_that_fails_every_job_is_closed_and_opened_again_when_it_works(
    cluster: Cluster, broken_node: str
) -> None:
    jobs = [cluster.submit("echo done", VM) for _ in range(20)]
    ends = [cluster.end(job, timeout=600) for job in jobs]
    assert {(end.state, end.exit, end.out) for end in ends} == {("COMPLETED", "0:0", b"done\n")}
    starts = sum(int(end.record["Restarts"]) for end in ends)
    assert 3 <= starts <= 5, f"{starts} starts failed on the broken node; it was to be closed after 3"
    record = cluster.lab.node(broken_node)
    assert (
        "DRAIN" in record["State"] and record["Reason"].startswith("belljar:") and "/no/such/qemu" in record["Reason"]
    ), record
    env = {**cluster.lab.env, "SLURMD_NODENAME": broken_node}
    cluster.site.configure(SETTINGS, qemu='binary = "/no/such/qemu"')
    broken = cluster.site.command("batch", "node", "slurm", "test", check=False, env=env)
    cluster.site.configure(SETTINGS)
    assert broken.returncode != 0 and b"/no/such/qemu" in broken.stdout + broken.stderr
    for passes in (1, 2):
        assert "DRAIN" in cluster.lab.node(broken_node)["State"], f"opened after {passes - 1} good self-checks, not 2"
        cluster.site.command("batch", "node", "slurm", "test", env=env)
    cluster.lab.until(lambda: cluster.lab.node(broken_node)["State"].startswith("IDLE"), "the node is open again")


# -- belljar dies --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("point", POINTS)
def test_killed_at_any_point_leaves_nothing_and_the_next_job_works(cluster: Cluster, point: str) -> None:
    end = cluster.run("echo ran", VM, f"--export=ALL,BELLJAR_TESTING_ABORT_AT={point}")
    assert (end.state, end.exit) == ("FAILED", "0:9"), (end, cluster.lab.tail())
    cluster.clean()  # by Epilog alone
    works(cluster)


@pytest.mark.torture
@pytest.mark.slow
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


def test_settings_of_these_tests_are_the_fixtures() -> None:
    assert "retries = 3" in SETTINGS and "retry_delay = 1" in SETTINGS
