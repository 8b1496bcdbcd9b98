"""What machines take of an execution host that runs native jobs, too: the host's own consumables say what it has left for jobs.

`slots`, and `h_vmem` where the site has made it consumable, are set to what the host has without its machines. Grid Engine counts jobs
against them whatever their queue is; while they are overdrawn no job starts, and those that run go on.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from belljar.batch.gridengine.dialect import memory
from belljar.batch.job.terms import one_node, whole
from belljar.model import MIB
from belljar.pool.terms import Command, JobId, JobState, JobView, NodeView, Part

ROUNDING = 0.01  # qhost prints four digits
HINT = 'as in room = "slots=16,h_vmem=60G": what the host has for native jobs and machines together'


def whole_host(text: str) -> tuple[int, int]:
    """Processors and bytes of `slots=16,h_vmem=60G`; 0 bytes: memory is not counted. Raises ValueError: key, what is wrong, hint."""
    said = dict(part.strip().partition("=")[::2] for part in text.split(","))
    cpus, size = whole(said.get("slots", "")), memory(said.get("h_vmem", "0"))
    if not cpus or size is None or set(said) - {"slots", "h_vmem"}:
        raise ValueError("room", f"{text[:60]!r} is not what a host has", HINT)
    return cpus, size


def left_of(entry: str) -> tuple[int | None, int | None]:
    """Of a host as qhost tells of it: its slots and bytes that no job has; None: they are not counted there."""
    found = dict(re.findall(r"<resourcevalue name='(\w+)' dominance='hc'>([^<]{1,40})</resourcevalue>", entry))
    slots, size = (
        re.fullmatch(r"(-?[0-9]{1,12}(?:\.[0-9]{1,9})?)([KMG]?)", found.get(key, "")) for key in ("slots", "h_vmem")
    )
    unit = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    return int(float(slots[1])) if slots else None, int(float(size[1]) * unit[size[2]]) if size else None


def reserve(
    node: str, parts: Iterable[Part], jobs: Mapping[JobId, JobView], view: NodeView | None, host: tuple[int, int]
) -> tuple[Command, ...]:
    """The command that leaves jobs what these machines do not take; none where it is so."""
    parts = tuple(parts)
    cpus, size = max(host[0] - sum(one.cpus for one in parts), 0), max(host[1] - sum(one.memory for one in parts), 0)
    if view is None or (
        is_so(view, cpus) and (not host[1] or abs(_memory(node, jobs, view) - size) <= ROUNDING * host[1])
    ):
        return ()
    values = f"slots={cpus}" + (f",h_vmem={size // MIB}M" if host[1] else "")
    return (("qconf", "-mattr", "exechost", "complex_values", values, one_node(node)),)


def reserved(
    node: str, parts: Iterable[Part], jobs: Mapping[JobId, JobView], view: NodeView | None, host: tuple[int, int]
) -> frozenset[str]:
    """The machines that have their part: the first of them that native jobs leave room for."""
    parts = tuple(parts)
    if view is None or not is_so(view, max(host[0] - sum(one.cpus for one in parts), 0)):
        return frozenset()
    native = [job for job in jobs.values() if _is_on(job, node)]
    cpus, size = host[0] - sum(job.cpus for job in native), host[1] - sum(job.memory for job in native)
    found = []
    for part in parts:
        cpus, size = cpus - part.cpus, size - part.memory
        if cpus < 0 or (host[1] and size < 0):
            break
        found.append(part.machine)
    return frozenset(found)


def is_so(view: NodeView, cpus: int) -> bool:
    """Jobs are left so many processors of it."""
    return view.cpus == cpus and view.free_cpus >= 0


def _memory(node: str, jobs: Mapping[JobId, JobView], view: NodeView) -> int:
    return view.memory + sum(job.memory for job in jobs.values() if _is_on(job, node))


def _is_on(job: JobView, node: str) -> bool:
    return job.state in (JobState.RUNNING, JobState.ENDING) and any(one.rpartition("@")[2] == node for one in job.on)
