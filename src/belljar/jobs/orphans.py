"""Machines that outlived their batch jobs: found, of every user, judged by what the systems say, and ended."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from belljar import batch
from belljar.batch.node import Answer, Decision, Live, ask, decide
from belljar.errors import BelljarError
from belljar.host.files import private_folder, read_json, write_whole
from belljar.host.locks import locked
from belljar.host.privileges import User
from belljar.jobs.node import memory_folder, runner
from belljar.jobs.users import asked_as, users_of
from belljar.reading import from_json
from belljar.records import dataclass

if TYPE_CHECKING:
    from belljar.jobs import House

MEMORY = "batch-gone.json"
USER_TIMEOUT = 60.0  # seconds to look through one user's folders, or to end machines there
LOCK_TIMEOUT = 10.0


@dataclass(frozen=True)
class Owned:
    """A live machine of a batch job, and whose it is; None: our own."""

    user: User | None
    machine: str
    live: Live


def settle(house: House, systems: Collection[str], *, dry: bool) -> tuple[list[dict[str, str]], list[str]]:
    """End machines whose job these systems do not know any more. Returns what was done with each, and all errors."""
    machines, trouble = live_machines(house, dry=dry)
    ours = [one for one in machines if one.live.system in systems]
    timeout = house.settings.batch.ask_timeout
    names = sorted({one.live.system for one in ours})
    answers = {name: ask(batch.load(name).dialect, runner(house, name, timeout)) for name in names}
    silent = [(name, one.trouble) for name, one in answers.items() if one.living is None]
    trouble += [f"{name} cannot be asked, its machines are left alone: {why}" for name, why in silent]
    decision = judge(house, [one.live for one in ours], answers, dry=dry)
    met = (*decision.to_end, *decision.waiting)
    return [result(house, one, decision, dry=dry) for one in ours if one.live.key in met], trouble


def judge(house: House, live: list[Live], answers: dict[str, Answer], *, dry: bool) -> Decision:
    """Decide, with what is remembered from the time before."""
    folder = memory_folder(house) if os.geteuid() == 0 else house.folders.run
    path = folder / MEMORY
    now = time.clock_gettime(time.CLOCK_BOOTTIME)  # nobody sets it, and no machine outlives a boot
    gone_after = house.settings.batch.gone_after
    if dry:
        return decide(live, answers, remembered(path), now, gone_after)
    private_folder(folder)
    with locked(path.with_suffix(".lock"), timeout=LOCK_TIMEOUT, what="remember which jobs are gone"):
        decision = decide(live, answers, remembered(path), now, gone_after)
        write_whole(path, json.dumps(decision.remembered).encode() + b"\n")
    return decision


def remembered(path: Path) -> dict[str, float]:
    """What was not known before; a file that makes no sense is as none."""
    try:
        found: dict[str, float] = from_json(dict[str, float], read_json(path, 1 << 22))
    except (OSError, ValueError, BelljarError):
        return {}
    return found


def result(house: House, one: Owned, decision: Decision, *, dry: bool) -> dict[str, str]:
    """What became of it; ends the machine where that was decided."""
    owner = one.user.name if one.user else ""
    job = ", ".join(f"{one.live.system}:{id}" for id in sorted(one.live.jobs)[:3])
    if one.live.key not in decision.to_end:
        what = f"job unknown; ended when it is so in {house.settings.batch.gone_after:g} s again"
    elif dry:
        what = "would be ended"
    else:
        what = end(house, one)
    return {"user": owner, "machine": one.machine, "job": job, "what": what}


def end(house: House, one: Owned) -> str:
    try:
        if one.user is None:
            return _end(house, one.machine)
        work = partial(_end, machine=one.machine)
        return str(asked_as(house, one.user, work, timeout=USER_TIMEOUT, what="end a machine"))[:80]
    except BelljarError as exc:
        return f"not ended: {exc.message}"


def _end(house: House, machine: str) -> str:

    for view in house.machines.list():
        if view.id == machine and not house.reaper.end(view):
            return "does not go away"
    return "ended"


# -- looking -------------------------------------------------------------------------------------------------------------


def live_machines(house: House, *, dry: bool) -> tuple[list[Owned], list[str]]:
    """The live machines of batch jobs, for root of every user, and all errors. What dead supervisors left is finished
    first."""
    machines, stuck = _look(house, dry=dry)
    found, trouble = _owned(machines, None), _stuck(stuck)
    for user in users_of(house):
        try:
            look = partial(_look, dry=dry)
            machines, stuck = asked_as(house, user, look, timeout=USER_TIMEOUT, what="look for machines")
            found += _owned(machines, user)
            trouble += [f"{user.name}: {line}" for line in _stuck(stuck)]
        except (BelljarError, ValueError, TypeError) as exc:
            trouble.append(f"{user.name}'s machines cannot be seen: {exc}")
    return found, trouble


def _look(house: House, *, dry: bool) -> list[Any]:
    """[[machine, [names]], ...], and what could not be finished; runs as the machines' owner."""
    from belljar.machine.outside.registry import jobs_of

    if not house.folders.run.is_dir():
        return [[], []]
    stuck = []
    if not dry:
        try:
            stuck = [f"{one.machine} {one.what}: {one.error}" for one in house.machines.reap() if one.error]
        except BelljarError as exc:
            stuck = [exc.message]
    views = [view for view in house.machines.list() if view.alive]
    return [[[view.id, sorted(jobs_of(view))[:8]] for view in views if jobs_of(view)], stuck]


def _stuck(raw: Any) -> list[str]:
    return [line[:300] for line in raw if isinstance(line, str)][:20] if isinstance(raw, list) else []


def _owned(raw: Any, user: User | None) -> list[Owned]:
    """What the look reported, as far as it makes sense: a user's word about that user's machines."""
    found = []
    for one in raw if isinstance(raw, list) else []:
        if not (isinstance(one, list) and len(one) == 2 and isinstance(one[0], str) and isinstance(one[1], list)):
            continue
        names = [name for name in one[1] if isinstance(name, str) and len(name) <= 200]
        pairs = [(system, id) for system, colon, id in (name.partition(":") for name in names) if colon and id]
        system = next((system for system, _ in pairs if system in batch.names()), None)
        if system is None:
            continue
        jobs = frozenset(id for other, id in pairs if other == system)
        owner = str(user.uid) if user else ""
        found.append(Owned(user, one[0], Live(f"{owner}/{one[0]}", system, jobs)))
    return found
