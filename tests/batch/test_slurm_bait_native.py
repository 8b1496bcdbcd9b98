"""Native jobs and machines of a bait on one host, with a real Slurm and real guests: what Slurm's books say of the host shrinks and grows
with the machines."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.batch.lab.site import Site
from tests.batch.lab.worker import BAIT, PATIENCE, Worker, until
from tests.live.net_lab import Lab

from belljar.batch import JobState, JobView, NodeState

pytestmark = pytest.mark.slow  # builds an image with slurmd, and waits for real nodes to come and go

NATIVE = "bait2"
PARTITIONS = f"""
PartitionName=vm Nodes={BAIT} MaxTime=INFINITE State=UP
PartitionName=native Nodes={NATIVE} MaxTime=INFINITE State=UP
PartitionName=belljar-room Nodes={NATIVE} Hidden=YES PriorityTier=100 MaxTime=INFINITE State=UP
"""


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    net, site, folder = Lab(), Site("native"), tmp_path_factory.mktemp("native")
    made = Worker(net, site, folder, PARTITIONS)
    made.file.write_text(made.file.read_text().replace(f'also = ["{NATIVE}"]', f'native = "{NATIVE}"'))
    prolog = folder / "prolog"
    prolog.write_text(prolog.read_text().replace("in bait*)", f"in {BAIT})"))
    try:
        made.slurm.up()
        made.start()
        yield made
    finally:
        made.close()
        site.close()
        net.close()


def keeping(worker: Worker) -> list[JobView]:
    """The jobs that keep room on the node of native jobs."""
    over = (JobState.ENDED, JobState.ENDING)
    return [one for one in worker.slurm.jobs().values() if one.keeps[0] and one.state not in over]


def test_native_jobs_wait_for_machines_and_start_when_these_have_gone_even_if_the_bait_was_killed(
    worker: Worker,
) -> None:
    ends = worker.site.home("bjalice") / "ends"
    job = worker.slurm.submit("until [ -e ends ]; do sleep 0.2; done; exit 5", "--partition=vm")
    until(lambda: "running" in worker.states(job), f"job {job} to run\n{worker.said()}", PATIENCE)
    (room,) = keeping(worker)
    (machine,) = worker.json("nodes")["nodes"]
    assert room.keeps == (machine["machine"], NATIVE) and (room.owner, room.state) == ("root", JobState.RUNNING)
    assert worker.slurm.nodes()[NATIVE].free_cpus == 1
    native = worker.slurm.submit("hostname", "--partition=native", "--cpus-per-task=2")
    small = worker.slurm.submit("hostname", "--partition=native")
    assert worker.slurm.lab.ended(small, PATIENCE)["JobState"] == "COMPLETED"  # what is left is for native jobs
    assert worker.slurm.lab.job(native)["JobState"] == "PENDING"
    worker.kill()
    ends.touch()
    worker.slurm.lab.until(lambda: worker.slurm.lab.job(job)["JobState"] == "FAILED", "the job to end", PATIENCE)
    assert len(keeping(worker)) == 1 and worker.slurm.lab.job(native)["JobState"] == "PENDING"
    worker.start()
    worker.closed(job)
    assert worker.slurm.lab.ended(native, PATIENCE)["JobState"] == "COMPLETED", worker.said()
    assert keeping(worker) == [] and worker.belljar.leftovers() == []


def test_a_machine_waits_for_native_jobs_and_the_bait_is_closed_meanwhile(worker: Worker) -> None:
    native = worker.slurm.submit("sleep 600", "--partition=native", "--cpus-per-task=2")
    worker.slurm.lab.until(lambda: worker.slurm.lab.job(native)["JobState"] == "RUNNING", "the native job to run")
    until(lambda: worker.slurm.nodes()[BAIT].state is NodeState.OUT, "the bait to close", 60)
    assert worker.json("status")["status"]["why"] == "no processor is free"
    half = worker.slurm.submit("sleep 600", "--partition=native")
    worker.slurm.run(worker.slurm.pool.client.cancel(native))
    until(lambda: worker.slurm.nodes()[BAIT].state is NodeState.IDLE, "the bait to open", 60)
    job = worker.slurm.submit("exit 4", "--partition=vm", "--cpus-per-task=2", "--mem=600")
    until(lambda: keeping(worker), f"room to be asked for\n{worker.said()}", PATIENCE)
    (room,) = keeping(worker)
    until(lambda: any("beside native" in one["why"] for one in worker.json("jobs")["jobs"]), "its reason", 30)
    assert room.state is JobState.WAITING and worker.belljar.domains() == []
    worker.kill()
    worker.start()
    worker.slurm.run(worker.slurm.pool.client.cancel(half))
    record = worker.slurm.lab.ended(job, PATIENCE)
    assert record["ExitCode"] == "4:0", worker.said()
    worker.closed(job)
    until(lambda: keeping(worker) == [], "the room to be given back", 30)


def test_a_cancelled_job_gives_its_room_back(worker: Worker) -> None:
    job = worker.slurm.submit("sleep 600", "--partition=vm")
    until(lambda: "vm-booting" in worker.states(job), f"job {job} to have a machine\n{worker.said()}", PATIENCE)
    worker.kill()
    worker.slurm.run(worker.slurm.pool.client.cancel(job))
    worker.start()
    worker.closed(job)
    until(lambda: keeping(worker) == [], "the room to be given back", 30)
    assert worker.slurm.nodes()[NATIVE].free_cpus == 2 and worker.belljar.leftovers() == []
