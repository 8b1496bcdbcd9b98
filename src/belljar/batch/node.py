"""A node as a whole: when it is closed, and which of its machines have outlived their jobs.

So many node faults in a row close it, counted from the records of ended jobs. Users can write those, so a report is a
few validated words and can only count. A machine of root's own tests whether the node works, and opens it again.

A batch system that does not answer, or makes no sense, is never read as "the job is gone"; nor is one answer enough,
for a system that was just restarted may not know its jobs yet.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path

from belljar.batch.job.terms import NODE_NAME, Dialect, one_line
from belljar.errors import BelljarError
from belljar.host.files import private_folder, read_json, write_whole
from belljar.host.locks import Lock, locked
from belljar.model import OutcomeClass
from belljar.reading import from_json
from belljar.records import dataclass, field, replace

LOCK_TIMEOUT = 10.0
LATEST = 1 << 40  # seconds since the epoch: no moment of ours
REMEMBERED = 64  # machines that were counted already; a job that comes again leaves its old records on the node
# Of a machine that ran to its payload's end: the node works.
GOOD = (OutcomeClass.PAYLOAD.value, OutcomeClass.WALLTIME.value)
# A machine that died with its job tells nothing about the node: whoever ends a job may kill QEMU first.
KILLED = ("", "DomainKilled")


@dataclass(frozen=True)
class Report:
    """What a job's newest machine left behind, as far as it can be believed."""

    machine: str
    job: str
    klass: str
    error: str
    reason: str
    started: float = 0.0  # seconds since the epoch


@dataclass(frozen=True)
class Node:
    """What is remembered of this node."""

    faults: int = 0  # in a row
    jobs: tuple[str, ...] = ()  # that had them
    passes: int = 0  # of the self-check, in a row
    failures: int = 0  # of the self-check, in a row
    reason: str = ""  # of the last fault
    closed: float = 0.0  # when it was closed by us, seconds since the epoch; 0: it was not
    counted: tuple[str, ...] = field(default=())  # machines


def report_of(raw: Mapping[str, object], job: str) -> Report | None:
    """A report from what the child said; None where it makes no sense."""
    started = raw.get("started")
    values = (raw.get(name) for name in ("machine", "class", "error", "reason"))
    machine, klass, error, reason = (value if isinstance(value, str) else "" for value in values)
    if not re.fullmatch(r"[0-9a-f]{12}", machine) or klass not in {each.value for each in OutcomeClass}:
        return None
    when = float(started) if isinstance(started, (int, float)) and 0 <= started < LATEST else 0.0
    return Report(machine, job, klass, error if re.fullmatch(r"[A-Za-z]{0,60}", error) else "", one_line(reason), when)


def count(node: Node, report: Report, limit: int) -> tuple[Node, bool]:
    """The node after this report, counted once, and whether it is to be closed. One job alone never closes a node."""
    if report.machine in node.counted:
        return node, False
    if node.closed and report.started > node.closed:  # somebody put it into service again
        node = replace(node, closed=0.0, faults=0, jobs=())
    counted = (*node.counted, report.machine)[-REMEMBERED:]
    if report.klass in GOOD:
        return replace(node, faults=0, jobs=(), counted=counted), False
    if report.klass != OutcomeClass.NODE.value or report.error in KILLED:
        return replace(node, counted=counted), False
    jobs = tuple(dict.fromkeys((*node.jobs, report.job)))[-REMEMBERED:]
    node = replace(node, faults=node.faults + 1, jobs=jobs, reason=report.reason, counted=counted, passes=0)
    is_enough = node.faults >= limit and len(jobs) >= min(limit, 2)
    return node, bool(limit) and is_enough and not node.closed


def checked(node: Node, passed: bool, reason: str, limit: int) -> tuple[Node, bool]:
    """The node after a self-check, and whether it may be opened."""
    if not passed:
        return replace(node, passes=0, failures=node.failures + 1, reason=one_line(reason)), False
    node = replace(node, passes=node.passes + 1, failures=0)
    return node, node.passes >= max(limit, 1)


def is_hopeless(node: Node, limit: int) -> bool:
    """Did so many self-checks in a row fail that the node is to be closed? On a full disk jobs leave no records."""
    return bool(limit) and node.failures >= limit and not node.closed


def name_of(variable: str, env: Mapping[str, str], host: str) -> str:
    """The node's name in its system's words: by the variable that tells its hooks, else its host name."""
    named = env.get(variable, "")
    return named if NODE_NAME.fullmatch(named) else host


class Memory:
    """A node's state in a file of root's. Locked while it is changed, written whole."""

    def __init__(self, folder: Path, system: str, node: str) -> None:
        self._path = private_folder(folder) / f"{system}-{node}.json"

    def read(self) -> Node:
        """What is remembered; a file that makes no sense is as none."""
        try:
            return from_json(Node, read_json(self._path, 1 << 16))
        except (FileNotFoundError, ValueError):
            return Node()

    def write(self, node: Node) -> None:
        write_whole(self._path, json.dumps(asdict(node)).encode() + b"\n")

    def locked(self) -> Lock:
        return locked(self._path.with_suffix(".lock"), timeout=LOCK_TIMEOUT, what="count a fault of this node")


@dataclass(frozen=True)
class Live:
    """A live machine of a batch job."""

    key: str  # of whoever remembers: owner and machine
    system: str
    jobs: frozenset[str]  # every id the job is known by


@dataclass(frozen=True)
class Answer:
    """What a system said: the jobs it knows here, or why that is not known."""

    living: frozenset[str] | None
    trouble: str = ""


@dataclass(frozen=True)
class Decision:
    """What is to be done, and what is to be remembered for the next time."""

    to_end: tuple[str, ...]
    waiting: tuple[str, ...]  # unknown for the first time, or not for long enough
    remembered: dict[str, float]


def ask(dialect: Dialect, run: Callable[[tuple[str, ...]], bytes]) -> Answer:
    """Ask one system. Never raises for what a system may do wrong."""
    try:
        return Answer(dialect.living(run(dialect.alive())))
    except (BelljarError, OSError, ValueError) as exc:
        return Answer(None, str(exc))


def decide(
    live: Iterable[Live], answers: Mapping[str, Answer], remembered: Mapping[str, float], now: float, gone_after: float
) -> Decision:
    """*remembered*: when each machine's job was first not known, by a clock that nobody sets."""
    to_end, waiting, kept = list[str](), list[str](), dict[str, float]()
    for machine in live:
        living, since = answers.get(machine.system, Answer(None)).living, min(remembered.get(machine.key, now), now)
        if living is None and machine.key in remembered:
            kept[machine.key] = since
        elif living is not None and not machine.jobs & living:
            kept[machine.key] = since
            is_gone = machine.key in remembered and now - since >= gone_after
            (to_end if is_gone else waiting).append(machine.key)
    return Decision(tuple(to_end), tuple(waiting), kept)
