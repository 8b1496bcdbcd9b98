"""The words all dialects have in common: what a job's surroundings are, what they mean, how a job is answered."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import Protocol

from belljar.batch import Settings
from belljar.errors import OUR_FAILURE
from belljar.model import Outcome
from belljar.records import dataclass, field


@dataclass(frozen=True)
class Surroundings:
    """All that a system gives a job it starts. Bytes are as the kernel has them."""

    argv: tuple[bytes, ...]  # what follows `belljar internal wrap SYSTEM` and its options
    env: tuple[tuple[bytes, bytes], ...]  # in order, as at the start of this process
    cwd: bytes
    uid: int
    gid: int
    groups: tuple[int, ...]
    options: Mapping[str, str]  # words of the redirect itself: `--image=x --time=60` of Slurm's first line
    stdin: Callable[[], bytes]  # all of standard input, at most 64 KiB; for systems that tell the script's path there
    read: Callable[[bytes], bytes]  # a small file (at most 16 MiB); raises OSError

    def var(self, name: str) -> str:
        """A variable's value as text, "" where it is not set. The first one counts, as for getenv."""
        key = name.encode()
        return next((value for other, value in self.env if other == key), b"").decode("utf-8", "surrogateescape")

    def paths(self, *names: str) -> tuple[bytes, ...]:
        """The absolute paths that these variables hold."""
        return tuple(os.fsencode(path) for path in map(self.var, names) if path.startswith("/"))

    def peek(self, path: bytes) -> bytes:
        """A small file; empty where there is none, or none that can be read."""
        with suppress(OSError):
            return self.read(path) if path else b""
        return b""


@dataclass(frozen=True)
class Command:
    """A program as execvp takes it: a path without a slash is looked for in the job's PATH. `argv[0]` is its name only."""

    path: bytes
    argv: tuple[bytes, ...]
    stdin: bytes | None = None  # what its standard input holds (then EOF); None: it has ours
    # Where the system itself calls execve: its answer to a program that cannot be started. None: as a shell starts it.
    unstarted: Callable[[OSError], Ending] | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Staged:
    """What belongs to the job and lies on the host: carried in before, where it is there; and out after."""

    into: tuple[bytes, ...] = ()  # files (node lists, job ads), kept at the same path
    folders: tuple[bytes, ...] = ()  # made in the guest at the same path, empty and the job's own (TMPDIR)


@dataclass(frozen=True)
class Job:
    """What the surroundings mean. Sizes in bytes, times in seconds; None where the system tells nothing."""

    system: str
    id: str  # as the system's own commands take it: "4711", "4711_3", "4711.3", "4711[3].server"
    aliases: tuple[str, ...] = ()  # other ids a person may know it by
    name: str = ""
    queue: str = ""
    image: str = ""  # what the job itself asks for; "" where it asks for none
    checkpoint: str | None = None  # when, in its own words or ""; None: jobs of its system are not checkpointed
    native: Command = Command(b"", ())  # how the system itself would have started it, here
    inside: Command = Command(b"", ())  # the same in the guest, where that differs
    visitor: Callable[[Path], Command] | None = None  # its owner beside a job in a machine: what to run here
    script: bytes = b""  # path of the spooled script; carried in at the same path, without its first line where...
    script_skips_line: bool = False  # ...the first line is ours
    cpus: int | None = None
    memory: int | None = None  # of the whole job on this node
    disk: int | None = None
    wall: float | None = None  # limit, from the start of this run
    started_before: int = 0  # how often, as far as the surroundings tell
    grace: float = 10.0  # between TERM and the end, less two seconds: the system's default
    inherits_ignored: bool = False  # the system does not put back, for its jobs, the signals it ignores itself
    signals_reach_all: bool = True  # a signal to the job is meant for its process group, not for its leader alone
    notice: tuple[int, float] | None = None  # (signal, seconds): the system announces the end by it, so long before
    lingers: bool = False  # after TERM the system waits for all of the job's processes, not for its first alone
    staged: Staged = Staged()
    redirect: tuple[bytes, ...] = ()  # variables that are there for the redirect's sake: the job gets none of them
    keeps_output: bool = False  # at the end there is the standard error of every start, not of the last alone
    failed_starts: int = 0  # for lack of a machine, as the system's own record of the job has it (`Dialect.counted`)
    reruns: bool = True  # the system would start it again although its payload had begun
    answer: bytes = b""  # the file, or folder, where the system looks for what became of the job
    comment: str | None = None  # as the system has it; None where it was not asked, or has none
    ask_env: tuple[str, ...] = ()  # `NAME=VALUE` each, by which the system's own commands find it


class Verdict(Enum):
    """What is to become of the job; see verdict.py for the rules."""

    MIRROR = "mirror"  # end as the payload ended
    FAIL = "fail"  # the asker must change something: end with our exit code, say why
    REQUEUE = "requeue"  # try again, after a time, elsewhere if possible
    HOLD = "hold"  # keep it in the queue, but do not start it until somebody lets it


class Standing(Enum):
    """What a system means to do with a job that it warned, or told to end."""

    RUNS = "runs"  # nothing: it starts again where its wrapper gives it back
    QUEUED = "queued"  # to start it again, whatever its wrapper says
    OVER = "over"  # not to start it again


@dataclass(frozen=True)
class Ending:
    """How this process is to leave. Commands run in order, each with a deadline; if one fails `otherwise` counts."""

    exit_code: int | None = 0
    signal: int | None = None
    commands: tuple[tuple[str, ...], ...] = ()
    files: tuple[tuple[bytes, bytes], ...] = ()  # (path, content) to write: HTCondor's wrapper error file
    opens: bytes = b""  # the folder of these files: at the very end others may find and read them
    delay: float = 0.0  # the least time this process keeps the job before it leaves, where no command can say "later"
    otherwise: Ending | None = None


def whole(text: str) -> int | None:
    """A number of decimal digits; None for all else."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 19 else None


def one_line(text: str, longest: int = 200, *, without: str = "") -> str:
    """Plain printable ASCII, for comments of batch systems and for logs."""
    return "".join(char if " " <= char <= "~" and char not in without else "?" for char in text)[:longest]


NODE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")


def one_node(name: str) -> str:
    """Raises ValueError for what a system's command would take for an option, for more than one node, or for none."""
    if not NODE_NAME.fullmatch(name) or name.upper() == "ALL":
        raise ValueError(f"{name[:60]!r} is no name of a node")
    return name


class Dialect(Protocol):
    """One batch system's language. It keeps nothing of a job: that is in its `Job`, or a subclass."""

    name: str
    failed: Ending = Ending(OUR_FAILURE)

    def read(self, here: Surroundings) -> Job:
        """Raises NotInAJob when these are not the surroundings of a job of this system."""

    def tell(self, job: Job, verdict: Verdict, outcome: Outcome, tries: int, settings: Settings) -> Ending:
        """`verdict` in this system's words. *tries*: starts so far that failed for lack of a machine, this one included."""
        if verdict is Verdict.MIRROR:
            return self.mirror(job, outcome)
        return self.failed if verdict is Verdict.FAIL else self.again(job, verdict, outcome, tries, settings)

    def mirror(self, job: Job, outcome: Outcome) -> Ending:
        """End as the payload ended; one that was ended before it began ends by TERM, as a native job does."""
        number = outcome.signal if outcome.payload_ran else signal.SIGTERM
        return Ending(exit_code=None if number is not None else outcome.exit_code, signal=number)

    def again(self, job: Job, verdict: Verdict, outcome: Outcome, tries: int, settings: Settings) -> Ending:
        """For REQUEUE and HOLD."""

    def give_back(self, job: Job, *, is_queued: bool) -> Ending:
        """For a job that goes on from its checkpoint: it is to start again soon, and this counts as no failure. *is_queued*: the
        system starts it by itself."""
        return self.failed

    def ask_standing(self, job: Job) -> tuple[str, ...]:
        """The command that tells how a job stands; () where the system itself sees to what becomes of a job that it ends."""
        return ()

    def standing(self, job: Job, printed: bytes) -> Standing:
        """What that command says."""
        return Standing.RUNS

    def count(self, job: Job) -> tuple[str, ...]:
        """The command that tells how often this job was requeued by us; () where the system cannot keep a number."""
        return ()

    def counted(self, job: Job, printed: bytes) -> Job:
        """The job with that number, `failed_starts`, and whatever else of the command's answer `tell` needs."""
        return job

    def devices(self, env: Mapping[str, str]) -> dict[str, list[str]]:
        """class -> the system's own names of the devices that a job was given. Raises HostError where it does not tell which."""
        return {}

    def alive(self) -> tuple[str, ...]:
        """The command that lists the jobs the system knows to run on this node."""

    def living(self, printed: bytes) -> frozenset[str]:
        """Their ids, in the form of `Job.id` (aliases too). Raises ValueError for what is not such a list."""

    def close_node(self, node: str, reason: str) -> tuple[tuple[str, ...], ...]:
        """The commands that take a node out of service, with the reason where everybody looks for it."""

    def open_node(self, node: str) -> tuple[tuple[str, ...], ...]: ...
    def why_closed(self, node: str) -> tuple[str, ...]:
        """The command that tells whether, and why, a node is closed."""

    def closed_by_us(self, printed: bytes) -> bool:
        """Was it we who closed it? Only then may we open it."""

    def epilog(self, env: Mapping[str, str], argv: tuple[str, ...]) -> tuple[str, str]:
        """(job id, user name or uid) of the job that ended, for the hook that runs as root after it."""
