"""What the pages on Slurm say and no other test does: a site's own job_submit.lua, options of `install`, the words a user
tries first."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.batch.slurm_fixtures import IMAGE, VM, Cluster
from tests.live.conftest import ROOT, STORE
from tests.live.terminal import terminal

LONG = "x" * 99  # a name that 127 bytes cannot hold
OWN = """-- the site's own
function slurm_job_submit(job_desc, part_list, submit_uid)
   if job_desc.account == "closed" then
      slurm.log_user("site: the account is closed")
      return slurm.ERROR
   end
   job_desc.admin_comment = "seen by the site"
   return slurm.SUCCESS
end

function slurm_job_modify(job_desc, job_rec, part_list, modify_uid)
   return slurm.SUCCESS
end

return slurm.SUCCESS
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A node with features and a GPU, and a store in which the image has a second, long name."""
    node = "CPUs=2 RealMemory=8000 TmpDisk=100000 Feature=el9,ssd Gres=gpu:1"
    made = Cluster("slurm-guide", node=node, GresTypes="gpu")
    try:
        made.lab.etc.mkdir(parents=True)
        (made.lab.etc / "gres.conf").write_text("Name=gpu File=/dev/null\n")
        made.site.config.write_text(made.site.config.read_text().replace(str(STORE), str(store_of(made))))
        made.lab.up()
        yield made
    finally:
        made.close()


def store_of(cluster: Cluster) -> Path:
    """The tests' image, under one more name."""
    store = cluster.site.top / "store/images"
    if not store.is_dir():
        (store / "names").mkdir(parents=True)
        folder = (STORE / "images/names" / IMAGE).resolve()
        shutil.copytree(folder, store / folder.name, copy_function=linked)
        for name in (IMAGE, LONG):
            (store / "names" / name).symlink_to(f"../{folder.name}")
        # Where the files had to be copied they are others than the manifest knows, until all their bytes were looked at.
        cluster.site.run(
            str(cluster.site.belljar), "image", "verify", IMAGE, env={"BELLJAR_PATHS_STORE": str(store.parent)}
        )
    return store.parent


@contextmanager
def rules(cluster: Cluster, lines: str, **sections: str) -> Iterator[None]:
    """Other settings of the site for a while."""
    before = cluster.site.config.read_text()
    more = "".join(f"[{section}]\n{text}\n" for section, text in sections.items())
    cluster.site.config.write_text(
        re.sub(r"(?m)^(retries|retry_delay|node_faults) = .*\n", "", before) + f"{lines}\n{more}"
    )
    try:
        yield
    finally:
        cluster.site.config.write_text(before)


def linked(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copy2(source, target)


def words(cluster: Cluster, *options: str) -> tuple[str, ...]:
    where = ("--folder", str(cluster.lab.etc), "--prefix", str(cluster.site.top))
    return (*where, *(word for option in options for word in ("--set", option)))


@contextmanager
def installed(cluster: Cluster, *options: str) -> Iterator[str]:
    """belljar in this Slurm for a while, and what `install` said."""
    try:
        yield cluster.belljar("batch", "install", "slurm", *words(cluster, *options)).decode()
    finally:
        cluster.belljar("batch", "uninstall", "slurm", *words(cluster))


def check(cluster: Cluster) -> list[str]:
    """What `check` finds wrong with submission."""
    said = json.loads(cluster.belljar("batch", "check", "slurm", *words(cluster), "--format=json", check=False))
    return [one["text"] for one in said["findings"] if one["grade"] == "fail"]


def sentence(cluster: Cluster, *options: str) -> str:
    """Why `sbatch` refuses; "" where it does not."""
    done = cluster.sbatch("true", "--hold", *options)
    if done.returncode == 0:
        cluster.as_user("scancel", done.stdout.decode().strip())
        return ""
    return str(done.stderr.decode())


def is_inside(cluster: Cluster, *options: str) -> bool:
    ended = cluster.run("hostname", *options)
    assert ended.exit == "0:0", ended.err
    return ended.out.startswith(b"belljar-")


# -- a site's own job_submit.lua -----------------------------------------------------------------------------------------


def merged(own: str, cluster: Cluster) -> str:
    """The site's plugin with the lines in it that the page tells to put there."""
    page = (ROOT / "docs/batch/reference/slurm.md").read_text().replace("/etc/slurm", str(cluster.lab.etc))
    load, submit = (re.search(rf"^ +({start}.*)$", page, re.MULTILINE)[1] for start in ("local belljar", "if belljar"))  # type: ignore[index]
    modify = submit.replace(
        "submit(job_desc, part_list, submit_uid)", "modify(job_desc, job_rec, part_list, modify_uid)"
    )
    first, last = "   return slurm.SUCCESS\nend\n\nfunction", "   return slurm.SUCCESS\nend\n\nreturn"
    text = f"{load}\n{own}".replace(first, f"   {submit}\n{first}").replace(last, f"   {modify}\n{last}")
    assert [text.count(word) for word in ("dofile(", "belljar.submit(", "belljar.modify(")] == [1, 1, 1]
    return text


def edit(plugin: Path, text: str) -> None:
    """Write it, newer than slurmctld's last reading of it: times count in whole seconds there."""
    newer = max(time.time(), plugin.stat().st_mtime) + 2
    plugin.write_text(text)
    os.utime(plugin, (newer, newer))


@pytest.fixture
def own_plugin(cluster: Cluster) -> Iterator[Path]:
    """A Slurm whose site has a plugin, and is as it was afterwards."""
    before, path = cluster.lab.conf.read_text(), cluster.lab.etc / "job_submit.lua"
    cluster.lab.conf.write_text(f"{before}JobSubmitPlugins=lua\n")
    path.write_text(OWN)
    cluster.lab.run("scontrol", "reconfigure")
    try:
        yield path
    finally:
        path.unlink()
        cluster.lab.conf.write_text(before)
        cluster.lab.run("scontrol", "reconfigure")


def test_a_sites_own_plugin_stays_and_asks_ours(cluster: Cluster, own_plugin: Path) -> None:
    conf = cluster.lab.conf.read_bytes()
    with installed(cluster) as printed:
        assert f"let {own_plugin} call {cluster.lab.etc}/belljar.lua" in printed
        assert own_plugin.read_text() == OWN
        assert check(cluster) == [f"{own_plugin} is the site's own"]
        assert not is_inside(cluster, VM)
        edit(own_plugin, merged(OWN, cluster))
        assert check(cluster) == []
        assert "the account is closed" in sentence(cluster, "-A", "closed", VM)
        assert "no image is called nope here" in sentence(cluster, "--comment=vm=nope")
        ended = cluster.run("hostname", VM)
        assert ended.out.startswith(b"belljar-") and ended.record["AdminComment"].strip() == "seen by the site"
        assert not is_inside(cluster)
        held = cluster.submit("true", "--hold")
        assert "Unspecified error" in cluster.as_user(
            "scontrol", "update", f"JobId={held}", f"Comment=vm={IMAGE}", check=False
        )
        cluster.as_user("scancel", held)
        # New rules hold at once, and nothing is left to be done by hand.
        with rules(cluster, "max_cpus = 1"):
            assert "by hand" not in cluster.belljar("batch", "install", "slurm", *words(cluster)).decode()
            assert "at most 1 here" in sentence(cluster, VM, "-c2")
        edit(own_plugin, OWN)  # first: a slurmctld whose plugin loads what is not there does not start again
        cluster.belljar("batch", "uninstall", "slurm", *words(cluster))
        assert own_plugin.read_text() == OWN and cluster.lab.conf.read_bytes() == conf
        assert not is_inside(cluster, VM)


def test_a_mistake_in_the_sites_own_plugin_leaves_the_rules_as_they_were(cluster: Cluster, own_plugin: Path) -> None:
    with installed(cluster):
        edit(own_plugin, merged(OWN, cluster))
        assert sentence(cluster, "--comment=vm=nope")
        edit(own_plugin, merged(OWN, cluster) + "function oops(\n")
        assert "no image is called nope here" in sentence(cluster, "--comment=vm=nope")
        assert is_inside(cluster, VM)
        assert "using previous script" in (cluster.lab.folder / "log/slurmctld.log").read_text()


# -- options of install --------------------------------------------------------------------------------------------------


def test_a_feature_stands_for_an_image(cluster: Cluster) -> None:
    with installed(cluster, f"feature=el9={IMAGE}"):
        assert is_inside(cluster, "--constraint=el9&ssd")
        assert not is_inside(cluster, "--constraint=ssd")
        assert "does not name the same image" in sentence(cluster, "-C", "el9", "--comment=vm=other")
        assert "no image is called nope here" in sentence(cluster, "-C", "vm_nope")


def test_a_name_that_no_line_can_hold_is_refused(cluster: Cluster) -> None:
    with installed(cluster):
        assert "the name of the image is too long" in sentence(cluster, f"--comment=vm={LONG}")
        ended = cluster.run(
            "hostname; cat $JOBFEATURES/wall_limit_secs", f"--comment=vm={IMAGE}", "--time=9-0", "--tmp=9000"
        )
        host, limit = ended.out.split()
        assert host.startswith(b"belljar-") and 777000 < int(limit) <= 777600
        assert (
            b" --time=12960 --disk=9000 --image="
            in cluster.lab.text("scontrol", "write", "batch_script", ended.job, "-").encode()
        )


def test_without_lua_the_line_is_written_by_hand(cluster: Cluster) -> None:
    with installed(cluster, "submit=hand"):
        assert "JobSubmitPlugins" not in cluster.lab.conf.read_text()
        script = f"#!{cluster.site.top}/libexec/slurm/wrap-slurm --image={IMAGE}\n#!/bin/bash\n#SBATCH -J byhand\n"
        ended = cluster.run(f"{script}hostname; echo $BASH_VERSION $SLURM_JOB_NAME; exit 3")
        host, version, name = ended.out.split()
        assert (host.startswith(b"belljar-"), version[:1] > b"4", name, ended.exit) == (True, True, b"byhand", "3:0")
        ended = cluster.run(script.replace(IMAGE, "nope"))
        assert ended.exit == "125:0" and b"no image is called 'nope'" in ended.err
        assert check(cluster) == []


def test_nothing_that_asks_for_an_image_runs_outside(cluster: Cluster) -> None:
    asked = {
        VM: f"image {IMAGE}",
        "--partition=night": "partition night",
        "--partition=batch,night": "partition batch,night",
    }
    with installed(cluster):
        for option, what in asked.items():
            for command in ("srun", "salloc"):
                done = cluster.site.run(command, option, "hostname", user="bjalice", check=False, env=cluster.lab.env)
                assert done.returncode != 0 and done.stdout == b""
                assert f"belljar: {what}: only a script of sbatch runs in a machine" in done.stderr.decode()
        assert "already; ask for more, or leave --tmp out" in sentence(cluster, VM, "--tmp=100")


def test_what_a_machine_cannot_give_is_refused_and_without_an_image_runs(cluster: Cluster) -> None:
    with installed(cluster):
        for options, why in (
            (("--gres=gpu:1",), "a machine has no GPU"), (("--gpus=1",), "a machine has no GPU"),
            (("--ntasks=1", "--gpus-per-task=1"), "a machine has no GPU"), (("--mem=600", ":", "--mem=600"), "heterogeneous"),
        ):  # fmt: skip
            assert sentence(cluster, *options) == "", options
            for own in (VM, "--partition=night"):
                assert why in sentence(cluster, own, *options), options
        cluster.lab.run("scancel", "--user=bjalice")


def test_a_shell_in_the_machine_of_a_running_job(cluster: Cluster) -> None:
    """As the page says it, at a terminal of the user's."""
    with installed(cluster), terminal() as user:
        job = cluster.submit("sleep 120", VM)
        cluster.lab.until(lambda: cluster.lab.state(job) == "RUNNING", "the job has a node")
        ours = (str(cluster.site.belljar), "--config", str(cluster.site.config))
        by = (
            "setpriv",
            "--reuid=bjalice",
            "--regid=bjalice",
            "--clear-groups",
            "env",
            "-C",
            cluster.site.home("bjalice"),
        )
        step = (
            "srun",
            "--overlap",
            "--pty",
            f"--jobid={job}",
            *ours,
            "exec",
            "-t",
            "--wait",
            "3m",
            f"slurm:{job}",
            "--",
            "sh",
        )
        user.start((*by, *step), env=cluster.lab.env)
        user.expect(rb"[$#] $", 180)
        user.type(b"tty; hostname; id -un; stty size; exit 7\r")
        seen = user.rest()
        assert user.process is not None and user.process.returncode == 7
        assert b"/dev/pts/" in seen and b"belljar-" in seen and b"bjalice" in seen and b"31 117" in seen, seen
        assert cluster.lab.state(job) == "RUNNING", "the job goes on"
        cluster.lab.run("scancel", job)
        cluster.lab.ended(job)


@pytest.mark.slow
def test_an_array_of_a_hundred_two_at_a_time(cluster: Cluster) -> None:
    with installed(cluster):
        array = cluster.submit("echo $SLURM_ARRAY_TASK_ID $(hostname)", "--array=1-100", VM)
        ended = [cluster.lab.ended(f"{array}_{task}", 600)["ExitCode"] for task in range(1, 101)]
        assert ended == ["0:0"] * 100
        said = [cluster.read(f"{array}.{task}.out").split() for task in range(1, 101)]
        assert [int(number) for number, _ in said] == list(range(1, 101))
        assert len({host for _, host in said}) == 100
        cluster.clean()
