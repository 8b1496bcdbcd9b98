"""What the guide of Slurm says and no other test does: a site's own job_submit.lua, options of `install`, a bundle's job
that is suspended or runs out of time, the words a user tries first."""

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
from tests.batch.test_slurm_control import cpu_of, qemus
from tests.live.conftest import STORE

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
    """A node with features, and a store in which the image has a second, long name."""
    made = Cluster("slurm-guide", node="CPUs=2 RealMemory=8000 TmpDisk=100000 Feature=el9,ssd")
    try:
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
        cluster.belljar("batch", "uninstall", "slurm", *words(cluster), "--force")


def check(cluster: Cluster) -> list[str]:
    """What `check` finds wrong with submission."""
    said = json.loads(cluster.belljar("batch", "check", "slurm", *words(cluster), "--format=json", check=False))
    return [one["detail"] for one in said["findings"] if not one["is_good"]]


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


def merged(own: str, said: str) -> str:
    """The site's plugin with the lines in it that `install` tells to put there."""
    load, submit = (re.search(rf"^ +({start}.*)$", said, re.MULTILINE)[1] for start in ("local belljar", "if belljar"))  # type: ignore[index]
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
    with installed(cluster) as said:
        assert own_plugin.read_text() == OWN
        assert check(cluster) == [f"{own_plugin} is the site's own"]
        assert not is_inside(cluster, VM)
        edit(own_plugin, merged(OWN, said))
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
        # What the site's plugin loads is not taken from under it: slurmctld would not start again.
        refused = cluster.belljar("batch", "uninstall", "slurm", *words(cluster), check=False).decode()
        assert f"{own_plugin}: calls {cluster.lab.etc}/belljar.lua" in refused
        assert is_inside(cluster, VM)
        edit(own_plugin, OWN)
        cluster.belljar("batch", "uninstall", "slurm", *words(cluster))
        assert own_plugin.read_text() == OWN and cluster.lab.conf.read_bytes() == conf
        assert not is_inside(cluster, VM)


def test_a_mistake_in_the_sites_own_plugin_leaves_the_rules_as_they_were(cluster: Cluster, own_plugin: Path) -> None:
    with installed(cluster) as said:
        edit(own_plugin, merged(OWN, said))
        assert sentence(cluster, "--comment=vm=nope")
        edit(own_plugin, merged(OWN, said) + "function oops(\n")
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


def test_a_long_name_needs_the_longer_line(cluster: Cluster) -> None:
    with installed(cluster):
        assert "the name of the image is too long" in sentence(cluster, f"--comment=vm={LONG}")
    with installed(cluster, "line=255"):
        ended = cluster.run(
            "hostname; cat $JOBFEATURES/wall_limit_secs", f"--comment=vm={LONG}", "--time=9-0", "--tmp=9000"
        )
        host, limit = ended.out.split()
        assert host.startswith(b"belljar-") and 777000 < int(limit) <= 777600
        assert (
            b" --time=12960 --disk=9000\n"
            in cluster.lab.text("scontrol", "write", "batch_script", ended.job, "-").encode()
        )


# -- a job in a bundle ---------------------------------------------------------------------------------------------------


def bundle(cluster: Cluster) -> str:
    return f"--container={cluster.lab.etc}/bundles/{IMAGE}"


def test_a_job_in_a_bundle_is_suspended_and_resumed(cluster: Cluster) -> None:
    text = "echo started; i=0; while [ $i -lt 400 ]; do i=$((i+1)); echo $i >counter; : $(seq 2000); done; exit 3"
    with installed(cluster, "redirect=oci"):
        job = cluster.submit(text, bundle(cluster))
        cluster.started(job)
        cluster.lab.run("scontrol", "suspend", job)
        cluster.lab.until(lambda: qemus(cluster) and all(stopped(pid) for pid in qemus(cluster)), "QEMU is stopped", 10)
        before, count = cpu_of(qemus(cluster)), cluster.read("counter")
        time.sleep(1.5)  # nothing is to happen in it
        assert cpu_of(qemus(cluster)) == before and cluster.read("counter") == count
        cluster.lab.run("scontrol", "resume", job)
        ended = cluster.end(job)
    assert (ended.exit, cluster.read("counter")) == ("3:0", b"400\n")


def stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


@pytest.mark.slow
@pytest.mark.parametrize("text", ["trap 'echo limit; exit 4' TERM", "trap '' TERM", ":"])
def test_a_job_in_a_bundle_runs_out_of_time(cluster: Cluster, text: str) -> None:
    loop = "echo started; i=0; while [ $i -lt 900 ]; do i=$((i+1)); sleep 0.2; done"
    with installed(cluster, "redirect=oci"):
        jobs = [cluster.submit(f"{text}\n{loop}", "--time=1", *options) for options in ((), (bundle(cluster),))]
        native, guest = (cluster.end(job, timeout=200) for job in jobs)
        assert (guest.state, guest.out) == (native.state, native.out)
        assert guest.state == "TIMEOUT"
        if text != "trap '' TERM":  # Slurm's KILL ends the native one (0:9), belljar ends the other before (0:15)
            assert guest.exit == native.exit
        cluster.clean()
        assert not list(cluster.lab.folder.glob("spool/*/oci-job*"))


@pytest.mark.slow
def test_a_job_in_a_bundle_is_held_and_released(cluster: Cluster) -> None:
    with installed(cluster, "redirect=oci"):
        with rules(cluster, "retries = 2\nretry_delay = 1\nnode_faults = 0", qemu='binary = "/no/such/qemu"'):
            job = cluster.submit("echo at last", bundle(cluster))
            cluster.lab.until(lambda: "held" in cluster.lab.job(job)["Reason"], "it is held", 120)
            assert "belljar=2 try 2 of 2: /no/such/qemu" in cluster.lab.job(job)["Comment"]
            cluster.as_user("scontrol", "release", job)  # nothing is mended: it is held again
            cluster.lab.until(lambda: cluster.lab.job(job)["Restarts"] == "3", "its third start", 60)
            cluster.lab.until(lambda: "held" in cluster.lab.job(job)["Reason"], "it is held again", 60)
        cluster.as_user("scontrol", "update", f"JobId={job}", f"Comment=vm={IMAGE}")
        cluster.as_user("scontrol", "release", job)
        assert cluster.end(job).out == b"at last\n"


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
