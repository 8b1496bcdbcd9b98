"""A real Grid Engine, seen and changed as a bait would: a job is taken off its host, a second host with an execd of its own joins,
the job runs there, and the host is removed."""

from __future__ import annotations

import os
import pwd
import subprocess
from collections.abc import Iterator

import pytest
from tests.batch.lab.gridengine import ADMIN, ENV, QUEUE, GridEngine, until
from tests.batch.lab.site import Site

from belljar.pool import Command, JobState, JobView, NodeState, NodeView
from belljar.pool.gridengine.nodes import GridEnginePool

NODE, POOL = "vm1", GridEnginePool(QUEUE)


class Cell:
    """The cell, and a second host that is another network namespace."""

    def __init__(self) -> None:
        self.site = Site("ge-pool")
        self.lab = GridEngine(self.site)
        hosts = self.lab.top / "hosts"  # known before the qmaster hears of it
        hosts.write_text(hosts.read_text() + f"10.78.0.2 {NODE} {NODE}.lab\n")
        self.node: subprocess.Popen[bytes] | None = None

    def run(self, *commands: Command) -> bytes:
        return b"".join(self.lab.run(*one).stdout for one in commands)

    def job(self, job: str) -> JobView | None:
        return POOL.jobs(self.run(POOL.query("")), "").get(job)

    def nodes(self) -> dict[str, NodeView]:
        return POOL.nodes(self.run(POOL.query_nodes()))

    def until(self, job: str, state: JobState) -> JobView:
        def look() -> JobView | None:
            found = self.job(job)
            return found if found is not None and found.state is state else None

        found: JobView = until(look, f"job {job} to be {state.value}")
        return found

    def join(self) -> None:
        """An execd with a spool folder, a name and an address of its own."""
        spool = self.lab.top / "spool-of-node"
        (spool / "execd").mkdir(parents=True)
        os.chown(spool / "execd", pwd.getpwnam(ADMIN).pw_uid, -1)
        hold = f"hostname {NODE}; mount --bind {spool} /var/spool/gridengine; ip link set lo up; echo up; exec sleep infinity"
        within = ["nsenter", "-t", str(self.lab.pid), "-m", "-u", "-n", "unshare", "--net", "--uts", "--mount"]
        self.node = subprocess.Popen([*within, "bash", "-c", hold], stdout=subprocess.PIPE)
        assert self.node.stdout is not None and self.node.stdout.readline() == b"up\n"
        pid = str(self.node.pid)
        subprocess.run(["nsenter", "-t", str(self.lab.pid), "-n", "ip", "link", "set", "v1", "netns", pid], check=True)
        inside = ["nsenter", "-t", pid, "-m", "-u", "-n"]
        subprocess.run([*inside, "sh", "-c", "ip addr add 10.78.0.2/24 dev v1 && ip link set v1 up"], check=True)
        subprocess.run([*inside, "sge_execd"], env=ENV, check=True, timeout=30, capture_output=True)

    def close(self) -> None:
        if self.node is not None:
            mine = os.readlink(f"/proc/{self.node.pid}/ns/net")
            for entry in os.listdir("/proc"):
                try:
                    if entry.isdigit() and os.readlink(f"/proc/{entry}/ns/net") == mine:
                        os.kill(int(entry), 9)
                except OSError:
                    continue
            self.node.wait(10)
            assert self.node.stdout is not None
            self.node.stdout.close()
        self.lab.close()
        self.site.close()


@pytest.fixture
def cell() -> Iterator[Cell]:
    made = Cell()
    try:
        yield made
    finally:
        made.close()


def test_a_job_moves_to_a_host_of_its_own_and_keeps_its_id_and_exit_code(cell: Cell) -> None:
    home = cell.site.home("bjalice")
    script = home / "job.sh"
    script.write_text('#!/bin/sh\necho on $(hostname), "$1"\n[ "$(hostname)" = vm1 ] || sleep 60\nexit 7\n')
    script.chmod(0o755)
    argv = ("qsub", "-terse", "-l", "h_vmem=600M", "-o", f"{home}/out", "-e", f"{home}/err", str(script))
    job = cell.lab.run(*argv, "an arg", user="bjalice").stdout.decode().strip().partition(".")[0]
    running = cell.until(job, JobState.RUNNING)
    assert (running.on, running.owner, running.memory) == (("bjge",), "bjalice", 600 << 20)

    cell.run(*POOL.take_back(running))
    held = cell.until(job, JobState.HELD)
    assert held.starts == 1 and held.on == ()
    cell.run(POOL.note(held, "its host, which is new, boots"))
    assert "belljar=its_host_which_is_new_boots" in cell.lab.detail(job)

    cell.run(*POOL.create(NODE, held))
    assert cell.nodes()[NODE].state is NodeState.AWAY
    cell.join()
    until(lambda: NODE in cell.nodes() and cell.nodes()[NODE].state is NodeState.IDLE, "the host to join")
    cell.run(*POOL.move(held, (NODE,), QUEUE))
    row = cell.lab.account(job, rows=2, timeout=60)[-1]
    assert row["hostname"].partition(".")[0] == NODE and row["exit_status"].split()[0] == "7"
    assert (home / "out").read_text().splitlines()[-1] == f"on {NODE}, an arg"
    assert cell.job(job) is None

    cell.run(POOL.close(NODE, "its job has ended"))
    until(lambda: cell.nodes()[NODE].state is NodeState.OUT, "the host to be out")
    cell.run(("qconf", "-ke", NODE))
    cell.run(*POOL.remove(NODE))
    assert set(cell.nodes()) == {"bjge"} and NODE not in cell.lab.config("-sh") + cell.lab.config("-sq", QUEUE)
