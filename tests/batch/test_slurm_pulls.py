"""Jobs of a real Slurm that name the image of a registry: where a job may pull, once for all, within the job's limits."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.batch.lab import pulls
from tests.batch.lab.pulls import NAME, SCRIPT, drafts, printed, pulled
from tests.batch.slurm_fixtures import SETTINGS, Cluster
from tests.live import container_lab as lab
from tests.live.container_lab import Hub, Layout, mirrored
from tests.unit.image.http_server import serving

pytestmark = pytest.mark.slow
MEMORY = Path("/sys/fs/cgroup/memory")
HAS_GROUPS = (MEMORY / "memory.limit_in_bytes").exists()
NEVER = f"{SETTINGS}pull = 'never'\n"
LIMIT, LAYER = 512, 600  # MiB, of a job and of an image


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    made = Cluster("slurm-pulls", nodes=2, cgroup=HAS_GROUPS, prefix="bjpl")
    try:
        yield made.up()
    finally:
        made.close()


@pytest.fixture(scope="module")
def hub(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    """Its image is what jobs name by `cluster.image`; the site allows its registry."""
    with pulled(cluster.site.home("bjalice"), tmp_path_factory.mktemp("hub")) as (hub, _):
        yield hub


def allowed(hub: Hub) -> str:
    return f"{SETTINGS}pull = 'site-registries'\nregistries = ['{hub.address}/team']\n"


def image(hub: Hub, name: str = f"{NAME}:1") -> str:
    return f"--comment=vm={hub.reference(name)}"


def test_jobs_that_ask_at_once_pull_once_and_run_as_their_user(cluster: Cluster, hub: Hub) -> None:
    home = cluster.site.home("bjalice")
    with cluster.other_settings(allowed(hub)):
        jobs = [cluster.submit(SCRIPT, image(hub)) for _ in range(3)]
        ended = [cluster.end(job, timeout=600) for job in jobs]
    assert [(it.state, it.exit, it.out) for it in ended] == [("FAILED", "7:0", printed(home))] * 3, ended
    assert list(hub.fetched(NAME).values()) == [1, 1, 1]
    cluster.clean()
    assert drafts(cluster.site.node) == []


def test_where_no_job_may_pull_it_is_refused_at_submission_and_on_the_node(cluster: Cluster, hub: Hub) -> None:
    with cluster.other_settings(NEVER):
        refused = cluster.sbatch(SCRIPT, image(hub, f"{NAME}:2"))
        assert refused.returncode and b"a job pulls images from no registry here" in refused.stderr, refused
    with cluster.other_settings(allowed(hub)):
        cluster.site.configure(NEVER)  # the node's are newer than what judges at submission
        ended = cluster.run(SCRIPT, image(hub, f"{NAME}:2"))
    assert b"a job pulls images from no registry here" in ended.err and ended.out == b"", ended
    assert not hub.fetched(f"{NAME}:2")


@pytest.mark.skipif(not HAS_GROUPS, reason="no memory controller of version 1 on this host")
def test_a_pull_larger_than_the_jobs_memory_stays_within_it(cluster: Cluster, hub: Hub, tmp_path: Path) -> None:
    noise = lab.layer(lab.file("noise", os.urandom(LAYER // 2 << 20)), lab.file("zeros", bytes(LAYER // 2 << 20)))
    layout = Layout(tmp_path / "layout")
    layout.image("x", [lab.busybox("sh", "sleep"), noise])
    hub.push(layout, "x", "team/large:1")
    with cluster.other_settings(allowed(hub)):
        job = cluster.submit("#!/bin/sh\necho started; sleep 4", image(hub, "team/large:1"), f"--mem={LIMIT}")
        cluster.started(job, timeout=240)
        group = MEMORY / f"slurm_{cluster.lab.nodes[0]}/uid_{cluster.site.home('bjalice').stat().st_uid}/job_{job}"
        group = group if group.exists() else Path(str(group).replace(*cluster.lab.nodes))
        most, limit = (int((group / f"memory.{name}_in_bytes").read_text()) for name in ("max_usage", "limit"))
        kills = (group / "step_batch/memory.oom_control").read_text()
        ended = cluster.end(job)
    print(f"at most {most >> 20} MiB of {limit >> 20}, pages of files included")
    assert (ended.state, ended.exit) == ("COMPLETED", "0:0") and "oom_kill 0" in kills, (ended, kills)
    assert most <= limit + (1 << 20) and limit == LIMIT << 20  # the kernel counts in lots
    cluster.belljar("image", "remove", hub.reference("team/large:1"), "--force", user="bjalice", check=False)


def test_the_time_limit_ends_a_pull_that_stalls_and_nothing_is_left(cluster: Cluster, tmp_path: Path) -> None:
    """Slurm's shortest limit is a minute."""
    layout = Layout(tmp_path / "layout")
    layout.image("x", [lab.layer(lab.file("x", os.urandom(1 << 20)))])
    with serving() as server:
        source = mirrored(server, layout, "x", "team/stalls", stall_after=1000)
        pulls.trust(cluster.site.home("bjalice"), server.address.partition("//")[2])
        with cluster.other_settings(f"{SETTINGS}pull = 'any'\n", image="stall_timeout = 600.0"):
            job = cluster.submit(SCRIPT, f"--comment=vm={source}", "--time=1")
            cluster.lab.until(lambda: drafts(cluster.site.node), "the pull has begun", 30)
            ended = cluster.end(job)
    assert ended.state == "TIMEOUT", ended
    cluster.lab.until(lambda: not drafts(cluster.site.node), f"no drafts: {drafts(cluster.site.node)}", 5)
    cluster.clean()
