"""The site's side under a real Slurm: install twice, check, reap by asking it, take it all out again."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Iterator

import pytest
from tests.batch.slurm_fixtures import SETTINGS, VM, Cluster
from tests.batch.test_node_side import Node

FAST = SETTINGS + "gone_after = 0\nask_timeout = 5\n"
BEFORE: dict[str, bytes] = {}  # Slurm's own files


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    made = Cluster("site", FAST)
    try:
        made.lab.up()
        BEFORE.update(settings_of(made))
        made.reconfigure(FAST)
        yield made
    finally:
        made.close()


def settings_of(cluster: Cluster) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in cluster.lab.etc.iterdir() if path.is_file()}


def words(cluster: Cluster) -> tuple[str, ...]:
    return ("--folder", str(cluster.lab.etc))


def test_twice_is_as_once_and_check_finds_all_in_place(cluster: Cluster) -> None:
    before = settings_of(cluster)
    assert b"All is in place." in cluster.belljar("batch", "install", "slurm", *words(cluster))
    assert settings_of(cluster) == before
    said = json.loads(cluster.belljar("batch", "check", "slurm", *words(cluster), "--format", "json"))
    assert [one for one in said["findings"] if one["grade"] == "fail"] == []


def test_a_partition_with_an_image_that_slurm_does_not_have_is_told_by_check(cluster: Cluster) -> None:
    text = cluster.site.config.read_text()
    try:
        cluster.site.config.write_text(text.replace("queue_images = [", 'queue_images = ["nihgt=debian12", '))
        found = cluster.belljar("batch", "check", "slurm", *words(cluster), check=False)
        assert found.count(b"fail  batch.queue_images") == 1 and b"slurm has no queue nihgt" in found
    finally:
        cluster.site.config.write_text(text)


def test_reap_asks_slurm_and_ends_only_what_it_does_not_know(cluster: Cluster) -> None:
    begun = time.time()
    job = cluster.submit("echo started; sleep 120", VM)
    cluster.started(job)
    stray = node_of(cluster).job(999999, "sleep 300")
    try:
        said = b""
        for _ in range(3):
            said += cluster.belljar("reap", "--batch")
        assert b"slurm:999999" in said and f"slurm:{job}".encode() not in said
        assert stray.wait(timeout=10) != 0
        assert cluster.lab.state(job) == "RUNNING"
        # It writes jobs down some seconds after they came; killed before, it would not know this one.
        saved = cluster.lab.folder / "state/job_state"
        cluster.lab.until(
            lambda: saved.exists() and saved.stat().st_mtime > begun, "slurmctld has written the job down"
        )
        cluster.lab.stop("slurmctld", signal.SIGKILL)
        try:
            for _ in range(2):
                assert b"slurm cannot be asked" in cluster.belljar("reap", "--batch", check=False)
        finally:
            cluster.lab.start_slurmctld()
        shown = cluster.belljar("show", f"slurm:{job}")
        assert b"running" in shown
    finally:
        cluster.lab.run("scancel", job)
    cluster.lab.ended(job)


def node_of(cluster: Cluster) -> Node:
    made = Node.__new__(Node)
    made.site, made.jobs = cluster.site, list[subprocess.Popen[bytes]]()
    return made


def test_faults_of_several_jobs_drain_the_node_with_the_reason_and_good_tests_resume_it(cluster: Cluster) -> None:
    (name, *_) = cluster.lab.nodes
    cluster.site.configure(FAST, qemu='binary = "/no/such/qemu"')
    jobs = [cluster.submit("echo done", VM) for _ in range(3)]
    cluster.lab.until(lambda: "DRAIN" in cluster.lab.node(name)["State"], "the node is drained", 60)
    reason = cluster.lab.node(name)["Reason"]
    assert reason.startswith("belljar: 3 node faults in a row: /no/such/qemu"), reason
    assert node_test(cluster, name)["passed"] is False
    cluster.site.configure(FAST)
    first = node_test(cluster, name)
    assert (first["passed"], first["opened"]) == (True, False)
    assert "DRAIN" in cluster.lab.node(name)["State"]
    assert node_test(cluster, name)["opened"] is True
    assert "DRAIN" not in cluster.lab.node(name)["State"]
    for job in jobs:
        cluster.lab.run("scancel", job, check=False)
    cluster.lab.run("scontrol", "update", f"NodeName={name}", "State=DRAIN", "Reason=a person's")
    for _ in range(3):
        assert node_test(cluster, name)["opened"] is False, "what a person closed is a person's to open"
    cluster.lab.run("scontrol", "update", f"NodeName={name}", "State=RESUME")
    assert cluster.run("echo fine", VM).out == b"fine\n"


def node_test(cluster: Cluster, name: str) -> dict[str, object]:
    said = cluster.site.command(
        "batch", "node", "slurm", "test", "--node", name, "--format", "json", check=False, env=cluster.lab.env
    )
    return dict(json.loads(said.stdout))


def test_a_job_without_a_limit_has_none(cluster: Cluster) -> None:
    job = cluster.submit("cat $JOBFEATURES/wall_limit_secs; echo end", VM)
    assert cluster.end(job).out == b"end\n"
    shown = cluster.belljar("show", f"bjalice/slurm:{job}").decode()
    assert "e+07" not in shown and "31536000" not in shown, shown


def test_uninstall_leaves_slurm_as_it_was(cluster: Cluster) -> None:
    cluster.belljar("batch", "uninstall", "slurm", *words(cluster))
    assert settings_of(cluster) == BEFORE
    assert not (cluster.site.top / "libexec").exists()
    done = cluster.lab.run("sbatch", "--wait", "--output=/dev/null", "--wrap", "true", check=False)
    assert done.returncode == 0, done
