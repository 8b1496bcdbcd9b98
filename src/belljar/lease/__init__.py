"""The words of leases: N machines of an image for so long, on nodes that pilot jobs of the site's batch system hold.

    states.py    where a lease, a slot and an instance stand, what may follow, and why each ended
    margins.py   from the time that was promised: the pilot's deadline and the job's limit
    prices.py    what machines on spare nodes cost, and who gets them
    advance.py   from a lease as written down, and what is seen now: the next state, and what is to be done
    reports.py   what a pilot says, applied to what is written down
    policy.py    who may have how much, with numbers in the denial
    store/       what is written down: SQLite, or PostgreSQL
    desk.py      what owners ask: run, describe, terminate, ... each in one transaction
    usage.py     what owners used, from the events

Frozen values, no input or output. Sizes are in bytes, durations in seconds, moments in seconds since the epoch.
"""

from __future__ import annotations

import secrets
from enum import Enum
from math import ceil
from pathlib import Path

from belljar.lease.states import LEASE_ENDS, Cause, InstanceState, LeaseState, SlotState
from belljar.model import GIB, MIB, setting
from belljar.records import dataclass

__all__ = [
    "AccessKey", "Cause", "Console", "Do", "Event", "Facts", "Instance", "InstanceState", "KeyPair", "Lease", "LeaseState", "MachineOrder", "Order", "Pairs", "Report",
    "Settings", "Size", "Slot", "SlotState", "Tag", "Tell", "Token", "Wanted", "instance_id", "key_id", "lease_id",
]  # fmt: skip

Pairs = tuple[tuple[str, str], ...]
LARGEST_USER_DATA = 16 << 10  # bytes, as EC2 has it
LARGEST_CONSOLE = 64 << 10
LONGEST_TOKEN = 64


@dataclass(frozen=True)
class Settings:
    """`[lease]` in lease.toml."""

    address: str = setting("", "required: name or address of this service, as nodes reach it")
    port: int = setting(8470, "where pilots connect", minimum=1)
    listen: str = setting("", "address that pilots' port is opened at; empty: all of this host")
    ec2_listen: str = setting(
        "", "ADDRESS:PORT of the EC2 query API: by TLS, or on loopback without; empty: there is none"
    )
    ec2_certificate: str = setting(
        "", "PEM file with its chain of certificates and key; empty: the service's own where it needs one"
    )
    database: str = setting(
        "", "postgresql://... of the service's records; empty: a file of SQLite in the service's folder"
    )
    jobs: Path = setting(
        Path("/var/lib/belljar/lease/jobs"), "folder of job files: nodes see it, and none but the service's account may"
    )
    system: str = setting("slurm", "the batch system")
    queue: str = setting("", "partition or queue of pilot jobs; empty: the batch system's own default")
    spot_queue: str = setting("", "queue whose jobs are preempted, for spot machines; empty: there are none")
    account: str = setting("", "account or project of pilot jobs; empty: the batch system's own default")
    environment: str = setting(
        "", "Grid Engine: parallel environment of leases with more than one processor, with as many on each node"
    )
    notice: float = setting(
        0.0, "the batch system's time between TERM and KILL; 0: what it has by default", unit="seconds", minimum=0
    )
    door: Path = setting(
        Path("/run/belljar-lease/door"), "socket by which owners on this host ask (`belljar lease run`)"
    )
    pilot: str = setting("belljar", "the belljar command, as nodes find it")
    images: tuple[str, ...] = setting((), "required: names of images that may be leased; `*` and `?` are wildcards")
    types: Pairs = setting(
        (("small", "1/2G/10G"),), "table: instance type -> CPUS/MEMORY/DISK; the first is the default"
    )
    networks: Pairs = setting(
        (("user", "user"),), "table: network class -> what machines get for `--network`; the first is the default"
    )
    zone: str = setting("lease", "availability zone that EC2 clients are told; its region is the same name")
    default_time: float = setting(86400.0, "a lease that names no time gets this", unit="seconds", minimum=60)
    longest_time: float = setting(1209600.0, "a lease gets no more than this", unit="seconds", minimum=60)
    staging: float = setting(300.0, "for an image's way to a node, and its boot", unit="seconds", minimum=1)
    barrier: float = setting(120.0, "from the first node of a group to its last", unit="seconds", minimum=1)
    grace: float = setting(30.0, "for a guest to shut down", unit="seconds", minimum=0)
    margin: float = setting(30.0, "between a pilot's own end and the batch system's limit", unit="seconds", minimum=0)
    queue_time: float = setting(
        604800.0, "a lease that did not start within this time has failed", unit="seconds", minimum=1
    )
    silence: float = setting(
        90.0, "a pilot not heard of for so long is lost, unless its job runs", unit="seconds", minimum=5
    )
    lost: float = setting(900.0, "a pilot not heard of for so long is lost", unit="seconds", minimum=5)
    heartbeat: float = setting(20.0, "a pilot is heard of at least once in this time", unit="seconds", minimum=1)
    unseen: float = setting(
        60.0, "a job that the batch system does not know for so long is gone", unit="seconds", minimum=1
    )
    linger: float = setting(
        0.0, "a node whose machines ended stays so long for its owner's next", unit="seconds", minimum=0
    )
    skew: float = setting(300.0, "a node whose clock is further off is refused", unit="seconds", minimum=1)
    tries: int = setting(3, "so many jobs are tried for one lease when nodes fail it", minimum=1)
    cycle: float = setting(5.0, "between two looks at the batch system", unit="seconds", minimum=0.1)
    shown: float = setting(3600.0, "ended instances are listed for so long", unit="seconds", minimum=60)
    token_time: float = setting(86400.0, "a client token counts so long after its lease ended", unit="seconds")
    overhead: int = setting(256 * MIB, "memory of a node's share beside its machines' own", unit="bytes", minimum=0)
    min_price: float = setting(0.1, "least price of a spot machine, of that of an ordinary one", minimum=0)


@dataclass(frozen=True)
class Size:
    """Of one machine."""

    cpus: int = 1
    memory: int = 2 * GIB
    disk: int = 10 * GIB


@dataclass(frozen=True)
class Wanted:
    """What is asked for, as policy allowed it: every default is filled in."""

    image: str
    count: int = 1  # machines, each on a node of its own unless `per_node` says more
    least: int = 0  # with so many it starts, too, when the others do not come in time; 0: with all or none
    size: Size = Size()
    type: str = ""  # name of the size, where it has one
    seconds: float = 86400.0
    queue: str = ""
    account: str = ""
    network: str = ""  # class
    key: str = ""  # name of the owner's key pair
    user_data: bytes = b""
    tags: Pairs = ()  # of each instance
    token: str = ""
    bid: float | None = None  # spot: at most this price
    per_node: int = 1  # so many machines share a node
    deadline: float = 0.0  # moment by which it must have started; 0: as the service's settings say

    @property
    def nodes(self) -> int:
        """Of its job."""
        return -(-self.count // self.per_node)


@dataclass(frozen=True)
class Lease:
    """What is written down of one. EC2's reservation id is its id."""

    id: str
    owner: str
    wanted: Wanted
    state: LeaseState = LeaseState.REQUESTED
    group: str = ""
    created: float = 0.0
    since: float = 0.0  # when it came into this state
    cause: Cause | None = None  # from draining on
    why: str = ""  # in words; of a lease that waits, the batch system's
    attempt: int = 1
    job: str = ""  # the batch system's id of its job; its name is `job_name`
    carrier: str = ""  # the lease whose nodes it is on, where it has no job of its own
    begun: float = 0.0  # when it became active; 0: it has not
    ends: float = 0.0  # when its time is over, once it is active
    deadline: float = 0.0  # by which it must have started
    missing: float = 0.0  # since when the batch system has not known its job; 0: it does
    shunned: tuple[str, ...] = ()  # nodes that failed it
    expected: float = 0.0  # when the batch system thinks that it starts; 0: it does not say

    @property
    def is_live(self) -> bool:
        return self.state not in LEASE_ENDS

    @property
    def job_name(self) -> str:
        """Unique: a submission whose answer was lost is found by it."""
        return f"belljar-{self.id}-{self.attempt}"


@dataclass(frozen=True)
class Facts:
    """What a pilot found that it was granted."""

    host: str
    boot: str = ""  # the kernel's boot id
    cpus: int = 1
    memory: int = 0
    disk: int = 0
    kvm: bool = False
    offset: float = 0.0  # its clock's, against the service's, in seconds


@dataclass(frozen=True)
class Slot:
    """A node that a pilot holds for a lease."""

    lease: str
    attempt: int
    rank: int
    pilot: str  # random at its start
    state: SlotState = SlotState.CLAIMED
    facts: Facts = Facts("")
    since: float = 0.0
    begun: float = 0.0  # its first hello
    heard: float = 0.0  # last, by the service's clock
    zero: float = 0.0  # the moment at which its pilot's monotonic clock was 0
    seq: int = 0  # of the last numbered report that was applied
    ends: float = 0.0  # when its pilot ends by its own clock

    @property
    def id(self) -> str:
        return f"{self.lease}.{self.attempt}.{self.rank}"

    @property
    def is_live(self) -> bool:
        return self.state is not SlotState.ENDED


@dataclass(frozen=True)
class Instance:
    """One machine of a lease."""

    id: str
    lease: str
    index: int
    owner: str
    size: Size = Size()
    seconds: float = 86400.0  # that it may run
    state: InstanceState = InstanceState.QUEUED
    slot: str = ""
    created: float = 0.0
    since: float = 0.0
    cause: Cause | None = None
    why: str = ""
    stop: bool = False  # it is wanted no longer
    deadline: float = 0.0  # when its time is over; 0: it has not run yet
    address: str = ""
    host_keys: tuple[str, ...] = ()
    launched: float = 0.0  # when it ran first
    ended: float = 0.0
    began_at: float = 0.0  # it ran, and ended, by its pilot's monotonic clock
    ended_at: float = 0.0

    @property
    def is_live(self) -> bool:
        return self.state is not InstanceState.TERMINATED

    @property
    def charged(self) -> int:
        """Whole seconds that it ran, rounded up; 0 while it lives."""
        return 0 if self.is_live or not self.launched else max(0, ceil(self.ended_at - self.began_at))


@dataclass(frozen=True)
class Event:
    """A move of a lease, slot or instance. Never changed. Accounting derives from them."""

    lease: str
    of: str  # id of what moved
    before: str  # "": it was made
    after: str
    wall: float
    slot: str = ""
    seq: int = 0  # of the report that told it; 0: the service itself
    mono: float = 0.0  # by the pilot's clock, in seconds since its start
    cause: Cause | None = None
    why: str = ""


@dataclass(frozen=True)
class KeyPair:
    """The public half; the private one was shown once."""

    id: str
    owner: str
    name: str
    public: str  # a line of authorized_keys
    fingerprint: str
    kind: str = "rsa"
    created: float = 0.0


@dataclass(frozen=True)
class Tag:
    """A word that an owner put at something of theirs."""

    resource: str
    key: str
    value: str
    owner: str

    @property
    def id(self) -> str:
        return f"{self.resource} {self.key}"


@dataclass(frozen=True)
class Token:
    """A request that may be sent again: the same lease is told, and none is made."""

    owner: str
    token: str
    digest: str  # of what was asked for
    lease: str

    @property
    def id(self) -> str:
        return f"{self.owner} {self.token}"


@dataclass(frozen=True)
class AccessKey:
    """Of a user of the EC2 API. Its secret is derived from the service's own, and stored nowhere."""

    id: str
    owner: str
    group: str = ""
    created: float = 0.0
    enabled: bool = True


@dataclass(frozen=True)
class Console:
    """The last that a machine wrote there."""

    id: str  # of the instance
    text: bytes
    at: float


# -- between service and pilot -----------------------------------------------------------------------------------------


class Do(str, Enum):
    """What the service orders. Each may be ordered twice."""

    GO = "go"
    WAIT = "wait"
    VOID = "void"
    START = "start"
    STOP = "stop"
    REBOOT = "reboot"
    CONSOLE = "console"
    EXTEND = "extend"
    DRAIN = "drain"
    RELEASE = "release"
    PING = "ping"
    STREAM = "stream"  # connect once more, and carry an owner's ssh to this instance


@dataclass(frozen=True)
class Order:
    """To one pilot."""

    do: Do
    instance: str = ""
    request: str = ""  # start: the machine's request, as JSON
    seconds: float = (
        0.0  # go: from now until the pilot ends; start, extend: that the machine may run, from when it is up
    )
    why: str = ""
    stream: str = ""  # stream: what the new connection names


@dataclass(frozen=True)
class MachineOrder:
    """The machine's request, as `Order.request` has it in JSON."""

    image: str
    cpus: int = 1
    memory: int = 2 * GIB
    disk: int = 0  # 0: as large as the image's
    network: str = "user"  # as `belljar run --network` takes it: none, user, bridge:NAME
    user_data: bytes = b""
    keys: tuple[str, ...] = ()  # lines of authorized_keys, for root
    hostname: str = ""
    owner: str = ""


class Tell(str, Enum):
    """What a pilot reports."""

    HELLO = "hello"
    INSTANCE = "instance"
    HEARTBEAT = "heartbeat"
    ENDED = "ended"


@dataclass(frozen=True)
class Report:
    """From one pilot. Those of instances and of its end are numbered 1, 2, 3 ..., and applied in that order, each once; a hello and a
    heartbeat have the number 0. The hello is the first of every connection."""

    tell: Tell
    lease: str
    attempt: int
    rank: int
    pilot: str
    seq: int
    wall: float = 0.0  # by its own clocks
    mono: float = 0.0
    facts: Facts | None = None  # hello
    instance: str = ""
    state: InstanceState | None = None
    cause: Cause | None = None  # instance, ended
    why: str = ""
    address: str = ""
    host_keys: tuple[str, ...] = ()
    console: bytes = b""  # the last of it

    @property
    def slot(self) -> str:
        return f"{self.lease}.{self.attempt}.{self.rank}"


def lease_id() -> str:
    return f"r-{secrets.token_hex(9)[:17]}"


def instance_id() -> str:
    return f"i-{secrets.token_hex(9)[:17]}"


def key_id() -> str:
    return f"key-{secrets.token_hex(9)[:17]}"
