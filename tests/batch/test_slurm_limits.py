"""Slurm with control groups (version 1): a job's limits hold for its machine, and its own figures include it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.batch.slurm_fixtures import VM, Cluster

MEMORY = Path("/sys/fs/cgroup/memory")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (MEMORY / "memory.limit_in_bytes").exists(), reason="no memory controller of version 1 on this host"
    ),
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    made = Cluster("slurm-limits", cgroup=True, prefix="bjcg")
    try:
        yield made.up()
    finally:
        made.close()


def group_of(cluster: Cluster, job: str) -> Path:
    uid = cluster.site.home("bjalice").stat().st_uid
    return MEMORY / f"slurm_{cluster.lab.nodes[0]}/uid_{uid}/job_{job}"


@pytest.mark.parametrize("size", ["512M", "1G"])
def test_a_job_that_fills_its_machine_is_killed_inside(cluster: Cluster, size: str) -> None:
    """The first job of a size makes its template too, within the same limit."""
    text = "echo working; tail /dev/zero; code=$?; echo started; sleep 4; exit $code"
    job = cluster.submit(text, VM, f"--mem={size}")
    cluster.started(job)
    group = group_of(cluster, job)
    limit, used = (int((group / f"memory.{name}_in_bytes").read_text()) for name in ("limit", "usage"))
    control = (group / "step_batch/memory.oom_control").read_text()
    ended = cluster.end(job)
    assert limit == {"512M": 512, "1G": 1024}[size] << 20
    assert used < limit and "oom_kill 0" in control, (used, limit, control)
    assert (ended.state, ended.exit) == ("FAILED", "137:0"), ended
    native = cluster.run("tail /dev/zero", f"--mem={size}")
    assert native.state == "OUT_OF_MEMORY"  # the limit is no paper tiger


def seconds(shown: str) -> float:
    """`[DAYS-]HH:MM:SS` of sstat."""
    days, _, clock = shown.rpartition("-")
    parts = [float(part) for part in clock.split(":")]
    return float(days or 0) * 86400 + sum(part * 60**power for power, part in enumerate(reversed(parts)))


def test_slurms_own_figures_include_the_machine(cluster: Cluster) -> None:
    """What sstat counts is what QEMU really used; on an otherwise idle host that is two cpus for twenty seconds."""
    size = ("--cpus-per-task=2", "--mem=1G")
    cluster.run("true", VM, *size)  # makes the template
    burner = "timeout 20 sh -c 'while :; do :; done'"
    job = cluster.submit(f"{burner} & {burner} & wait; echo started; sleep 5", VM, *size)
    cluster.started(job)

    figures = cluster.lab.text("sstat", "-n", "-P", "-j", f"{job}.batch", "--format=AveCPU,MaxRSS").strip()
    cpu, memory = seconds(figures.partition("|")[0]), figures.partition("|")[2]
    assert cluster.end(job).exit == "0:0"
    shown = json.loads(cluster.belljar("show", "--format", "json", f"slurm:{job}", user="bjalice"))
    host = shown["outcome"]["host"]
    really = host["user"] + host["system"]
    assert 0.9 * really <= cpu <= 1.15 * really + 3, (cpu, really)
    assert int(re.sub(r"\D", "", memory)) > 64 * 1024, memory  # KiB
    print(f"sstat: {cpu} cpu-s, {memory}; QEMU: {really:.1f} cpu-s")


def test_the_next_job_finds_no_group_left(cluster: Cluster) -> None:
    job = cluster.run("exit 0", VM).job
    cluster.lab.until(lambda: not group_of(cluster, job).exists(), "the job's group is gone", 20)
