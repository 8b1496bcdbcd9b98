"""Preemptible leases on a real Slurm: an ordinary job takes their nodes, and their guests learn when they end."""

from __future__ import annotations

import calendar
import re
import time
from collections.abc import Iterator

import pytest
from tests.batch.lab.lease import IMAGE, LeaseSite

pytestmark = pytest.mark.slow

PARTITIONS = (
    "batch Nodes=ALL Default=YES MaxTime=INFINITE PriorityTier=2 State=UP",
    "spare Nodes=ALL MaxTime=INFINITE PriorityTier=1 PreemptMode=CANCEL State=UP",
)
PREEMPTING = {"PreemptType": "preempt/partition_prio", "PreemptMode": "CANCEL"}
NOTICE = re.compile(r"belljar: the batch system takes this node back at (\S+)")


@pytest.fixture(scope="module")
def site() -> Iterator[LeaseSite]:
    site = LeaseSite(nodes=2, more='preemptible_queue = "spare"', partitions=PARTITIONS, KillWait="25", **PREEMPTING)
    site.notice = 20  # a busy guest takes a while to hear of it
    with site.running():
        yield site


def test_an_ordinary_job_takes_the_nodes_and_the_next_preemptible_lease_waits_for_its_end(site: LeaseSite) -> None:
    lease = site.leased("--preemptible")
    assert site.lab.job(site.status(lease)[0]["job"])["Partition"] == "spare"
    work = site.folder / "work.sh"
    work.write_text("#!/bin/sh\nsleep 3600\n")
    words = ("--nodes=2", "--exclusive", "--mem=0", "--chdir=/", "--output=/dev/null", str(work))
    begin = time.time()
    job = site.lab.text("sbatch", "--parsable", *words).strip()
    site.until(lambda: site.state(lease) == "preempted", "Slurm has preempted the lease's job")
    (machine,) = site.status(lease)[1]
    assert (machine["state"], machine["cause"]) == ("terminated", "Server.LrmPreempted")
    found = NOTICE.search(site("console", machine["id"]))
    assert found is not None, "its guest was not told when it ends"
    assert begin < calendar.timegm(time.strptime(found[1], "%Y-%m-%dT%H:%M:%SZ")) < time.time() + 60
    assert 0 < machine["ran_until"] - machine["ran_from"] < 600  # what is charged is what it ran
    site.until(lambda: site.lab.state(job) == "RUNNING", "the job has its nodes")
    assert not site.left() and not site.pilots()
    other = site.run(IMAGE, "--time", "1h", "--preemptible")
    site.until(lambda: site.state(other) == "queued", "the next one is in Slurm's queue")
    assert site.lab.state(site.status(other)[0]["job"]) == "PENDING"
    site.lab.run("scancel", job)
    site.until(lambda: site.is_running(other), "it runs")
    site("release", other)
    site.until(lambda: site.state(other) == "released", "it is released")
    site.until_nothing_is_left()
