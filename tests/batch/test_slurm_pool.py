"""A real Slurm, seen and changed as the bait does it: a job is taken off a bait, runs on a node that was not there before, and the
node is removed."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest
from tests.batch.lab.pool import QUEUE, PooledSlurm
from tests.batch.lab.site import Site
from tests.live.net_lab import Lab

from belljar.bait.decisions.note import Parts, read, write
from belljar.model import MIB
from belljar.pool import JobState, JobView, NodeState

VM, OTHER = "vm0123456789abx", "vm0123456789acx"
ROOM = """PartitionName=room Nodes=bait2 Hidden=YES PriorityTier=100 MaxTime=INFINITE State=UP
PartitionName=alone Nodes=bait1,bait2 OverSubscribe=EXCLUSIVE MaxTime=INFINITE State=UP
"""


@pytest.fixture(scope="module")
def slurm() -> Iterator[PooledSlurm]:
    net, site = Lab(), Site("slurm-pool")
    made = PooledSlurm(net, site, lines=ROOM)
    try:
        made.up()
        yield made
    finally:
        made.down()
        site.close()
        net.close()


def until(slurm: PooledSlurm, job: str, state: JobState) -> JobView:
    slurm.lab.until(lambda: slurm.jobs()[job].state is state, f"job {job} is {state.value}", 30)
    return slurm.jobs()[job]


def test_a_job_moves_to_a_node_of_its_own_and_keeps_its_id_and_exit_code(slurm: PooledSlurm) -> None:
    pool = slurm.pool
    job = slurm.submit(
        "echo on $SLURMD_NODENAME, $1; exit 7", "--comment=vm=debian12 net=open", "--begin=now+60", args=("an arg",)
    )
    other = slurm.submit("sleep 60", "--comment=vm=a|b\n        1" + "RUNNING |", "-J", "na|me\nx")
    seen = until(slurm, other, JobState.RUNNING)
    assert (seen.on, seen.image, seen.owner, seen.queue, seen.memory) == (("bait1",), "", "bjalice", "batch", 600 * MIB)
    slurm.run(pool.cancel(other))
    assert set(slurm.jobs()) == {job, other}  # what looks like a row in a comment is none

    slurm.run(*pool.take_back(slurm.jobs()[job]))
    held = until(slurm, job, JobState.HELD)
    assert (held.image, held.network, held.cpus, held.nodes) == ("debian12", "open", 1, 1)
    slurm.join(VM)
    slurm.lab.until(
        lambda: VM in slurm.nodes() and slurm.nodes()[VM].state is NodeState.IDLE, "the node has joined", 30
    )
    assert slurm.nodes()[VM].features == (QUEUE,)
    slurm.run(*pool.move(held, (VM,), QUEUE))
    ended = until(slurm, job, JobState.ENDED)
    assert ended.on == (VM,) and slurm.lab.job(job)["ExitCode"] == "7:0"
    assert (slurm.site.home("bjalice") / f"{job}.out").read_text() == f"on {VM}, an arg\n"

    slurm.run(pool.close(VM, "its job has ended"))
    slurm.lab.until(lambda: slurm.nodes()[VM].state is NodeState.OUT, "the node is quiet", 30)
    slurm.leave(VM)
    slurm.run(*pool.remove(VM))
    assert set(slurm.nodes()) == {"bait1", "bait2"}


def test_a_running_job_is_taken_back_and_given_back(slurm: PooledSlurm) -> None:
    pool = slurm.pool
    job = slurm.submit("sleep 60")
    slurm.run(*pool.take_back(until(slurm, job, JobState.RUNNING)))
    held = until(slurm, job, JobState.HELD)
    assert held.starts == 1 and held.on == ()
    slurm.run(pool.note(held, "no host has such an image"))
    assert "belljar: no host has such an image" in slurm.lab.text("scontrol", "show", "job", job)
    slurm.run(*pool.give_back(held, "batch", 1))
    assert until(slurm, job, JobState.RUNNING).on[0] in ("bait1", "bait2")
    slurm.run(pool.cancel(job))
    until(slurm, job, JobState.ENDED)


def test_a_task_of_an_array_is_one_job_of_its_own(slurm: PooledSlurm) -> None:
    array = slurm.submit("sleep 60", "--array=1-2")
    slurm.run(*slurm.pool.take_back(until(slurm, f"{array}_1", JobState.RUNNING)))
    until(slurm, f"{array}_1", JobState.HELD)
    assert slurm.jobs()[f"{array}_2"].state is JobState.RUNNING and slurm.jobs()[f"{array}_2"].array == (array, "2")
    slurm.run(slurm.pool.cancel(array))


def test_a_bait_closes_and_opens(slurm: PooledSlurm) -> None:
    slurm.lab.until(lambda: slurm.nodes()["bait1"].state is NodeState.IDLE, "the bait is free", 60)
    slurm.run(slurm.pool.close("bait1", "no memory"))
    closed = slurm.nodes()["bait1"]
    assert closed.state is NodeState.OUT and closed.reason.startswith("belljar: no memory")
    slurm.run(slurm.pool.open("bait1"))
    slurm.lab.until(lambda: slurm.nodes()["bait1"].state is NodeState.IDLE, "the bait is free again", 60)


def test_a_job_that_may_run_once_is_taken_back_and_may_run_once_again(slurm: PooledSlurm) -> None:
    pool = slurm.pool
    job = slurm.submit("sleep 60", "--no-requeue")
    running = until(slurm, job, JobState.RUNNING)
    assert not running.reruns
    slurm.run(*pool.take_back(running))
    held = until(slurm, job, JobState.HELD)
    slurm.run(*pool.move(held, ("bait2",), "batch", reruns=running.reruns))
    again = until(slurm, job, JobState.RUNNING)
    assert again.on == ("bait2",) and not again.reruns
    slurm.run(pool.cancel(job))
    until(slurm, job, JobState.ENDED)


def test_a_job_of_a_range_of_nodes_gets_those_it_is_moved_to_and_no_others(slurm: PooledSlurm) -> None:
    job = slurm.submit("sleep 60", "--nodes=1-2", "--ntasks=2", "--mem=100", "--hold")
    slurm.run(*slurm.pool.move(slurm.jobs()[job], ("bait1",), "alone"))
    assert until(slurm, job, JobState.RUNNING).on == ("bait1",)
    slurm.run(slurm.pool.cancel(job))
    until(slurm, job, JobState.ENDED)


def test_what_a_job_was_given_on_the_bait_is_not_what_it_asks_for_when_it_is_held(slurm: PooledSlurm) -> None:
    job = slurm.submit("sleep 60", "--exclusive")
    running = until(slurm, job, JobState.RUNNING)
    assert (running.cpus, running.memory) == (2, 1200 * MIB)
    slurm.run(*slurm.pool.take_back(running))
    held = until(slurm, job, JobState.HELD)
    assert (held.cpus, held.memory) == (1, 600 * MIB)
    slurm.run(slurm.pool.cancel(job))


def test_a_job_that_cannot_be_moved_says_so(slurm: PooledSlurm) -> None:
    words = ("ReservationName=night", "StartTime=now+3600", "Duration=60", "Users=bjalice", "Nodes=bait1")
    slurm.run(("scontrol", "create", "reservation", *words))
    job = slurm.submit("sleep 60", "--reservation=night")
    assert slurm.jobs()[job].unmovable == "reservation night: machines that are made for a job are not in it"
    both = slurm.submit("#SBATCH --mem=100\n#SBATCH hetjob\n#SBATCH --mem=100\nsleep 60", "--hold")
    for component in (both, str(int(both) + 1)):
        assert slurm.jobs()[component].unmovable.startswith("it is a component of a heterogeneous job")
    slurm.run(slurm.pool.cancel(job), slurm.pool.cancel(both))
    slurm.run(("scontrol", "delete", "ReservationName=night"))


def test_somebody_at_a_terminal_is_no_batch_job(slurm: PooledSlurm) -> None:
    waiting = subprocess.Popen(
        [*slurm.lab.inside, "srun", "sleep", "60"], env=slurm.lab.env, cwd="/", stderr=subprocess.PIPE
    )
    try:
        slurm.lab.until(lambda: any(not one.is_batch for one in slurm.jobs().values()), "the job at a terminal", 30)
        (job,) = [one for one in slurm.jobs().values() if not one.is_batch]
        slurm.lab.until(lambda: slurm.jobs()[job.id].state is JobState.RUNNING, "it runs", 30)
        slurm.run(slurm.pool.note(job, "only batch scripts run here"), slurm.pool.cancel(job.id))
        until(slurm, job.id, JobState.ENDED)
    finally:
        waiting.communicate(timeout=30)
    assert waiting.returncode != 0


def test_a_job_of_two_baits_names_both_and_a_note_at_it_is_read_again(slurm: PooledSlurm) -> None:
    job = slurm.submit("sleep 60", "--nodes=2", "--ntasks-per-node=1")
    assert until(slurm, job, JobState.RUNNING).on == ("bait1", "bait2")
    parts = Parts((("bait1", "0" * 12), ("bait2", "1" * 12)), "1" * 12, "no space; it's gone")
    slurm.run(slurm.pool.note(slurm.jobs()[job], write(parts)))
    assert read(slurm.jobs()[job].note) == parts
    slurm.run(slurm.pool.note(slurm.jobs()[job], "its machine failed"))
    assert slurm.jobs()[job].note == "belljar: its machine failed"
    forbidden = slurm.submit("sleep 60", "--dependency=after:1000000")
    owner = ("setpriv", f"--reuid={slurm.jobs()[forbidden].uid}", "--clear-groups")
    assert slurm.lab.run(*owner, *slurm.pool.note(slurm.jobs()[forbidden], write(parts)), check=False).returncode
    assert slurm.jobs()[forbidden].note == ""  # users do not write there
    slurm.run(slurm.pool.cancel(job), slurm.pool.cancel(forbidden))


def test_a_reservation_keeps_processors_of_a_host_from_its_native_jobs(slurm: PooledSlurm) -> None:
    """The recipe of docs/batch/bait/guide.md for a host with native jobs and machines."""
    words = (
        "ReservationName=machines",
        "Nodes=bait2",
        "CoreCnt=1",
        "Users=root",
        "StartTime=now",
        "Duration=UNLIMITED",
    )
    slurm.run(("scontrol", "create", "reservation", *words))
    whole = slurm.submit("true", "--nodelist=bait2", "--cpus-per-task=2")
    small = slurm.submit("true", "--nodelist=bait2")
    until(slurm, small, JobState.ENDED)
    assert slurm.jobs()[whole].state is JobState.WAITING
    slurm.run(("scontrol", "delete", "ReservationName=machines"))  # Slurm changes the size of none that counts cores
    until(slurm, whole, JobState.ENDED)
    slurm.run(("scontrol", "create", "reservation", *(word.replace("CoreCnt=1", "CoreCnt=2") for word in words)))
    late = slurm.submit("true", "--nodelist=bait2")
    slurm.lab.until(lambda: slurm.jobs()[late].reason not in ("", "None"), "Slurm to look at it", 30)
    assert slurm.jobs()[late].state is JobState.WAITING
    slurm.run(("scontrol", "delete", "ReservationName=machines"))
    until(slurm, late, JobState.ENDED)


def test_a_job_whose_node_was_removed_outlives_a_restart_of_slurmctld(slurm: PooledSlurm) -> None:
    pool = slurm.pool
    job = slurm.submit("sleep 60")
    slurm.run(*pool.take_back(until(slurm, job, JobState.RUNNING)))
    held = until(slurm, job, JobState.HELD)
    slurm.join(OTHER)
    slurm.lab.until(
        lambda: OTHER in slurm.nodes() and slurm.nodes()[OTHER].state is NodeState.IDLE, "it has joined", 30
    )
    slurm.run(*pool.move(held, (OTHER,), QUEUE))
    slurm.run(*pool.take_back(until(slurm, job, JobState.RUNNING)))
    until(slurm, job, JobState.HELD)
    slurm.run(pool.close(OTHER, "its machine failed"))
    slurm.lab.until(lambda: slurm.nodes()[OTHER].state is NodeState.OUT, "the node is quiet", 30)
    slurm.leave(OTHER)
    slurm.run(*pool.unpin(held, "batch"), *pool.remove(OTHER))
    slurm.lab.stop("slurmctld")
    slurm.lab.start_slurmctld()
    assert slurm.jobs()[job].state is JobState.HELD
    slurm.run(*pool.give_back(held, "batch", 1))
    assert until(slurm, job, JobState.RUNNING).on[0] in ("bait1", "bait2")
    slurm.run(pool.cancel(job))
    until(slurm, job, JobState.ENDED)
