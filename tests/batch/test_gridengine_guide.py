# ruff: noqa: F811 - `cell` is a fixture
"""What the guide promises and other tests do not show: interactive jobs, jobs that cannot be started."""

from __future__ import annotations

from tests.batch.lab.gridengine_cell import IN_MACHINE, WITHOUT, Cell, cell  # noqa: F401


def test_interactive_jobs_stay_out_and_close_no_queue(cell: Cell) -> None:
    """Grid Engine 8.1.9 closes a queue with a prolog at the first qrsh that it starts there."""
    elsewhere = cell.lab.run("qrsh", "hostname", user="bjalice", timeout=60)
    assert elsewhere.stdout.strip() == b"bjge"
    here = cell.lab.run("qrsh", "-q", "all.q", "hostname", user="bjalice", check=False, timeout=60)
    assert here.returncode == 1 and b"could not be scheduled" in here.stdout + here.stderr
    asked = cell.lab.run("qrsh", "-l", "vm_image=debian12", "hostname", user="bjalice", check=False, timeout=60)
    assert asked.returncode == 1 and b"qrsh and qlogin have no machine" in asked.stdout + asked.stderr
    assert cell.lab.queue_state() == ""


def test_a_job_that_cannot_be_started_is_held_as_without_a_machine(cell: Cell) -> None:
    jobs = [cell.submit("#!/no/such/interpreter\n", *queue) for queue in (IN_MACHINE, WITHOUT)]
    jobs += [cell.qsub("-b", "y", "-shell", "n", *queue, "/no/such/program") for queue in (IN_MACHINE, WITHOUT)]
    for job in jobs:
        cell.lab.until_state(job, "Eqw", timeout=240)
    assert "interpreter is missing" in cell.error_reason(jobs[0])
    assert "/no/such/program" in cell.error_reason(jobs[2])
    cell.lab.run("qdel", *jobs)
    cell.clean()
    assert cell.lab.queue_state() == ""
