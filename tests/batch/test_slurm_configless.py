"""A node without a slurm.conf, under a real slurmctld: its slurmd fetches the settings, belljar puts its two hooks there.

The node has mounts of its own: empty folders where slurmctld's host has Slurm's settings and belljar's launchers, and a /run/slurm.
https://slurm.schedmd.com/configless_slurm.html
"""

from __future__ import annotations

import json
import os
import pwd
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.batch.lab.slurm import LONGEST, PATH
from tests.batch.slurm_fixtures import VM, Cluster

NODE = """set -eu
mount --make-rprivate /
mkdir -p /run/slurm /run/munge
mount -t tmpfs none {etc}
mount -t tmpfs none /run/slurm
mount -t tmpfs -o mode=0755 none {prefix}
mount -t tmpfs -o mode=0755 none /run/munge
ln -s {munge}/munge.socket /run/munge/munge.socket.2
slurmd -N {name} --conf-server {server}
echo up
exec sleep infinity
"""


class Configless(Cluster):
    """Everybody who asks Slurm does so from the node, where no SLURM_CONF is set."""

    def up(self) -> Configless:
        lab = self.lab
        self.prefix = self.site.top / "opt"
        self.prefix.mkdir(mode=0o755)
        lab.start_slurmd = self.start_slurmd  # type: ignore[method-assign]
        lab.up()
        words = ("batch", "install", "slurm", "--folder", str(lab.etc), "--prefix", str(self.prefix))
        self.belljar(*words)
        before = self.on_node("sh", "-c", f"ls -A {lab.etc}")
        assert before == "", before
        self.on_node(str(self.site.belljar), "--config", str(self.site.config), *words)
        return self

    def start_slurmd(self, node: str) -> None:
        (self.lab.folder / "spool" / node).mkdir(mode=0o755, exist_ok=True)
        text = NODE.format(
            etc=self.lab.etc,
            prefix=self.prefix,
            munge=self.lab.folder / "munge/run",
            name=node,
            server=f"{os.uname().nodename}:{self.lab.ports[0]}",
        )
        self.holder = subprocess.Popen(
            ("unshare", "--mount", "sh", "-c", text),
            env={"PATH": PATH},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
        )
        assert self.holder.stdout is not None and self.holder.stdout.readline() == b"up\n"
        self.lab.until(lambda: self.lab.pid(f"slurmd-{node}"), "slurmd has its settings")

    def close(self) -> None:
        super().close()
        if (holder := getattr(self, "holder", None)) is not None:
            holder.kill()
            holder.communicate()

    def on_node(self, *words: str, user: str | None = None, check: bool = True) -> str:
        who: tuple[str, ...] = ()
        if user is not None:
            of = pwd.getpwnam(user)
            who = ("setpriv", f"--reuid={of.pw_uid}", f"--regid={of.pw_gid}", "--clear-groups")
        env = {"PATH": PATH, "LANG": "C.UTF-8"}
        entry = ("nsenter", "-t", str(self.holder.pid), "-m", "--")
        done = subprocess.run(
            (*entry, *who, *words),
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=LONGEST,
            cwd=self.site.top,
        )
        assert not check or done.returncode == 0, done.stderr.decode()
        return done.stdout.decode()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Configless]:
    made = Configless("configless", prefix="c", SlurmctldParameters="enable_configless")
    absent = [folder for folder in (Path("/run/slurm"), Path("/run/munge")) if not folder.exists()]
    try:
        yield made.up()
    finally:
        made.close()
        for folder in absent:
            folder.rmdir()


def submit(cluster: Configless, text: str, *options: str) -> str:
    home = cluster.site.home("bjalice")
    path, files = cluster.script(text), (f"--output={home}/%j.out", f"--error={home}/%j.err", f"--chdir={home}")
    return cluster.on_node("sbatch", "--parsable", *files, *options, str(path), user="bjalice").strip()


def test_a_node_without_settings_gets_the_hooks_and_no_slurm_conf(cluster: Configless) -> None:
    assert set(cluster.on_node("ls", str(cluster.lab.etc)).split()) == {"belljar-epilog", "belljar-prolog"}


def test_a_job_has_its_machine_there_and_another_does_not(cluster: Configless) -> None:
    jobs = [submit(cluster, "uname -n; cat /etc/slurm-lab 2>&1; exit 7", *vm) for vm in ((VM,), ())]
    inside, outside = (cluster.end(job) for job in jobs)
    assert (inside.exit, outside.exit) == ("7:0", "7:0")
    assert outside.out.split()[0].decode() == os.uname().nodename
    assert inside.out.split()[0] != outside.out.split()[0], inside
    cluster.clean()


def test_check_finds_all_in_place_on_the_node(cluster: Configless) -> None:
    said = cluster.on_node(
        str(cluster.site.belljar), "--config", str(cluster.site.config), "batch", "check", "slurm",
        "--folder", str(cluster.lab.etc), "--prefix", str(cluster.prefix), "--format", "json", check=False,
    )  # fmt: skip
    assert [one for one in json.loads(said)["findings"] if one["grade"] == "fail"] == []


def test_uninstall_on_the_node_leaves_nothing_there(cluster: Configless) -> None:
    cluster.on_node(str(cluster.site.belljar), "--config", str(cluster.site.config), "batch", "uninstall", "slurm", "--folder", str(cluster.lab.etc), "--prefix", str(cluster.prefix))  # fmt: skip
    assert cluster.on_node("ls", "-A", str(cluster.lab.etc)) == ""
