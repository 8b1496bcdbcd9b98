"""Faults of leases that only a real batch system and real guests show, watched by an observer. The table of all is in
tests/stories/lease/test_faults.py."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator

import pytest
from tests.batch.lab.lease import IMAGE, LeaseSite
from tests.batch.lab.observer import Observer

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site() -> Iterator[LeaseSite]:
    with LeaseSite(nodes=2, more="lost = 60").running() as site:
        yield site


@pytest.fixture(autouse=True)
def observer(site: LeaseSite) -> Iterator[Observer]:
    """In the end nothing is left, and it has nothing to say."""
    made = Observer(site, most=4)
    try:
        yield made
        for lease in site.leases():
            site("release", lease, check=False)
        site.until(lambda: not site.leases(), "all leases have ended")
        site.until_nothing_is_left()
        assert made.verdict() == []
    finally:
        made.close()


def guests(site: LeaseSite) -> list[int]:
    """QEMU processes."""
    return site.belljar.domains()


def test_f4_a_job_that_slurmctld_brings_back_after_the_end_of_its_lease_is_cancelled_again(site: LeaseSite) -> None:
    """What was cancelled is saved minutes later: a slurmctld that is killed before has the job again."""
    saved = site.folder / "slurm/state/job_state"
    for node in site.lab.nodes:
        site.lab.run("scontrol", "update", f"NodeName={node}", "State=DRAIN", "Reason=test")
    lease = site.run(IMAGE, "--time", "1h")
    site.until(lambda: site.state(lease) == "queued", "its job waits")
    name = f"belljar-{lease}-1".encode()
    site.until(lambda: saved.exists() and name in saved.read_bytes(), "slurmctld has saved its job")
    before = saved.read_bytes()
    site("release", lease)
    site.until(lambda: site.state(lease) == "cancelled" and not site.jobs(), "its job is cancelled")
    site.lab.stop("slurmctld", signal.SIGKILL)
    saved.write_bytes(before)
    site.lab.start_slurmctld()
    site.until(lambda: "no lease of ours has it" in site.log.read_text(), "the job that came back is cancelled")
    site.until(lambda: not site.jobs(), "it is gone")
    assert site.state(lease) == "cancelled"
    for node in site.lab.nodes:  # unless slurmctld forgot that, too
        site.lab.run("scontrol", "update", f"NodeName={node}", "State=RESUME", check=False)


def test_f7_a_pilot_that_comes_while_the_service_is_away_is_heard_when_that_is_back(site: LeaseSite) -> None:
    for node in site.lab.nodes:
        site.lab.run("scontrol", "update", f"NodeName={node}", "State=DRAIN", "Reason=test")
    lease = site.run(IMAGE, "--time", "1h")
    site.until(lambda: site.state(lease) == "queued", "its job waits")
    site.kill_service()
    for node in site.lab.nodes:
        site.lab.run("scontrol", "update", f"NodeName={node}", "State=RESUME")
    site.until(site.pilots, "its pilot runs")
    time.sleep(5)
    assert guests(site) == []
    site.start()
    site.until(lambda: site.is_running(lease), "it runs")
    assert site.status(lease)[0]["attempt"] == 1


def test_f8_a_machine_ends_in_time_while_the_service_is_away(site: LeaseSite) -> None:
    lease = site.run(IMAGE, "--time", "60s", "--wait", "120s")
    began = time.monotonic()
    site.kill_service()
    try:
        assert guests(site)
        site.until(lambda: not guests(site), "its machine has ended by its pilot's clock")
        assert 40 < time.monotonic() - began < 60 + 3 + 30
    finally:
        site.start()
    site.until(lambda: site.status(lease)[1][0]["state"] == "terminated", "that was heard")
    (machine,) = site.status(lease)[1]
    assert (
        machine["cause"] in ("Server.LeaseExpired", "Server.NodeLost")
        and machine["ran_until"] - machine["ran_from"] < 70
    )


def test_f12_of_two_leases_on_one_host_the_one_that_ends_ends_alone(site: LeaseSite) -> None:
    first, second = (site.leased() for _ in range(2))
    (machine,) = site.status(second)[1]
    site("release", first)
    site.until(lambda: site.state(first) == "released", "the first has ended")
    assert site.is_running(second) and site.ssh(machine["id"], "echo here") == "here\n"


def test_f14_a_node_that_hangs_before_its_pilot_speaks_costs_its_group_one_try(site: LeaseSite) -> None:
    """The barrier's deadline, by the service's clock; then another job is tried."""
    wrapper = site.folder / "belljar"
    honest = wrapper.read_text()
    wrapper.write_text(
        honest.replace("exec ", '[ "$SLURMD_NODENAME" = n2 ] && [ "$1" = pilot ] && exec sleep 300\nexec ', 1)
    )
    try:
        lease = site.run(IMAGE, "--time", "1h", "-n", "2")
        site.until(lambda: site.status(lease)[0]["attempt"] == 2, "another job is tried")
        assert guests(site) == []
    finally:
        wrapper.write_text(honest)
    site.until(lambda: site.is_running(lease), "both run")


def test_f19_a_guest_that_hangs_is_ended_all_the_same(site: LeaseSite) -> None:
    """Its QEMU is stopped: it hears neither its monitor nor TERM."""
    lease = site.leased()
    (qemu,) = guests(site)
    os.kill(qemu, signal.SIGSTOP)
    site("release", lease)
    site.until(lambda: site.state(lease) == "released", "the lease is released")
    site.until(lambda: not guests(site), "its QEMU is gone", 30)


def test_a_power_cut_of_all_hosts_ends_each_machine_once_and_a_lease_that_waits_goes_on(site: LeaseSite) -> None:
    """Service, slurmctld, slurmds, pilots and machines are gone, and `run` was on a tmpfs."""
    lease = site.run(IMAGE, "--time", "1h", "-n", "2")
    site.until(lambda: site.is_running(lease), "both run")
    lost = set(site.belljar.machines())
    for node in site.lab.nodes:
        site.lab.run("scontrol", "update", f"NodeName={node}", "State=DRAIN", "Reason=test")
    waiting = site.run(IMAGE, "--time", "1h")
    site.until(lambda: site.state(waiting) == "queued", "the second lease waits")
    for pid in site.belljar.processes():  # all go at once: none sees another's end
        os.kill(pid, signal.SIGSTOP)
    daemons = ["slurmctld", *(f"slurmd-{node}" for node in site.lab.nodes)]
    for daemon in daemons:
        site.lab.stop(daemon, signal.SIGKILL)
    site.lab.end_steps()
    site.kill_service()
    site.belljar.power_cut()
    site.lab.start_slurmctld()
    for node in site.lab.nodes:
        site.lab.start_slurmd(node)
    site.start()
    site.until(lambda: site.state(lease) == "failed", "the lease whose nodes are gone has failed")
    assert {(one["state"], one["cause"]) for one in site.status(lease)[1]} == {("terminated", "Server.NodeLost")}
    for node in site.lab.nodes:
        site.lab.run("scontrol", "update", f"NodeName={node}", "State=RESUME", check=False)
    site.until(lambda: site.is_running(waiting), "the lease that waited runs")  # and what is left goes with its machine
    lines = [line for path in site.belljar.logs.glob("ledger-*") for line in path.read_text().splitlines()]
    rows = [row for row in map(json.loads, lines) if row["id"] in lost]
    assert len(lost) == 2 == len(rows) and {row["id"] for row in rows} == lost
    assert {row["reason"] for row in rows} == {"the host was restarted while the machine was running"}
    assert not [path for path in site.belljar.scratch.iterdir() if path.name.partition(".")[0] in lost]
