"""What the page and `belljar top` show: nodes with their machines and with what ended there, and the sections made of all of them."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from operator import attrgetter
from typing import Any

from belljar import errors
from belljar.model import Cause, to_json
from belljar.monitor import Machine
from belljar.records import dataclass

Values = dict[str, Any]
SHOWN = 200  # machines that ended last
HOUR = 3600
PERCENTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
PER_USER = ("live", "cpus", "machines", "failed", "cpu_seconds")
HINTS = {  # of causes that are no error of belljar's
    Cause.WALLTIME.value: "Ask for more time: `--timeout`, or the batch job's own limit.",
    Cause.GUEST_OOM.value: "Ask for more with `--memory`; a batch job, for more memory.",
}


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
    ended: tuple[Machine, ...] = ()  # the latest of them, and the latest failure of each cause
    # All that ended, added up: table, row, column, number. `starts` has by path how many took so many seconds.
    counts: tuple[tuple[str, str, str, float], ...] = ()
    modes: tuple[Mode, ...] = ()
    heard: float = 0.0  # when its monitor last answered
    why: str = ""  # why nothing is known of it just now


class Counted:
    """The machines that ended on a node, as they are counted."""

    def __init__(self) -> None:
        self._counts = defaultdict[tuple[str, str, str], float](int)
        self._recent, self._latest = deque[Machine](maxlen=SHOWN), dict[str, Machine]()

    def count(self, machine: Machine) -> None:
        sums = machine.sums()
        numbers = {"machines": 1, "failed": sums["failed"], "cpu_seconds": sums["wall"] * machine.cpus}
        rows = {"all": "", "hours": str(int(machine.ended // HOUR * HOUR)), "users": machine.user}
        if machine.has_failed:
            rows["causes"] = machine.failure
            latest = self._latest.get(machine.failure, machine)
            self._latest[machine.failure] = max(machine, latest, key=attrgetter("ended"))
        self._recent.append(machine)
        for table, row in rows.items():
            for column, number in numbers.items():
                self._counts[table, row, column] += number
        if machine.path and sums["started"]:
            self._counts["starts", machine.path, f"{machine.until_ready:.2g}"] += 1

    def node(self, name: str) -> Node:
        ended = {machine.id: machine for machine in (*self._latest.values(), *self._recent)}
        counts = tuple((*key, number) for key, number in self._counts.items())
        return Node(name, ended=tuple(ended.values()), counts=counts)


def shown(machine: Machine, node: str) -> Values:
    """A machine as the page gets it. Phases come with their beginnings."""
    phases = machine.states or [(name, round(begin, 3)) for name, begin, end in machine.timeline() if begin < end]
    return {
        "id": machine.id, "node": node, "name": machine.name, "user": machine.user, "image": machine.image, "cpus": machine.cpus,
        "memory": machine.memory, "requester": machine.requester, "start": machine.path, "phases": phases,
        "state": machine.state or ("failed" if machine.has_failed else "ended"), "ended": machine.ended or None,
        "cause": machine.failure, "reason": machine.reason,
        "hint": errors.about(machine.hint or usual_hint(machine.failure), machine.id),
    }  # fmt: skip


def usual_hint(cause: str) -> str:
    """The sentence that says what to do, for a cause with the class of its error."""
    word, _, error = cause.partition(": ")
    kind = getattr(errors, error, None)
    return kind.hint if isinstance(kind, type) and issubclass(kind, errors.BelljarError) else HINTS.get(word, "")


def view(nodes: Sequence[Node], *, is_trusted: bool) -> Values:
    """All nodes together, in sections. *is_trusted*: with names of machines, users and nodes, and what machines said."""
    tables = defaultdict[str, defaultdict[str, defaultdict[str, float]]](lambda: defaultdict(lambda: defaultdict(int)))
    for node in nodes:
        for table, row, column, number in node.counts:
            tables[table][row][column] += number
    live = [shown(machine, node.name) for node in nodes for machine in node.living]
    ended = [shown(machine, node.name) for node in nodes for machine in node.ended]
    ended.sort(key=lambda machine: -machine["ended"])
    users = tables["users"]
    for machine in live:
        users[machine["user"]]["live"] += 1
        users[machine["user"]]["cpus"] += machine["cpus"]
    totals = {
        "live": len(live), "cpus": sum(machine["cpus"] for machine in live), "memory": sum(machine["memory"] for machine in live),
        "states": Counter(machine["state"] for machine in live), **{column: tables["all"][""][column] for column in ("machines", "failed")},
    }  # fmt: skip
    sections: Values = {
        "totals": totals,
        "hours": sorted((int(hour), counts["machines"], counts["failed"]) for hour, counts in tables["hours"].items()),
        "starts": [{"path": path, **percentiles(counts)} for path, counts in sorted(tables["starts"].items())],
        "causes": [*_causes(tables["causes"], ended, is_trusted=is_trusted)],
    }
    if is_trusted:
        rows = [{"user": user, **dict.fromkeys(PER_USER, 0), **counts} for user, counts in users.items()]
        sections["users"] = sorted(rows, key=lambda row: (-row["cpus"], -row["cpu_seconds"]))
        sections["machines"] = [*live, *ended[:SHOWN]]
        sections["modes"] = [to_json(mode) for node in nodes for mode in node.modes]
        sections["nodes"] = [_about(node) for node in nodes]
    return sections


def _causes(table: Mapping[str, Mapping[str, float]], ended: Sequence[Values], *, is_trusted: bool) -> Iterator[Values]:
    """Causes of failures, the most frequent first, each with its latest machine; what that said is for trusted readers."""
    latest = {machine["cause"]: machine for machine in reversed(ended)}
    for cause, counts in sorted(table.items(), key=lambda item: -item[1]["machines"]):
        last = latest[cause]
        details = {"hint": last["hint"], "reason": last["reason"], "machine": last["id"], "node": last["node"]}
        more = details if is_trusted else {"hint": usual_hint(cause)}
        yield {"cause": cause, "count": counts["machines"], "last": last["ended"], **more}


def _about(node: Node) -> Values:
    about = {"node": node.name, "heard": node.heard, "why": node.why, "live": len(node.living)}
    ended = {column: number for table, _, column, number in node.counts if table == "all"}
    return {**about, "machines": 0, "failed": 0, **ended}


def percentiles(counts: Mapping[str, float]) -> Values:
    """Of seconds, to two digits."""
    spread = sorted((float(seconds), count) for seconds, count in counts.items())
    passed = [*accumulate(count for _, count in spread)]
    shares = {name: spread[bisect_left(passed, share * passed[-1])][0] for name, share in PERCENTILES.items()}
    return {"count": passed[-1], **shares, "spread": spread}
