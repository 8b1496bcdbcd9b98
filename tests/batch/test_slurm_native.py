"""What belljar does to a Slurm whose jobs do not ask for it: nothing. And what its hooks and settings do when they break."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Iterator

import pytest
from tests.batch.slurm_fixtures import SETTINGS, VM, Cluster

# All that a process can tell of how it was started.
LOOK = r"""#!/bin/bash
env -0 | tr '\0' '\n' | grep -v '^SLURM_\(JOB_\?ID\|JOB_SLUID\|JOB_\(START\|END\)_TIME\|TASK_PID\)=' | sort
tr '\0' '\n' </proc/$$/cmdline
cat /proc/$PPID/comm; ps -o pgid= -o sid= -p $$ | awk -v p=$$ '{print ($1 == p), ($2 == p)}'
grep -E '^(Sig[BIC]|Shd|Cap|NoNew|Umask|Groups|Seccomp:)' /proc/self/status; ulimit -a; ulimit -aH
for n in 0 1 2 3 4 5 6 7 8 9 255; do echo $n; readlink /proc/$$/fd/$n; done; nice; pwd; printf '%s\n' "$@"
"""
ARGS = ("a b", "--image=x", "")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    made = Cluster("slurm-native")
    try:
        made.lab.up()
        made.before = same(made.run(LOOK, args=ARGS).out)  # type: ignore[attr-defined]
        yield made.up()
    finally:
        made.close()


def same(output: bytes) -> list[bytes]:
    return re.sub(rb"job[0-9]{5}|/[0-9]+(?=\.(out|err)\b)", b"N", output).splitlines()


def test_a_job_that_asks_for_nothing_is_untouched(cluster: Cluster) -> None:
    ended = cluster.run(LOOK, args=ARGS)
    assert same(ended.out) == cluster.before and len(cluster.before) > 60  # type: ignore[attr-defined]
    spooled = cluster.lab.text("scontrol", "write", "batch_script", ended.job, "-")
    assert spooled.strip() == LOOK.strip()


def test_a_job_whose_partition_turned_out_to_have_no_image_is_as_if_untouched(cluster: Cluster) -> None:
    """Of two partitions one has an image: the wrapper is asked, and goes out of the way."""
    ended = cluster.run(LOOK, "--partition=batch,night", args=ARGS)
    spooled = cluster.lab.text("scontrol", "write", "batch_script", ended.job, "-")
    assert spooled.startswith("#!") and "wrap-slurm --array=no\n" in spooled
    assert ended.record["Partition"] == "batch"
    assert same(ended.out) == cluster.before  # type: ignore[attr-defined]


def test_srun_and_salloc_are_untouched(cluster: Cluster) -> None:
    """Those that ask for no image; the others are refused (test_slurm_guide.py). They listen where their host's name
    points, and are called back where they called from: on 127.0.1.1, as Debian names a host, the two are not the same."""
    apart = (
        "unshare",
        "--uts",
        "sh",
        "-ec",
        'hostname localhost; exec setpriv --reuid="$0" --regid="$0" --clear-groups "$@"',
    )
    for command in (("srun",), ("salloc", "--quiet")):
        done = cluster.site.run(*apart, "bjalice", *command, "echo", "native", env=cluster.lab.env)
        assert done.stdout == b"native\n"


def hook(cluster: Cluster, name: str, job: str = "4711") -> float:
    """Run a hook as slurmd does, and give the time it took. It must end with 0."""
    env = {"SLURM_JOB_ID": job, "SLURM_JOB_UID": str(cluster.site.home("bjalice").stat().st_uid), "SLURMD_NODENAME": "n1",
           "SLURM_JOB_USER": "bjalice", "SLURM_CONF": str(cluster.lab.conf)}  # fmt: skip
    before = time.monotonic()
    done = subprocess.run(
        [cluster.lab.etc / f"belljar-{name}"],
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done
    return time.monotonic() - before


def test_hooks_are_quick_when_there_is_nothing_to_do(cluster: Cluster) -> None:
    for name in ("prolog", "epilog"):
        assert min(hook(cluster, name) for _ in range(3)) < 1.0


def test_hooks_never_take_a_node_away(cluster: Cluster) -> None:
    """Prolog's or Epilog's exit code would drain the node: also when belljar itself is broken."""
    settings = cluster.site.config.read_text()
    cluster.site.config.write_text("[batch\n")
    try:
        for name in ("prolog", "epilog"):
            hook(cluster, name, "not a job")
            hook(cluster, name)
        assert cluster.run("echo native").out == b"native\n"
        assert "DRAIN" not in cluster.lab.node("n1")["State"]
    finally:
        cluster.site.config.write_text(settings)


BROKEN = {
    "retries = -x": "belljar.toml: not TOML",
    'retries = "x"': "retries",
    'allow = ["alice debian12"]': "batch.allow",
    'queue_images = ["night"]': "batch.queue_images",
    'default_image = "../x"': "../x",
    'max_memory = "many"': "max_memory",
    'no_such_key = "1"': "no_such_key",
}


@pytest.mark.parametrize("line", BROKEN)
def test_a_broken_setting_is_refused_when_installing_and_nothing_changes(cluster: Cluster, line: str) -> None:
    before = {path: path.read_bytes() for path in cluster.lab.etc.iterdir() if path.is_file()}
    settings = cluster.site.config.read_text()
    cluster.site.configure(line)
    try:
        answer = cluster.belljar(
            "batch",
            "install",
            "slurm",
            "--folder",
            str(cluster.lab.etc),
            "--prefix",
            str(cluster.site.top),
            check=False,
        )
    finally:
        cluster.site.config.write_text(settings)
    assert answer.startswith(b"belljar: ") and BROKEN[line].encode() in answer, answer
    assert {path: path.read_bytes() for path in cluster.lab.etc.iterdir() if path.is_file()} == before


def test_a_full_disk_holds_the_job_and_spares_the_next_one(cluster: Cluster) -> None:
    settings = SETTINGS.replace("retries = 3", "retries = 1") + "node_faults = 0\n"
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m,mode=711", "tmpfs", cluster.site.node], check=True)
    try:
        with cluster.other_settings(settings):
            job = cluster.submit("echo never", VM)
            cluster.lab.until(lambda: cluster.lab.job(job)["Reason"] == "job_requeued_in_held_state", "it is held", 120)
            comment = cluster.lab.job(job)["Comment"]
    finally:
        subprocess.run(["umount", "--lazy", cluster.site.node], check=True)
    assert "belljar=1 try 1 of 1" in comment and re.search("space|full|MiB", comment), comment
    cluster.as_user("scontrol", "release", job)
    assert cluster.end(job).out == b"never\n"
    assert not os.path.ismount(cluster.site.node)
