"""What users, images and keys may do to a bait, with a real Slurm and real guests: each time one line where the administrator looks, and
the job its verdict. What a user does to somebody else's job and node comes to nothing."""

from __future__ import annotations

import grp
import pwd
import subprocess
from collections.abc import Iterator

import pytest
from tests.batch.lab.pool import QUEUE
from tests.batch.lab.site import Site
from tests.batch.lab.worker import IMAGE, PATIENCE, Worker, until
from tests.live.net_lab import Lab

pytestmark = pytest.mark.slow  # waits for real nodes to come and go

BARE = "debian12"  # without slurmd
LONG = "PartitionName=long Nodes=bait1,bait2 MaxTime=INFINITE State=UP\n"


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    net, site = Lab(), Site("input")
    made = Worker(net, site, tmp_path_factory.mktemp("input"), LONG, more='tries = 1\ndelay = "1s"')
    made.file.write_text(made.file.read_text().replace(f'images = ["{IMAGE}"]', f'images = ["{IMAGE}", "{BARE}"]'))
    try:
        made.slurm.up()
        made.start()
        yield made
    finally:
        made.close()
        site.close()
        net.close()


def by(worker: Worker, user: str, *argv: str) -> subprocess.CompletedProcess[str]:
    """A command of Slurm's, or of belljar's, as this user runs it."""
    entry, home = pwd.getpwnam(user), worker.site.home(user)
    words = ["setpriv", f"--reuid={entry.pw_uid}", f"--regid={entry.pw_gid}", "--clear-groups", *argv]
    return subprocess.run(
        [*worker.slurm.lab.inside, *words], env={**worker.slurm.lab.env, "HOME": str(home)}, cwd=home, capture_output=True,
        text=True, timeout=60, check=False,
    )  # fmt: skip


def is_in(worker: Worker, job: str, state: str) -> None:
    until(lambda: state in worker.states(job), f"job {job} to be {state}\n{worker.said()}", PATIENCE)


def why(worker: Worker, job: str, state: str) -> str:
    said = [
        one["why"] for one in worker.events() if (one["event"], one.get("job"), one.get("state")) == ("job", job, state)
    ]
    return str(said[-1]) if said else ""


def cancelled(worker: Worker, *jobs: str) -> None:
    worker.slurm.run(*(worker.slurm.pool.cancel(job) for job in jobs))
    worker.closed(*jobs)
    assert worker.belljar.leftovers() == []


def test_a_user_alters_releases_and_moves_a_job_while_its_machine_boots(worker: Worker) -> None:
    job = worker.slurm.submit("echo $SLURM_MEM_PER_NODE $SLURM_JOB_PARTITION > got; exit 3", "--mem=500")
    is_in(worker, job, "vm-booting")
    altered = by(
        worker, "bjalice", "scontrol", "update", f"JobId={job}", "MinMemoryNode=640", "Comment=a\nb | c", "TimeLimit=77"
    )
    assert altered.returncode == 0, altered.stderr
    until(lambda: worker.states(job).count("vm-booting") == 2, f"another machine\n{worker.said()}", PATIENCE)
    assert "it was altered: asked for 1 nodes, 1 cpus, 500 MiB" in why(worker, job, "reprocess")
    by(worker, "bjalice", "scontrol", "release", job)
    record = worker.slurm.lab.ended(job, PATIENCE)
    assert (record["ExitCode"], record["TimeLimit"]) == ("3:0", "01:17:00"), worker.said()
    assert worker.written("got").split()[0] == "640"
    worker.closed(job)
    moved = worker.slurm.submit("echo $SLURM_JOB_PARTITION > got; exit 4")
    is_in(worker, moved, "vm-booting")
    assert by(worker, "bjalice", "scontrol", "update", f"JobId={moved}", "Partition=long").returncode == 0
    record = worker.slurm.lab.ended(moved, PATIENCE)
    assert record["ExitCode"] == "4:0" and "requeue" in worker.states(moved), worker.said()
    assert why(worker, moved, "requeue") == "it was moved to long"
    worker.closed(moved)


def test_what_cannot_be_moved_is_refused_when_it_arrives_and_an_exclusive_job_has_the_whole_bait(
    worker: Worker,
) -> None:
    words = (
        "ReservationName=night",
        "StartTime=now",
        "Duration=60",
        "Users=bjalice",
        "Nodes=bait1",
        "Flags=IGNORE_JOBS",
    )
    worker.slurm.run(("scontrol", "create", "reservation", *words))
    reserved = worker.slurm.submit("true", "--reservation=night", f"--comment=vm={IMAGE} mine")
    is_in(worker, reserved, "closed")
    text = worker.slurm.lab.text("scontrol", "show", "job", reserved)
    assert text.count("belljar: reservation night: machines that are made") == 2 and " Comment=vm=" in text, text
    worker.slurm.run(worker.slurm.pool.cancel(reserved), ("scontrol", "delete", "ReservationName=night"))
    both = worker.slurm.submit("#SBATCH --mem=100\n#SBATCH hetjob\n#SBATCH --mem=100\ntrue")
    is_in(worker, both, "closed")
    assert "a component of a heterogeneous job" in worker.slurm.lab.text("scontrol", "show", "job", both)
    assert not worker.belljar.domains() and worker.slurm.lab.job(both)["Priority"] == "0"
    worker.slurm.run(worker.slurm.pool.cancel(both))
    job = worker.slurm.submit("nproc > got; exit 3", "--exclusive", "--nodes=1-2", "--mem-per-cpu=300")
    record = worker.slurm.lab.ended(job, PATIENCE)
    assert record["ExitCode"] == "3:0" and worker.written("got") == "2\n", worker.said()
    worker.closed(job)
    assert worker.belljar.leftovers() == []


def test_a_user_holds_a_job_that_is_moved_already_or_runs(worker: Worker) -> None:
    first = worker.slurm.submit("sleep 600", "--hold")  # never comes: what depends on it waits on its node
    job = worker.slurm.submit("sleep 600")
    is_in(worker, job, "vm-booting")
    assert by(worker, "bjalice", "scontrol", "update", f"JobId={job}", f"Dependency=afterok:{first}").returncode == 0
    is_in(worker, job, "migrating")
    until(lambda: worker.slurm.lab.job(job)["Priority"] != "0", "it to be released", PATIENCE)
    assert by(worker, "bjalice", "scontrol", "hold", job).returncode == 0
    worker.closed(job)
    record = worker.slurm.lab.job(job)
    assert (record["JobState"], record["Priority"], record["Partition"]) == ("PENDING", "0", "batch"), worker.said()
    assert "belljar: its user holds it" in worker.slurm.lab.text("scontrol", "show", "job", job)
    assert by(worker, "bjalice", "scontrol", "update", f"JobId={job}", "Dependency=").returncode == 0
    assert by(worker, "bjalice", "scontrol", "release", job).returncode == 0
    until(lambda: worker.states(job)[-1:] == ["running"], f"it to run after all\n{worker.said()}", PATIENCE)
    assert by(worker, "bjalice", "scontrol", "requeuehold", job).returncode == 0
    worker.closed(job)
    record = worker.slurm.lab.job(job)
    assert (record["JobState"], record["Priority"], record["Partition"]) == ("PENDING", "0", "batch"), worker.said()
    worker.slurm.run(worker.slurm.pool.cancel(job), worker.slurm.pool.cancel(first))
    assert worker.belljar.leftovers() == []


def test_nobody_reaches_another_users_job_machine_or_node(worker: Worker) -> None:
    first = worker.slurm.submit("true", "--hold")
    job = worker.slurm.submit(
        "echo alice > ran; sleep 20; exit 6", "--job-name=-o ProxyCommand=x\n[bait]", "--comment=x\n|R|"
    )
    is_in(worker, job, "vm-booting")
    by(worker, "bjalice", "scontrol", "update", f"JobId={job}", f"Dependency=afterok:{first}")
    is_in(worker, job, "migrating")
    (node,) = worker.json("nodes")["nodes"]
    name, machine = node["node"], node["machine"]
    for words in (
        ("scontrol", "update", f"NodeName={name}", "State=DRAIN", "Reason=x"), ("scontrol", "delete", f"NodeName={name}"),
        ("scontrol", "update", f"JobId={job}", f"ReqNodeList={name}"), ("scontrol", "release", job), ("scancel", job),
        (str(worker.site.belljar), "stop", machine), (str(worker.site.belljar), "exec", machine, "--", "id"),
        (str(worker.site.belljar), "bait", "arrive", job, "--timeout", "2s", "--state", str(worker.state)),
        (str(worker.site.belljar), "bait", "close", "--state", str(worker.state)),
        (str(worker.site.belljar), "bait", "jobs", "--state", str(worker.state)),
    ):  # fmt: skip
        done = by(worker, "bjbob", *words)
        said = done.stdout + done.stderr
        assert (done.returncode != 0 or "denied" in said) and "Traceback" not in said, (words, said)
    # The partition is hidden, not shut: the node itself lets nobody else in.
    intruder = worker.slurm.submit("touch ran", f"--partition={QUEUE}", f"--nodelist={name}", "--mem=100", user="bjbob")
    until(
        lambda: worker.slurm.lab.job(intruder)["Restarts"] != "0",
        f"the intruder to be sent away\n{worker.said()}",
        PATIENCE,
    )
    assert worker.written("ran", "bjbob") == "" and not (worker.site.home("bjbob") / "ran").exists()
    worker.slurm.run(worker.slurm.pool.cancel(intruder))
    by(worker, "bjalice", "scontrol", "update", f"JobId={job}", "Dependency=")
    record = worker.slurm.lab.ended(job, PATIENCE)
    assert record["ExitCode"] == "6:0" and worker.written("ran") == "alice\n", worker.said()
    worker.slurm.run(worker.slurm.pool.cancel(first))
    worker.closed(job)
    assert not (worker.site.home("bjbob") / "ran").exists() and worker.belljar.leftovers() == []


def test_an_image_without_slurmd_and_one_by_a_path_are_refused_with_the_reason(worker: Worker) -> None:
    bare = worker.slurm.submit("true", f"--comment=vm={BARE}")
    path = worker.slurm.submit("true", "--comment=vm=../../etc/shadow vm=slurm-node")
    worker.closed(bare)
    record, text = worker.slurm.lab.job(bare), worker.slurm.lab.text("scontrol", "show", "job", bare)
    assert (record["JobState"], record["Priority"]) == ("PENDING", "0")
    assert f"belljar: unfit image: {BARE}: no munged is installed in it" in text, worker.said()
    assert worker.states(bare).count("vm-booting") == 1
    cancelled(worker, bare, path)


def test_who_may_have_a_machine_is_said_by_user_group_and_partition(worker: Worker) -> None:
    group = grp.getgrgid(pwd.getpwnam("bjbob").pw_gid).gr_name
    worker.kill()
    try:
        for rules, is_allowed in (
            ("user:bjalice *,queue:long *", {"batch": False, "long": True}),
            (f"group:{group} *", {"batch": True, "long": True}),
        ):
            worker.belljar.env["BELLJAR_BATCH_ALLOW"] = rules
            worker.start()
            for queue, is_so in is_allowed.items():
                job = worker.slurm.submit("sleep 600", f"--partition={queue}", user="bjbob")
                if is_so:
                    is_in(worker, job, "vm-booting")
                else:
                    worker.closed(job)
                    says = f"belljar: image {IMAGE}: not allowed for bjbob in queue {queue}"
                    assert says in worker.slurm.lab.text("scontrol", "show", "job", job), worker.said()
                cancelled(worker, job)
            worker.kill()
    finally:
        del worker.belljar.env["BELLJAR_BATCH_ALLOW"]
        worker.start()


def test_a_machine_whose_key_does_not_fit_is_quoted_and_the_bait_goes_on(worker: Worker) -> None:
    good = worker.file.read_text()
    other = worker.belljar.folder / "other.key"
    other.write_bytes(b"x" * 128)
    key = next(line for line in good.splitlines() if line.startswith("key = "))
    worker.kill()
    worker.file.write_text(good.replace(key, f'key = "{other}"\njoin = "25s"'))
    worker.start()
    job = worker.slurm.submit("exit 9")
    is_in(worker, job, "reprocess")
    assert "a machine did not join within 25 s; " in why(worker, job, "reprocess"), worker.said()
    worker.kill()
    worker.file.write_text(good)
    worker.start()
    assert worker.slurm.lab.ended(job, PATIENCE)["ExitCode"] == "9:0", worker.said()
    worker.closed(job)
