"""The words of the bait: worker nodes on demand. A host attracts jobs of a batch system for which it has no node yet, has a machine
made for each, lets that join the batch system, and moves the job there. The batch system owns the job at every moment.

    decisions/   pure
        decide.py   is this host open, and whose turn is it; which tasks of an array move together
        step.py     where a job stands, what a look sees, and what a step says;  leaving.py: the way out of machines and nodes
        advance.py  the handler of each state: from what was written down and what is seen now to the next step. After a crash, too
        parts.py    what differs for a part of another bait's job, over several hosts;  note.py: what their baits tell each other
        cache.py    for machines that wait for another job: which one they may serve, and which ones make room
    machines/    keeper.py: by belljar's own door;  scrub.py: how one is cleaned between two jobs, and proved to be clean
    networks/    classes.py: rules that keep network classes apart;  uplink.py: how much of a way out is free
    cloud.py     Slurm's own way instead: nodes that slurmctld has made, and on which host
    journal.py   what was written down; what an operator says to it, and what it shows
    daemon.py    looks, decides, writes;  acts.py: acts;  arrivals.py: a prolog asks it to take a job back
    check.py     what a host still needs

Frozen values, no input or output. Sizes are in bytes, times in seconds, moments in seconds since the epoch.
"""

from __future__ import annotations

from pathlib import Path

from belljar.host.values import Form
from belljar.model import GIB, MIB, setting
from belljar.records import dataclass

Pairs = tuple[tuple[str, str], ...]
SYSTEMS = ("slurm", "gridengine")  # that machines join by themselves
NEVER, SAME_USER, SAME_GROUP = "never", "same-user", "same-group"
_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}"
WORD = Form(_NAME, "cannot be a name", "letters, digits, `.`, `_` and `-`")
NODE = Form(f"{_NAME}(@{_NAME})?", WORD.otherwise, WORD.as_in)  # a bait may be a queue on a host
ON_HOSTS = Form(
    rf"\S+\s*->(\s*{_NAME})(\s+{_NAME})*\s*", "is not NODES -> HOST HOST", 'as in "cloud[1-4] -> wn01 wn02"'
)
BRIDGE = Form(r"[A-Za-z0-9._-]{1,15}", "is not the name of a bridge", 'as in networks = { open = "br0" }')


@dataclass(frozen=True)
class Settings:
    """`[bait]` in bait.toml."""

    name: str = setting(
        "", "the bait's name in the batch system, NodeName or QUEUE@HOST; empty: this host's", form=NODE
    )
    also: tuple[str, ...] = setting((), "further baits of this host (`slurmd -N`), for jobs of several nodes")
    system: str = setting("slurm", "the batch system: slurm or gridengine", choices=SYSTEMS)
    queue: str = setting("belljar", "partition or queue that machines join; closed to users", form=WORD)
    feature: str = setting("belljar", "feature of all these nodes, of which the partition's NodeSet is made", form=WORD)
    images: tuple[str, ...] = setting((), "required: images that may become nodes; the first is the default")
    networks: Pairs = setting(
        (), 'table: network class -> bridge, `open = "br0"`; the first is the default', form=BRIDGE
    )
    closed: tuple[str, ...] = setting((), "classes whose nodes reach only `services` and each other")
    services: tuple[str, ...] = setting((), "what every node reaches: ADDRESS[/PREFIX][:PORT[/tcp|udp]]")
    shares: tuple[str, ...] = setting((), "host folders in every node, `SRC[:DST][:ro|rw]`")
    conf: Path = setting(Path("/etc/slurm/slurm.conf"), "the site's slurm.conf, or the cell's `common/bootstrap`")
    key: Path = setting(Path("/etc/munge/munge.key"), "the pool's secret, given to each machine when it starts")
    nodes: tuple[str, ...] = setting((), "Grid Engine: `ADDRESS NAME` of each node that a machine may become")
    hosts: tuple[str, ...] = setting((), "lines for a node's /etc/hosts, `ADDRESS NAME`")
    overhead: int = setting(192 * MIB, "memory of a machine beside its job's", unit="bytes", minimum=64 * MIB)
    max_cpus: int = setting(0, "processors of all machines together; 0: this host's", minimum=0)
    min_memory: int = setting(1 * GIB, "closed with less free memory", unit="bytes", minimum=0)
    min_disk: int = setting(2 * GIB, "closed with less free disk below `paths.scratch`", unit="bytes", minimum=0)
    min_bandwidth: int = setting(0, "closed with less free bandwidth a second; 0: any", unit="bytes", minimum=0)
    placement: tuple[str, ...] = setting(
        (), "cloud nodes on other hosts: `NODES -> HOST HOST`, in this order", form=ON_HOSTS
    )
    reach: tuple[str, ...] = setting(
        ("ssh", "-oBatchMode=yes", "-oConnectTimeout=10", "{host}", "belljar"), "the command for belljar on such a host"
    )
    faults: int = setting(3, "closed after so many failed starts in a row", minimum=1)
    retry: float = setting(300.0, "then it opens for one job after this time", unit="seconds", minimum=1)
    tries: int = setting(3, "a job goes back after so many failed machines", minimum=1)
    restarts: int = setting(10, "a job that was requeued so often is held", minimum=1)
    join: float = setting(300.0, "a machine has joined by then, or has failed", unit="seconds", minimum=1)
    settle: float = setting(0.0, "how long a node is known before its job is moved there", unit="seconds")
    gone_after: float = setting(60.0, "a job that has not been named for so long has ended", unit="seconds")
    delay: float = setting(30.0, "how long a job waits that goes back", unit="seconds", minimum=0)
    cache: str = setting(
        NEVER, "whose jobs may use a machine again: `never`, `same-user`, `same-group`",
        choices=(NEVER, SAME_USER, SAME_GROUP),
    )  # fmt: skip
    cache_age: float = setting(3600.0, "an older machine serves no further job", unit="seconds", minimum=1)
    cache_uses: int = setting(10, "how many jobs one machine serves", minimum=1)
    cycle: float = setting(2.0, "between two looks at the batch system", unit="seconds", minimum=0.1)

    @property
    def names(self) -> tuple[str, ...]:
        """For all baits of this host."""
        return (self.name, *self.also)


@dataclass(frozen=True)
class Order:
    """What an operator said: the bait is administratively open, or closed for a reason."""

    is_open: bool = True
    why: str = ""
