"""Jobs that are checkpointed, on a real Slurm: preempted, at their time limit, and when their machine is lost."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator

import pytest
from tests.batch.slurm_fixtures import VM, Cluster

pytestmark = pytest.mark.slow

PARTITIONS = (
    "low Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE",
    "high Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=9 PreemptMode=OFF",
)
LAB = {"PreemptType": "preempt/partition_prio", "PreemptMode": "REQUEUE", "KillWait": "30", "SlurmUser": "slurm"}
COUNT = "i=0; while [ $i -lt {most} ]; do i=$((i+1)); echo $i; echo $i >>numbers; sleep {pause}; done; exit 3"
NUMBERS = [str(number).encode() for number in range(1, 301)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    made = Cluster("slurm-checkpoints", "", nodes=2, **LAB)
    made.lab.partitions = PARTITIONS
    folder = made.site.top / "checkpoints"
    folder.mkdir()
    folder.chmod(0o1777)
    made.site.configure(
        f'checkpoint = "on-request"\ncheckpoint_folder = "{folder}"\ncheckpoint_lead = 25\nretry_delay = 1\n'
    )
    try:
        yield made.up()
    finally:
        made.close()


def counted(cluster: Cluster, job: str) -> list[bytes]:
    """What it wrote, without the words of slurmstepd."""
    return [line for line in cluster.read(f"{job}.out").splitlines() if line.isdigit()]


def comes_further(cluster: Cluster, job: str, lines: int = 3) -> None:
    before = len(counted(cluster, job))
    cluster.lab.until(lambda: len(counted(cluster, job)) >= before + lines, f"job {job} counts on from {before}", 180)


def is_whole(cluster: Cluster, job: str, most: int, restarts: int) -> None:
    """No number is lost and none doubled, on standard output and in the file; the exit code and the records are right."""
    ended = cluster.end(job, timeout=400)
    assert ended.exit == "3:0", ended
    assert counted(cluster, job) == NUMBERS[:most]
    assert cluster.read("numbers").splitlines() == NUMBERS[:most]
    (cluster.site.home("bjalice") / "numbers").unlink()
    shown = cluster.belljar("show", "--format=json", f"slurm:{job}", user="bjalice")
    assert json.loads(shown)["outcome"]["restarts"] == restarts
    top = cluster.site.top / "checkpoints" / str(cluster.site.home("bjalice").stat().st_uid)
    assert os.listdir(top) == [], "its folder went with it"
    cluster.clean()


@pytest.mark.parametrize("mode", ["append", "truncate"])
def test_a_job_that_is_preempted_five_times(cluster: Cluster, mode: str) -> None:
    text = COUNT.format(most=300, pause=0.3)
    comment = f"{VM} vm-checkpoint=on-preempt"
    job = cluster.submit(text, comment, f"--open-mode={mode}", "--exclusive")
    for preemptions in range(1, 6):
        comes_further(cluster, job)
        other = cluster.submit("exit 0", "--partition=high", "--exclusive", "--nodes=2")
        cluster.lab.until(lambda: cluster.lab.job(job)["Restarts"] == str(preemptions), "it is preempted", 60)  # noqa: B023
        cluster.end(other)
        cluster.lab.run("scontrol", "update", f"JobId={job}", "StartTime=now", check=False)
    is_whole(cluster, job, 300, 5)


@pytest.mark.parametrize("warning", [("--signal=B:USR1@40",), ()], ids=["signal", "own-clock"])
def test_a_job_that_is_longer_than_its_limit(cluster: Cluster, warning: tuple[str, ...]) -> None:
    job = cluster.submit(COUNT.format(most=130, pause=1), f"{VM} vm-checkpoint=on-limit", "--time=2", *warning)
    restarts = int(cluster.lab.ended(job, 500)["Restarts"])
    assert restarts >= 1
    is_whole(cluster, job, 130, restarts)


def test_a_job_that_loses_its_machine_goes_on_from_the_last_checkpoint(cluster: Cluster) -> None:
    job = cluster.submit(COUNT.format(most=60, pause=0.3), f"{VM} vm-checkpoint=every=5s")
    top = cluster.site.top / "checkpoints"
    cluster.lab.until(lambda: list(top.glob("*/*/2")) != [], "it is checkpointed twice", 90)
    comes_further(cluster, job, 1)
    (qemu,) = (int(word.split()[1]) for word in cluster.site.leftovers() if word.startswith("qemu "))
    os.kill(qemu, signal.SIGKILL)
    is_whole(cluster, job, 60, 1)


def test_a_job_that_is_cancelled_is_gone(cluster: Cluster) -> None:
    job = cluster.submit(COUNT.format(most=300, pause=1), f"{VM} vm-checkpoint=on-preempt+every=3s")
    comes_further(cluster, job, 8)
    before = time.monotonic()
    cluster.as_user("scancel", job)
    assert cluster.end(job).state == "CANCELLED" and time.monotonic() - before < 20
    cluster.lab.until(
        lambda: not list((cluster.site.top / "checkpoints").glob("*/slurm-*")), "its folder went with it", 20
    )
    cluster.clean()


def test_what_cannot_be_is_refused_at_submission(cluster: Cluster) -> None:
    done = cluster.sbatch("exit 0", f"{VM} vm-checkpoint=always")
    assert done.returncode and b"checkpoint 'always': not when a job can be checkpointed" in done.stderr
