"""The door of the pool room: a batch system from the outside, in words that all systems share: its jobs, its nodes, and the commands that
change them. Nothing here runs a command.

    load(name)         a Pool, where belljar can add worker nodes: nodes.py in the system's folder
    pilots_of(name)    Pilots, where belljar can submit jobs of its own: pilots.py in the system's folder

`batch/` is about one job that belljar was started for; this is about all of them, for a policy that works beside the batch system and
owns none of its jobs. A system's module is commands and strict parsers.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from enum import Enum
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, cast

from belljar import batch
from belljar.errors import BadOption
from belljar.findings import Finding
from belljar.host.caller import describe
from belljar.model import PlainFile
from belljar.records import dataclass

JobId = str  # as the system's own commands take it: "4711", "4711_3", "4711.3"
Command = tuple[str, ...]
Names = tuple[str, ...]
Ask = Callable[..., str]  # what a command prints; raises BelljarError
LARGEST_ANSWER = 64 << 20  # bytes of one list
UNFIT_CODE = 78  # a joining script's exit code where its image cannot join, as it says in a line on stderr; EX_CONFIG of sysexits.h
PILOT_NAME = re.compile(r"belljar-r-[0-9a-f]{17}-[0-9]{1,4}")
NODE_FORM = re.compile(r"vm([0-9a-f]{12})x")


class JobState(str, Enum):
    """Where a job is, as far as a follower needs to know."""

    WAITING = "waiting"
    HELD = "held"  # waits, and is not started until somebody lets it
    RUNNING = "running"
    ENDING = "ending"  # over, but its nodes are not free yet
    ENDED = "ended"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class JobView:
    """A job as its system tells of it. Sizes in bytes, for the whole job; what its user wrote is not to be trusted."""

    id: JobId
    state: JobState
    owner: str = ""
    uid: int = -1  # -1: the system does not tell it
    group: str = ""
    queue: str = ""
    image: str = ""  # what the job asks for; "" where it asks for none
    network: str = ""  # the network class it asks for
    cpus: int = 1
    memory: int = 0
    disk: int = 0
    nodes: int = 1  # how many it asks for
    features: tuple[str, ...] = ()  # of nodes, that its constraints name
    on: tuple[str, ...] = ()  # the nodes it was given
    wants: tuple[str, ...] = ()  # the nodes without which it does not start
    array: tuple[str, str] = ("", "")  # the array's id, and the task's
    number: str = ""  # as hooks on a node know it
    name: str = ""  # whole; "" where it is not asked for
    starts: int = 0  # how often it was requeued
    reason: str = ""  # why it waits, in the system's words
    is_held_by_user: bool = False  # and its user may release it
    reruns: bool = True  # the system may start it anew; False: its user wants it to run once at most
    is_batch: bool = True  # a script, not somebody at a terminal: such a job cannot be taken back
    comment: str = ""  # what its user wrote at it
    note: str = ""  # what an administrator, or a bait, wrote at it; its user cannot
    unmovable: str = ""  # why it could not start on another node than its system chooses; "" where it could
    is_limited: bool = False  # it waits for the end of other jobs, or for a date, not for its nodes


class NodeState(str, Enum):
    """Where a node is, as far as its maker needs to know."""

    IDLE = "idle"  # it has joined, and would take a job
    BUSY = "busy"  # it has a job, or the end of one
    OUT = "out"  # it is quiet, and takes no job any more: it may be removed
    DRAINING = "draining"  # it has a job, and takes no other one
    AWAY = "away"  # known, but not there: it was not heard of yet, or no longer


@dataclass(frozen=True)
class NodeView:
    """A node as its system tells of it."""

    name: str
    state: NodeState
    features: tuple[str, ...] = ()
    reason: str = ""  # why it is out, in the words of whoever took it out
    cpus: int = 0
    memory: int = 0  # bytes
    queues: tuple[str, ...] = ()


@dataclass(frozen=True)
class Joining:
    """What a machine needs to join the pool: a script that root runs in it, which reads the pool's secret from its standard input
    and lasts as long as the node; it ends with UNFIT_CODE where the image lacks something. It runs what BASELINE holds before it lets
    the user in and starts the daemon that takes jobs."""

    script: bytes
    env: tuple[tuple[bytes, bytes], ...]
    files: tuple[PlainFile, ...]
    copies: tuple[Path, ...] = ()  # files of this host's, which lie at the same place in the machine


@dataclass(frozen=True)
class Member:
    """A node that is to join: its size is what the jobs of the system may use of it."""

    name: str
    cpus: int
    memory: int  # bytes
    features: tuple[str, ...]
    account: tuple[str, ...]  # of the one user whose job it runs: lines of passwd and group
    hosts: str  # lines for its /etc/hosts
    job: str = ""  # the one job that may start there, by its number; "": each of that user's
    is_known: bool = False  # the system's own configuration has it; else it adds itself

    def joining(
        self, script: bytes, env: Mapping[str, str], *, files: tuple[PlainFile, ...] = (), copies: tuple[Path, ...] = ()
    ) -> Joining:  # fmt: skip
        """*env*: what a system's script needs besides the node's name, its hosts and its user's account."""
        words = {
            "NODE": self.name, "HOSTS": self.hosts, "PASSWD": "".join(self.account[:1]), "GROUPS_OF": "\n".join(self.account[1:]),
            "HOME": "/root", "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", **env,
        }  # fmt: skip
        return Joining(script, tuple((key.encode(), value.encode()) for key, value in words.items()), files, copies)


class Revoked(Enum):
    """Does a node's daemon know that a job was taken back? Then it starts nothing of it."""

    YES = "yes"
    NO = "no"
    CANNOT_TELL = "it cannot be asked"


class Pool(Protocol):
    """The jobs and the nodes of one system. A command that changes a job may fail where the job is gone: that is seen at the next look.

    *folders*: what a node's daemons write to in its machine, by themselves; *packages*: of Debian's, that an image needs to become one;
    *defaults*: a bait's settings, what this system has instead."""

    folders: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = {}
    # The tasks of an array that wait can be told where to run only together: they come to one bait, and move one by one.
    moves_whole_arrays: bool = False
    saves: float = 0.0  # seconds in which the system saves what became of a job, and must know the nodes it named
    tells_reasons: bool = True  # why a node is closed; else nobody sees who closed it

    def of_bait(self, name: str, queue: str, feature: str, nodes: tuple[str, ...]) -> Pool:
        """For a bait of this name, whose machines become nodes of this queue, known by this feature; *nodes*: those that the system
        has to know beforehand. Raises ValueError: key, what is wrong, hint."""
        return self

    # -- jobs ----------------------------------------------------------------------------------------------------------

    def query(self, mark: str) -> Command:
        """The one command that tells of all jobs. *mark*: letters nobody could guess, which a job's own text cannot hold."""

    def jobs(self, printed: bytes, mark: str) -> dict[JobId, JobView]:
        """Raises ValueError for any other answer."""

    def take_back(self, job: JobView) -> tuple[Command, ...]:
        """Off its node, and held; one that only waits is held."""

    def arrive(self, jobs: Sequence[JobView]) -> tuple[Command, ...]:
        """The first is in its prolog on the bait: hold it, and those that come with it."""
        return tuple(command for job in jobs for command in self.take_back(job))

    def is_back(self, job: JobView) -> bool:
        """The prolog of this job may end: it does not start on the bait."""
        return job.state is not JobState.RUNNING

    def has_forgotten(self, job: JobView) -> bool:
        """The system was killed, and does not know that this job, which is in its prolog, began: its node would start it all the same."""
        return False

    def force_end(self, job: JobId) -> Command:
        """For a job whose machine is gone, and that may not run again."""
        return self.cancel(job)

    def revoked(self, number: str, since: float, env: Mapping[str, str]) -> Revoked:
        """Asked in a prolog with this environment, about the daemon of this host and what happened since then."""
        return Revoked.CANNOT_TELL

    def release(self, job: JobId) -> Command: ...
    def cancel(self, job: JobId) -> Command: ...
    def note(self, job: JobView, text: str) -> Command:
        """*text* where an administrator looks."""

    def refuse(self, job: JobView, why: str) -> Command:
        """Say why it is held where its user looks for it, too."""
        return self.note(job, why)

    # -- nodes ---------------------------------------------------------------------------------------------------------

    def new_machine(self, nodes: Collection[str]) -> str:
        """The id of a machine that is to become a node beside these; "" while it could have no name."""
        return os.urandom(6).hex()

    def name_of(self, machine: str) -> str:
        return node_of(machine)

    def machine_of(self, node: str) -> str:
        """The id of a machine that has this name, or might have had it; "" where the name is not one of ours."""
        return machine_of(node)

    def address_of(self, machine: str) -> str:
        """The one that this machine has to have; "": any."""
        return ""

    def query_nodes(self) -> Command: ...
    def nodes(self, printed: bytes) -> dict[str, NodeView]:
        """Raises ValueError for any other answer."""

    def create(self, node: str, job: JobView) -> tuple[Command, ...]:
        """Before its machine is started. Those that fail have been done before."""
        return ()

    def open(self, node: str) -> Command: ...
    def close(self, node: str, reason: str) -> Command: ...
    def lose(self, node: str, reason: str) -> tuple[Command, ...]:
        """Its machine is gone: what ran there has ended."""

    def remove(self, node: str) -> tuple[Command, ...]:
        """Only for one that is OUT. Those that fail have been done before."""

    def move(self, job: JobView, nodes: tuple[str, ...], queue: str, *, reruns: bool = True) -> tuple[Command, ...]:
        """Let a job that is held run on these nodes and no others. *reruns*: as its user wanted it before it was taken back."""

    def unpin(self, job: JobView, queue: str = "") -> tuple[Command, ...]:
        """Before its nodes are removed: a held job no longer wants them, and is in the queue that it came from."""
        return ()

    def give_back(self, job: JobView, queue: str, delay: float, *, stays_held: bool = False) -> tuple[Command, ...]:
        """Let a job that is held run anywhere again, in the queue it came from, after so many seconds. *stays_held*: when somebody
        releases it."""

    def joining(self, member: Member, conf_file: Path, text: bytes) -> Joining:
        """*conf_file*, *text*: the system's settings on this host."""

    def needs(self, ask: Ask, conf: str, baits: Names, queue: str, feature: str, hosts: Names) -> Iterable[Finding]:
        """Can machines join, and baits of these names take jobs for them? *conf*: the text of the system's settings; *hosts*: lines for a
        machine's /etc/hosts. Raises BelljarError where the system does not answer."""


def node_of(machine: str) -> str:
    """The name of the node that this machine becomes. It ends in a letter: Slurm writes no two such names as one."""
    return f"vm{machine}x"


def machine_of(node: str) -> str:
    """The machine behind a node of this name; "" where we give no such name."""
    match = NODE_FORM.fullmatch(node)
    return match[1] if match else ""


def words_of(text: str, *known: str) -> dict[str, str]:
    """`name=value` of these names in a user's text, each as a plain word. The first one counts."""
    words: dict[str, str] = {}
    for word in text[:4096].split():
        name, equals, value = word.partition("=")
        if equals and name in known and re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", value):
            words.setdefault(name, value)
    return words


# -- jobs of our own: each starts one command on each of its nodes, runs once, and is found again by its name ---------

# Their limit is the backstop of the pilot's own clock. Each system that can do it has pilots.py, with `PILOTS`.


@dataclass(frozen=True)
class PilotJob:
    """What is asked for. Sizes are of each node's share, in bytes."""

    name: str
    command: tuple[str, ...]
    nodes: int
    cpus: int
    memory: int
    seconds: float  # that the system gives it
    owner: str  # for whom it is: noted at the job
    output: str  # path of a file
    queue: str = ""
    account: str = ""
    shunned: tuple[str, ...] = ()  # nodes that it is not to have
    environment: str = ""  # the parallel environment, where a system needs one for more than a processor


@dataclass(frozen=True)
class NamedJob:
    """A job of ours, found by its name."""

    name: str
    id: JobId
    state: JobState
    reason: str = ""
    expected: float = 0.0  # when the system thinks that it starts; 0: it does not say


def account() -> str:
    """Whose jobs ours are. Somebody else's may have any name."""
    return describe(os.geteuid(), os.getegid(), ()).name


def id_printed(printed: bytes, pattern: str) -> JobId:
    """The id of a job, alone. Raises ValueError."""
    job = printed.decode("ascii", "replace").strip()
    if re.fullmatch(pattern, job) is None:
        raise ValueError(f"the batch system printed {job[:60]!r} where a job's id is expected")
    return job


def longest_of(limits: Sequence[float | None]) -> float | None:
    """None: no limit is known, or one of the queues has none."""
    return None if None in limits else max((limit for limit in limits if limit is not None), default=None)


class Pilots(Protocol):
    """One system's."""

    quantum: int  # seconds: a job's limit is a multiple of it
    notice: float  # seconds between TERM, or its like, and KILL, where the site set no other time
    limits: Command  # tells what queues allow

    def submit(self, job: PilotJob, script: str) -> Command:
        """*script*: path of a file with `script(job)`. Raises ValueError for what the system cannot be asked."""

    def script(self, job: PilotJob) -> bytes: ...
    def submitted(self, printed: bytes) -> JobId:
        """Raises ValueError."""

    def cancel(self, job: JobId) -> Command:
        """`qdel`, but in Slurm."""
        return ("qdel", job)

    def extend(self, job: JobId, seconds: float) -> Command:
        """A running job's limit is this now. Raises ValueError where a system cannot do that."""

    def longest(self, printed: bytes, queue: str) -> float | None:
        """Seconds that a job may have in this queue ("": that of a job which names none). None: as long as it likes, or it is not told."""

    def query(self) -> Command:
        """The one command that tells of all jobs of this account, or of everybody's."""

    def jobs(self, printed: bytes) -> tuple[NamedJob, ...]:
        """Those of this account with names of ours; two of one name where there are two. Raises ValueError for any other answer."""


# -- the systems --------------------------------------------------------------------------------------------------------


def load(name: str) -> Pool:
    """The jobs and nodes of this system. Raises BadOption where belljar cannot add worker nodes to it."""
    return cast("Pool", _module(name, "nodes", "belljar adds no worker nodes to this system").POOL)


def pilots_of(name: str) -> Pilots:
    """How jobs of our own are started in this system. Raises BadOption where that is not built."""
    return cast("Pilots", _module(name, "pilots", "it cannot run pilots yet").PILOTS)


def _module(name: str, file: str, lack: str) -> ModuleType:
    able = batch.systems_in(__name__, __path__, f"{file}.py")
    if name not in able:
        batch.load(name)  # says so where there is no such system at all
        raise BadOption(f"{name}: {lack}", hint=f"Known are {', '.join(sorted(able))}.")
    return import_module(f"{able[name]}.{file}")
