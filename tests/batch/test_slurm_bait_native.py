"""Native jobs, jobs in machines of their own and machines of a bait on one host, with a real Slurm and real guests: what Slurm's books say
of the host shrinks and grows with the machines."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from tests.batch.lab.site import Site
from tests.batch.lab.worker import BAIT, IMAGE, PATIENCE, Worker, until
from tests.live.net_lab import Lab

from belljar.pool import JobState, JobView, NodeState

pytestmark = pytest.mark.slow  # builds an image with slurmd, and waits for real nodes to come and go

NATIVE, CPUS = "bait2", 3
WRAPPED = "--comment=vm=debian12"
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
    wrapped = f"*) exec {made.slurm.lab.etc}/belljar-prolog"
    prolog.write_text(prolog.read_text().replace("in bait*)", f"in {BAIT})").replace("esac", f"{wrapped};; esac"))
    made.slurm.lab.node_line = made.slurm.lab.node_line.replace("CPUs=2", f"CPUs={CPUS}")
    made.slurm.baits = (BAIT,)
    try:
        made.slurm.up()
        install = ("batch", "install", "slurm", "--folder", str(made.slurm.lab.etc), "--prefix", str(site.top))
        words = (str(site.belljar), "--config", str(site.config), *install, "--set", "bait=vm belljar belljar-room")
        site.run(*made.slurm.lab.inside, *words, env=made.slurm.lab.env)
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
    assert worker.slurm.nodes()[NATIVE].free_cpus == CPUS - 1
    native = worker.slurm.submit("hostname", "--partition=native", f"--cpus-per-task={CPUS}")
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
    native = worker.slurm.submit("sleep 600", "--partition=native", f"--cpus-per-task={CPUS}")
    worker.slurm.lab.until(lambda: worker.slurm.lab.job(native)["JobState"] == "RUNNING", "the native job to run")
    until(lambda: worker.slurm.nodes()[BAIT].state is NodeState.OUT, "the bait to close", 60)
    assert worker.json("status")["status"]["why"] == "no processor is free"
    half = worker.slurm.submit("sleep 600", "--partition=native", f"--cpus-per-task={CPUS - 1}")
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
    assert worker.slurm.nodes()[NATIVE].free_cpus == CPUS and worker.belljar.leftovers() == []


def test_native_jobs_jobs_in_machines_and_worker_nodes_share_the_host(worker: Worker) -> None:
    """Three processors: one for each kind, and nothing is left; when one ends, just its own is free again."""
    lab, home = worker.slurm.lab, worker.site.home("bjalice")
    free = lambda: worker.slurm.nodes()[NATIVE].free_cpus  # noqa: E731
    waits = lambda name: f"hostname > {name}; until [ -e end-{name} ]; do sleep 0.2; done; exit 5"  # noqa: E731
    node = worker.slurm.submit(waits("node"), "--partition=vm")
    until(lambda: worker.written("node"), f"a worker node\n{worker.said()}", PATIENCE)
    assert free() == CPUS - 1
    own = worker.slurm.submit(waits("own"), "--partition=native", WRAPPED)
    until(lambda: worker.written("own"), f"a machine of the job's own\n{worker.written(f'{own}.err')}", PATIENCE)
    assert free() == CPUS - 2 and lab.job(own)["NodeList"] == NATIVE
    native = worker.slurm.submit(waits("native"), "--partition=native")
    until(lambda: worker.written("native"), "a native job", 60)
    hosts = [worker.written(name).strip() for name in ("node", "own", "native")]
    assert hosts[0].startswith("vm") and hosts[1].startswith("belljar-") and hosts[2] == os.uname().nodename
    until(lambda: worker.json("status")["status"]["why"] == "no processor is free", "the bait to close", 60)
    assert free() == 0 and len(worker.belljar.domains()) == 1
    late = worker.slurm.submit(waits("late"), "--partition=native", WRAPPED)
    (home / "end-own").touch()
    assert lab.ended(own, PATIENCE)["ExitCode"] == "5:0", worker.written(f"{own}.err")
    until(lambda: worker.written("late"), "the next job's machine, in the place of the first", PATIENCE)
    assert {lab.job(one)["JobState"] for one in (node, native, late)} == {"RUNNING"} and free() == 0
    for name in ("node", "native", "late"):
        (home / f"end-{name}").touch()
    for job in (node, native, late):
        assert lab.ended(job, PATIENCE)["ExitCode"] == "5:0", worker.said()
    worker.closed(node)
    until(lambda: free() == CPUS and not keeping(worker), "all of the host to be free", 60)
    until(lambda: worker.slurm.nodes()[BAIT].state is NodeState.IDLE, "the bait to open", 60)
    assert worker.belljar.leftovers() == worker.site.leftovers() == []


def test_a_job_that_names_its_image_is_the_baits_and_not_wrapped(worker: Worker) -> None:
    job = worker.slurm.submit("cat /etc/worker; exit 6", "--partition=vm", f"--comment=vm={IMAGE}")
    assert worker.slurm.lab.ended(job, PATIENCE)["ExitCode"] == "6:0", worker.said()
    assert worker.written(f"{job}.out") == f"{IMAGE}\n"
    worker.closed(job)
