"""Leases on a real Slurm, with real guests: from a request to ssh, and back to nothing."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest
from tests.batch.lab.lease import IMAGE, LeaseSite


@pytest.fixture(scope="module")
def site() -> Iterator[LeaseSite]:
    site = LeaseSite(nodes=2)
    try:
        yield site.up()
    finally:
        site.close()


def test_a_lease_runs_is_reached_by_ssh_and_leaves_nothing(site: LeaseSite) -> None:
    lease = site.run(IMAGE, "--hours", "1", "--wait", "120s")
    found, (machine,) = site.status(lease)
    assert (found["state"], machine["state"]) == ("active", "running") and machine["host_keys"]
    assert site.jobs() == [found["job"]]
    assert f"belljar: for {found['owner']}" in site.lab.text("squeue", "-h", "-o", "%k")
    assert site.ssh(lease, "id -un; hostname").split()[0] == "root"
    assert site.ssh(machine["id"], "cat /etc/ssh/ssh_host_ed25519_key.pub").split()[1] in " ".join(machine["host_keys"])
    site("release", lease)
    site.until(lambda: site.state(lease) == "released", "the lease is released")
    site.until_nothing_is_left()
    assert not list((site.folder / "jobs").glob(f"belljar-{lease}-1"))


@pytest.mark.slow
def test_two_nodes_begin_together_and_each_is_given_back_alone(site: LeaseSite) -> None:
    lease = site.run(IMAGE, "--hours", "1", "-n", "2")
    site.until(lambda: site.is_running(lease), "both run")
    _, machines = site.status(lease)
    assert {one["host"] for one in machines} == {"n1", "n2"}
    site("release", machines[0]["id"])
    site.until(lambda: [one["state"] for one in site.status(lease)[1]] == ["terminated", "running"], "one is left")
    assert site.ssh(machines[1]["id"], "echo here") == "here\n"
    site("release", lease)
    site.until(lambda: site.state(lease) == "released", "the lease is released")
    site.until_nothing_is_left()


@pytest.mark.slow
def test_a_service_that_is_killed_changes_no_answer(site: LeaseSite) -> None:
    lease = site.run(IMAGE, "--hours", "1", "--wait", "120s")
    before = site.status(lease)[1]
    site.kill_service()
    time.sleep(2)
    site.start()
    assert [(one["id"], one["state"], one["host_keys"]) for one in site.status(lease)[1]] == [
        (one["id"], one["state"], one["host_keys"]) for one in before
    ]
    site.until(lambda: site.ssh(lease, "echo here") == "here\n", "its pilot is connected again")
    site.kill_service()
    site.start()
    site("release", lease)
    site.until(lambda: site.state(lease) == "released", "the lease is released")
    site.until_nothing_is_left()


@pytest.mark.slow
def test_a_pilot_that_is_killed_takes_its_machine_with_it(site: LeaseSite) -> None:
    lease = site.run(IMAGE, "--hours", "1", "--wait", "120s")
    (pilot,) = site.pilots()
    os.kill(pilot, signal.SIGKILL)
    site.until(lambda: site.state(lease) == "failed", "the lease has failed")
    assert site.status(lease)[1][0]["cause"] == "Server.NodeLost"
    site.until_nothing_is_left()


@pytest.mark.slow
def test_a_job_that_is_cancelled_behind_our_back_ends_its_lease(site: LeaseSite) -> None:
    lease = site.run(IMAGE, "--hours", "1", "--wait", "120s")
    site.lab.run("scancel", site.status(lease)[0]["job"])
    site.until(lambda: site.state(lease) in ("preempted", "failed"), "the lease has ended")
    assert site.status(lease)[1][0]["cause"] == "Server.LrmPreempted"
    site.until_nothing_is_left()


@pytest.mark.slow
def test_a_lease_that_cannot_be_had_says_why(site: LeaseSite) -> None:
    assert "not among the images" in site("run", "windows", check=False)
    lease = site.run(IMAGE, "--hours", "1", "--queue", "nowhere")
    site.until(lambda: site.state(lease) == "failed", "it is refused")
    assert "invalid partition" in site.status(lease)[0]["why"].lower()
    waits = site.run(IMAGE, "--hours", "1", "-n", "3")
    site.until(lambda: site.state(waits) in ("failed", "queued"), "Slurm has said what it thinks")
    site("release", waits)
    site.until_nothing_is_left()
