"""The words every room uses: what is asked (`Request`), what comes back (`Outcome`), and the parts of both.

Frozen values, no input or output, standard library only. Argv, environment and file names of a payload are bytes, never
decoded; in JSON they are latin-1 text. Sizes are in bytes, times in seconds unless a name says otherwise."""

from __future__ import annotations

import json
import os
from enum import Enum

from belljar.hints import Any, TypeVar
from belljar.records import RESERVED, dataclass, field

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

SCRATCH_PLACE = "/scratch"  # of a scratch disk in the guest
# files of a machine's folder, of the hypervisor's
QEMU_LOG, VIRTIOFSD_LOG, SEED = "qemu.log", "virtiofsd.log", "seed.iso"
MachineId = str  # 12 lower-case hexadecimal digits
T = TypeVar("T")


def setting(default: T, help: str, /, **metadata: object) -> T:
    """A key in a room's settings: its default, what it means, and where it has one its `unit` and its `minimum`."""
    return field(default=default, metadata={"help": help, **metadata})


class State(str, Enum):
    """Where a machine stands in its life. A state ending in -ING is an intent, journaled before the act."""

    REQUESTED, PREPARING, STARTING, BOOTING = "requested", "preparing", "starting", "booting"
    READY, RUNNING, STOPPING, CLEANING, DONE = "ready", "running", "stopping", "cleaning", "done"


class Cause(str, Enum):
    """Why a machine ended."""

    FINISHED = "finished"  # the payload ended by itself
    CANCELLED = "cancelled"
    WALLTIME = "walltime"
    BOOT_FAILED = "boot-failed"
    GUEST_LOST = "guest-lost"
    GUEST_OOM = "guest-oom"
    HOST_OOM = "host-oom"
    NODE_FAULT = "node-fault"
    IMAGE_FAULT = "image-fault"
    REFUSED = "refused"
    CHECKPOINTED = "checkpointed"  # it was written to a folder, to go on from there


class OutcomeClass(str, Enum):
    """What the batch system is to be told."""

    PAYLOAD = "payload"  # its own exit code or signal
    USER = "user"  # the asker must change something
    NODE = "node"  # this host cannot: requeue, close the node after k in a row
    TRANSIENT = "transient"  # requeue, counted
    CANCELLED = "cancelled"
    WALLTIME = "walltime"


class Retry(Enum):
    """May the same request be tried again?"""

    NEVER = "never"  # the request must change first
    LATER = "later"  # the same host may do it next time
    ELSEWHERE = "elsewhere"  # another host may do it


class Start(str, Enum):
    AUTO, CLONE, COLD = "auto", "clone", "cold"


class Pin(str, Enum):
    """Where the virtual processors of a machine run."""

    AUTO = "auto"  # one to one on the processors that a batch system gave to its job alone
    CPUS = "cpus"  # one to one on what this process may use, or refused
    NONE = "none"


class Topology(str, Enum):
    """What a guest sees of the sockets, siblings and NUMA nodes of the processors it is pinned to."""

    AUTO = "auto"  # them, where they are on several NUMA nodes and nothing insists on a clone
    HOST = "host"
    FLAT = "flat"  # one socket


class Pages(str, Enum):
    """What a machine's memory consists of."""

    DEFAULT = "default"
    THP = "thp"  # a boot whose memory the kernel makes large pages of by itself
    TWO_MIB, ONE_GIB = "2M", "1G"  # reserved ones

    @property
    def size(self) -> int:
        """Of a reserved page, in bytes; 0: there is none."""
        return {"2M": 2 * MIB, "1G": GIB}.get(self.value, 0)


PLACING = ("pin", "topology", "pages")


class NetworkMode(str, Enum):
    NONE = "none"
    USER = "user"  # out through the host, by QEMU's own user network; nobody reaches in
    BRIDGE = "bridge"  # a card on a bridge of the host: `network_name`
    ISOLATED = "isolated"  # a private segment for the machines of one group: `network_name`


class Context(str, Enum):
    """How a guest is told who it is and given the agent, or does without one."""

    AUTO = "auto"  # as the image says; else the first of the following that it can
    RAMDISK = "ramdisk"  # belljar's own ramdisk and init bring the agent; the image's init never runs
    CLOUD_INIT = "cloud-init"  # the image's own init; a NoCloud disc whose user-data installs the agent
    INJECT = "inject"  # the image's own init; the agent is written into its file system before the first boot
    NONE = "none"  # the image knows its own work, or brings its own agent


class Firmware(str, Enum):
    """What starts the boot loader of a disk that is not booted directly."""

    BIOS = "bios"  # SeaBIOS, which QEMU brings along
    UEFI = "uefi"  # OVMF, a package of its own


class StdinKind(str, Enum):
    """What the payload finds at a standard descriptor, seen from outside."""

    STREAM = "stream"  # pipe, file, socket, terminal: bytes are carried
    NULL = "null"  # /dev/null outside is /dev/null inside
    CLOSED = "closed"  # no descriptor outside, none inside
    STDOUT = "stdout"  # stderr alone: the same file as stdout outside, the same pipe inside, so what is written keeps its order


@dataclass(frozen=True)
class Share:
    """A folder of this host that the guest mounts at `target`."""

    source: str
    target: str
    readonly: bool = True
    kind: str = ""  # by its file system in the guest; "": the usual one


@dataclass(frozen=True)
class FileSystem:
    """How a guest's kernel mounts shared folders of one kind."""

    type: str
    modules: str  # in the order in which they are loaded, with spaces between
    options: str = ""


@dataclass(frozen=True)
class Port:
    """A port of the guest's loopback that is published on this host."""

    guest: int
    host: int = 0  # 0: a free one is chosen
    address: str = "127.0.0.1"

    @property
    def place(self) -> str:
        """Where it can be connected to."""
        return f"[{self.address}]:{self.host}" if ":" in self.address else f"{self.address}:{self.host}"


@dataclass(frozen=True)
class Transfer:
    """A file or folder copied between host and guest. `inside` may be relative to the payload's cwd."""

    outside: str
    inside: str
    skip: tuple[str, ...] = ()  # paths below it, relative, that are left where they are
    changed_only: bool = False  # to the host: no file that is as it was when the payload started


@dataclass(frozen=True)
class PlainFile:
    """A small file the guest is to have before the payload starts; its folders are made where they are missing."""

    path: bytes  # absolute
    data: bytes | None  # None: a folder
    mode: int = 0o644
    is_users: bool = True  # it belongs to the payload's user; else to root


@dataclass(frozen=True)
class Account:
    """The user of the payload, inside the guest as outside."""

    name: str
    uid: int
    gid: int
    group: str
    groups: tuple[tuple[int, str], ...] = ()  # supplementary (gid, name)
    home: str = "/"
    shell: str = "/bin/sh"


@dataclass(frozen=True)
class Container:
    """What a container image says of its processes: the defaults of a payload."""

    entrypoint: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    cwd: str = "/"
    account: Account = Account("root", 0, 0, "root", home="/root")


@dataclass(frozen=True)
class Payload:
    """What runs inside. Either `argv` names a program of the guest, or `script` is copied in and run by its `#!` line
    with `argv[0]` as its name. With `program`, that is what is executed, and `argv[0]` is only its name."""

    argv: tuple[bytes, ...]
    account: Account
    script: bytes | None = None
    cwd: bytes | None = None  # None: the account's home
    env: tuple[tuple[bytes, bytes], ...] = ()
    umask: int = 0o022
    rlimits: tuple[tuple[str, int, int], ...] = ()  # ("NOFILE", soft, hard); -1 is unlimited
    terminal: bool = False
    stdin: StdinKind = StdinKind.STREAM
    stdout: StdinKind = StdinKind.STREAM
    stderr: StdinKind = StdinKind.STREAM
    inputs: tuple[Transfer, ...] = ()
    outputs: tuple[Transfer, ...] = ()
    program: bytes | None = None
    files: tuple[PlainFile, ...] = ()  # together at most some MiB
    lingers: bool = False  # after TERM, what its first process leaves behind goes on to its own end, or until killed
    leaves: bool = False  # what its first process leaves behind goes on, and is not waited for, until the machine ends
    prepares: bool = False  # likewise, and beyond: what is left runs on in the clones of the template that is made then


@dataclass(frozen=True)
class Secret:
    """A value that the guest never has: it has a placeholder, and requests to these hosts are sent with the value."""

    name: str  # of the guest's variable
    source: str  # env:VAR or file:PATH, of this host
    hosts: tuple[str, ...]  # NAME or NAME:PORT

    @property
    def placeholder(self) -> str:
        return f"belljar-{self.name}-placeholder"  # none begins another


@dataclass(frozen=True)
class MachineSpec:
    """The machine that is asked for."""

    image: str
    cpus: int
    memory: int
    disk: int | None = None  # None: as large as the image's disk
    network: NetworkMode = NetworkMode.NONE
    shares: tuple[Share, ...] = ()
    start: Start = Start.AUTO
    context: Context = Context.AUTO
    network_name: str = ""  # of the bridge or the isolated group
    scratch: int | None = None  # bytes of an empty disk at /scratch, where $TMPDIR then is
    cache: int | None = None  # bytes of a disk a later machine of this user may find again; of a guest without agent
    allow: tuple[str, ...] = ()  # what it may reach at most, on a user network; none: what the settings let it
    secrets: tuple[Secret, ...] = ()
    public_image: bool = False  # a stranger named the image's address: it is fetched from public hosts only
    ports: tuple[Port, ...] = ()
    fork: str = ""  # the template that a running machine was forked into: it is cloned from that
    pin: Pin = Pin.AUTO
    topology: Topology = Topology.AUTO
    pages: Pages = Pages.DEFAULT
    devices: tuple[str, ...] = ()  # of this host: pci:ADDRESS, or CLASS:COUNT by the site's classes

    @property
    def network_class(self) -> str:
        """The mode, with the name of what the network is one of."""
        return f"{self.network.value}:{self.network_name}" if self.network_name else self.network.value


@dataclass(frozen=True)
class RunPayload:
    """The work is a command or a script that belljar starts in the guest."""

    payload: Payload
    user_data: bytes | None = None  # for the guest's own init, or for what it runs; at most a MiB

    @property
    def account(self) -> Account | None:
        """Whose work it is, where that is said."""
        return self.payload.account

    @property
    def has_agent(self) -> bool:
        """It begins the payload."""
        return True


class Sign(str, Enum):
    """What shows that a guest is ready for its own work."""

    NONE = "none"  # nothing does: it is ready as soon as it runs
    AGENT = "agent"  # belljar's agent answers
    FILE = "file"  # a file is there, in the guest
    LINE = "line"  # a line with this text is written to the console


@dataclass(frozen=True)
class Probe:
    """How it is found out that a guest is ready. `of`: path of the file, text of the line."""

    sign: Sign = Sign.NONE
    of: str = ""
    within: float | None = None  # seconds from the machine's start; None: as long as a boot may take


@dataclass(frozen=True)
class OwnWork:
    """The guest knows its own work, and ends by powering itself off."""

    user_data: bytes | None = None  # at most a MiB
    ready: Probe = Probe()
    agent: bool = False  # with belljar's agent, though nothing of `ready` asks for it
    reboots: bool = False  # a guest that reboots starts again from its disk; else that is the machine's end
    told: tuple[tuple[str, str], ...] = ()  # by its metadata service, as EC2 has it: path below meta-data -> text

    @property
    def account(self) -> Account | None:
        """The guest's own work has no account of the host's."""
        return None

    @property
    def has_agent(self) -> bool:
        """Then the machine may be a clone, proves its identity, and takes `exec` and `cp`."""
        return self.agent or self.ready.sign in (Sign.AGENT, Sign.FILE)


Work = RunPayload | OwnWork


@dataclass(frozen=True)
class Request:
    """What is asked of the supervisor."""

    id: MachineId
    machine: MachineSpec
    work: Work
    name: str = ""
    requester: str = "cli"
    created: float = 0.0  # seconds since the epoch
    timeout: float | None = None  # seconds the payload may run
    grace: float = 10.0  # seconds between TERM and the end of the machine
    keep: bool = False  # leave the machine's folder for inspection
    wall_limit: float | None = None  # seconds from `created`; the batch system enforces it, the guest is told
    labels: tuple[tuple[str, str], ...] = ()  # what else is known of the job: ("queue", "night"), ...
    collect: tuple[str, ...] = ()  # files and folders of the guest that are kept with the machine's records
    collect_limit: int = 64 * MIB  # bytes of that archive; more is cut off
    is_allotted: bool = False  # a batch system has set memory and processors aside for it
    checkpointable: bool = False  # refused at the start where it could not be written to a folder
    restore: str = ""  # a folder: it goes on from the newest checkpoint that is whole, or begins anew

    @classmethod
    def from_json(cls, value: Any) -> Request:
        """The inverse of `to_json`; what has a default may be left out. Raises ValueError with key and value."""
        from belljar.reading import bad, from_json

        made = from_json(cls, value, LEAST)
        if len(made.id) != 12 or not set(made.id) <= set(ID_DIGITS):
            raise bad("id", made.id, "not an id")
        return made


@dataclass(frozen=True)
class Usage:
    """Processor time and peak memory of one side."""

    user: float = 0.0
    system: float = 0.0
    peak_memory: int = 0


@dataclass(frozen=True)
class Outcome:
    """What came of a request: the only input of accounting."""

    id: MachineId
    cause: Cause
    klass: OutcomeClass
    exit_code: int | None = None  # of the payload
    signal: int | None = None  # that ended the payload
    core_dumped: bool = False
    reason: str = ""  # one line a person understands
    hint: str = ""
    error: str = ""  # class of the error, where one was raised
    name: str = ""
    image: str = ""
    image_digest: str = ""
    image_manifest: str = ""  # of a container image: its manifest's digest in the registry
    start: str = ""  # "clone" or "cold", as it really was
    start_reason: str = ""  # why it was not a clone
    context: str = ""  # how the guest was given its agent
    context_reason: str = ""  # why in this way, where that was a question
    accelerator: str = ""
    accelerator_reason: str = ""  # why it was that one
    phases: dict[str, float] = field(default_factory=dict)  # seconds per phase
    guest: Usage = field(default_factory=Usage)
    host: Usage = field(default_factory=Usage)
    started: float = 0.0  # seconds since the epoch
    ended: float = 0.0
    troubles: tuple[str, ...] = ()  # steps of clearing the machine away that failed, and why
    requester: str = ""
    labels: tuple[tuple[str, str], ...] = ()
    uid: int | None = None  # whose payload it was; of a guest at its own work, whose machine
    account: str = ""
    cpus: int = 0
    memory: int = 0
    disk: int | None = None
    network: str = ""  # its class: "none", "user", "bridge:br0", "isolated:GROUP"
    shutdown_code: int | None = None  # of the guest's own message
    shutdown_message: str = ""
    restarts: int = 0  # how often it went on from a checkpoint; the usage of both sides is that of all its parts

    @classmethod
    def of(cls, request: Request, cause: Cause, klass: OutcomeClass, **fields: Any) -> Outcome:
        """With all that the request tells."""
        machine, account = request.machine, request.work.account
        return cls(
            request.id, cause, klass, name=request.name, image=machine.image, requester=request.requester,
            labels=request.labels, uid=account.uid if account else os.geteuid(), account=account.name if account else "",
            cpus=machine.cpus, memory=machine.memory, disk=machine.disk, network=machine.network_class, **fields,
        )  # fmt: skip

    @classmethod
    def from_json(cls, value: Any) -> Outcome:
        """The inverse of `to_json`. Raises ValueError with key and value."""
        from belljar.reading import from_json

        return from_json(cls, value)

    @property
    def shell_code(self) -> int | None:
        """The code by which a shell tells this end: 128 + N for signal N; None where the payload never ran."""
        return self.exit_code if self.signal is None else 128 + self.signal

    @property
    def payload_ran(self) -> bool:
        """True when an exit code or a signal of the payload itself is known."""
        return self.exit_code is not None or self.signal is not None


ID_DIGITS = "0123456789abcdef"
# The least values of what a request asks for.
LEAST = {"cpus": 1, "memory": 1, "disk": 1, "scratch": 1, "cache": 1, "grace": 0, "timeout": 0, "wall_limit": 0}


def to_json(value: Any) -> Any:
    """Turn a value of this module into what `json` can write."""
    if type(value) in (str, int, float, bool, type(None)):  # most are
        return value
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, bytes):
        return value.decode("latin-1")
    if hasattr(value, "__dataclass_fields__"):
        return {RESERVED.get(name, name): to_json(getattr(value, name)) for name in value.__dataclass_fields__}
    if isinstance(value, (list, tuple)):
        return [to_json(item) for item in value]
    if isinstance(value, dict):
        return {str(key): to_json(item) for key, item in value.items()}
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def dumps(value: Any) -> bytes:
    """One line of JSON, ASCII only, without the newline."""
    return json.dumps(to_json(value), separators=(",", ":")).encode("ascii")
