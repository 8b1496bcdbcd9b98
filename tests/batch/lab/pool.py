"""A Slurm in a network namespace, to which nodes can be added: two baits, and a hidden partition of all nodes that machines become."""

from __future__ import annotations

import os
import pwd
import subprocess
from pathlib import Path

from tests.batch.lab.site import Site
from tests.batch.lab.slurm import Slurm
from tests.batch.lab.slurmdbd import Accounting
from tests.live.net_lab import Lab

from belljar.pool import Command, JobView, NodeView, load
from belljar.pool.slurm.nodes import guest_conf

QUEUE = "belljar"
PARTITIONS = (
    "batch Nodes=bait1,bait2 Default=YES MaxTime=INFINITE State=UP",
    f"{QUEUE} Nodes={QUEUE} Hidden=YES MaxTime=INFINITE State=UP OverSubscribe=EXCLUSIVE",
)
# In place of slurmstepd, on a bait: no job starts there.
STEP = r"""#!/bin/sh
[ $# = 0 ] || exec /usr/sbin/slurmstepd "$@"
printf '\0\0\0\0'
exec cat >/dev/null
"""
BIND = 'mount --bind "$0" /etc/hosts; exec "$@"'
MARK = "@0123456789abcdef@"


def entering(namespace: str, hosts: Path | None = None) -> tuple[str, ...]:
    """Not `ip netns exec`: that takes the control groups away, without which slurmd does not start. *hosts*: in place of /etc/hosts."""
    words = ("nsenter", f"--net=/run/netns/{namespace}")
    return (*words, "unshare", "--mount", "sh", "-ec", BIND, str(hosts)) if hosts else words


class PooledSlurm:
    """`lab` is the Slurm; `run` carries out a command of the pool; `join` adds a node that lives in the other namespace."""

    def __init__(
        self, net: Lab, site: Site, address: str = "10.77.0.2", lines: str = "", *, like_a_site: bool = False, **settings: str
    ) -> None:  # fmt: skip
        """*lines*: further ones of slurm.conf. *like_a_site*: slurmctld is not root, and slurm.conf has names that only the
        hosts file of this host knows; slurmdbd keeps the accounts."""
        hosts = net.hosts(f"{address} {os.uname().nodename.partition('.')[0]}") if like_a_site else None
        settings = {**({"SlurmUser": "slurm"} if like_a_site else {}), **settings}
        self.net, self.site, self.lines, self.pool = net, site, lines, load("slurm")
        self.baits: tuple[str, ...] = ()  # nodes on which no job starts
        self.lab = Slurm(
            site.top / "slurm", nodes=2, prefix="bait", partitions=PARTITIONS, inside=entering(net.host, hosts), address=address,
            names=like_a_site,
            **{"CommunicationParameters": "", "MaxNodeCount": "32", "MinJobAge": "30", **settings},
        )  # fmt: skip

        if like_a_site:
            self.lab.accounting = Accounting(self.lab)
            self.lab.settings |= self.lab.accounting.settings

    def up(self) -> None:
        self.lab.etc.mkdir(parents=True, exist_ok=True)
        self.lab.write_conf()
        text = self.lab.conf.read_text().replace(
            "PartitionName=", f"NodeSet={QUEUE} Feature={QUEUE}\nPartitionName=", 1
        )
        self.lab.conf.write_text(text + self.lines)
        step = self.lab.etc / "bait-step"
        step.write_text(STEP)
        step.chmod(0o755)
        self.lab.options = {node: ("-d", str(step)) for node in self.baits}
        self.lab.up()

    def down(self) -> None:
        for file in sorted((self.lab.folder / "run").glob("slurmd-vm*.pid")):
            self.lab.stop(file.stem)
        self.lab.down()

    def run(self, *commands: Command) -> bytes:
        return b"".join(self.lab.run(*one).stdout for one in commands)

    def jobs(self) -> dict[str, JobView]:
        return self.pool.jobs(self.run(self.pool.query(MARK)), MARK)

    def nodes(self) -> dict[str, NodeView]:
        return self.pool.nodes(self.run(self.pool.query_nodes()))

    def submit(self, text: str, *options: str, user: str = "bjalice", args: tuple[str, ...] = ()) -> str:
        home, entry = self.site.home(user), pwd.getpwnam(user)
        script = home / "job.sh"
        script.write_text(f"#!/bin/sh\n{text}\n")
        script.chmod(0o755)
        argv = ("sbatch", "--parsable", "--output=%j.out", "--error=%j.err", *options, str(script))
        done = subprocess.run(
            [*self.lab.inside, "setpriv", f"--reuid={entry.pw_uid}", f"--regid={entry.pw_gid}", "--clear-groups", *argv, *args],
            env={**self.lab.env, "HOME": str(home)}, cwd=home, capture_output=True, timeout=60, check=True,
        )  # fmt: skip
        return done.stdout.decode().strip().partition(";")[0]

    def join(self, name: str, memory: int = 700) -> None:
        """A node in the other namespace, as a machine would be: by a slurm.conf that knows nothing of nodes."""
        folder = self.lab.folder
        (folder / "spool" / name).mkdir()
        conf = folder / f"{name}.conf"
        places = f"SlurmdSpoolDir={folder}/spool/%n\nSlurmdPidFile={folder}/run/slurmd-%n.pid\nSlurmdLogFile={folder}/log/slurmd-%n.log\n"
        text = guest_conf(self.lab.conf.read_bytes()).decode().partition("SlurmdSpoolDir=")[0]
        conf.write_text(text.replace("AuthInfo=", f"AuthInfo=socket={folder}/munge/run/munge.socket,") + places)
        start = (
            f"hostname {name}; exec slurmd -f {conf} -Z -N {name} --conf 'Feature={QUEUE} RealMemory={memory} CPUs=1'"
        )
        subprocess.run(
            [*entering(self.net.world), "unshare", "--uts", "sh", "-c", start], env=self.lab.env, stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=60, check=True,
        )  # fmt: skip

    def leave(self, name: str) -> None:
        self.lab.stop(f"slurmd-{name}")


def read(path: Path) -> bytes:
    return path.read_bytes() if path.exists() else b""
