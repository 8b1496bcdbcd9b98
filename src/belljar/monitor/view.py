"""What the page and `belljar top` show: nodes with their machines and with what ended there, and the sections made of all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from belljar import errors
from belljar.model import Cause, to_json
from belljar.monitor import PHASES, Ended
from belljar.records import dataclass, field

Values = dict[str, Any]
Table = dict[str, dict[str, float]]  # rows of named numbers
SHOWN = 200  # machines that ended last
HOUR = 3600
PERCENTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
HINTS = {  # of causes that are no error of belljar's
    Cause.WALLTIME.value: "Ask for more time: `--timeout`, or the batch job's own limit.",
    Cause.GUEST_OOM.value: "Ask for more with `--memory`; a batch job, for more memory.",
}


@dataclass(frozen=True)
class Machine:
    """One that lives or has ended. Moments are seconds since the epoch; memory is in bytes."""

    id: str
    name: str
    user: str
    image: str
    requester: str
    cpus: int
    memory: int
    start: str  # "clone", "cold", "template", or "": not started yet
    state: str  # while it lives: that of its journal, or "abandoned"; then "ended" or "failed"
    phases: tuple[tuple[str, float], ...]  # each with its beginning
    ended: float | None = None
    cause: str = ""
    reason: str = ""
    hint: str = ""


@dataclass(frozen=True)
class Counted:
    """The machines that ended on a node, counted; the latest of them, and the latest failure of each cause."""

    hours: Table = field(default_factory=dict)  # by the hour's first second
    users: Table = field(default_factory=dict)
    causes: Table = field(default_factory=dict)  # of failures
    starts: Table = field(default_factory=dict)  # by path, of how many took so many seconds, to two digits
    recent: dict[str, Machine] = field(default_factory=dict)  # by id
    latest: dict[str, Machine] = field(default_factory=dict)  # by cause

    def count(self, ended: Ended) -> None:
        machine, counts = machine_of(ended), {"machines": 1, "failed": int(ended.has_failed)}
        self.recent[ended.id] = machine
        if len(self.recent) > SHOWN:
            del self.recent[next(iter(self.recent))]
        _add(self.hours, {str(int(ended.ended // HOUR * HOUR)): counts})
        _add(self.users, {ended.user: {**counts, "cpu_seconds": ended.wall * ended.cpus}})
        if ended.path and ended.run:
            _add(self.starts, {ended.path: {f"{ended.until_ready:.2g}": 1}})
        if ended.has_failed:
            _add(self.causes, {machine.cause: {"machines": 1}})
            self.latest[machine.cause] = max(machine, self.latest.get(machine.cause, machine), key=_end)


@dataclass(frozen=True)
class Mode:
    """A vacuum, a bait or a lease service. *at*: when it wrote this."""

    kind: str
    name: str
    state: str
    why: str
    unit: str
    at: float
    bars: tuple[tuple[str, float, float | None, str], ...]  # name, value, target, why


@dataclass(frozen=True)
class Node:
    """A node as its own monitor shows it, or its ledger."""

    name: str
    living: tuple[Machine, ...] = ()
    counted: Counted = field(default_factory=Counted)
    modes: tuple[Mode, ...] = ()
    heard: float = 0.0  # when its monitor last answered
    why: str = ""  # why nothing is known of it just now


def machine_of(ended: Ended) -> Machine:
    moment, phases, cause = ended.started, list[tuple[str, float]](), ended.cause
    for phase in PHASES:
        if seconds := ended.phases.get(phase):
            phases.append((phase, round(moment, 3)))
            moment += seconds
    cause += f": {ended.error}" if ended.error else ""
    return Machine(
        ended.id, ended.name, ended.user, ended.image, ended.requester, ended.cpus, ended.memory, ended.path,
        "failed" if ended.has_failed else "ended", tuple(phases), ended.ended, cause, ended.reason,
        errors.about(ended.hint or usual_hint(cause), ended.id),
    )  # fmt: skip


def usual_hint(cause: str) -> str:
    """The sentence that says what to do, for a cause with the class of its error."""
    word, _, error = cause.partition(": ")
    kind = getattr(errors, error, None)
    return kind.hint if isinstance(kind, type) and issubclass(kind, errors.BelljarError) else HINTS.get(word, "")


def view(nodes: Sequence[Node], *, is_trusted: bool) -> Values:
    """All nodes together, in sections. *is_trusted*: with names of machines, users and nodes, and what machines said."""
    tables = {name: Table() for name in ("hours", "users", "causes", "starts")}
    for node in nodes:
        for name, table in tables.items():
            _add(table, getattr(node.counted, name))
    hours, users, causes, starts = tables.values()
    live = [machine for node in nodes for machine in node.living]
    sections = {
        "totals": {
            "live": len(live), "cpus": sum(machine.cpus for machine in live), "memory": sum(machine.memory for machine in live),
            "states": Counter(machine.state for machine in live), "machines": _sum(hours, "machines"), "failed": _sum(hours, "failed"),
            "users": len(users), "nodes": len(nodes), "silent": sum(bool(node.why) for node in nodes),
        },
        "hours": sorted((int(hour), counts["machines"], counts["failed"]) for hour, counts in hours.items()),
        "starts": [{"path": path, **percentiles(counts)} for path, counts in sorted(starts.items())],
        "causes": [
            {"cause": cause, "count": counts["machines"], **_latest(cause, nodes, is_trusted=is_trusted)}
            for cause, counts in sorted(causes.items(), key=lambda item: -item[1]["machines"])
        ],
    }  # fmt: skip
    return sections | (_names(nodes, users) if is_trusted else {})


def _latest(cause: str, nodes: Sequence[Node], *, is_trusted: bool) -> Values:
    """The latest failure of this cause, for a stranger without what the machine said."""
    failures = [(node.name, node.counted.latest[cause]) for node in nodes if cause in node.counted.latest]
    node, latest = max(failures, key=lambda failure: _end(failure[1]))
    if not is_trusted:
        return {"last": latest.ended, "hint": usual_hint(cause)}
    return {"last": latest.ended, "machine": latest.id, "node": node, "reason": latest.reason, "hint": latest.hint}


def _names(nodes: Sequence[Node], users: Table) -> Values:
    """The sections that only a reader with the token gets."""
    live = [{**to_json(machine), "node": node.name} for node in nodes for machine in node.living]
    ended = [{**to_json(machine), "node": node.name} for node in nodes for machine in node.counted.recent.values()]
    for machine in live:
        _add(users, {machine["user"]: {"live": 1, "cpus": machine["cpus"]}})
    none = dict.fromkeys(("live", "cpus", "machines", "failed", "cpu_seconds"), 0)
    rows = [{"user": user, **none, **counts} for user, counts in users.items()]
    return {
        "machines": [*live, *sorted(ended, key=lambda machine: -machine["ended"])[:SHOWN]],
        "users": sorted(rows, key=lambda row: (-row["cpus"], -row["cpu_seconds"])),
        "modes": [to_json(mode) for node in nodes for mode in node.modes],
        "nodes": [
            {
                "node": node.name, "heard": node.heard, "why": node.why, "live": len(node.living),
                "machines": _sum(node.counted.hours, "machines"), "failed": _sum(node.counted.hours, "failed"),
            }
            for node in nodes
        ],
    }  # fmt: skip


def _end(machine: Machine) -> float:
    return machine.ended or 0.0


def _add(total: Table, more: Mapping[str, Mapping[str, float]]) -> None:
    for name, counts in more.items():
        row = total.setdefault(name, {})
        for key, number in counts.items():
            row[key] = row.get(key, 0) + number


def _sum(table: Table, key: str) -> float:
    return sum(row[key] for row in table.values())


def percentiles(counts: Mapping[str, float]) -> Values:
    """Of seconds, to two digits."""
    shown, passed, spread = Values(), 0.0, sorted((float(seconds), count) for seconds, count in counts.items())
    for seconds, count in spread:
        passed += count
        for name, share in PERCENTILES.items():
            if passed >= share * sum(counts.values()):
                shown.setdefault(name, seconds)
    return {"count": passed, **shown, "spread": spread}
