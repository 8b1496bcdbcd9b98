"""The job_submit.lua of docs/batch/bait/security.md, in a real slurmctld: users reach the machines' partition by no door."""

from __future__ import annotations

import pwd
import subprocess
from collections.abc import Iterator

import pytest
from tests.batch.lab.pool import QUEUE, PooledSlurm
from tests.batch.lab.site import Site
from tests.live.conftest import ROOT
from tests.live.net_lab import Lab

from belljar.pool import JobState, NodeState

VM = "vm0123456789abx"
PAGE = ROOT / "docs/batch/bait/security.md"


@pytest.fixture
def slurm() -> Iterator[PooledSlurm]:
    net, site = Lab(), Site("submit-rules")
    made = PooledSlurm(net, site, JobSubmitPlugins="lua")
    made.lab.etc.mkdir(parents=True)
    (made.lab.etc / "job_submit.lua").write_text(PAGE.read_text().partition("```lua\n")[2].partition("```")[0])
    try:
        made.up()
        yield made
    finally:
        made.down()
        site.close()
        net.close()


def by(slurm: PooledSlurm, user: str, *argv: str) -> subprocess.CompletedProcess[str]:
    entry = pwd.getpwnam(user)
    words = ["setpriv", f"--reuid={entry.pw_uid}", f"--regid={entry.pw_gid}", "--clear-groups", *argv]
    return subprocess.run(
        [*slurm.lab.inside, *words], env=slurm.lab.env, capture_output=True, text=True, timeout=60, check=False
    )


def test_users_are_refused_in_the_machines_partition_and_a_bait_is_not(slurm: PooledSlurm) -> None:
    for partition in (QUEUE, f"batch,{QUEUE}"):
        with pytest.raises(subprocess.CalledProcessError):
            slurm.submit("true", f"--partition={partition}")
    job = slurm.submit("true", "--hold")
    assert by(slurm, "bjalice", "scontrol", "update", f"JobId={job}", f"Partition={QUEUE}").returncode != 0
    assert by(slurm, "bjalice", "scontrol", "update", f"JobId={job}", "Comment=vm=x", "TimeLimit=5").returncode == 0
    slurm.join(VM)
    slurm.lab.until(
        lambda: VM in slurm.nodes() and slurm.nodes()[VM].state is NodeState.IDLE, "the node has joined", 30
    )
    slurm.run(slurm.pool.move(slurm.jobs()[job], (VM,), QUEUE)[0])
    moved = slurm.jobs()[job]
    assert (moved.state, moved.queue) == (JobState.HELD, QUEUE)
    for change in ("ReqNodeList=bait1", "Partition=batch"):
        assert by(slurm, "bjalice", "scontrol", "update", f"JobId={job}", change).returncode != 0
    assert by(slurm, "bjalice", "scontrol", "update", f"JobId={job}", "TimeLimit=4").returncode == 0
    assert by(slurm, "bjalice", "scancel", job).returncode == 0
