"""The words of leases: N machines of an image for so long, on nodes that pilot jobs of the site's batch system hold.

    states.py     where a lease, a slot and an instance stand, what may follow, and why each ended
    orders.py     what service and pilots say to each other; protocol.py: how; jobfile.py: what a pilot is started with
    decisions/    from what is written down, and what is seen now: the next state, and what is to be done
    desk.py       what owners ask: run, describe, terminate, ... each in one transaction; clerk.py: what they may read
    store/        what is written down: SQLite, or PostgreSQL
    service/      looks, decides, writes, acts; pilot/: the job on each node; network/: between a lease's machines
    ec2/, broker/ what cloud clients ask; clusters

Frozen values, no input or output. Sizes are in bytes, durations in seconds, moments in seconds since the epoch.
"""

from __future__ import annotations

import secrets
from functools import cached_property
from math import ceil
from pathlib import Path

from belljar.host.values import Form
from belljar.lease.orders import Do, Facts, MachineOrder, Order, Report, Tell
from belljar.lease.states import LEASE_ENDS, Cause, InstanceState, LeaseState, SlotState
from belljar.model import GIB, MIB, setting
from belljar.records import dataclass

__all__ = [
    "LARGEST_CONSOLE", "LARGEST_USER_DATA", "OLD_PILOT", "AccessKey", "Cause", "Console", "Do", "Event", "Facts", "Instance", "InstanceState",
    "KeyPair", "Lease", "LeaseState", "MachineOrder", "Order", "Pairs", "Report", "Settings", "Size", "Slot", "SlotState", "Tag",
    "Tell", "Wanted", "new_id",
]  # fmt: skip

Pairs = tuple[tuple[str, str], ...]
OLD_PILOT = "nimbus "  # so begins the name of a pilot that tells of its begin and end alone
SIZE = Form(r"(?i) *[1-9]\d{0,3} *(/ *\d+(\.\d+)? *[KMGT]?(i?B)? *){2}", "is not a size", 'as in small = "1/2G/10G"')
LARGEST_USER_DATA, LARGEST_CONSOLE = 16 << 10, 64 << 10  # bytes, as EC2 has them


@dataclass(frozen=True)
class Settings:
    """`[lease]` in lease.toml."""

    address: str = setting("", "required: name or address of this service, as nodes reach it")
    port: int = setting(8470, "where pilots connect", minimum=1, maximum=65535)
    listen: str = setting("", "address that pilots' port is opened at; empty: all of this host")
    ec2_listen: str = setting("", "ADDRESS:PORT of the EC2 API: by TLS, or on loopback without; empty: there is none")
    ec2_certificate: str = setting("", "PEM file with its chain and key; empty: the service's own where it needs one")
    legacy_listen: str = setting("", "ADDRESS:PORT for notifications of Nimbus's old pilots; empty: there is none")
    database: str = setting("", "postgresql://... of the records; empty: a file of SQLite in the service's folder")
    jobs: Path = setting(Path("/var/lib/belljar/lease/jobs"), "job files: nodes see it, the service's account alone")
    system: str = setting("slurm", "the batch system")
    queue: str = setting("", "partition or queue of pilot jobs; empty: the batch system's own default")
    preemptible_queue: str = setting(
        "", "queue of preemptible leases, whose jobs the batch system may preempt; empty: none"
    )
    account: str = setting("", "account or project of pilot jobs; empty: the batch system's own default")
    environment: str = setting("", "Grid Engine: parallel environment of leases with more than one processor")
    notice: float = setting(0.0, "between the batch system's TERM and KILL; 0: its default", unit="seconds", minimum=0)
    door: Path = setting(Path("/run/belljar-lease/door"), "socket by which owners on this host ask")
    pilot: str = setting("belljar", "the belljar command, as nodes find it")
    images: tuple[str, ...] = setting((), "required: images that may be leased; `*` and `?` are wildcards")
    types: Pairs = setting((("small", "1/2G/10G"),), "table: type -> CPUS/MEMORY/DISK, the default first", form=SIZE)
    networks: Pairs = setting(
        (("user", "user"), ("private", "private")),
        "table: class -> none, user, bridge, bridge:NAME, or private: a network of the lease's own; the first is the default",
    )
    private_net: str = setting("10.98.0.0/24", "addresses of private networks; each lease has all of them")
    private_ports: str = setting("0", "FIRST-LAST: ports of nodes where pilots of such a lease connect; 0: any")
    zone: str = setting("lease", "availability zone that EC2 clients are told; its region is the same name")
    default_time: float = setting(
        86400.0, "where none is named and queue and policy allow it", unit="seconds", minimum=60
    )
    longest_time: float = setting(1209600.0, "a lease gets no more than this", unit="seconds", minimum=60)
    staging: float = setting(300.0, "for an image's way to a node, and its boot", unit="seconds", minimum=1)
    barrier: float = setting(120.0, "from the first node of a group to its last", unit="seconds", minimum=1)
    grace: float = setting(30.0, "for a guest to shut down", unit="seconds", minimum=0)
    margin: float = setting(30.0, "between a pilot's own end and the batch system's limit", unit="seconds", minimum=0)
    queue_time: float = setting(604800.0, "a lease not started in this time has failed", unit="seconds", minimum=1)
    silence: float = setting(90.0, "a pilot so quiet is lost, unless its job runs", unit="seconds", minimum=5)
    lost: float = setting(900.0, "a pilot so quiet is lost", unit="seconds", minimum=5)
    heartbeat: float = setting(20.0, "a pilot is heard of at least once in this time", unit="seconds", minimum=1)
    unseen: float = setting(60.0, "a job unknown to the batch system for so long is gone", unit="seconds", minimum=1)
    skew: float = setting(300.0, "a node whose clock is further off is refused", unit="seconds", minimum=1)
    tries: int = setting(3, "so many jobs are tried for one lease when nodes fail it", minimum=1)
    cycle: float = setting(5.0, "between two looks at the batch system", unit="seconds", minimum=0.1)
    shown: float = setting(3600.0, "ended instances are listed for so long", unit="seconds", minimum=60)
    token_time: float = setting(86400.0, "a client token counts so long after its lease ended", unit="seconds")
    overhead: int = setting(256 * MIB, "memory of a node's share beside its machines' own", unit="bytes", minimum=0)


@dataclass(frozen=True)
class Size:
    """Of one machine."""

    cpus: int = 1
    memory: int = 2 * GIB
    disk: int = 10 * GIB


@dataclass(frozen=True)
class Wanted:
    """The terms of a lease: what is asked for, as policy allowed it, with every default filled in."""

    image: str
    count: int = 1  # machines, each on a node of its own unless `per_node` says more
    least: int = 0  # with so many it starts, too, when the others do not come in time; 0: with all or none
    size: Size = Size()
    type: str = ""  # name of the size, where it has one
    seconds: float = 86400.0  # 0, asked for: the usual time
    queue: str = ""
    account: str = ""
    network: str = ""  # class
    key: str = ""  # name of the owner's key pair
    user_data: bytes = b""
    tags: Pairs = ()  # of each instance
    token: str = ""  # the same request with it may be sent again: the same lease is told, and none is made
    preemptible: bool = False  # its job is in `lease.preemptible_queue`
    per_node: int = 1  # so many machines share a node
    images: tuple[str, ...] = ()  # of each machine in its order, where not all have `image`
    sizes: tuple[Size, ...] = ()  # the same; `size` is the largest then
    metadata: Pairs = ()  # EC2's options of each machine's metadata service, as they were asked for

    @property
    def nodes(self) -> int:
        """For its job."""
        return -(-self.count // self.per_node)

    def image_of(self, index: int) -> str:
        return self.images[index] if self.images else self.image

    def size_of(self, index: int) -> Size:
        return self.sizes[index] if self.sizes else self.size


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
    begun: float | None = None  # when it became active
    ends: float | None = None  # when its time is over, once it is active
    deadline: float | None = None  # by which it must have started
    missing: float | None = None  # since when the batch system has not known its job
    shunned: tuple[str, ...] = ()  # nodes that failed it
    expected: float | None = None  # when the batch system thinks that it starts
    digest: str = ""  # of what was asked for

    @property
    def is_live(self) -> bool:
        return self.state not in LEASE_ENDS

    def left(self, now: float) -> float:
        """Seconds of its time; 0 where it is not active."""
        return 0.0 if self.ends is None else max(0.0, self.ends - now)

    @property
    def job_name(self) -> str:
        """Unique: a submission whose answer was lost is found by it."""
        return f"belljar-{self.id}-{self.attempt}"


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
    ends: float | None = None  # when its pilot ends by its own clock, once it takes machines

    @cached_property
    def id(self) -> str:
        return f"{self.lease}.{self.attempt}.{self.rank}"

    @property
    def is_live(self) -> bool:
        return self.state is not SlotState.ENDED

    def left(self, now: float) -> float:
        """Seconds until its pilot ends; 0 where it takes no machines yet."""
        return 0.0 if self.ends is None else max(0.0, self.ends - now)


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
    cause: Cause | None = None  # why it ends
    why: str = ""
    stop: bool = False  # it is wanted no longer
    deadline: float | None = None  # when its time is over, once it runs
    address: str = ""
    host_keys: tuple[str, ...] = ()
    launched: float | None = None  # when it ran first
    ended: float | None = None
    rebooted: float | None = None  # when its guest did last
    ran_from: float = 0.0  # by its pilot's monotonic clock
    ran_until: float = 0.0

    @property
    def is_live(self) -> bool:
        return self.state is not InstanceState.TERMINATED

    @property
    def charged(self) -> int:
        """Whole seconds that it ran, rounded up; 0 while it lives."""
        return 0 if self.is_live or self.launched is None else max(0, ceil(self.ran_until - self.ran_from))


@dataclass(frozen=True)
class Event:
    """A move of a lease, slot or instance. Never changed. By them accounting finds what ended."""

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
    charged: int = 0  # of a machine that ended: whole seconds that it ran, rounded up


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
class AccessKey:
    """For a user of the EC2 API. Its secret is derived from the service's own, and stored nowhere."""

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


def new_id(kind: str) -> str:
    """*kind*: `r` of a lease, `i` of an instance, `key` of a key pair, as EC2 begins them."""
    return f"{kind}-{secrets.token_hex(9)[:17]}"
