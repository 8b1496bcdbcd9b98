"""The bait with a real Grid Engine and real guests: each job gets a machine on a bridge, with execd from Debian's packages, that joins as
an execution host of its own."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator

import pytest
from tests.batch.lab.gridengine import ENV, HOST, QUEUE
from tests.batch.lab.gridengine_bait import BAIT, NODES, NODES_QUEUE, GridEngineWorker
from tests.batch.lab.site import Site
from tests.batch.lab.worker import PATIENCE, until

from belljar.pool import NodeState

pytestmark = pytest.mark.slow  # builds an image with execd, and waits for real hosts to come and go


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GridEngineWorker]:
    site = Site("ge-bait")
    made = GridEngineWorker(site, tmp_path_factory.mktemp("bait"))
    try:
        made.start()
        yield made
    finally:
        made.close()
        site.close()


def test_what_a_bait_needs_is_there(worker: GridEngineWorker) -> None:
    file = worker.file.with_name("here.toml")
    file.write_text(worker.file.read_text().replace("max_cpus = 4\n", ""))  # this host may have fewer
    words = worker.argv("bait", "check", str(file))
    done = subprocess.run(words, env={**worker.belljar.env, **ENV}, capture_output=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout.decode() + done.stderr.decode()
    assert f"ok    bait {BAIT}" in done.stdout.decode()


def test_a_job_runs_on_a_host_that_is_made_for_it(worker: GridEngineWorker) -> None:
    waits = "until [ -e seen ]; do sleep 0.2; done"  # a job that ends between two looks is never seen to run
    says = 'hostname; id -un; echo "$JOB_ID $QUEUE $NSLOTS $1"; qconf -sh 2>&1; exit 7'
    job = worker.submit(f"{waits}; {says}", "-pe", "smp", "2", "-o", "out", "-j", "y", args=("an arg",))
    worker.reached(job, "running")
    intruder = worker.cell.submit("-q", NODES_QUEUE, "-b", "y", "true", user="bjbob")
    (worker.site.home("bjalice") / "seen").touch()
    row = worker.ended(job)
    name = row["hostname"].partition(".")[0]
    assert (row["exit_status"].split()[0], row["qname"]) == ("7", NODES_QUEUE), worker.said()
    first, *more = worker.written("out").splitlines()
    assert (first, more[:2]) == (name, ["bjalice", f"{job} belljar 2 an arg"]), worker.written("out")
    # Neither an administrative nor a submit host: what runs there has no say in the cell.
    assert f'denied: host "{name}" is neither submit nor admin host' in more[2]
    assert worker.cell.state(intruder) == "qw"  # a machine is for its job's owner alone
    worker.cell.run("qdel", intruder)
    worker.closed(job)
    assert [one for one in worker.states(job) if one != "image-wait"] == [
        "arrived", "stopped", "vm-requested", "vm-booting", "vm-ready", "migrating", "running", "finished", "closed",
    ]  # fmt: skip


def test_each_task_of_an_array_has_a_host_of_its_own(worker: GridEngineWorker) -> None:
    # Of these the first by its number is the last by its letters.
    job = worker.submit("hostname; exit $SGE_TASK_ID", "-t", "9-11", "-o", "task.$TASK_ID", "-j", "y")
    ended = {task: worker.ended(job, task=task) for task in ("9", "10", "11")}
    for task, row in ended.items():
        assert row["exit_status"].split()[0] == task, worker.said()
        assert worker.written(f"task.{task}").strip() == row["hostname"].partition(".")[0] in NODES
    worker.closed(*(f"{job}.{task}" for task in ended))


def test_a_bait_that_is_killed_goes_on_where_it_was(worker: GridEngineWorker) -> None:
    job = worker.submit("date +%s >> runs; sleep 15; exit 5", "-r", "n", "-o", "/dev/null", "-j", "y")
    for state in ("vm-booting", "running"):
        worker.reached(job, state)
        worker.kill()
        worker.start()
    (node,) = worker.json("nodes")["nodes"]
    assert node["job"] == job and node["node"] in NODES
    assert worker.ended(job)["exit_status"].split()[0] == "5"
    assert len(worker.written("runs").splitlines()) == 1
    worker.closed(job)


@pytest.mark.parametrize("reruns", ["y", "n"])
def test_a_job_whose_machine_is_killed_runs_again_or_ends_as_its_user_wants(
    worker: GridEngineWorker, reruns: str
) -> None:
    job = worker.submit(f"hostname >> hosts-{reruns}; sleep 10", "-r", reruns, "-o", "/dev/null", "-j", "y")
    hosts = lambda: worker.written(f"hosts-{reruns}").split()  # noqa: E731
    until(hosts, f"job {job} to begin\n{worker.said()}", PATIENCE)
    worker.reached(job, "running")
    (pid,) = worker.belljar.domains()
    os.kill(pid, signal.SIGKILL)
    until(lambda: not worker.cell.state(job), f"job {job} to end\n{worker.said()}", PATIENCE)
    worker.closed(job)
    assert len(hosts()) == (2 if reruns == "y" else 1), worker.said()
    assert "lost" in worker.states(job)


def test_what_nobody_can_make_is_held_with_the_reason_and_a_deleted_job_leaves_nothing(
    worker: GridEngineWorker,
) -> None:
    wrong = worker.submit("true", memory="2000G")
    until(lambda: worker.states(wrong)[-1:] == ["closed"], f"job {wrong} to be refused\n{worker.said()}", PATIENCE)
    assert worker.cell.state(wrong).startswith("h")
    assert "belljar=2048192_MiB_of_memory:_this_host_has" in worker.cell.detail(wrong)
    job = worker.submit("sleep 600")
    worker.reached(job, "vm-booting")
    worker.cell.run("qdel", job, wrong)
    worker.closed(job)


def test_a_closed_bait_takes_no_job_and_an_open_one_does(worker: GridEngineWorker) -> None:
    assert worker.belljar("bait", "close", "--reason", "disk swap", "--state", str(worker.state)).returncode == 0
    until(lambda: worker.nodes()[BAIT].state is NodeState.OUT, "the bait to close")
    until(lambda: worker.json("status")["status"]["state"] == "closed-admin", "the bait to say so")
    worker.kill()
    worker.start()
    assert worker.belljar("bait", "open", "--state", str(worker.state)).returncode == 0
    until(lambda: worker.nodes()[BAIT].state is NodeState.IDLE, "the bait to open")
    worker.cell.run("qmod", "-d", f"{QUEUE}@{HOST}")
    until(lambda: worker.nodes()[BAIT].state is NodeState.OUT, "an administrator to close it")
    looked = worker.json("status")["status"]["looked"]
    until(lambda: worker.json("status")["status"]["looked"] > looked + 3, "three more looks")
    assert worker.nodes()[BAIT].state is NodeState.OUT  # what somebody else closed stays so
    worker.cell.run("qmod", "-e", f"{QUEUE}@{HOST}")


def test_a_bait_that_is_not_there_starts_nothing_on_its_host(worker: GridEngineWorker) -> None:
    worker.kill()
    worker.set_prolog(timeout="5s")
    job = worker.submit("hostname > where", "-o", "/dev/null", "-j", "y")
    until(lambda: "E" in worker.cell.queue_state(), f"the prolog to fail\n{worker.said()}", PATIENCE)
    worker.set_prolog()
    worker.start()
    row = worker.ended(job)
    assert row["exit_status"].split()[0] == "0" and worker.written("where").strip() in NODES, worker.said()
    worker.closed(job)
