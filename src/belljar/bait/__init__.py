"""The words of the bait: worker nodes on demand. A host attracts jobs of a batch system for which it has no node yet, has a machine
made for each, lets that join the batch system, and moves the job there. The batch system owns the job at every moment.

    decisions/   pure
        states.py   where a job stands, and what may follow
        decide.py   is this host open, and whose turn is it
        table.py    the handler of each state: from what was written down and what is seen now to the next step. After a crash, too
        step.py     what a look sees, and what a step says;  leaving.py: the way out of machines and nodes
        advance.py  handlers for a job of this bait's own
        parts.py    for a part of another bait's job, over several hosts;  note.py: what their baits tell each other
        cache.py    for machines that wait for another job: which one they may serve, and which ones make room
        arrays.py   tasks that have to be moved together
    machines/    keeper.py: by belljar's own door;  scrub.py: how one is cleaned between two jobs, and proved to be clean
    networks/    classes.py: rules that keep network classes apart;  uplink.py: how much of a way out is free
    cloud/       Slurm's own way instead: nodes.py that slurmctld has made;  placement.py: on which host
    journal.py   what was written down
    daemon.py    looks, decides, writes;  acts.py: acts;  arrivals.py: a prolog asks it to take a job back
    status.py    what an operator says to it, and what it shows;  check.py: what a host still needs

Frozen values, no input or output. Sizes are in bytes, times in seconds, moments in seconds since the epoch.
"""

from __future__ import annotations

from pathlib import Path

from belljar.model import GIB, MIB, setting
from belljar.records import dataclass

Pairs = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Settings:
    """`[bait]` in bait.toml."""

    name: str = setting("", "the bait's name in the batch system: NodeName, or QUEUE@HOST; empty: this host's own")
    also: tuple[str, ...] = setting(
        (), "further baits of this host (`slurmd -N`): a job of N nodes comes only where there are N"
    )
    system: str = setting("slurm", "the batch system")
    queue: str = setting("belljar", "partition or queue of the nodes that machines become; users may not submit to it")
    feature: str = setting(
        "belljar", "feature that these nodes have in common, of which the partition's NodeSet is made"
    )
    images: tuple[str, ...] = setting(
        (), "required: names of images that may become nodes; the first is that of jobs that name none"
    )
    networks: Pairs = setting(
        (), 'table: network class -> bridge, `open = "br0"`; the first is that of jobs that name none'
    )
    closed: tuple[str, ...] = setting(
        (), "network classes whose nodes reach `services` and each other, and nothing else; see `belljar bait rules`"
    )
    services: tuple[str, ...] = setting(
        (),
        "what every node reaches beside its class, of this host too: batch system, file and name servers, ADDRESS[/PREFIX][:PORT[/tcp|udp]]",
    )
    shares: tuple[str, ...] = setting((), "what every node sees: host folders, `SRC[:DST][:ro|rw]`")
    conf: Path = setting(
        Path("/etc/slurm/slurm.conf"),
        "the site's slurm.conf; nodes get it without other nodes and paths of hosts. Grid Engine: the cell's `common/bootstrap`",
    )
    key: Path = setting(Path("/etc/munge/munge.key"), "the pool's secret, given to each machine when it starts")
    nodes: tuple[str, ...] = setting(
        (),
        "Grid Engine: `ADDRESS NAME` of each node that a machine may become, as the server finds them by DNS or /etc/hosts",
    )
    hosts: tuple[str, ...] = setting(
        (), "lines for a node's /etc/hosts, `ADDRESS NAME`: of the server, where DNS does not know it"
    )
    overhead: int = setting(
        192 * MIB,
        "memory of a machine beside what its job may use: its system and slurmd",
        unit="bytes",
        minimum=64 * MIB,
    )
    max_cpus: int = setting(0, "processors of all its machines together; 0: as many as this host has", minimum=0)
    min_memory: int = setting(1 * GIB, "with less free memory the bait is closed", unit="bytes", minimum=0)
    min_disk: int = setting(
        2 * GIB, "with less free disk below `paths.scratch` the bait is closed", unit="bytes", minimum=0
    )
    min_bandwidth: int = setting(
        0,
        "with less free bandwidth a second on the bridges' uplinks the bait is closed; 0: it is not looked at",
        unit="bytes",
        minimum=0,
    )
    placement: tuple[str, ...] = setting(
        (),
        "cloud nodes on other hosts: `NODES -> HOST HOST` each, the first host that answers and has room makes a node; empty: this one makes all",
    )
    reach: tuple[str, ...] = setting(
        ("ssh", "-oBatchMode=yes", "-oConnectTimeout=10", "{host}", "belljar"),
        "how belljar is run on such a host: a command and its words, without a shell here",
    )
    faults: int = setting(3, "after so many failed starts in a row the bait is closed", minimum=1)
    retry: float = setting(300.0, "then it opens for one job after this time", unit="seconds", minimum=1)
    tries: int = setting(3, "a job for which so many machines failed here goes back to the batch system", minimum=1)
    restarts: int = setting(10, "a job that was requeued so often is held, with the reason", minimum=1)
    join: float = setting(
        300.0, "a machine has joined within this time, or counts as failed", unit="seconds", minimum=1
    )
    settle: float = setting(
        0.0, "so long a node is known before its job is moved there; 6s: Slurm has saved it", unit="seconds"
    )
    gone_after: float = setting(60.0, "a job that the batch system has not named for so long has ended", unit="seconds")
    delay: float = setting(30.0, "a job that goes back to the batch system waits so long", unit="seconds", minimum=0)
    cache: str = setting(
        "never",
        "whom a machine may serve after its job: `never`, `same-user` or `same-group`; cleaned and proved before",
    )
    cache_age: float = setting(3600.0, "so long after its start it serves no further job", unit="seconds", minimum=1)
    cache_uses: int = setting(10, "how many jobs one machine serves", minimum=1)
    cycle: float = setting(2.0, "between two looks at the batch system", unit="seconds", minimum=0.1)

    @property
    def names(self) -> tuple[str, ...]:
        """Of all baits of this host."""
        return (self.name, *self.also)


@dataclass(frozen=True)
class Order:
    """What an operator said: the bait is administratively open, or closed for a reason."""

    is_open: bool = True
    why: str = ""
