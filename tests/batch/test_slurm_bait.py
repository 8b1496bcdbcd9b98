"""The bait with a real Slurm and real guests: each job gets a machine on a bridge, with slurmd and munge from Debian's packages, that
joins as a node of its own."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.batch.lab.pool import read
from tests.batch.lab.site import Site
from tests.batch.lab.worker import BAIT, IMAGE, PATIENCE, Worker, until
from tests.live.net_lab import Lab

from belljar.pool import NodeState

BEGIN = 10  # seconds from now: slurmctld has written the job down by then
pytestmark = pytest.mark.slow  # builds an image with slurmd, and waits for real nodes to come and go


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    net, site = Lab(), Site("bait")
    made = Worker(net, site, tmp_path_factory.mktemp("bait"), like_a_site=True)
    try:
        made.slurm.up()
        made.start()
        yield made
    finally:
        made.close()
        site.close()
        net.close()


def test_a_job_runs_on_a_node_that_is_made_for_it(worker: Worker) -> None:
    waits = "until [ -e seen ]; do sleep 0.2; done"  # a job that ends between two looks is never seen to run
    says = "hostname; id -un; echo $SLURM_JOB_ID $SLURMD_NODENAME $1; exit 7"
    job = worker.slurm.submit(f"{waits}; {says}", args=("an arg",))
    until(lambda: "running" in worker.states(job), f"job {job} to run\n{worker.said()}", PATIENCE)
    shown = worker.belljar("show", f"slurm:{job}")
    assert shown.returncode == 0 and b"slurm-node" in shown.stdout, shown.stderr
    assert worker.daemon is not None
    worker.daemon.send_signal(signal.SIGSTOP)  # the machine ends when its job has, whether the bait looks or not
    (worker.site.home("bjalice") / "seen").touch()
    record = worker.slurm.lab.ended(job, PATIENCE)
    assert (record["JobState"], record["ExitCode"]) == ("FAILED", "7:0"), worker.said()
    until(lambda: not worker.belljar("ps", "-q").stdout, f"its machine to end\n{worker.said()}")
    worker.daemon.send_signal(signal.SIGCONT)
    node = record["NodeList"]
    assert node.startswith("vm") and record["BatchHost"] == node
    out = (worker.site.home("bjalice") / f"{job}.out").read_text()
    assert out == f"{node}\nbjalice\n{job} {node} an arg\n"
    worker.closed(job)
    assert [one for one in worker.states(job) if one != "image-wait"] == [
        "arrived", "stopped", "vm-requested", "vm-booting", "vm-ready", "migrating", "running", "finished", "closed",
    ]  # fmt: skip
    assert worker.belljar.leftovers() == []
    key = (worker.slurm.lab.folder / "munge/key/munge.key").read_bytes()
    for folder in (worker.belljar.folder, worker.state):
        assert not [path for path in folder.rglob("*") if path.is_file() and key[:16] in path.read_bytes()]


def checked(worker: Worker, *words: str, **settings: str) -> dict[str, str]:
    """What `belljar bait check` finds wrong, with other settings in bait.toml."""
    text = worker.file.read_text()
    for key, value in settings.items():
        text = re.sub(rf"(?m)^{key} = .*\n|\Z", "", text) + f"{key} = {value}\n"
    file = worker.file.with_name("other.toml")
    file.write_text(text)
    env = {**worker.belljar.env, "SLURM_CONF": str(worker.slurm.lab.conf)}
    argv = worker.argv("bait", "check", str(file), "--format", "json", *words)
    done = subprocess.run(argv, env=env, capture_output=True, timeout=300, check=False)
    assert done.returncode in (0, 1), done.stderr
    findings = json.loads(done.stdout)["findings"]
    assert not words or findings[-1]["name"] == "a machine joins", findings
    return {finding["name"]: finding["text"] for finding in findings if finding["text"]}


def test_check_proves_a_join_with_a_tiny_machine(worker: Worker, tmp_path: Path) -> None:
    here = {"max_cpus": "2"}
    assert checked(worker, **here) == {}
    assert checked(worker, "--join", **here) == {}
    (tmp_path / "key").write_bytes(os.urandom(128))
    foreign = checked(worker, "--join", **here, key=f'"{tmp_path}/key"', join="30")
    assert "it did not join within 30 s" in foreign["a machine joins"], foreign
    nowhere = checked(worker, "--join", **here, hosts=f'["10.99.0.77 {os.uname().nodename}"]', join="30")
    assert list(nowhere) == ["a machine joins"], nowhere
    elsewhere = checked(worker, "--join", **here, feature='"other"', join="30")
    assert elsewhere == {"a machine joins": "its node is not in partition belljar"}, elsewhere
    assert set(worker.slurm.nodes()) == {BAIT, "bait2"} and worker.belljar.leftovers() == []
    wrong = checked(worker, max_cpus="999", shares='["/nowhere/at/all:rw"]')
    assert set(wrong) == {"max_cpus", "share /nowhere/at/all"}, wrong


def test_a_bait_and_a_slurmctld_that_are_killed_go_on_where_they_were(worker: Worker) -> None:
    job = worker.slurm.submit("date +%s >> runs; sleep 20; exit 5", "--no-requeue")
    for state in ("vm-booting", "running"):
        until(lambda state=state: state in worker.states(job), f"job {job} to be {state}\n{worker.said()}", PATIENCE)
        worker.kill()
        worker.start()
    runs = worker.site.home("bjalice") / "runs"
    began = lambda: float(read(runs) or "inf")  # noqa: E731 - the file is there before its line is
    # It writes its state down some seconds after a job has begun; killed before, it would start the job anew, bait or no bait.
    until(lambda: time.time() - began() > 8, "slurmctld to know of the job's start")
    worker.slurm.lab.stop("slurmctld", signal.SIGKILL)
    worker.slurm.lab.start_slurmctld()
    (node,) = worker.json("nodes")["nodes"]
    assert node["job"] == job and node["node"] == f"vm{node['machine']}x"
    record = worker.slurm.lab.ended(job, PATIENCE)
    assert (record["JobState"], record["ExitCode"], record["Restarts"]) == ("FAILED", "5:0", "1"), worker.said()
    assert record["Requeue"] == "0"
    assert len(runs.read_text().splitlines()) == 1
    worker.closed(job)
    assert worker.belljar.leftovers() == []


def test_a_job_that_may_run_once_does_not_run_again_where_slurmctld_has_forgotten_that_it_began(worker: Worker) -> None:
    lab, saved = worker.slurm.lab, worker.slurm.lab.folder / "state/job_state"
    job = worker.slurm.submit("echo >> once; sleep 60; echo >> once", "--no-requeue")
    until(lambda: "vm-booting" in worker.states(job), f"job {job} to be held\n{worker.said()}", PATIENCE)
    worker.daemon.send_signal(signal.SIGSTOP)  # so that it stays held
    asked = time.time()
    worker.slurm.run(("scontrol", "update", f"JobId={job}", "Comment=mine"))
    until(lambda: saved.stat().st_mtime > asked, f"slurmctld to write job {job} down")
    before = saved.read_bytes()
    worker.daemon.send_signal(signal.SIGCONT)
    until(lambda: worker.written("once"), f"job {job} to begin\n{worker.said()}", PATIENCE)
    until(lambda: "running" in worker.states(job), f"job {job} to run\n{worker.said()}", PATIENCE)
    lab.stop("slurmctld", signal.SIGKILL)
    saved.write_bytes(before)  # as if it had been killed before it wrote down that the job began
    lab.start_slurmctld()
    record = lab.ended(job, PATIENCE)
    assert (record["JobState"], record["Restarts"]) == ("CANCELLED", "1"), worker.said()
    assert "is not to run twice" in lab.text("scontrol", "show", "job", job)
    worker.closed(job)
    assert worker.written("once") == "\n" and worker.states(job).count("running") == 1


@pytest.mark.parametrize("known", ["held", "waiting"])
def test_a_job_whose_start_slurmctld_has_forgotten_does_not_run_on_the_bait(worker: Worker, known: str) -> None:
    lab, saved = worker.slurm.lab, worker.slurm.lab.folder / "state/job_state"
    asked, option = time.time(), "--hold" if known == "held" else f"--begin=now+{BEGIN}"
    job = worker.slurm.submit("echo $SLURMD_NODENAME >> where", option)
    until(lambda: saved.exists() and saved.stat().st_mtime > asked, f"slurmctld to write job {job} down")
    before = saved.read_bytes()
    worker.daemon.send_signal(signal.SIGSTOP)  # so that the job stays in its prolog
    try:
        if known == "held":
            worker.slurm.run(worker.slurm.pool.release(job))
        until(lambda: running(f"bait arrive {job} "), f"job {job} to be in its prolog")
        lab.stop("slurmctld", signal.SIGKILL)
        saved.write_bytes(before)  # as if it had been killed before it wrote down that the job began
        lab.start_slurmctld()
        assert (lab.job(job)["Priority"] == "0") is (known == "held")
    finally:
        worker.daemon.send_signal(signal.SIGCONT)
    until(lambda: not running(f"bait arrive {job} "), f"the prolog of job {job} to end\n{worker.said()}", PATIENCE)
    record = lab.ended(job, PATIENCE)
    assert record["JobState"] == "COMPLETED", worker.said()
    where = worker.written("where").split()
    (worker.site.home("bjalice") / "where").unlink()
    assert len(where) == 1 and where[0].startswith("vm"), worker.said()
    worker.closed(job)
    until(lambda: worker.slurm.nodes()[BAIT].state is NodeState.IDLE, "the bait to be open", 60)


def test_a_job_of_which_no_prolog_told_does_not_run_on_the_bait(worker: Worker) -> None:
    prolog = Path(worker.slurm.lab.settings["Prolog"])
    before = prolog.read_bytes()
    prolog.write_text("#!/bin/sh\n")
    try:
        job = worker.slurm.submit("echo $SLURMD_NODENAME >> untold; exit 3")
        until(lambda: worker.states(job), f"job {job} to be taken back\n{worker.said()}", 60)
    finally:
        prolog.write_bytes(before)
    record = worker.slurm.lab.ended(job, PATIENCE)
    assert (record["JobState"], record["ExitCode"]) == ("FAILED", "3:0"), worker.said()
    (where,) = worker.written("untold").split()
    assert where == record["NodeList"] and where.startswith("vm")
    worker.closed(job)
    assert worker.slurm.nodes()[BAIT].state is NodeState.IDLE and worker.belljar.leftovers() == []


def running(words: str) -> bool:
    """Some process has these words on its command line."""
    lines = (read(path).replace(b"\0", b" ") for path in Path("/proc").glob("[0-9]*/cmdline"))
    return any(words.encode() in line for line in lines)


def test_a_job_whose_machine_is_killed_runs_again_on_another(worker: Worker) -> None:
    job = worker.slurm.submit("echo $SLURMD_NODENAME >> nodes; sleep 5; exit 0")
    until(lambda: len(nodes_of(worker)) == 1, f"the job to begin\n{worker.said()}", PATIENCE)
    (pid,) = worker.belljar.domains()
    os.kill(pid, signal.SIGKILL)
    record = worker.slurm.lab.ended(job, PATIENCE)
    assert record["JobState"] == "COMPLETED" and len(set(nodes_of(worker))) == 2, worker.said()
    worker.closed(job)
    assert {"lost", "reprocess"} & set(worker.states(job)) and worker.belljar.leftovers() == []
    (worker.site.home("bjalice") / "nodes").unlink()


def test_after_a_restart_of_the_host_its_machines_have_their_ends_and_their_jobs_run_again(worker: Worker) -> None:
    """Power is cut while one job runs and the next one's machine boots: nothing of before is there, but Slurm's controller."""
    runs = worker.slurm.submit("echo $SLURMD_NODENAME >> nodes; [ -e again ] || sleep 600; exit 3")
    until(lambda: nodes_of(worker), f"the job to begin\n{worker.said()}", PATIENCE)
    once = worker.slurm.submit("sleep 600", "--no-requeue")
    until(lambda: "vm-booting" in worker.states(once), f"job {once} to have a machine\n{worker.said()}", PATIENCE)
    lost = {row["machine"] for row in worker.json("nodes")["nodes"]}
    assert len(lost) == 2
    worker.kill()
    for bait in (BAIT, "bait2"):
        worker.slurm.lab.stop(f"slurmd-{bait}", signal.SIGKILL)
    worker.belljar.power_cut()
    (worker.site.home("bjalice") / "again").touch()
    for bait in (BAIT, "bait2"):
        worker.slurm.lab.start_slurmd(bait)
    worker.start()
    until(lambda: f"vm{min(lost)}x" not in worker.slurm.nodes(), f"lost nodes to leave\n{worker.said()}", PATIENCE)
    record = worker.slurm.lab.ended(runs, PATIENCE)
    assert (record["ExitCode"], len(set(nodes_of(worker)))) == ("3:0", 2), worker.said()
    until(lambda: "running" in worker.states(once), f"job {once} to run\n{worker.said()}", PATIENCE)
    worker.slurm.run(worker.slurm.pool.cancel(once))
    worker.closed(runs, once)
    files = worker.belljar.logs.glob("ledger-*.jsonl")
    rows = [row for file in files for row in map(json.loads, file.read_text().splitlines()) if row["id"] in lost]
    assert sorted((row["id"], row["cause"]) for row in rows) == [(id, "node-fault") for id in sorted(lost)]
    reasons = {worker.belljar.json("show", id)["outcome"]["reason"] for id in lost}
    assert all(reason.startswith("the host was restarted while the machine was ") for reason in reasons), reasons
    assert worker.belljar.leftovers() == []
    (worker.site.home("bjalice") / "nodes").unlink()


def nodes_of(worker: Worker) -> list[str]:
    return read(worker.site.home("bjalice") / "nodes").decode().split()


def test_what_nobody_can_make_is_held_with_the_reason_and_a_cancelled_job_leaves_nothing(worker: Worker) -> None:
    wrong = worker.slurm.submit("true", "--comment=vm=windows")
    until(lambda: worker.states(wrong)[-1:] == ["closed"], f"job {wrong} to be refused\n{worker.said()}", PATIENCE)
    record = worker.slurm.lab.job(wrong)
    assert record["JobState"] == "PENDING" and record["Priority"] == "0"
    why = f"belljar: image windows: not among the images that may become nodes here ({IMAGE})"
    assert why in worker.slurm.lab.text("scontrol", "show", "job", wrong)
    job = worker.slurm.submit("sleep 600")
    until(lambda: "vm-booting" in worker.states(job), f"job {job} to have a machine\n{worker.said()}", PATIENCE)
    worker.slurm.run(worker.slurm.pool.cancel(job), worker.slurm.pool.cancel(wrong))
    worker.closed(job)
    assert worker.belljar.leftovers() == []


def test_a_closed_bait_takes_no_job_and_an_open_one_does(worker: Worker) -> None:
    assert worker.belljar("bait", "close", "--reason", "disk swap", "--state", str(worker.state)).returncode == 0
    until(lambda: worker.slurm.nodes()[BAIT].state is NodeState.OUT, "the bait to close", 60)
    assert "belljar: disk swap" in worker.slurm.nodes()[BAIT].reason
    assert worker.json("status")["status"]["state"] == "closed-admin"
    assert worker.belljar("bait", "open", "--state", str(worker.state)).returncode == 0
    until(lambda: worker.slurm.nodes()[BAIT].state is NodeState.IDLE, "the bait to open", 60)


def test_a_job_of_two_nodes_has_both_and_srun_reaches_them(worker: Worker) -> None:
    array = worker.slurm.submit("exit $SLURM_ARRAY_TASK_ID", "--array=3-4", "--output=/dev/null", "--error=/dev/null")
    job = worker.slurm.submit("srun --ntasks-per-node=1 hostname | sort; exit 4", "--nodes=2")
    record = worker.slurm.lab.ended(job, PATIENCE)
    assert record["ExitCode"] == "4:0" and record["NumNodes"] == "2", worker.said()
    names = (worker.site.home("bjalice") / f"{job}.out").read_text().split()
    problem = (worker.site.home("bjalice") / f"{job}.err").read_text()
    assert sorted(record["NodeList"].split(",")) == names and len(names) == 2, problem
    for task in (3, 4):
        assert worker.slurm.lab.ended(f"{array}_{task}", PATIENCE)["ExitCode"] == f"{task}:0"
    worker.closed(job, f"{array}_3", f"{array}_4")
    assert worker.belljar.leftovers() == []
