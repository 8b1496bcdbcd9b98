"""What service and pilot say to each other: orders one way, reports the other. Frozen values, as JSON on the channel."""

from __future__ import annotations

from enum import Enum

from belljar.lease.states import Cause, InstanceState
from belljar.model import GIB
from belljar.records import dataclass


@dataclass(frozen=True)
class Reach:
    """Where a pilot takes connections of its lease's others, for the network between their machines."""

    at: str  # HOST:PORT
    pin: str  # SHA-256 of its certificate, hexadecimal


@dataclass(frozen=True)
class Peer:
    """Another pilot of the lease, and the numbers of its machines on their network."""

    rank: int
    reach: Reach
    numbers: tuple[int, ...]


@dataclass(frozen=True)
class Facts:
    """What a pilot found that it was granted."""

    host: str
    boot: str = ""  # the kernel's boot id
    cpus: int = 1
    memory: int = 0
    disk: int = 0  # free where machines' disks lie; 0: it did not say
    kvm: bool = False
    offset: float = 0.0  # its clock's, against the service's, in seconds
    reach: Reach | None = None  # None: it takes no connections


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
    RELEASE = "release"
    PING = "ping"
    STREAM = "stream"  # connect once more, and carry an owner's ssh, or `request`, to this instance


@dataclass(frozen=True)
class Order:
    """To one pilot."""

    do: Do
    instance: str = ""
    request: str = ""  # start: the machine's request, as JSON; stream: a command for its shell
    seconds: float = 0.0  # go: from now until the pilot ends; start, extend: that the machine may run once it is up
    why: str = ""
    stream: str = ""  # stream: what the new connection names


@dataclass(frozen=True)
class MachineOrder:
    """The machine's request, as `Order.request` has it in JSON."""

    image: str
    cpus: int = 1
    memory: int = 2 * GIB
    disk: int = 0  # 0: as large as the image's
    network: str = "user"  # as `belljar run --network` takes it: none, user, bridge:NAME, isolated:GROUP@ADDRESS/PREFIX
    user_data: bytes = b""
    keys: tuple[str, ...] = ()  # lines of authorized_keys, for root
    hostname: str = ""
    owner: str = ""
    name: str = ""  # of the guest, on a private network
    hosts: tuple[tuple[str, str], ...] = ()  # name -> address of each machine of the lease, there
    peers: tuple[Peer, ...] = ()
    told: tuple[tuple[str, str], ...] = ()  # by its metadata service: path below meta-data -> text


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
    rebooted: bool = False  # its guest did, just now

    @property
    def slot(self) -> str:
        return f"{self.lease}.{self.attempt}.{self.rank}"
