"""`sbatch --container=BUNDLE`: the other way into a machine, on a real Slurm with belljar's oci.conf."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.batch.slurm_fixtures import IMAGE, SETTINGS, VM, Cluster, Ended

# What a script can tell of how it was started, but for what names this very run.
LOOK = r"""#!/bin/bash
printf '<%s>' "$@"; echo; umask; pwd; cat; ulimit -a; ulimit -aH; nproc
for n in 0 1 2; do [ -p /proc/$$/fd/$n ] && echo "$n pipe"; done
env -0 | sort -z | tr '\0' '\n' | grep -av '^SLURM_\(JOB_\?ID\|TASK_PID\|CONTAINER\|TOPOLOGY_.*\|WORKING_CLUSTER\)='
echo complaint >&2
exit 42
"""
ARGS = ("a b", "--image=x", "", "$(id) 'q\"")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    made = Cluster("slurm-oci")
    try:
        made.lab.up()
        install(made, "both")
        yield made
    finally:
        made.close()


def install(cluster: Cluster, redirect: str) -> bytes:
    where = ("--folder", str(cluster.lab.etc), "--prefix", str(cluster.site.top))
    return cluster.belljar("batch", "install", "slurm", *where, "--set", f"redirect={redirect}")


def bundle(cluster: Cluster, image: str = IMAGE) -> str:
    return f"--container={cluster.lab.etc}/bundles/{image}"


def same(ended: Ended) -> list[str]:
    text = ended.out.decode("utf-8", "surrogateescape")
    return re.sub(r"job[0-9]{5}|pts/[0-9]+|belljar-[0-9a-f]{12}", "N", text).splitlines()


def left(cluster: Cluster) -> list[str]:
    return [path.name for path in cluster.lab.folder.glob("spool/*/oci-job*")]


def test_a_job_in_a_bundle_is_as_one_with_a_line(cluster: Cluster) -> None:
    folder = cluster.site.home("bjalice") / "elsewhere"
    folder.mkdir()
    (cluster.site.home("bjalice") / "input").write_text("fed\n")
    options = (f"--chdir={folder}", "-c", "2", "-t", "5", "--tmp=9000", f"--input={folder.parent}/input")
    files = tuple(f"--{kind}={folder.parent}/%j.{short}" for kind, short in (("output", "out"), ("error", "err")))
    env = {"MINE": 'x"y\nz \udcff\u00e9', "SLURM_RESTART_COUNT": "7"}
    by_line, by_bundle = (cluster.run(LOOK, way, *options, *files, args=ARGS, env=env) for way in (VM, bundle(cluster)))
    assert by_bundle.exit == by_line.exit == "42:0"
    assert by_bundle.err == by_line.err == b"complaint\n"
    assert same(by_bundle) == same(by_line) and len(same(by_bundle)) > 60
    assert str(folder) in same(by_bundle) and "fed" in same(by_bundle)
    shown = json.loads(cluster.belljar("show", f"slurm:{by_bundle.job}", "--format=json", user="bjalice"))
    assert IMAGE in json.dumps(shown)
    cluster.clean()
    assert left(cluster) == []


def test_a_task_of_an_array_is_itself(cluster: Cluster) -> None:
    text = "echo $SLURM_ARRAY_JOB_ID $SLURM_ARRAY_TASK_ID started; [ $SLURM_ARRAY_TASK_ID != 4 ] || sleep 60 & wait"
    job = cluster.submit(text, bundle(cluster), "--array=3-4")
    cluster.lab.until(lambda: b"4 started" in cluster.read(f"{job}.4.out"), "the last task runs", 120)
    said = cluster.belljar("exec", f"slurm:{job}_4", "--", "echo", "inside", user="bjalice")
    assert said == b"inside\n"
    cluster.as_user("scancel", job)
    cluster.lab.ended(job)
    cluster.clean()


def test_a_death_by_a_signal_leaves_nothing_behind(cluster: Cluster) -> None:
    """With a core file in slurmstepd's folder the job's stderr would tell of it."""
    ended = cluster.run("ulimit -c unlimited; kill -SEGV $$", bundle(cluster))
    assert (ended.exit, ended.out, ended.err) == ("0:11", b"", b"")
    assert left(cluster) == []


def test_scancel_leaves_time_for_last_words(cluster: Cluster) -> None:
    text = "trap 'echo last; exit 5' TERM; trap 'echo usr1' USR1; echo started; while :; do sleep 0.1; done"
    job = cluster.submit(text, bundle(cluster))
    cluster.started(job)
    cluster.as_user("scancel", "--batch", "--signal=USR1", job)
    cluster.started(job, b"usr1")
    cluster.as_user("scancel", job)
    ended = cluster.end(job)
    assert ended.state == "CANCELLED" and ended.out.endswith(b"last\n")
    cluster.clean()
    assert left(cluster) == []


def test_what_lies_in_slurmstepds_folder_does_not_harm_the_next_run(cluster: Cluster) -> None:
    """A job that runs again on the same node has the same folder, and slurmstepd must find it gone."""
    job = cluster.submit(
        'echo "started ${SLURM_RESTART_COUNT:-0}"; [ "$SLURM_RESTART_COUNT" ] || sleep 100', bundle(cluster)
    )
    cluster.started(job)
    (folder,) = cluster.lab.folder.glob("spool/*/oci-job*")
    (folder / "core").write_bytes(b"x" * 10)
    (folder / "deep/er").mkdir(parents=True)
    (folder / "deep/config.json").write_text("{}")
    (folder / "link").symlink_to(cluster.site.home("bjalice"))
    cluster.as_user("scontrol", "requeue", job)
    cluster.as_user("scontrol", "update", f"JobId={job}", "StartTime=now+5")  # Slurm's own is two minutes
    ended = cluster.end(job)
    assert (ended.state, ended.out, ended.err) == ("COMPLETED", b"started 1\n", b"")
    assert left(cluster) == [] and cluster.site.home("bjalice").is_dir()


def test_a_slurmstepd_that_was_killed_is_not_in_the_way(cluster: Cluster) -> None:
    job = cluster.submit(
        'echo "started ${SLURM_RESTART_COUNT:-0}"; [ "$SLURM_RESTART_COUNT" ] || sleep 60', bundle(cluster)
    )
    cluster.started(job)
    (step,) = [path for path in Path("/proc").glob("[0-9]*") if f"slurmstepd: [{job}.batch]" in command(path)
               and str(cluster.lab.conf) in command(path, "environ")]  # fmt: skip
    os.kill(int(step.name), signal.SIGKILL)
    cluster.lab.until(lambda: not step.exists(), "slurmstepd is gone")
    assert left(cluster) == [f"oci-job{int(job):05}-batch"]
    cluster.lab.run("scontrol", "requeue", job)
    cluster.as_user("scontrol", "update", f"JobId={job}", "StartTime=now+5", check=False)
    ended = cluster.end(job)
    assert (ended.state, ended.out, ended.err) == ("COMPLETED", b"started 1\n", b"")
    assert left(cluster) == []


def command(process: Path, what: str = "cmdline") -> str:
    try:
        return (process / what).read_bytes().decode(errors="replace")
    except OSError:
        return ""


def test_a_machine_that_cannot_be_had_holds_the_job_with_a_reason(cluster: Cluster) -> None:
    settings = SETTINGS.replace("retries = 3", "retries = 2") + "node_faults = 0\n"
    with cluster.other_settings(settings, qemu='binary = "/no/such/qemu"'):
        job = cluster.submit("echo at last", bundle(cluster))
        cluster.lab.until(lambda: cluster.lab.job(job)["Reason"] == "job_requeued_in_held_state", "it is held", 120)
        assert "belljar=2 try 2 of 2: /no/such/qemu" in cluster.lab.job(job)["Comment"]
    cluster.as_user("scontrol", "release", job)
    assert cluster.end(job).out == b"at last\n"


def foreign(cluster: Cluster, name: str, **annotations: str) -> str:
    folder = cluster.site.home("bjalice") / name
    folder.mkdir()
    config = {"ociVersion": "1.0.0", "root": {"path": "/"}, "annotations": annotations}
    (folder / "config.json").write_text(json.dumps(config))
    return f"--container={folder}"


def test_what_is_refused_at_submission(cluster: Cluster) -> None:
    with cluster.other_settings(SETTINGS + 'allow = ["* debian*"]\n'):
        for options, said in (
            ((foreign(cluster, "own"),), "--container: not one of the bundles in"),
            ((bundle(cluster, "secret"),), "image secret: not allowed for bjalice"),
            ((bundle(cluster, "debian99"),), "no image is called debian99 here"),
            ((bundle(cluster), "--comment=vm=debian99"), "do not name the same image"),
            ((bundle(cluster), "-N2"), "2 nodes: a job in a machine has one"),
            ((bundle(cluster, "../bundles/debian12"),), "--container: not one of the bundles in"),
        ):
            done = cluster.sbatch("echo never", *options)
            assert done.returncode != 0 and said in done.stderr.decode(), (options, done.stderr)


def test_without_the_plugin_the_node_refuses(cluster: Cluster) -> None:
    install(cluster, "oci")
    where = ("--folder", str(cluster.lab.etc), "--prefix", str(cluster.site.top))
    assert "BAD" not in cluster.belljar("batch", "check", "slurm", *where).decode()
    (cluster.lab.etc / "job_submit.lua").write_text("function slurm_job_submit() return slurm.SUCCESS end\n"
                                                    "function slurm_job_modify() return slurm.SUCCESS end\n")  # fmt: skip
    cluster.lab.run("scontrol", "reconfigure")
    cases = (
        (foreign(cluster, "theirs"), "--container: not a bundle of belljar's"),
        (foreign(cluster, "hostile", **{"belljar.image": "../$(id)"}), "not a name of an image"),
        (foreign(cluster, "secret", **{"belljar.image": "secret"}), "image secret: not allowed for bjalice"),
    )
    with cluster.other_settings(SETTINGS + 'allow = ["* debian*"]\n'):
        for option, said in cases:
            ended = cluster.run("echo never", option)
            assert (ended.exit, ended.out) == ("125:0", b"") and said in ended.err.decode(), ended
            assert len(ended.err.splitlines()) <= 2
        assert cluster.run("echo inside; cat /sys/class/dmi/id/sys_vendor", bundle(cluster)).out == b"inside\nQEMU\n"
    done = cluster.site.run("srun", bundle(cluster), "id", user="bjalice", check=False, env=cluster.lab.env)
    assert done.returncode == 125 and b"not the folder of a batch job" in done.stderr and not done.stdout
    assert cluster.run("echo native").out == b"native\n"


def test_a_folder_that_is_not_there_is_tmp(cluster: Cluster) -> None:
    ended = cluster.run("pwd", bundle(cluster), "--chdir=/no/such/folder", f"--output={home(cluster)}/%j.out",
                        f"--error={home(cluster)}/%j.err")  # fmt: skip
    assert ended.out == b"/tmp\n" and b"/no/such/folder: No such file or directory: going to /tmp instead" in ended.err


def home(cluster: Cluster) -> Path:
    return cluster.site.home("bjalice")


def test_uninstall_takes_all_of_it_out(cluster: Cluster) -> None:
    where = ("--folder", str(cluster.lab.etc), "--prefix", str(cluster.site.top))
    cluster.belljar("batch", "uninstall", "slurm", *where, "--force")
    assert not (cluster.lab.etc / "bundles").exists() and not (cluster.lab.etc / "oci.conf").exists()
