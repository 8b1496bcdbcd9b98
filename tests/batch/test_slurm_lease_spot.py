"""Spot machines on a real Slurm, in a partition whose jobs it preempts: who takes their room, and how they are told."""

from __future__ import annotations

import calendar
import json
import time
from collections.abc import Iterator
from typing import Any

import boto3
import pytest
from tests.batch.lab.lease import IMAGE, LeaseSite, free_port

from belljar.lease.ec2.actions.instances import spot_id

pytestmark = pytest.mark.slow

NOTICE = 75.0  # seconds
MORE = f'spot_queue = "spot"\nspot_machines = 1\nspot_notice = {NOTICE:.0f}'
PARTITIONS = (
    "batch Nodes=ALL Default=YES MaxTime=INFINITE PriorityTier=2 State=UP",
    "spot Nodes=ALL MaxTime=INFINITE PriorityTier=1 PreemptMode=CANCEL State=UP",
)
PREEMPTING = {"PreemptType": "preempt/partition_prio", "PreemptMode": "CANCEL"}


@pytest.fixture(scope="module")
def site() -> Iterator[LeaseSite]:
    site = LeaseSite(nodes=2, more=MORE, policy="spot = true", partitions=PARTITIONS, **PREEMPTING)
    site.ec2 = f"127.0.0.1:{free_port()}"
    with site.running():
        yield site


@pytest.fixture(scope="module")
def ec2(site: LeaseSite) -> Any:
    """boto3's client."""
    key = json.loads(site("key", "new", "--format", "json"))
    return boto3.client(
        "ec2", endpoint_url=f"http://{site.ec2}", region_name="lease", aws_access_key_id=key["id"], aws_secret_access_key=key["secret"]
    )  # fmt: skip


def request(site: LeaseSite, ec2: Any, lease: str) -> tuple[str, str]:
    """State and code of the spot request of a lease with one machine."""
    (machine,) = site.status(lease)[1]
    (found,) = ec2.describe_spot_instance_requests(SpotInstanceRequestIds=[spot_id(machine["id"])])[
        "SpotInstanceRequests"
    ]
    return found["State"], found["Status"]["Code"]


def test_a_higher_bid_takes_the_room_of_a_lower_one_whose_guest_knows_when(site: LeaseSite, ec2: Any) -> None:
    low = site.leased("--bid", "0.2")
    assert site.lab.job(site.status(low)[0]["job"])["Partition"] == "spot"
    assert request(site, ec2, low) == ("active", "fulfilled")
    high = site.run(IMAGE, "--hours", "1", "--bid", "0.5")
    site.until(lambda: site.status(low)[1][0]["cause"] == "Server.SpotInstanceTermination", "the lower bid has notice")
    (machine,) = site.status(low)[1]
    assert machine["state"] == "running" and time.time() < machine["deadline"] <= time.time() + NOTICE
    assert site.state(high) == "requested" and "waits" in site.status(high)[0]["why"]
    assert request(site, ec2, high) == ("open", "pending-evaluation")
    told = site.ssh(
        low, "for n in 1 2 3 4 5 6 7 8 9; do cat /run/belljar/termination-time 2>/dev/null && break; sleep 1; done"
    )
    assert abs(calendar.timegm(time.strptime(told.strip(), "%Y-%m-%dT%H:%M:%SZ")) - machine["deadline"]) <= 3
    site.until(lambda: site.state(low) == "preempted", "the lower bid has ended", NOTICE + 60)
    assert site.status(low)[1][0]["cause"] == "Server.SpotInstanceTermination"
    assert request(site, ec2, low) == ("closed", "instance-terminated-by-price")
    site.until(lambda: site.is_running(high), "the higher bid runs")
    assert "0.5" in site("prices")
    site("release", high)
    site.until_nothing_is_left()


def test_an_ordinary_job_takes_the_nodes_and_the_next_bid_waits_for_its_end(site: LeaseSite, ec2: Any) -> None:
    lease = site.leased("--bid", "0.5")
    work = site.folder / "work.sh"
    work.write_text("#!/bin/sh\nsleep 3600\n")
    words = ("--nodes=2", "--exclusive", "--mem=0", "--chdir=/", "--output=/dev/null", str(work))
    job = site.lab.text("sbatch", "--parsable", *words).strip()
    site.until(lambda: site.state(lease) == "preempted", "Slurm has preempted the lease's job")
    (machine,) = site.status(lease)[1]
    assert (machine["state"], machine["cause"]) == ("terminated", "Server.LrmPreempted")
    assert request(site, ec2, lease) == ("closed", "instance-terminated-no-capacity")
    assert 0 < machine["ended_at"] - machine["began_at"] < 600  # what is charged is what it ran
    site.until(lambda: site.lab.state(job) == "RUNNING", "the job has its nodes")
    assert not site.left() and not site.pilots()
    other = site.run(IMAGE, "--hours", "1", "--bid", "0.5")
    site.until(lambda: site.state(other) == "queued", "the next one is in Slurm's queue")
    assert site.lab.state(site.status(other)[0]["job"]) == "PENDING"
    assert request(site, ec2, other) == ("open", "capacity-not-available")
    site.lab.run("scancel", job)
    site.until(lambda: site.is_running(other), "it runs")
    site("release", other)
    site.until(lambda: site.state(other) == "released", "it is released")
    site.until_nothing_is_left()
