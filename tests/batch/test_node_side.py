"""A node's side with real machines and without a batch system: the wrapper is started as Slurm starts it, the hooks are
called as root as Slurm calls them. What the systems themselves do is in the tests of each of them."""

from __future__ import annotations

import hashlib
import os
import pwd
import re
import resource
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.batch.lab.load import stretched
from tests.batch.lab.site import Site
from tests.live.conftest import STORE

START = 120.0  # seconds for a first machine, which may have to make its template
HOOK_LIMIT = 1.0  # seconds


def processor_time() -> float:
    """Of all children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


class Node:
    """A site whose users have jobs that some Slurm would have started."""

    def __init__(self) -> None:
        self.site = Site("node", 'default_image = "debian12"')
        self.jobs: list[subprocess.Popen[bytes]] = []

    def hook(self, act: str, job: int, user: str = "bjalice", **env: str) -> float:
        """Call prolog or epilog; returns the seconds of processor time it took."""
        facts = {
            "SLURM_JOB_ID": str(job),
            "SLURM_JOB_UID": str(pwd.getpwnam(user).pw_uid),
            "SLURMD_NODENAME": "n1",
            **env,
        }
        begin = processor_time()
        done = self.site.command("-v", "internal", act, "slurm", env=facts)
        self.said = done.stderr.decode()
        return processor_time() - begin

    def job(
        self, job: int, script: str, *, user: str = "bjalice", name: str = "job", **env: str
    ) -> subprocess.Popen[bytes]:
        """Start it as slurmstepd does, and wait until its payload has said something."""
        entry = pwd.getpwnam(user)
        spool = self.site.homes / f"job{job}"
        spool.write_text(f"#!/bin/sh\necho begun\n{script}\n")
        spool.chmod(0o755)
        out = self.site.home(user) / f"{job}.out"
        facts = {
            "SLURM_JOB_ID": str(job), "SLURM_JOBID": str(job), "SLURM_JOB_UID": str(entry.pw_uid), "SLURM_JOB_NAME": name,
            "SLURM_JOB_PARTITION": "night", "SLURM_CPUS_ON_NODE": "1", "SLURM_MEM_PER_NODE": "600", "HOME": str(self.site.home(user)),
            "PATH": "/usr/bin:/bin", "USER": user, **env,
        }  # fmt: skip
        with open(out, "wb") as file:
            os.chown(out, entry.pw_uid, entry.pw_gid)
            process = subprocess.Popen(
                [str(self.site.belljar), "--config", str(self.site.config), "internal", "wrap", "slurm", "--image=debian12 --time=9", str(spool)],
                stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=facts, cwd=self.site.home(user),
                user=entry.pw_uid, group=entry.pw_gid, extra_groups=[], start_new_session=True,
            )  # fmt: skip
        self.jobs.append(process)
        process.path = out  # type: ignore[attr-defined]
        self._await_word(out, process)
        return process

    def _await_word(self, out: Path, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + START
        while b"begun\n" not in out.read_bytes():
            assert process.poll() is None, out.read_bytes()
            assert time.monotonic() < deadline, "the payload's first word"
            time.sleep(0.05)

    def close(self) -> None:
        for process in self.jobs:
            process.kill()
            process.wait(timeout=30)
        self.site.close()


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    made = Node()
    made.hook("prolog", 1)
    made.hook("prolog", 1, "bjbob")
    yield made
    made.close()


def test_owner_and_root_reach_into_a_job_by_its_batch_id(node: Node, tmp_path: Path) -> None:
    job = node.job(11, "sleep 300", name="evil\n\x1b[2J$(id)")
    for user in ("bjalice", None):
        done = node.site.command("exec", "slurm:11", "--", "sh", "-c", "id -un; hostname", user=user)
        assert done.stdout.split()[0] == b"bjalice"
        shown = node.site.command("show", "slurm:11", user=user).stdout
        assert b"night" in shown and b"-name guest=" not in shown and b"request.json" in shown
        assert b"evil\\n\\x1b[2J$(id)" in shown and b"\x1b" not in shown
        assert b" running\n" in node.site.command("logs", "slurm:11", "--journal", user=user).stdout
        assert b"slurm:11" in node.site.command("ps", *(() if user else ("--all-users",)), user=user).stdout
    node.site.command("cp", "slurm:11:/etc/hostname", str(node.site.home("bjalice") / "hostname"), user="bjalice")
    assert (node.site.home("bjalice") / "hostname").read_bytes().startswith(b"belljar-")
    refused = node.site.command("exec", "slurm:11", "--", "true", user="bjbob", check=False)
    assert refused.returncode == 125
    node.site.command("stop", "slurm:11", "--grace", "1s")
    assert job.wait(timeout=30) == -15
    assert re.search(rb"cause +cancelled", node.site.command("show", "bjalice/slurm:11").stdout)


def test_the_epilog_ends_a_machine_that_outlived_its_job_and_no_other(node: Node) -> None:
    job, other = node.job(21, "sleep 300"), node.job(22, "sleep 300", user="bjbob")
    node.hook("epilog", 21)
    assert "machine" in node.said and "ended" in node.said
    assert job.wait(timeout=10) != 0
    assert other.poll() is None
    node.hook("epilog", 22, "bjbob")
    assert other.wait(timeout=10) != 0
    assert node.site.leftovers() == []


@pytest.mark.parametrize("act", ["prolog", "epilog"])
def test_a_hook_is_quick_when_nothing_is_left(node: Node, act: str) -> None:
    """In processor time, and by the clock too: one that waited for something would cost no processor time."""
    took = []
    for _ in range(3):
        begin = time.monotonic()
        used = node.hook(act, 21)
        took.append((time.monotonic() - begin, used))
    assert min(took)[0] < stretched(HOOK_LIMIT) and min(used for _, used in took) < HOOK_LIMIT, took


@pytest.mark.parametrize("how", ["kill", "stop"])
def test_a_wrapper_that_was_killed_or_stopped_leaves_nothing_after_the_epilog(node: Node, how: str) -> None:
    import signal

    job = node.job(31, "sleep 300")
    os.kill(job.pid, signal.SIGKILL if how == "kill" else signal.SIGSTOP)
    if how == "kill":
        job.wait(timeout=10)
    node.hook("epilog", 31)
    job.wait(timeout=10)
    assert node.site.leftovers() == []
    assert "payload" in node.site.command("show", "bjalice/slurm:31").stdout.decode()


def test_a_system_that_cannot_be_asked_costs_no_machine_its_life(node: Node) -> None:
    node.site.configure('default_image = "debian12"\ngone_after = 0\nask_timeout = 5')
    job = node.job(41, "sleep 300")
    for _ in range(2):
        done = node.site.command("reap", "--batch", env={"SLURM_CONF": "/nonexistent/slurm.conf"}, check=False)
        assert done.returncode == 1, done.stdout
        assert b"slurm cannot be asked" in done.stderr
    assert job.poll() is None
    node.hook("epilog", 41)
    job.wait(timeout=10)


def test_node_faults_are_counted_from_what_real_wrappers_leave(node: Node) -> None:
    """A QEMU that cannot be found is this node's fault. Nothing is closed here: there is no Slurm to tell."""
    node.site.configure('default_image = "debian12"\nask_timeout = 5', qemu='binary = "/nonexistent/qemu"')
    try:
        for number in (51, 52):
            with pytest.raises(AssertionError):
                node.job(number, "true")
            node.hook("epilog", number)
        done = node.site.command("batch", "node", "slurm", "status", "--node", "n1", check=False)
        assert b"faults in a row: 2" in done.stdout, done
    finally:
        node.site.configure('default_image = "debian12"')


def test_the_self_check_runs_as_an_ordinary_user_in_a_folder_of_the_node(node: Node) -> None:
    done = node.site.command("batch", "node", "slurm", "test", "--node", "n2")
    assert b"passed: a machine ran" in done.stdout
    assert node.site.leftovers() == []


def test_the_self_check_makes_the_template_that_users_first_jobs_are_cloned_from(node: Node) -> None:
    """With the site's shares in it: a user's first job boots none of its own."""
    site, uid = node.site, pwd.getpwnam("bjbob").pw_uid
    store, theirs, before = site.top / "store", site.node / str(uid) / "store/templates", site.config.read_text()
    store.mkdir(mode=0o755)
    (store / "images").symlink_to(STORE / "images")
    shutil.rmtree(theirs, ignore_errors=True)
    site.config.write_text(before.replace(str(STORE), str(store)))
    root = {"BELLJAR_PATHS_SITE_STORE": "", "BELLJAR_PATHS_STORE": str(store)}
    try:
        for name in ("n3", "n4"):  # the second time it is there
            site.command("batch", "node", "slurm", "test", "--node", name, env=root)
            (made,) = memories(store / "templates")
        assert memories(theirs) == []
        assert node.job(61, "exit 3", user="bjbob").wait(timeout=60) == 3
        assert memories(theirs) in ([], [made]), "none, or a copy of root's"
    finally:
        site.config.write_text(before)
        shutil.rmtree(store)
        shutil.rmtree(theirs, ignore_errors=True)


def memories(templates: Path) -> list[str]:
    """The digests of what the guests of these templates had in their memory: equal for one boot alone."""
    return [hashlib.sha256(path.read_bytes()).hexdigest() for path in templates.glob("*/ram")]


def test_users_of_a_node_have_what_belljar_needs(node: Node) -> None:
    before, _, _ = node.site.belljar.read_text().partition("from belljar")
    words = f"{before}import cryptography, h11, pycdlib, rich"
    assert node.site.run("/usr/bin/python3", "-ISc", words, user="bjalice").returncode == 0
