"""Leases on a real Grid Engine, with real guests: from a request to ssh, and back to nothing. The service is an ordinary account."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
from tests.batch.lab import lease_checks
from tests.batch.lab.gridengine_lease import GridSite
from tests.batch.lab.lease import IMAGE


@pytest.fixture(scope="module")
def site() -> Iterator[GridSite]:
    with GridSite("one").running() as site:
        yield site


@pytest.fixture(scope="module")
def two() -> Iterator[GridSite]:
    with GridSite("two", nodes=2).running() as site:
        yield site


def test_a_lease_runs_is_reached_by_ssh_and_leaves_nothing(site: GridSite) -> None:
    lease = site.leased()
    found, (machine,) = site.status(lease)
    assert (found["state"], machine["state"]) == ("active", "running") and machine["host_keys"]
    assert site.jobs() == [found["job"]] and f"owner={found['owner']}" in site.cell.detail(found["job"])
    assert site.ssh(lease, "id -un; hostname").split()[0] == "root"
    site.give_back(lease)
    assert not list((site.folder / "jobs").glob(f"belljar-{lease}-1"))


@pytest.mark.slow
def test_a_job_that_is_deleted_behind_our_back_ends_its_lease(site: GridSite) -> None:
    lease = site.leased()
    site.cell.run("qdel", site.status(lease)[0]["job"])
    lease_checks.a_job_that_is_taken_away_ends_its_lease(site, lease)


@pytest.mark.slow
def test_a_service_that_is_killed_changes_no_answer(site: GridSite) -> None:
    lease_checks.a_killed_service_changes_no_answer(site)


@pytest.mark.slow
def test_a_machine_that_is_rebooted_has_its_disk_and_its_host_key(site: GridSite) -> None:
    lease = site.leased()
    (machine,) = site.status(lease)[1]
    look = "cat /proc/sys/kernel/random/boot_id"
    before = site.ssh(lease, f"echo kept >/root/f; {look}")
    site("reboot", machine["id"])
    site.until(lambda: site.tried(lease, look) not in ("", before), "its guest runs again")
    assert site.ssh(lease, "cat /root/f") == "kept\n"  # its host key is checked
    assert [one["state"] for one in site.status(lease)[1]] == ["running"]
    site.give_back(lease)


@pytest.mark.slow
def test_a_pilot_that_is_killed_takes_its_machine_with_it(site: GridSite) -> None:
    lease = site.leased()
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
    lease_checks.two_nodes_begin_together_and_each_is_given_back_alone(two, {"bjge", "bjge2"})


@pytest.mark.slow
def test_a_job_of_two_nodes_that_is_deleted_ends_on_both(two: GridSite) -> None:
    lease = two.run(IMAGE, "--time", "1h", "-n", "2")
    two.until(lambda: two.is_running(lease), "both run")
    two.cell.run("qdel", two.status(lease)[0]["job"])
    lease_checks.a_job_that_is_taken_away_ends_its_lease(two, lease)
