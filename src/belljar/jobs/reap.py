"""`belljar reap`: what dead supervisors left is finished, and machines that outlived their batch jobs are ended, for root those of
every user of the node."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Collection, Iterator
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

from belljar import batch
from belljar.batch.node import Answer, Decision, Live, ask, decide
from belljar.errors import BelljarError
from belljar.host.files import private_folder, read_json, write_whole
from belljar.host.locks import locked
from belljar.host.privileges import User
from belljar.jobs import Runtime, devices
from belljar.jobs.node import memory_folder, runner
from belljar.jobs.users import MOST_ROWS, asked_as, users_of
from belljar.reading import from_json
from belljar.records import dataclass

MEMORY = "batch-gone.json"
USER_TIMEOUT = 60.0  # seconds to look through one user's folders, or to end machines there
LOCK_TIMEOUT = 10.0


@dataclass(frozen=True)
class Row:
    """What became of a machine or a device, or of a thing that was a machine's, and why it could not be cleared away."""

    user: str  # "": our own
    machine: str
    what: str
    where: str = ""  # a path, a process, or the job
    error: str = ""


def reap(runtime: Runtime, systems: Collection[str], *, dry: bool) -> tuple[list[Row], list[str]]:
    """Finish what dead supervisors left, and end machines whose job these systems do not know any more. Returns what was
    done, and who could not be asked."""
    rows, machines, trouble = look(runtime, dry=dry)
    ours = {live: user for live, user in machines.items() if live.system in systems}
    asked = sorted({live.system for live in ours})
    answers = {name: ask(batch.load(name).dialect, runner(runtime, name)) for name in asked}
    for name, answer in answers.items():
        if answer.living is None:
            trouble.append(f"{name} cannot be asked, its machines are left alone: {answer.trouble}")
    if ours:
        decision = judge(runtime, list(ours), answers, dry=dry)
        concerned = (*decision.to_end, *decision.waiting)
        rows += [result(runtime, live, user, decision, dry=dry) for live, user in ours.items() if live.key in concerned]
    return rows, trouble


def judge(runtime: Runtime, live: list[Live], answers: dict[str, Answer], *, dry: bool) -> Decision:
    """Decide, with what is remembered from the time before."""
    path = (memory_folder(runtime) if os.geteuid() == 0 else runtime.folders.run) / MEMORY
    now = time.clock_gettime(time.CLOCK_BOOTTIME)  # nobody sets it, and no machine outlives a boot
    if not dry:
        private_folder(path.parent)
    lock = path.with_suffix(".lock")
    with nullcontext() if dry else locked(lock, timeout=LOCK_TIMEOUT, what="remember which jobs are gone"):
        known = dict[str, float]()
        with suppress(OSError, ValueError, BelljarError):  # a file that makes no sense is as none
            known = from_json(dict[str, float], read_json(path, 1 << 22))
        decision = decide(live, answers, known, now, runtime.settings.batch.gone_after)
        if not dry:
            write_whole(path, json.dumps(decision.remembered).encode() + b"\n")
    return decision


def result(runtime: Runtime, live: Live, user: User | None, decision: Decision, *, dry: bool) -> Row:
    """What became of a user's machine, or ours; ends it where that was decided."""
    id, what, error = live.key.partition("/")[2], "would be ended", ""
    if live.key not in decision.to_end:
        what = f"job unknown; ended when it is so in {runtime.settings.batch.gone_after:g} s again"
    elif not dry:
        try:
            ended = asked_as(runtime, user, partial(_end, id), timeout=USER_TIMEOUT, what="end a machine")
            what = str(ended)[:80]
        except BelljarError as exc:
            what, error = "not ended", exc.message
    jobs = ", ".join(f"{live.system}:{job}" for job in sorted(live.jobs)[:3])
    return Row(user.name if user else "", id, what, jobs, error)


def _end(id: str, runtime: Runtime) -> str:
    """End this machine, or give this device back; runs as its owner."""
    if devices.bindings(runtime).release([id]):  # no machine, but the address of a device
        return "device given back"
    views = [view for view in runtime.machines.list() if view.id == id]
    return "ended" if all(runtime.reaper.end(view) for view in views) else "does not go away"


# -- looking -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Seen:
    """What is seen as one user: what dead supervisors left, and live machines and bound devices with the names of their jobs."""

    left: tuple[tuple[str, str, str, str], ...]
    machines: dict[str, tuple[str, ...]]


def look(runtime: Runtime, *, dry: bool) -> tuple[list[Row], dict[Live, User | None], list[str]]:
    """What dead supervisors left, finished unless *dry*; the live machines and bound devices of batch jobs, for root of every
    user, with their owners (None: ourselves); and who could not be asked."""
    rows, machines, trouble = list[Row](), dict[Live, User | None](), list[str]()
    for user in (None, *users_of(runtime)):
        owner = user.name if user else ""
        try:
            looked = asked_as(runtime, user, partial(_look, dry=dry), timeout=USER_TIMEOUT, what="look for machines")
            seen = from_json(Seen, looked)
        except (BelljarError, ValueError) as exc:
            trouble.append(f"{owner or 'machines'}: cannot be looked at: {exc}")
            continue
        rows += [Row(owner, *(word[:300] for word in left)) for left in seen.left[:MOST_ROWS]]
        machines |= dict.fromkeys(_lives(seen, user), user)
    return rows, machines, trouble


def _look(runtime: Runtime, *, dry: bool) -> dict[str, Any]:
    """A `Seen` in JSON; runs as the machines' owner."""
    from belljar.machine.outside.registry import jobs_of

    bindings = devices.bindings(runtime)
    left = runtime.reaper.leftovers() if dry else runtime.reaper.full()
    rows = [(undone.machine, undone.what, undone.path, undone.error) for undone in left]
    for binding in bindings.left():  # somebody was killed over it
        what, error = "device half bound", ""
        try:
            what = what if dry else _end(binding.address, runtime)
        except BelljarError as exc:
            error = exc.message
        rows.append(("", what, binding.address, error))
    jobs = {view.id: sorted(jobs_of(view))[:8] for view in runtime.machines.list() if view.alive}
    return {"left": rows, "machines": jobs | {binding.address: [binding.job] for binding in bindings.all()}}


def _lives(seen: Seen, user: User | None) -> Iterator[Live]:
    """A user's word about that user's machines, as far as it makes sense."""
    for id, names in seen.machines.items():
        pairs = [(system, job) for system, _, job in (name[:200].partition(":") for name in names) if job]
        if system := next((system for system, _ in pairs if system in batch.names()), ""):
            jobs = frozenset(job for other, job in pairs if other == system)
            yield Live(f"{user.uid if user else ''}/{id}", system, jobs)
