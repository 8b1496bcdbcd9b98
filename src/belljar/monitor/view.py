"""What the page and `belljar top` show: plain values that JSON can say, made of journals and ledgers, and added up over nodes.

A *part* is what one node shows: `node`, `machines` (those that live, then those that ended last), `tally` (what ended, counted), `hours`
(of each hour, how many ended and failed), `modes` (its vacuum, bait and leases)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from belljar import errors
from belljar.model import Cause
from belljar.monitor.outcomes import PHASES, Ended
from belljar.records import dataclass

Values = dict[str, Any]
SHOWN = 200  # machines that ended last
PERCENTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
NO_FAILURE = (Cause.FINISHED.value, Cause.CANCELLED.value)
HINTS = {  # where neither the machine's row nor its error has one
    Cause.WALLTIME.value: "Ask for more time: `--timeout`, or the batch job's own limit.",
    Cause.GUEST_OOM.value: "Ask for more with `--memory`; a batch job, for more memory.",
    Cause.BOOT_FAILED.value: errors.BootFailed.hint,
    Cause.GUEST_LOST.value: errors.GuestError.hint,
    Cause.HOST_OOM.value: errors.DomainKilled.hint,
    Cause.IMAGE_FAULT.value: errors.ImageError.hint,
    Cause.NODE_FAULT.value: errors.HostError.hint,
    Cause.REFUSED.value: errors.BelljarError.hint,
}
BLANK: Values = {  # a machine of which nothing is known
    **dict.fromkeys(("id", "node", "name", "user", "image", "requester", "start", "state", "cause", "reason"), ""),
    "cpus": 0, "memory": 0, "phases": (), "ended": None,
}  # fmt: skip


@dataclass(frozen=True)
class Node:
    """A node as its monitor or its ledger shows it."""

    name: str
    part: Values
    heard: float = 0.0  # when it last answered
    why: str = ""  # it is silent, and why; "" where it is not


def machine_of(ended: Ended) -> Values:
    """One that ended, its phases with the moments of their beginnings."""
    moment, phases = ended.started, list[tuple[str, float]]()
    for phase in PHASES:
        if seconds := ended.phases.get(phase):
            phases.append((phase, round(moment, 3)))
            moment += seconds
    return {
        "id": ended.id, "node": ended.node, "name": ended.name, "user": ended.user, "image": ended.image, "requester": ended.requester,
        "cpus": ended.cpus, "memory": ended.memory, "start": ended.path, "state": "failed" if is_failure(ended) else "ended",
        "phases": phases, "ended": ended.ended, "cause": cause_of(ended), "reason": ended.reason,
    }  # fmt: skip


def tally_of(ended: Ended) -> Values:
    """One that ended, counted."""
    failed, latest = int(is_failure(ended)), [ended.ended, ended.id, ended.node, ended.reason, hint_of(ended)]
    use = {"machines": 1, "failed": failed, "cpu_seconds": ended.wall * ended.cpus}
    return {
        "machines": 1, "failed": failed, "users": {ended.user: use},
        "starts": {ended.path: {f"{ended.until_ready:.2g}": 1}} if ended.path and ended.run else {},
        "causes": {cause_of(ended): {"count": 1, "latest": latest}} if failed else {},
    }  # fmt: skip


def add(total: Values, more: Mapping[str, Any]) -> None:
    """Add numbers up, name by name; of lists the later one is kept."""
    for name, value in more.items():
        if isinstance(value, dict):
            add(total.setdefault(name, {}), value)
        else:
            total[name] = max(total.get(name, []), value) if isinstance(value, list) else total.get(name, 0) + value


def is_failure(ended: Ended) -> bool:
    """Did something end it? A payload that ends by itself, with any exit code, or is cancelled, did not fail here."""
    return ended.cause not in NO_FAILURE


def cause_of(ended: Ended) -> str:
    """With the class of the error, where one was raised."""
    return f"{ended.cause}{f': {ended.error}' if ended.error else ''}"


def hint_of(ended: Ended) -> str:
    """The sentence that says what to do."""
    kind = getattr(errors, ended.error, None)
    usual = kind.hint if isinstance(kind, type) and issubclass(kind, errors.BelljarError) else ""
    return errors.about(ended.hint or usual or HINTS.get(ended.cause, ""), ended.id)


def view(nodes: Iterable[Node], *, is_trusted: bool) -> Values:
    """All nodes together, in sections. *is_trusted*: with names of machines, users and nodes, and what machines said."""
    nodes, total = [*nodes], Values()
    for node in nodes:
        add(total, {"hours": {}, "tally": {"machines": 0, "failed": 0, "starts": {}, "users": {}, "causes": {}}})
        add(total, {name: node.part.get(name, {}) for name in ("tally", "hours")})
    tally, machines = total["tally"], [machine for node in nodes for machine in node.part.get("machines", ())]
    live = [machine for machine in machines if machine["ended"] is None]
    causes = []
    for cause, failures in sorted(tally["causes"].items(), key=lambda item: -item[1]["count"]):
        moment, id, node_name, reason, hint = failures["latest"]
        names = {"machine": id, "node": node_name, "reason": reason, "hint": hint} if is_trusted else {"hint": HINTS.get(cause.partition(":")[0], "")}  # fmt: skip
        causes.append({"cause": cause, "count": failures["count"], "last": moment, **names})
    sections = {
        "totals": {
            "live": len(live), "cpus": sum(machine["cpus"] for machine in live), "memory": sum(machine["memory"] for machine in live),
            "states": Counter(machine["state"] for machine in live), "machines": tally["machines"], "failed": tally["failed"],
            "users": len(tally["users"]), "nodes": len(nodes), "silent": sum(bool(node.why) for node in nodes),
        },
        "starts": [{"path": path, **percentiles(counts)} for path, counts in sorted(tally["starts"].items())],
        "hours": sorted((int(hour), counts["machines"], counts["failed"]) for hour, counts in total["hours"].items()),
        "causes": causes,
    }  # fmt: skip
    return sections | _names(nodes, machines, tally) if is_trusted else sections


def _names(nodes: list[Node], machines: list[Values], tally: Values) -> Values:
    """The sections that only a reader with the token gets."""
    live, none = (
        [machine for machine in machines if machine["ended"] is None],
        {"machines": 0, "failed": 0, "cpu_seconds": 0},
    )
    ended = sorted(
        (machine for machine in machines if machine["ended"] is not None), key=lambda machine: -machine["ended"]
    )
    users = {user: {"user": user, "live": 0, "cpus": 0, **none, **use} for user, use in tally["users"].items()}
    for machine in live:
        add(users.setdefault(machine["user"], {"user": machine["user"], **none}), {"live": 1, "cpus": machine["cpus"]})
    rows = [
        {
            "node": node.name, "heard": node.heard, "why": node.why, "machines": node.part.get("tally", {}).get("machines", 0),
            "failed": node.part.get("tally", {}).get("failed", 0), "live": sum(machine["node"] == node.name for machine in live),
        }
        for node in nodes
    ]  # fmt: skip
    return {
        "machines": [*live, *ended[:SHOWN]], "nodes": rows, "modes": [mode for node in nodes for mode in node.part.get("modes", ())],
        "users": sorted(users.values(), key=lambda user: (-user["cpus"], -user["cpu_seconds"])),
    }  # fmt: skip


def percentiles(counts: Mapping[str, int]) -> Values:
    """Of seconds, to two digits."""
    number, spread, shown, passed = sum(counts.values()), sorted((float(s), n) for s, n in counts.items()), Values(), 0
    for seconds, count in spread:
        passed += count
        shown |= {
            name: seconds for name, share in PERCENTILES.items() if name not in shown and passed >= share * number
        }
    return {"count": number, **shown, "spread": spread}
