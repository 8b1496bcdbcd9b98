"""A fresh node with a batch system on it, in a room over this host's own files, and a page of docs/ followed there.

python -m tests.batch.lab.fresh slurm docs/batch/slurm.md     # in the room: what is written is gone with it
"""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from tests.batch.lab.gridengine import ENV as OF_THE_CELL
from tests.batch.lab.gridengine import GridEngine
from tests.batch.lab.page import follow
from tests.batch.lab.pbs_real import openpbs as real_openpbs
from tests.batch.lab.pbs_real import torque as real_torque
from tests.batch.lab.pbs_server import serving
from tests.batch.lab.site import Site
from tests.batch.lab.slurm import PATH, Slurm
from tests.live.net_lab import Lab, ip

CHECKOUT, USER = Path(__file__).resolve().parents[3], "alice"
LONGEST = 600.0  # seconds for one step
ADDRESS = "10.77.0.2"  # of the host in a network of its own
FETCHING = ("apt-get", "make install", "image build")  # packages, by the host's network
# The cards of a network namespace are seen in a /sys that was mounted there; slurmd wants the control groups that lie below the other.
OWN_SYS = 'mount --rbind /sys/fs/cgroup /mnt; mount -t sysfs sysfs /sys; mount --rbind /mnt /sys/fs/cgroup; exec "$@"'


@dataclass(frozen=True)
class Node:
    """How one gets there, and what a login shell has set."""

    entry: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)


@contextmanager
def slurm() -> Iterator[Node]:
    """slurmctld and one slurmd, with their settings in the usual place."""
    lab = Slurm(Path("/srv/slurm"), node="CPUs=2 RealMemory=4000", KillWait="30")
    Path("/etc/hosts").write_text(f"127.0.0.1 localhost {os.uname().nodename}\n")
    lab.etc.mkdir(parents=True)
    subprocess.run(["mount", "--bind", lab.etc, "/etc/slurm"], check=True)
    try:
        lab.up()
        yield Node()
    finally:
        lab.down()


@contextmanager
def bait(like_a_site: bool = True) -> Iterator[Node]:
    """slurmctld and one slurmd, in a network of their own, where a bridge can be made; settings and key in their usual places."""
    net = Lab()
    ip("-n", net.host, "route", "del", "default")  # no resolver answers there, and none is to be waited for
    inside = ("nsenter", f"--net=/run/netns/{net.host}")
    lab = Slurm(
        Path("/srv/slurm"), node="CPUs=2 RealMemory=4000", inside=inside, address=ADDRESS, names=like_a_site,
        SlurmUser="slurm" if like_a_site else "root", CommunicationParameters="",
    )  # fmt: skip
    Path("/etc/hosts").write_text(f"127.0.0.1 localhost\n{ADDRESS} {os.uname().nodename}\n")
    for folder, usual in ((lab.etc, "/etc/slurm"), (lab.folder / "munge/key", "/etc/munge")):
        folder.mkdir(parents=True)
        subprocess.run(["mount", "--bind", folder, usual], check=True)
    try:
        lab.up()
        yield Node((*inside, "unshare", "--mount", "sh", "-ec", OWN_SYS, "sh"))
    finally:
        lab.down()
        net.close()


@contextmanager
def gridengine() -> Iterator[Node]:
    """A cell of one host, with a network and a name of its own."""
    lab = GridEngine(Site("fresh"))
    try:
        yield Node(("nsenter", "-t", str(lab.pid), "-n", "-u", "-m", "--"), OF_THE_CELL)
    finally:
        lab.close()


@contextmanager
def openpbs() -> Iterator[Node]:
    """The real one whose prefix BELLJAR_OPENPBS names, or the stand-in."""
    if prefix := os.environ.get("BELLJAR_OPENPBS"):
        with real_openpbs(Path(prefix)) as entry:
            yield Node(entry, {"PATH": f"{prefix}/bin:{PATH}"})
    else:
        with serving("openpbs", Path("/srv/pbs"), Path("/var/spool/pbs")) as server:
            yield Node(env={"PATH": f"{server.bin}:{PATH}"})


@contextmanager
def torque() -> Iterator[Node]:
    """The real one whose prefix BELLJAR_TORQUE names, or the stand-in."""
    if prefix := os.environ.get("BELLJAR_TORQUE"):
        with real_torque(Path(prefix)) as entry:
            yield Node(entry, {"PATH": f"{prefix}/bin:{prefix}/sbin:{PATH}"})
    else:
        with serving("torque", Path("/srv/torque"), Path("/var/spool/torque")) as server:
            yield Node(env={"PATH": f"{server.bin}:{PATH}"})


SYSTEMS = {
    "bait": bait,
    "gridengine": gridengine,
    "lease": partial(bait, False),
    "openpbs": openpbs,
    "slurm": slurm,
    "torque": torque,
}


def run(commands: str, as_user: bool, node: Node) -> str:
    """Both streams of some lines of shell. Raises AssertionError where one of them fails."""
    env = {"PATH": PATH, "LANG": "C.UTF-8", "HOME": "/root", **node.env}
    entry = pwd.getpwnam(USER)
    words = ["env", "-C", str(CHECKOUT), "sh", "-euc", commands]
    if as_user:
        env.update(HOME=entry.pw_dir, USER=USER, LOGNAME=USER)
        words = [
            "setpriv",
            f"--reuid={USER}",
            f"--regid={USER}",
            "--init-groups",
            "env",
            "-C",
            entry.pw_dir,
            *words[3:],
        ]
    if not any(word in commands for word in FETCHING):
        words = [*node.entry, *words]
    done = subprocess.run(
        words, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        timeout=LONGEST, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"$ {commands}{done.stdout}exit {done.returncode}"
    return str(done.stdout)


def main(system: str, page: str) -> None:
    os.umask(0o022)
    # The one that `make install` makes: where a password file is mounted nobody can be added to it.
    subprocess.run(["useradd", "--system", "--user-group", "belljar"], check=False, stderr=subprocess.DEVNULL)
    subprocess.run(["useradd", "--create-home", "--shell", "/bin/bash", USER], check=True)
    with SYSTEMS[system]() as node:
        print("\n".join(follow(Path(page), lambda commands, as_user: run(commands, as_user, node))))


if __name__ == "__main__":
    main(*sys.argv[1:])
