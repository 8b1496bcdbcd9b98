"""Leases on a real Slurm, with real guests: from a request to ssh, and back to nothing."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Iterator

import pytest
from tests.batch.lab import lease_checks
from tests.batch.lab.lease import IMAGE, LeaseSite

from belljar.errors import MachineBusy
from belljar.host.commands import printed
from belljar.lease import Settings
from belljar.lease.service.jobs import Jobs
from belljar.pool import pilots_of


@pytest.fixture(scope="module")
def site() -> Iterator[LeaseSite]:
    with LeaseSite(nodes=2).running() as site:
        yield site


def test_a_lease_runs_is_reached_by_ssh_and_leaves_nothing(site: LeaseSite) -> None:
    lease = site.leased()
    found, (machine,) = site.status(lease)
    assert (found["state"], machine["state"]) == ("active", "running")
    # None of RSA, which takes a guest without KVM half a minute.
    assert {key.split()[0] for key in machine["host_keys"]} == {"ssh-ed25519", "ecdsa-sha2-nistp256"}
    assert site.jobs() == [found["job"]]
    assert f"belljar: for {found['owner']}" in site.lab.text("squeue", "-h", "-o", "%k")
    assert site.ssh(lease, "id -un; hostname").split()[0] == "root"
    assert site.ssh(machine["id"], "cat /etc/ssh/ssh_host_ed25519_key.pub").split()[1] in " ".join(machine["host_keys"])
    stays = site.ssh(lease, "nohup sleep 1000 >/dev/null 2>&1 </dev/null & echo $!").split()[0]
    assert site.ssh(lease, f"cat /proc/{stays}/comm").split() == ["sleep"]  # it outlives its session
    site.give_back(lease)
    assert not list((site.folder / "jobs").glob(f"belljar-{lease}-1"))


def test_a_guest_that_crashes_soon_comes_back_with_its_keys(site: LeaseSite) -> None:
    lease = site.leased()
    look = "cat /proc/sys/kernel/random/boot_id"
    before = site.ssh(lease, look)
    time.sleep(3)  # far less than the time after which a guest writes to its disk by itself
    site.tried(lease, "echo b >/proc/sysrq-trigger")
    site.until(lambda: site.tried(lease, look) not in ("", before), "its guest is reached again", 60)
    site("release", lease)
    site.until_nothing_is_left()


def test_slurms_records_name_the_owner_and_have_no_key(site: LeaseSite) -> None:
    wanted = {"image": IMAGE, "seconds": 600.0, "count": 3}  # there are two nodes: it waits
    lease = site.knock("nobody", do="run", wanted=wanted)["lease"]["id"]
    site.until(lambda: site.jobs(), "its job is there")
    (job,) = site.jobs()
    assert site.lab.text("squeue", "-h", "-o", "%k").strip() == "belljar: for nobody"
    assert site.knock("nobody", do="status")["leases"][0]["id"] == lease
    assert lease not in json.dumps(site.knock("root", do="status"))
    assert site.knock("root", do="release", id=lease)["error"] == "NoSuchLease"
    key = json.loads((site.folder / f"jobs/belljar-{lease}-1").read_text())["key"]
    told = site.lab.text("scontrol", "show", "job", "-d", job) + site.lab.text(
        "scontrol", "write", "batch_script", job, "-"
    )
    assert lease in told and key not in told
    kept = [one for one in (site.folder / "slurm").rglob("*") if one.is_file()]
    assert kept and not [one for one in kept if key.encode() in one.read_bytes()]
    site.knock("nobody", do="release", id=lease)
    site.until_nothing_is_left()


@pytest.mark.slow
def test_two_nodes_begin_together_and_each_is_given_back_alone(site: LeaseSite) -> None:
    lease_checks.two_nodes_begin_together_and_each_is_given_back_alone(site, {"n1", "n2"})


@pytest.mark.slow
def test_a_lease_that_grows_has_machines_for_no_longer_than_it_was_asked_for(site: LeaseSite) -> None:
    lease = site.leased()
    more = json.loads(site("grow", lease, "-n", "1", "--format", "json"))["lease"]
    site.until(lambda: site.is_running(more), "one more runs")
    first, second = site.status(lease)[0], site.status(more)[0]
    assert first["job"] != second["job"] and 3500 < second["wanted"]["seconds"] <= 3600
    assert site.ssh(more, "echo here") == "here\n"
    for one in (more, lease):
        site("release", one)
    site.until_nothing_is_left()


@pytest.mark.slow
def test_a_service_that_is_killed_changes_no_answer(site: LeaseSite) -> None:
    lease_checks.a_killed_service_changes_no_answer(site)


@pytest.mark.slow
def test_a_lease_is_extended_at_slurm_too(site: LeaseSite) -> None:
    """By an operator: here the service is root."""
    lease = site.leased()
    found = site.status(lease)[0]
    assert site.lab.job(found["job"])["TimeLimit"].startswith("01:0")
    site("extend", lease, "1h")
    assert site.lab.job(found["job"])["TimeLimit"].startswith("02:0")
    assert site.status(lease)[0]["ends"] == pytest.approx(found["ends"] + 3600)
    site.give_back(lease)


@pytest.mark.slow
def test_an_account_that_is_not_an_operator_is_told_what_slurm_says(site: LeaseSite) -> None:
    lab = site.lab
    words = (
        "--parsable",
        "--uid=nobody",
        "--chdir=/tmp",
        "--time=10",
        "--mem=100",
        "--output=/dev/null",
        "--wrap=sleep 300",
    )
    job = lab.text("sbatch", *words).strip()
    lab.until(lambda: lab.state(job) == "RUNNING", "the job runs")
    env = ("env", *(f"{name}={value}" for name, value in lab.env.items()))
    jobs = Jobs(
        Settings(),
        pilots_of("slurm"),
        b"",
        "",
        lambda argv: printed(("runuser", "-u", "nobody", "--", *env, *argv), timeout=30),
    )
    with pytest.raises(MachineBusy, match="permission denied"):
        asyncio.run(jobs.extend(job, 1200))
    assert lab.job(job)["TimeLimit"] == "00:10:00"
    lab.run("scancel", job)


@pytest.mark.slow
def test_a_pilot_that_is_killed_takes_its_machine_with_it(site: LeaseSite) -> None:
    lease = site.leased()
    (pilot,) = site.pilots()
    os.kill(pilot, signal.SIGKILL)
    site.until(lambda: site.state(lease) == "failed", "the lease has failed")
    assert site.status(lease)[1][0]["cause"] == "Server.NodeLost"
    site.until_nothing_is_left()


@pytest.mark.slow
def test_a_job_that_is_cancelled_behind_our_back_ends_its_lease(site: LeaseSite) -> None:
    lease = site.leased()
    site.lab.run("scancel", site.status(lease)[0]["job"])
    lease_checks.a_job_that_is_taken_away_ends_its_lease(site, lease)


@pytest.mark.slow
def test_a_lease_that_cannot_be_had_says_why(site: LeaseSite) -> None:
    assert "not among the images" in site("run", "windows", check=False)
    lease = site.run(IMAGE, "--time", "1h", "--queue", "nowhere")
    site.until(lambda: site.state(lease) == "failed", "it is refused")
    assert "invalid partition" in site.status(lease)[0]["why"].lower()
    waits = site.run(IMAGE, "--time", "1h", "-n", "3")
    site.until(lambda: site.state(waits) in ("failed", "queued"), "Slurm has said what it thinks")
    site("release", waits)
    site.until_nothing_is_left()
