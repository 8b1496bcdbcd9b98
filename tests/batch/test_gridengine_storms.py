# ruff: noqa: F811 - `cell` is a fixture
"""Under Grid Engine: belljar killed at every point, jobs killed at random, one poison job among many."""

from __future__ import annotations

import json
import os
import random
import time
from contextlib import suppress

import pytest
from tests.batch.lab.gridengine import until
from tests.batch.lab.gridengine_cell import IN_MACHINE, SETTINGS, Cell, cell  # noqa: F401
from tests.batch.test_slurm_storms import POINTS

KILLS = int(os.environ.get("BELLJAR_KILLS", "500"))
SEED = int(os.environ.get("BELLJAR_SEED", "0")) or int(time.time())
NEVER_BOOTS = ("-v", "BELLJAR_QEMU_BOOT_TIMEOUT=0.05,BELLJAR_MACHINE_START=cold")


def works(cell: Cell) -> None:
    """The next job runs as if nothing had happened; nothing of the others is left; the queue is open."""
    after = cell.run("echo well; exit 3", *IN_MACHINE)
    assert (after.exit, after.out, after.err) == (3, b"well\n", b"")
    cell.clean()
    assert cell.lab.queue_state() == ""


@pytest.mark.slow
@pytest.mark.parametrize("point", POINTS)
def test_killed_at_any_point_leaves_nothing_and_the_next_job_works(cell: Cell, point: str) -> None:
    end = cell.run("echo ran", *IN_MACHINE, "-v", f"BELLJAR_TESTING_ABORT_AT={point}")
    assert end.exit == 128 + 9, end
    cell.clean()  # by the epilog alone
    works(cell)


@pytest.mark.slow
def test_one_poison_job_among_twenty_costs_its_own_bound(cell: Cell) -> None:
    with cell.site.leaving_qemu_open():
        poison = cell.submit("echo never", *IN_MACHINE, *NEVER_BOOTS)
        jobs = [cell.submit(f"echo job {number}", *IN_MACHINE) for number in range(20)]
        assert [cell.ended(job, timeout=300).out for job in jobs] == [b"job %d\n" % number for number in range(20)]
        until(lambda: "E" in cell.lab.state(poison), "the poison job is held", timeout=200)
        cell.lab.run("qdel", poison)
        machines = json.loads(cell.belljar("ps", "-a", "--format", "json", user="bjalice").stdout)
        assert sum(one["requester"] == f"gridengine:{poison}" for one in machines) == 2  # SETTINGS: retries
        works(cell)


@pytest.mark.torture
@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_hundreds_of_jobs_killed_at_random(cell: Cell) -> None:
    """Each job dies in one of three ways at a random moment of its life."""
    chance = random.Random(SEED)
    print(f"{KILLS} kills, seed {SEED}")
    for begin in range(0, KILLS, 20):
        jobs = [cell.submit("echo ran; sleep 2", *IN_MACHINE, "-r", "n") for _ in range(min(20, KILLS - begin))]
        for job in jobs:
            until(lambda job=job: cell.lab.state(job) not in ("qw", "t"), f"job {job} starts", timeout=300)
            time.sleep(chance.uniform(0, 3.0))  # the moment itself is what varies
            kill(cell, job, chance.choice(("qdel", "wrap", "qemu")))
        for job in jobs:
            until(lambda job=job: cell.lab.state(job) == "", f"the end of job {job}", timeout=300)
        cell.clean()
        works(cell)


def kill(cell: Cell, job: str, how: str) -> None:
    if how == "qdel":
        cell.lab.run("qdel", job, check=False)
        return
    with suppress(OSError, ValueError, KeyError, ProcessLookupError):
        os.kill(cell.pids(job)[how], 9)


def test_a_node_that_fails_every_job_is_closed_and_opened_again_when_it_works(cell: Cell) -> None:
    settings = SETTINGS.replace("node_faults = 0", "node_faults = 3")
    cell.site.configure(settings, qemu='binary = "/no/such/qemu"')
    try:
        jobs = [cell.submit("echo at last", *IN_MACHINE) for _ in range(4)]
        until(lambda: "d" in cell.lab.queue_state(), "the queue's instance here is disabled", timeout=90)
        status = cell.belljar("batch", "node", "gridengine", "status").stdout
        assert b"closed by belljar" in status and b"/no/such/qemu" in status
        assert cell.belljar("batch", "node", "gridengine", "test", check=False).returncode == 1
        cell.site.configure(settings)
        for passes in (1, 2):
            assert "d" in cell.lab.queue_state(), f"opened after {passes - 1} good self-checks"
            cell.belljar("batch", "node", "gridengine", "test")
        until(lambda: "d" not in cell.lab.queue_state(), "it is open again", timeout=30)
    finally:
        cell.site.configure(SETTINGS)
    for job in jobs:
        if "E" in cell.lab.state(job):
            cell.lab.run("qmod", "-cj", job, check=False)
        assert cell.ended(job, timeout=120).out == b"at last\n"
