"""Can machines join this cell, and a bait take its jobs? What `belljar bait check` asks of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from belljar.errors import BelljarError
from belljar.findings import Finding, fail_if
from belljar.pool.gridengine.nodes import GridEngineNodes

PAGE = "docs/bait/reference.md, Grid Engine"


def needs(
    nodes: GridEngineNodes, ask: Callable[..., str], conf: str, baits: tuple[str, ...], queue: str, feature: str,
    hosts: tuple[str, ...],
) -> Iterator[Finding]:  # fmt: skip
    """*ask*: carries out a command, raises BelljarError."""
    bait = baits[0]
    managers = ask("qconf", "-sm").split()
    yield fail_if("root manages the cell", "" if "root" in managers else "root is not a manager", "qconf -am root")
    yield fail_if(
        f"bait {bait}", _asked(lambda: _bait(ask("qconf", "-sq", bait))), f"Set the prolog of {bait} ({PAGE})."
    )
    remedy = f"Make it for machines alone, without a prolog ({PAGE})."
    yield fail_if(f"queue {queue}", _asked(lambda: _queue(ask("qconf", "-sq", queue))), remedy)
    unfit = _asked(lambda: _environments(ask, bait, queue))
    remedy = f"Only those of allocation_rule $pe_slots, each in the pe_list of both queues ({PAGE})."
    yield fail_if("parallel environments", unfit, remedy)
    wrong = ", ".join(name for name, address in nodes.hosts.items() if not _is_known(ask, name, address))
    remedy = "Give the qmaster's host each name with its address, both ways: DNS, or /etc/hosts."
    yield fail_if("names of machines", f"not known by name and address: {wrong}" if wrong else "", remedy)


def _bait(text: str) -> str:
    prolog = _value(text, "prolog")
    if not prolog.startswith("root@"):
        return f"its prolog is {prolog or 'NONE'}, which takes nothing back as root"
    return "" if "$job_id" in prolog and "$ja_task_id" in prolog else "its prolog is not told job and task"


def _queue(text: str) -> str:
    prolog = _value(text, "prolog")
    return "" if prolog == "NONE" else f"its prolog is {prolog}"


def _environments(ask: Callable[..., str], bait: str, queue: str) -> str:
    """A job of several slots gets one machine."""
    there = _list(ask("qconf", "-sq", queue))
    for name in _list(ask("qconf", "-sq", bait)):
        rule = _value(ask("qconf", "-sp", name), "allocation_rule")
        if rule != "$pe_slots":
            return f"{name}: its allocation_rule is {rule}: a job of it wants several machines, and would never start"
        if name not in there:
            return f"{name}: the queue {queue} does not have it, and a job of it would never start"
    return ""


def _list(text: str) -> list[str]:
    return [name for name in re.split(r"[\s,]+", _value(text, "pe_list")) if name not in ("", "NONE")]


def _value(text: str, key: str) -> str:
    match = re.search(rf"(?m)^{key}\s+(.*)$", text.replace("\\\n", " "))
    return match[1].strip() if match else ""


def _is_known(ask: Callable[..., str], name: str, address: str) -> bool:
    """By this host's resolver."""
    try:
        return (
            ask("getent", "ahostsv4", name).split()[:1] == [address] and name in ask("getent", "hosts", address).split()
        )
    except BelljarError:
        return False


def _asked(look: Callable[[], str]) -> str:
    try:
        return look()
    except BelljarError as exc:
        return exc.message.replace("\n", " ")
