"""Contexts: the machines of a lease that make a cluster, and learn from each other what they need for it.

    document.py   a cluster document and its folders of scripts become a `Cluster`
    plan.py       from what is written down: who is there, what each waits for, what each is told next; and what it answers: untrusted. Pure
    guest.sh      what a machine does with it, by its own /bin/sh
    broker.py     in the service: owners' requests, and the conversations with machines

The service asks and machines answer, by the way of an owner's ssh: a machine needs no network for it, and is known by where it is."""

from __future__ import annotations

from belljar.host.values import Form
from belljar.lease import Pairs
from belljar.model import setting
from belljar.records import dataclass

LARGEST_DATA = 16 << 10  # bytes of one value that a machine gives to others
LARGEST_CLUSTER = 96 << 10  # bytes of a document with its scripts, as JSON
WORD = Form(r"[a-z]([a-z-]{0,30}[a-z])?", "cannot be a name", "small letters, - inside; machines get a number behind")
Data = tuple[tuple[str, bytes], ...]


@dataclass(frozen=True)
class Role:
    """`[role.NAME]` of a cluster document."""

    name: str
    image: str = setting("", "required: name of an image that may be leased")
    count: int = setting(1, "so many machines", minimum=1)
    scripts: str = setting("", "folder of scripts, beside this file")
    requires: tuple[str, ...] = setting((), "roles of whose machines its scripts are told")
    needs: tuple[str, ...] = setting((), "names of data that its scripts are given")
    provides: tuple[str, ...] = setting((), "names of data that its scripts leave for others")
    after: tuple[str, ...] = setting((), "roles whose scripts have ended well before its own begin")
    type: str = setting("", "instance type of its machines; empty: the cluster's")
    files: Data = ()  # of the folder: path in it, content


@dataclass(frozen=True)
class Cluster:
    """A cluster document: `[cluster]`, and its roles."""

    name: str = setting("", "required: its name, which is its machines' domain, too", form=WORD)
    time: float = setting(0.0, "how long it is wanted, as in 2h; 0: the site's usual time", unit="seconds", minimum=0)
    type: str = setting("", "instance type of machines; empty: the site's first")
    queue: str = setting("", "partition or queue; empty: the site's own default")
    network: str = setting("", "network class; empty: the site's first")
    limit: float = setting(900.0, "it is ready so long after its first machine is up", unit="seconds", minimum=1)
    data: Pairs = setting((), "table: name -> text that roles may need")
    roles: tuple[Role, ...] = ()

    @property
    def seats(self) -> list[tuple[Role, str]]:
        """Role and name of each machine, in the order of the lease's."""
        return [(role, role.name + f"{n + 1}" * (role.count > 1)) for role in self.roles for n in range(role.count)]


@dataclass(frozen=True)
class Context:
    """What is written down of a cluster."""

    id: str  # of its lease
    owner: str
    cluster: Cluster
    generation: int = 0  # counts the changes of `roster`; 0: not all were there yet
    roster: tuple[str, ...] = ()  # ids of the machines that know each other
    since: float = 0.0  # of this generation


@dataclass(frozen=True)
class Member:
    """What a machine has answered last."""

    id: str  # of the instance
    context: str
    generation: int
    plan: str  # digest of what it was told
    code: int  # 0: all of its scripts ended well
    script: str = ""  # that did not
    log: bytes = b""  # the last that its scripts wrote
    data: Data = ()
