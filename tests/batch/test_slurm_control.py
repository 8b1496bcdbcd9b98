"""What Slurm, its users and bad luck do to running jobs; afterwards nothing is left and the next job works."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from tests.batch.lab.load import stretched
from tests.batch.slurm_fixtures import SETTINGS, VM, Cluster, Ended

LENIENT = SETTINGS + "node_faults = 0\n"
FAULTY = {"qemu": 'binary = "/no/such/qemu"'}  # a fault of the node


@pytest.fixture(autouse=True)
def next_job_works(cluster: Cluster):  # type: ignore[no-untyped-def]
    yield
    for node in cluster.lab.nodes:
        if "DRAIN" in cluster.lab.node(node)["State"]:
            cluster.lab.run("scontrol", "update", f"NodeName={node}", "State=RESUME")
    cluster.clean()
    assert cluster.run("echo fine", VM).out == b"fine\n"


def cancelled(cluster: Cluster, text: str, *options: str) -> tuple[Ended, float]:
    """A job cancelled once it has started, and how long its end took."""
    job = cluster.submit(f"echo started\n{text}", *options)
    cluster.started(job)
    before = time.monotonic()
    cluster.as_user("scancel", job)
    ended = cluster.end(job)
    cluster.lab.until(
        lambda: "COMPLETING" not in cluster.as_user("squeue", "-h", "-j", job, "-o", "%T", check=False), "the end"
    )
    return ended, time.monotonic() - before


def test_cancel_with_a_trap(cluster: Cluster) -> None:
    text = "trap 'echo cleaning; exit 5' TERM; i=0; while [ $i -lt 300 ]; do i=$((i+1)); sleep 0.2; done"
    native, _ = cancelled(cluster, text)
    guest, _ = cancelled(cluster, text, VM)
    assert (guest.state, guest.exit) == (native.state, native.exit)
    assert guest.out == native.out == b"started\ncleaning\n"


@pytest.mark.slow
def test_cancel_without_a_trap(cluster: Cluster) -> None:
    """One process: with a shell that waits, it is a race, natively too, whether the shell or what it waits for dies first."""
    native, _ = cancelled(cluster, "exec sleep 60")
    guest, took = cancelled(cluster, "exec sleep 60", VM)
    assert (guest.state, guest.exit) == (native.state, native.exit) == ("CANCELLED", "0:15")
    assert took < stretched(3)


@pytest.mark.slow
def test_cancel_of_what_ignores_it_ends_before_slurms_kill(cluster: Cluster) -> None:
    guest, took = cancelled(cluster, "trap '' TERM; sleep 60; sleep 60", VM)
    assert guest.state == "CANCELLED" and 2 < took < stretched(6)
    shown = cluster.belljar("show", f"slurm:{guest.job}", user="bjalice")
    assert b"cancelled" in shown


def test_cancel_while_the_machine_boots(cluster: Cluster) -> None:
    job = cluster.submit("echo started; sleep 60", VM, "--mem=777")  # a size that has no template yet
    cluster.lab.until(lambda: cluster.site.leftovers() != [], "its machine is being made")
    cluster.as_user("scancel", job)
    ended = cluster.end(job)
    assert ended.state == "CANCELLED" and b"started" not in ended.out


def test_a_signal_for_the_batch_shell(cluster: Cluster) -> None:
    text = "#!/bin/bash\ntrap 'echo got USR1' USR1\necho started\nfor i in {1..60}; do sleep 0.2; done & wait; wait; exit 3"
    for options in ((), (VM,)):
        job = cluster.submit(text, *options)
        cluster.started(job)
        cluster.as_user("scancel", "--batch", "--signal=USR1", job)
        cluster.started(job, b"got USR1", timeout=5)
        cluster.as_user("scancel", job)
        assert cluster.end(job).state == "CANCELLED"


@pytest.mark.slow
def test_the_warning_before_the_limit(cluster: Cluster) -> None:
    """With a limit below the lead Slurm gives the signal at once, perhaps before the payload could have set a trap: then it
    ends by it, with a machine as without."""
    text = "trap 'echo warned; exit 6' USR1; echo started; i=0; while [ $i -lt 300 ]; do i=$((i+1)); sleep 0.2; done"
    ended = cluster.run(text, VM, "--time=2", "--signal=B:USR1@115", timeout=120)
    assert ended.exit in ("6:0", "0:10"), ended


@pytest.mark.slow
@pytest.mark.parametrize("text", ["trap 'echo limit; exit 4' TERM", "trap '' TERM", ":"])
def test_the_limit_of_time(cluster: Cluster, text: str) -> None:
    loop = "echo started; i=0; while [ $i -lt 900 ]; do i=$((i+1)); sleep 0.2; done"
    jobs = [cluster.submit(f"{text}\n{loop}", "--time=1", *options) for options in ((), (VM,))]
    native, guest = (cluster.end(job, timeout=200) for job in jobs)
    assert (guest.state, guest.out) == (native.state, native.out)
    assert guest.state == "TIMEOUT"


def cpu_of(pids: list[int]) -> int:
    return sum(sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13])) for pid in pids)


def qemus(cluster: Cluster) -> list[int]:
    return [int(word.split()[1]) for word in cluster.site.leftovers() if word.startswith("qemu ")]


def test_suspend_and_resume(cluster: Cluster) -> None:
    text = "trap 'exit 3' USR1; echo started; i=0; while :; do i=$((i+1)); echo $i >counter; sleep 0.05; done"
    job = cluster.submit(text, VM)
    cluster.started(job)
    cluster.lab.run("scontrol", "suspend", job)
    cluster.lab.until(lambda: all(_state(pid) == "T" for pid in qemus(cluster)), "QEMU is stopped", 10)
    before, count = cpu_of(qemus(cluster)), cluster.read("counter")
    time.sleep(1.5)  # nothing is to happen in it
    assert cpu_of(qemus(cluster)) == before and cluster.read("counter") == count
    cluster.lab.run("scontrol", "resume", job)
    cluster.lab.until(lambda: int(cluster.read("counter") or 0) > int(count or 0), "it counts on", 30)
    cluster.as_user("scancel", "--batch", "--signal=USR1", job)
    ended = cluster.end(job)
    assert (ended.exit, ended.out) == ("3:0", b"started\n")


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


# -- requeue and hold ----------------------------------------------------------------------------------------------------


def is_held(cluster: Cluster, job: str) -> bool:
    record = cluster.lab.job(job)
    return record["JobState"] == "PENDING" and record["Reason"] == "job_requeued_in_held_state"


@pytest.mark.slow
def test_a_machine_that_could_not_be_had_once(cluster: Cluster) -> None:
    with cluster.other_settings(**FAULTY):
        text = "echo run $SLURM_RESTART_COUNT; exit 4"
        job = cluster.submit(text, "--comment=vm=debian12 project=x", "--open-mode=append")
        cluster.lab.until(lambda: cluster.lab.job(job).get("Restarts") == "1", "the job is requeued", 60)
        assert "project=x belljar=1 try 1 of 3: " in cluster.lab.job(job)["Comment"]
    ended = cluster.end(job)
    assert (ended.exit, ended.out) == ("4:0", b"run 1\n"), ended
    assert ended.record["Restarts"] == "1"


def test_a_machine_that_can_never_be_had_holds_its_job_and_no_other(cluster: Cluster) -> None:
    with cluster.other_settings(LENIENT, **FAULTY):
        poison = cluster.submit("echo never", VM)
        cluster.lab.until(lambda: is_held(cluster, poison), "it is held", 120)
    record = cluster.lab.job(poison)
    assert record["Restarts"] == "3"
    assert "belljar=3 try 3 of 3: " in record["Comment"] and record["Comment"].startswith("vm=debian12 ")
    assert cluster.run("echo another", VM).out == b"another\n"
    cluster.as_user("scontrol", "release", poison)  # the owner may let it go again
    assert cluster.end(poison).out == b"never\n"


@pytest.mark.slow
def test_tasks_of_an_array_are_held_each_for_itself(cluster: Cluster) -> None:
    with cluster.other_settings(LENIENT.replace("retries = 3", "retries = 1"), **FAULTY):
        array = cluster.submit("echo never", "--array=1-2", VM)
        tasks = [f"{array}_{number}" for number in (1, 2)]
        cluster.lab.until(lambda: all(is_held(cluster, task) for task in tasks), "both are held", 60)
        assert all("belljar=1 try 1 of 1" in cluster.lab.job(task)["Comment"] for task in tasks)
    cluster.as_user("scancel", array)


def test_a_job_that_may_not_be_requeued_fails_at_once(cluster: Cluster) -> None:
    with cluster.other_settings(LENIENT, **FAULTY):
        ended = cluster.run("echo never", VM, "--no-requeue")
    assert (ended.state, ended.exit, ended.out) == ("FAILED", "125:0", b"")
    assert b"/no/such/qemu" in ended.err


@pytest.mark.slow
def test_a_node_that_fails_again_and_again_is_closed_and_the_other_one_works_on(cluster: Cluster) -> None:
    with cluster.other_settings(SETTINGS.replace("retries = 3", "retries = 9") + "node_faults = 3\n", **FAULTY):
        jobs = [cluster.submit("echo done", VM, "--nodelist=n1") for _ in range(2)]
        cluster.lab.until(lambda: "DRAIN" in cluster.lab.node("n1")["State"], "n1 is drained", 90)
        assert cluster.lab.node("n1")["Reason"].startswith("belljar: ")
        for job in jobs:
            cluster.as_user("scancel", job)
    assert cluster.run("echo $SLURMD_NODENAME", VM).out == b"n2\n"


@pytest.mark.slow
def test_a_nodes_folder_that_keeps_users_out_closes_the_node_and_loses_no_job(cluster: Cluster) -> None:
    settings = SETTINGS.replace("retries = 3", "retries = 9") + "node_faults = 3\n"
    with cluster.other_settings(settings):
        cluster.site.node.chmod(0o700)
        try:
            jobs = [cluster.submit("echo done", VM, "--nodelist=n1", "--open-mode=append") for _ in range(2)]
            cluster.lab.until(lambda: "DRAIN" in cluster.lab.node("n1")["State"], "n1 is drained", 90)
        finally:
            cluster.site.node.chmod(0o755)
        assert f"{cluster.site.node}: uid" in cluster.lab.node("n1")["Reason"]
        cluster.lab.run("scontrol", "update", "NodeName=n1", "State=RESUME")
        assert [cluster.end(job).out for job in jobs] == [b"done\n"] * 2


# -- killed --------------------------------------------------------------------------------------------------------------


def wrapper_of(cluster: Cluster, job: str) -> int:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes()
                if (
                    b"wrap-slurm" in line
                    and f"job{int(job):05d}/".encode() in line
                    and str(cluster.site.top).encode() in line
                ):
                    return int(entry.name)
            except OSError:
                continue
    raise AssertionError(f"no wrapper of job {job}")


def test_the_wrapper_is_killed(cluster: Cluster) -> None:
    job = cluster.submit("echo started; sleep 60", VM)
    cluster.started(job)
    os.kill(wrapper_of(cluster, job), signal.SIGKILL)
    ended = cluster.end(job)
    assert ended.exit == "0:9"
    cluster.clean()


@pytest.mark.slow
def test_qemu_is_killed(cluster: Cluster) -> None:
    """To Slurm this is the loss of a node: it runs the job again, and so do we."""
    job = cluster.submit("echo started $SLURM_RESTART_COUNT; sleep 60", VM, "--open-mode=append")
    cluster.started(job)
    (qemu,) = qemus(cluster)
    os.kill(qemu, signal.SIGKILL)
    cluster.started(job, b"started 1\n")
    assert "belljar=1 try 1 of 3: " in cluster.lab.job(job)["Comment"]
    cluster.as_user("scancel", job)
    assert cluster.end(job).state == "CANCELLED"


QUICK = ("payload-started",)
POINTS = ("after-spawn", "after-claim", "after-overlay", "after-qmp", "after-boot", "after-agent", "payload-sent", "payload-ended",
          "status-written", "before-stop", "after-stop", "before-release")  # fmt: skip


def aborted(cluster: Cluster, point: str) -> None:
    with cluster.other_settings(testing=f'abort_at = "{point}"'):
        ended = cluster.run("echo started; sleep 1; exit 3", VM)
    assert (ended.state, ended.exit) == ("FAILED", "0:9")
    cluster.clean()  # Epilog found it


@pytest.mark.parametrize("point", QUICK)
def test_belljar_is_killed_at(cluster: Cluster, point: str) -> None:
    aborted(cluster, point)


@pytest.mark.slow
@pytest.mark.parametrize("point", POINTS)
def test_belljar_is_killed_at_each_point(cluster: Cluster, point: str) -> None:
    aborted(cluster, point)


def test_slurms_daemons_begin_anew_while_a_job_runs(cluster: Cluster) -> None:
    job = cluster.submit("echo started; sleep 6; echo on; exit 3", VM, "--nodelist=n1")
    cluster.started(job)
    cluster.lab.stop("slurmd-n1")
    cluster.lab.stop("slurmctld")
    cluster.lab.start_slurmctld()
    cluster.lab.start_slurmd("n1")
    ended = cluster.end(job)
    assert (ended.exit, ended.out) == ("3:0", b"started\non\n")


# -- others --------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_what_a_payload_leaves_behind_is_gone(cluster: Cluster) -> None:
    text = "setsid nohup sleep 600 >/dev/null 2>&1 & echo secret >/tmp/left; echo ok"
    assert cluster.run(text, VM).out == b"ok\n"
    assert cluster.run("ls /tmp; ps ax 2>/dev/null | grep -c '[s]leep 600'", VM).out.split() in ([b"0"], [])


def test_another_user_can_neither_see_nor_stop_it(cluster: Cluster) -> None:
    job = cluster.submit("echo started; sleep 30", VM)
    cluster.started(job)
    for verb in ("show", "stop", "logs", "console", "kill"):
        done = cluster.belljar(verb, f"slurm:{job}", user="bjbob", check=False)
        assert b"no machine" in done.lower() or b"belongs to" in done, (verb, done)
    assert b"running" in cluster.belljar("show", f"slurm:{job}", user="bjalice")
    mine = cluster.site.node / str(cluster.site.home("bjalice").stat().st_uid)
    done = cluster.site.run("ls", "-R", str(mine), user="bjbob", check=False)
    assert done.returncode and not done.stdout.strip()
    assert b"inside" in cluster.belljar("exec", f"slurm:{job}", "--", "echo", "inside", user="bjalice")
    cluster.as_user("scancel", job)
    cluster.end(job)


@pytest.mark.slow
def test_reaping_asks_slurm_and_takes_silence_for_nothing(cluster: Cluster) -> None:
    job = cluster.submit("echo started; sleep 90", VM)
    cluster.started(job)
    cluster.lab.stop("slurmctld")
    try:
        for _ in range(2):
            cluster.belljar("reap", "--batch", "slurm", check=False)
        assert len(qemus(cluster)) == 1
    finally:
        cluster.lab.start_slurmctld()
    cluster.belljar("reap", "--batch", "slurm")
    assert len(qemus(cluster)) == 1
    cluster.as_user("scancel", job)
    assert cluster.end(job).state == "CANCELLED"
