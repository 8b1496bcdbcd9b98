"""What holds of leases whichever the batch system is: each is asked of a site that has one."""

from __future__ import annotations

import time

from tests.batch.lab.lease import IMAGE, Leasing


def a_killed_service_changes_no_answer(site: Leasing) -> None:
    lease = site.leased()
    before = [(one["id"], one["state"], one["host_keys"]) for one in site.status(lease)[1]]
    site.kill_service()
    time.sleep(2)
    site.start()
    assert [(one["id"], one["state"], one["host_keys"]) for one in site.status(lease)[1]] == before
    site.until(lambda: site.ssh(lease, "echo here") == "here\n", "its pilot is connected again")
    site.kill_service()
    site.start()
    site.give_back(lease)


def two_nodes_begin_together_and_each_is_given_back_alone(site: Leasing, hosts: set[str]) -> None:
    lease = site.run(IMAGE, "--time", "1h", "-n", "2")
    site.until(lambda: site.is_running(lease), "both run")
    _, machines = site.status(lease)
    assert {one["host"] for one in machines} == hosts
    site("release", machines[0]["id"])
    site.until(lambda: [one["state"] for one in site.status(lease)[1]] == ["terminated", "running"], "one is left")
    assert site.ssh(machines[1]["id"], "echo here") == "here\n"
    site.give_back(lease)


def a_job_that_is_taken_away_ends_its_lease(site: Leasing, lease: str) -> None:
    site.until(lambda: site.state(lease) in ("preempted", "failed"), "the lease has ended")
    assert {one["cause"] for one in site.status(lease)[1]} == {"Server.LrmPreempted"}
    site.until_nothing_is_left()
