"""Jobs that are checkpointed, on a real Grid Engine: a queue of higher rank takes the slots, a manager reschedules."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.batch.lab.gridengine import until
from tests.batch.lab.gridengine_cell import IN_MACHINE, Cell

pytestmark = pytest.mark.slow

COUNT = "i=0; while [ $i -lt {most} ]; do i=$((i+1)); echo $i; echo $i >>numbers; sleep 0.3; done; exit 3"


@pytest.fixture(scope="module")
def cell() -> Iterator[Cell]:
    made = Cell("ge-checkpoints")
    try:
        folder = made.site.top / "checkpoints"
        folder.mkdir()
        folder.chmod(0o1777)
        made.site.configure(f'checkpoint = "on-request"\ncheckpoint_folder = "{folder}"\nretry_delay = 1\n')
        made.install()
        made.lab.set_queue(notify="00:00:40")
        made.lab.add_queue("high.q")
        made.lab.config("-mattr", "queue", "subordinate_list", "all.q=1", "high.q")
        yield made
    finally:
        made.close()


def by_a_subordinate_queue(cell: Cell, job: str) -> None:
    """The notice of the suspension, USR1, comes `notify` seconds before it."""
    other = cell.qsub("-q", "high.q", "-b", "y", "sleep", "15")
    until(lambda: "q" in cell.lab.state(job), "the job is queued again", timeout=40)
    cell.ended(other)


def by_a_manager(cell: Cell, job: str) -> None:
    """TERM by the terminate method."""
    checkpoints = list((cell.site.top / "checkpoints").glob("*/*/*[0-9]"))
    cell.lab.run("qmod", "-rj", job)
    until(
        lambda: list((cell.site.top / "checkpoints").glob("*/*/*[0-9]")) != checkpoints,
        "a checkpoint",
        timeout=40,
    )


@pytest.mark.parametrize("preempt", [by_a_subordinate_queue, by_a_manager])
def test_a_job_that_is_preempted_three_times(cell: Cell, preempt: Callable[[Cell, str], None]) -> None:
    options = (
        "-r",
        "y",
        "-v",
        "VM_CHECKPOINT=on-preempt",
        *(("-notify",) if preempt is by_a_subordinate_queue else ()),
    )
    job = cell.submit(COUNT.format(most=150), *IN_MACHINE, *options)
    for _ in range(3):
        before = len(cell.out(job).splitlines())
        until(lambda: len(cell.out(job).splitlines()) > before + 3, "it counts on", timeout=120)  # noqa: B023
        preempt(cell, job)
    ended = cell.ended(job, timeout=240, rows=4)
    numbers = [b"%d" % number for number in range(1, 151)]
    assert (ended.exit, ended.out.splitlines()) == (3, numbers), ended.err
    written = Path(cell.site.home("bjalice") / "numbers")
    assert written.read_bytes().splitlines() == numbers
    written.unlink()
    assert os.listdir(cell.site.top / "checkpoints" / str(cell.site.home("bjalice").stat().st_uid)) == []
    cell.clean()


def test_what_cannot_be_is_refused_at_submission(cell: Cell) -> None:
    script = cell.script("exit 0")
    done = cell.lab.run("qsub", *IN_MACHINE, "-v", "VM_CHECKPOINT=always", script, user="bjalice", check=False)
    assert done.returncode and b"checkpoint 'always': not when a job can be checkpointed" in done.stdout + done.stderr
