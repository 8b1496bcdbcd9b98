"""The bait's cache of machines, with a real Slurm and real guests: who finds what of whom in a machine that served another job."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tests.batch.lab.site import Site
from tests.batch.lab.worker import PATIENCE, Worker, until
from tests.live.net_lab import Lab

pytestmark = pytest.mark.slow  # builds an image with slurmd, and waits for real nodes to come and go

# What a job leaves in every place that a user can write to, and a process that Slurm loses here: proctrack/linuxproc knows parents only.
LEAVES = """
echo secret > /tmp/left; mkdir -p /tmp/deep/er; echo secret > /var/tmp/left; echo secret > /dev/shm/left; echo secret > /run/lock/left
ipcmk -M 4096 > /dev/null; ipcmk -Q > /dev/null; ipcmk -S 3 > /dev/null
cp /bin/sleep /tmp/belljar-sleeper; (setsid /tmp/belljar-sleeper 3000 < /dev/null > /dev/null 2>&1 &)
echo $SLURMD_NODENAME > first
"""
# Here, who somebody is in the machine's accounts, and what is not root's or the node's own.
FINDS = """
echo $SLURMD_NODENAME
ls -A /tmp /var/tmp /dev/shm /run/lock | grep -v ':$' | grep -v belljar-lab | grep .
cat /proc/sysvipc/msg /proc/sysvipc/shm /proc/sysvipc/sem | grep -v key
cat /proc/[0-9]*/comm | grep sleeper
find / -xdev -uid +999 -uid -60000 ! -path '/var/spool/slurmd/job*' 2> /dev/null
getent passwd bjalice bjbob | cut -d: -f1
awk '$2 == "/" { print $4 }' /proc/mounts | tr , '\\n' | grep nosuid
mount --bind /tmp /mnt 2> /dev/null || echo no root
"""


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    net, site = Lab(), Site("cache")
    made = Worker(net, site, tmp_path_factory.mktemp("cache"), more='cache = "same-user"\n')
    try:
        made.slurm.up()
        made.start()
        yield made
    finally:
        made.close()
        site.close()
        net.close()


def kept(worker: Worker) -> list[dict[str, Any]]:
    return [one for one in worker.json("jobs")["jobs"] if one["state"] == "kept"]


def ran(worker: Worker, text: str, user: str = "bjalice") -> tuple[str, list[str]]:
    """The job, and the lines that it printed."""
    job = worker.slurm.submit(text, user=user)
    record = worker.slurm.lab.ended(job, PATIENCE)
    assert record["JobState"] == "COMPLETED", f"{worker.said()}\n{worker.written(f'{job}.err', user)}"
    return job, worker.written(f"{job}.out", user).splitlines()


def one_is_kept(worker: Worker) -> dict[str, Any]:
    until(lambda: len(kept(worker)) == 1, f"a machine to be kept\n{worker.said()}", PATIENCE)
    return kept(worker)[0]


def test_a_second_job_finds_nothing_of_the_first_and_another_user_gets_a_fresh_machine(worker: Worker) -> None:
    ran(worker, LEAVES)
    first = worker.written("first").strip()
    (machine,) = one_is_kept(worker)["machines"]
    assert first == f"vm{machine}x" and worker.slurm.nodes()[first].state.value == "out"
    second, found = ran(worker, FINDS)
    assert found == [first, "bjalice", "nosuid", "no root"], worker.said()
    assert [one for one in worker.states(second)][:4] == ["arrived", "stopped", "vm-booting", "vm-ready"]
    one_is_kept(worker)
    _, others = ran(worker, FINDS, "bjbob")
    assert others[0] != first and others[1:] == ["bjbob", "nosuid", "no root"]


def test_what_root_changed_meanwhile_is_found_and_the_machine_destroyed(worker: Worker) -> None:
    job = worker.slurm.submit("until [ -e changed ]; do sleep 0.2; done")
    until(lambda: "running" in worker.states(job), f"job {job} to run\n{worker.said()}", PATIENCE)
    (node,) = (one for one in worker.json("nodes")["nodes"] if one["job"] == job)
    done = worker.belljar("exec", node["machine"], "--", "touch", "/etc/job")
    assert done.returncode == 0, done.stderr
    (worker.site.home("bjalice") / "changed").touch()
    worker.slurm.lab.ended(job, PATIENCE)
    name = f"kept:{node['machine']}"
    way = ["proving", "finished", "closed"]
    until(lambda: worker.states(name)[-3:] == way, f"{name} to be destroyed\n{worker.said()}", PATIENCE)
    why = [one.get("why", "") for one in worker.events() if one.get("job") == name]
    assert "not clean" in why[-2] and "/etc/job" in why[-2]


def test_a_bait_that_was_killed_goes_on_with_what_is_kept_and_one_with_other_settings_ends_it(worker: Worker) -> None:
    job = worker.slurm.submit("echo $SLURMD_NODENAME > killed")
    worker.slurm.lab.ended(job, PATIENCE)
    name = f"kept:{worker.written('killed').strip()[2:-1]}"
    until(lambda: "proving" in worker.states(name), f"{name} to be cleaned\n{worker.said()}", PATIENCE)
    worker.kill()
    worker.start()
    until(lambda: worker.states(name)[-1:] == ["kept"], f"{name} to be kept\n{worker.said()}", PATIENCE)
    worker.kill()
    worker.start()
    _, found = ran(worker, "echo $SLURMD_NODENAME")
    assert found == [worker.written("killed").strip()]
    until(lambda: kept(worker), f"a machine to be kept\n{worker.said()}", PATIENCE)
    worker.kill()
    worker.file.write_text(worker.file.read_text().replace("same-user", "never"))
    worker.start()
    until(lambda: worker.json("jobs")["jobs"] == [], f"all machines to end\n{worker.said()}", PATIENCE)
    assert [one for one in worker.slurm.nodes() if one.startswith("vm")] == [] and worker.belljar.leftovers() == []
