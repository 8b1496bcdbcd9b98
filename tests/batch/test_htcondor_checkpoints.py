"""Jobs that are checkpointed, on a real HTCondor: vacated three times, each time to a directory of another name."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.batch.lab.condor import Condor
from tests.batch.test_htcondor import IMAGE, as_the_page_says, images_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
CHECKPOINTS = "/var/lib/checkpoints"
COUNT = b"#!/bin/sh\ni=0; while [ $i -lt 150 ]; do i=$((i+1)); echo $i; echo $i >>numbers; sleep 0.3; done; exit 3\n"


@pytest.fixture(scope="module")
def condor() -> Iterator[Condor]:
    condor = Condor("trixie")
    try:
        condor.up()
        for section in ("1. Settings", "2. Install"):
            as_the_page_says(condor, section)
        condor.run("mkdir", "-m", "1777", CHECKPOINTS)
        condor.configure(f'checkpoint = "on-request"\ncheckpoint_folder = "{CHECKPOINTS}"')
        condor.belljar("batch", "install", "htcondor", "--yes")
        condor.until(lambda: b"debian12" in images_of(condor), "the schedd knows the pool's images", 150)
        yield condor
    finally:
        condor.close()


def test_a_job_that_is_vacated_three_times(condor: Condor) -> None:
    ad = {**IMAGE, "plus_VmCheckpoint": '"on-preempt"', "transfer_output_files": "numbers"}
    job = condor.job(COUNT, **ad)
    for vacations in range(1, 4):
        condor.happened(job, "ExecuteEvent", count=vacations)
        condor.until(lambda: b"running" in condor.belljar("ps", user="bjalice").stdout, "its machine runs")
        condor.run("sleep", "4")  # it counts on, unseen: its output is in the sandbox
        condor.run("condor_vacate_job", job)
        condor.happened(job, "JobEvictedEvent", count=vacations)
    ended = condor.wait(job)
    numbers = [b"%d" % number for number in range(1, 151)]
    assert (ended.status, ended.code, ended.out.splitlines()) == ("Completed", 3, numbers), ended.err
    assert condor.outside("/home/bjalice/numbers").read_bytes().splitlines() == numbers
    assert list(condor.outside(CHECKPOINTS).glob("*/*")) == []


def test_what_cannot_be_is_refused_at_submission(condor: Condor) -> None:
    done = condor.submit(COUNT, check=False, **IMAGE, plus_VmCheckpoint='"always"')
    assert done.returncode and b"belljar: +VmCheckpoint: It is never, on-preempt" in done.stderr
