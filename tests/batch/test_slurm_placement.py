"""Slurm with task/affinity: the machine of each job is pinned to the cpus that the job was given, and to no others."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.batch.slurm_fixtures import VM, Cluster

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(len(os.sched_getaffinity(0)) != 2, reason="the lab's node has two cpus, and so has the host"),
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    made = Cluster("slurm-placement", prefix="bjpin", TaskPlugin="task/affinity")
    try:
        yield made.up()
    finally:
        made.close()


def test_two_jobs_are_pinned_to_what_each_was_given(cluster: Cluster) -> None:
    text, pinned = "echo started; sleep 30", []
    jobs = [cluster.submit(text, VM, "--cpus-per-task=1") for _ in range(2)]
    for job in jobs:
        cluster.started(job)
    for job in jobs:
        shown = json.loads(cluster.belljar("show", "--format", "json", f"slurm:{job}", user="bjalice"))
        threads = {event["event"]: event for event in shown["placement"]}["pinned"]["threads"]
        for thread, cpu in threads.items():
            status = Path(f"/proc/{shown['pid']}/task/{thread}/status").read_text()
            assert f"Cpus_allowed_list:\t{cpu}\n" in status
            pinned.append(cpu)
    for job in jobs:
        assert cluster.end(job).exit == "0:0"
    assert sorted(pinned) == [0, 1]


def test_a_job_with_the_whole_node_floats_and_says_so(cluster: Cluster) -> None:
    job = cluster.run("nproc", VM, "--cpus-per-task=2")
    assert (job.exit, job.out) == ("0:0", b"2\n")
    shown = cluster.belljar("show", f"slurm:{job.job}", user="bjalice").decode()
    assert "not pinned     this process may use all 2 cpus of this host, as others may" in shown
