"""Leases on a real Grid Engine, with real guests: from a request to ssh, and back to nothing. The service is an ordinary account."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest
from tests.batch.lab.gridengine_lease import GridSite
from tests.batch.lab.lease import IMAGE


@pytest.fixture(scope="module")
def site() -> Iterator[GridSite]:
    site = GridSite("one")
    try:
        yield site.up()
    finally:
        site.close()


@pytest.fixture(scope="module")
def two() -> Iterator[GridSite]:
    site = GridSite("two", nodes=2)
    try:
        yield site.up()
    finally:
        site.close()


def test_a_lease_runs_is_reached_by_ssh_and_leaves_nothing(site: GridSite) -> None:
    lease = site.run(IMAGE, "--hours", "1", "--wait", "120s")
    found, (machine,) = site.status(lease)
    assert (found["state"], machine["state"]) == ("active", "running") and machine["host_keys"]
    assert site.jobs() == [found["job"]] and f"owner={found['owner']}" in site.cell.detail(found["job"])
    assert site.ssh(lease, "id -un; hostname").split()[0] == "root"
    site("release", lease)
    site.until(lambda: site.state(lease) == "released", "the lease is released")
    site.until_nothing_is_left()
    assert not list((site.folder / "jobs").glob(f"belljar-{lease}-1"))


@pytest.mark.slow
def test_a_job_that_is_deleted_behind_our_back_ends_its_lease(site: GridSite) -> None:
    lease = site.run(IMAGE, "--hours", "1", "--wait", "120s")
    site.cell.run("qdel", site.status(lease)[0]["job"])
    site.until(lambda: site.state(lease) in ("preempted", "failed"), "the lease has ended")
    assert site.status(lease)[1][0]["cause"] == "Server.LrmPreempted"
    site.until_nothing_is_left()


@pytest.mark.slow
def test_a_service_that_is_killed_changes_no_answer(site: GridSite) -> None:
    lease = site.run(IMAGE, "--hours", "1", "--wait", "120s")
    before = [(one["id"], one["state"], one["host_keys"]) for one in site.status(lease)[1]]
    site.kill_service()
    time.sleep(2)
    site.start()
    assert [(one["id"], one["state"], one["host_keys"]) for one in site.status(lease)[1]] == before
    site.until(lambda: site.ssh(lease, "echo here") == "here\n", "its pilot is connected again")
    site("release", lease)
    site.until(lambda: site.state(lease) == "released", "the lease is released")
    site.until_nothing_is_left()


@pytest.mark.slow
def test_a_machine_that_is_rebooted_has_its_disk_and_its_host_key(site: GridSite) -> None:
    lease = site.run(IMAGE, "--hours", "1", "--wait", "120s")
    (machine,) = site.status(lease)[1]
    look = "cat /proc/sys/kernel/random/boot_id"
    before = site.ssh(lease, f"echo kept >/root/f; {look}")
    site("reboot", machine["id"])
    site.until(lambda: site.tried(lease, look) not in ("", before), "its guest runs again")
    assert site.ssh(lease, "cat /root/f") == "kept\n"  # its host key is checked
    assert [one["state"] for one in site.status(lease)[1]] == ["running"]
    site("release", lease)
    site.until(lambda: site.state(lease) == "released", "the lease is released")
    site.until_nothing_is_left()


@pytest.mark.slow
def test_a_pilot_that_is_killed_takes_its_machine_with_it(site: GridSite) -> None:
    lease = site.run(IMAGE, "--hours", "1", "--wait", "120s")
    (pilot,) = site.pilots()
    assert any(one.startswith("qemu") for one in site.left())
    os.kill(pilot, signal.SIGKILL)
    site.until(lambda: site.state(lease) == "failed", "the lease has failed", 60)
    assert site.status(lease)[1][0]["cause"] == "Server.NodeLost"
    assert "its pilot is gone" in site.status(lease)[1][0]["why"]
    # Grid Engine kills whatever has the job's group: the machine's keeper, too, so that its files may wait for the next look.
    site.until(lambda: not site.jobs() and not any(one.startswith("qemu") for one in site.left()), "it is gone")
    site.reap()
    assert site.left() == []
    site.until_nothing_is_left()


@pytest.mark.slow
def test_two_nodes_begin_together_and_each_is_given_back_alone(two: GridSite) -> None:
    lease = two.run(IMAGE, "--hours", "1", "-n", "2")
    two.until(lambda: two.is_running(lease), "both run")
    _, machines = two.status(lease)
    assert {one["host"] for one in machines} == {"bjge", "bjge2"}
    two("release", machines[0]["id"])
    two.until(lambda: [one["state"] for one in two.status(lease)[1]] == ["terminated", "running"], "one is left")
    assert two.ssh(machines[1]["id"], "echo here") == "here\n"
    two("release", lease)
    two.until(lambda: two.state(lease) == "released", "the lease is released")
    two.until_nothing_is_left()


@pytest.mark.slow
def test_a_job_of_two_nodes_that_is_deleted_ends_on_both(two: GridSite) -> None:
    lease = two.run(IMAGE, "--hours", "1", "-n", "2")
    two.until(lambda: two.is_running(lease), "both run")
    two.cell.run("qdel", two.status(lease)[0]["job"])
    two.until(lambda: two.state(lease) in ("preempted", "failed"), "the lease has ended")
    assert {one["cause"] for one in two.status(lease)[1]} == {"Server.LrmPreempted"}
    two.until_nothing_is_left()
