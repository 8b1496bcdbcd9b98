"""Machines that are kept after their job, for the next one that asks for the same: which job may have which machine, and which machines go first. Pure.

A kept machine has an entry of its own, under a name that no job has. It was cleaned and proved before it was kept (scrub.py), its node
takes no job until one is moved there, and it ends when it is too old, when a job needs its room, or when the bait's settings are others.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import sha256

from belljar.bait import NEVER, SAME_GROUP, SAME_USER, Settings
from belljar.bait.decisions.decide import Room, Size, Turn, size_of
from belljar.bait.decisions.step import KEEPING, Act, Do, Entry, Seen, State, Step, to
from belljar.pool import JobView, NodeState
from belljar.records import replace

MARK = "kept:"  # begins the name of an entry that no job has
OURS = "belljar:"  # begins the reason of a node that we closed
PROVED = 90.0  # seconds in which a machine is cleaned and proved, by whichever bait is there


def terms_of(job: JobView, image: str, settings: Settings) -> str:
    """What a machine must have been made for to serve this job; "" where none may serve two. *image*: what the job's image is now."""
    if settings.cache == NEVER or job.uid <= 0 or not image or (settings.cache == SAME_GROUP and not job.group):
        return ""
    who = ("user", job.uid, job.owner) if settings.cache == SAME_USER else ("group", job.group)
    size, network = size_of(job, settings), job.network or settings.networks[0][0]
    same = (image, network, job.queue, job.features, who, size.count, size.cpus, size.memory, job.disk)
    return f"{rules_of(settings)} {same}"


def rules_of(settings: Settings) -> str:
    """Equal only for equal settings of the bait."""
    return sha256(repr(settings).encode()).hexdigest()[:16]


def kept_as(entry: Entry) -> Entry:
    """The machines of a job that is over, as an entry of their own."""
    return Entry(
        f"{MARK}{entry.machines[0]}", State.PROVING, entry.since, entry.machines, terms=entry.terms, takes=entry.takes,
        uses=entry.uses, born=entry.born,
    )  # fmt: skip


def too_old(entry: Entry, settings: Settings, now: float) -> str:
    """Why these machines serve no further job; "" where they may."""
    if not entry.terms.startswith(rules_of(settings)):
        return "the bait's settings are others"
    if entry.uses + 1 >= settings.cache_uses:
        return f"it has served {entry.uses + 1} jobs"
    return f"it is older than {settings.cache_age:.0f} s" if now - entry.born >= settings.cache_age else ""


def with_machines(turn: Turn, entries: Iterable[Entry], terms: str, size: Size, room: Room) -> Turn:
    """The turn of the first in line, by machines that no job has: one that fits serves it at once; one that will be clean in a moment is
    waited for, where there is no room for another; and those that it does not want make room for it."""
    idle = [entry for entry in entries if entry.job.startswith(MARK)]
    fits = [entry for entry in idle if terms and entry.terms == terms]
    kept = [entry for entry in fits if entry.state is State.KEPT]
    if kept:  # the last that was kept: the others grow old
        return replace(turn, job=turn.first, why="", kept=max(kept, key=lambda entry: entry.since).job)
    if turn.job or any(entry.state is State.PROVING for entry in fits):
        return turn
    return replace(turn, ending=making_room(idle, room, size.all_cpus, size.all_memory))


def with_kept(room: Room, entries: Iterable[Entry]) -> Room:
    """What were free without machines that no job has."""
    sizes = [entry.takes for entry in entries if entry.job.startswith(MARK)]
    cpus, memory = map(sum, zip((0, 0), *sizes, strict=True))
    return replace(room, cpus=room.cpus + cpus, memory=room.memory + memory)


def making_room(idle: Iterable[Entry], room: Room, cpus: int, memory: int) -> tuple[str, ...]:
    """The kept machines to end so that these processors and this memory are free, oldest first; none where that would not do."""
    idle = sorted(idle, key=lambda entry: entry.since)
    free = with_kept(room, (entry for entry in idle if entry.state not in KEEPING))  # those are on their way out
    ending: list[str] = []
    for entry in (entry for entry in idle if entry.state in KEEPING):
        if cpus <= free.cpus and memory <= free.memory:
            break
        ending.append(entry.job)
        free = with_kept(free, (entry,))
    return tuple(ending) if cpus <= free.cpus and memory <= free.memory else ()


def is_worth_it(entry: Entry, seen: Seen, settings: Settings) -> bool:
    """The machines of a job that is over: their nodes are quiet, closed by us and nobody else, and they live."""
    if not entry.machines or entry.job.startswith(MARK) or too_old(entry, settings, seen.now):
        return False
    nodes = [seen.nodes.get(seen.node(machine)) for machine in entry.machines]
    are_quiet = all(node is not None and node.state is NodeState.OUT and node.reason.startswith(OURS) for node in nodes)
    return are_quiet and seen.machines.issuperset(entry.machines)


def keeping(entry: Entry, job: JobView | None, seen: Seen, settings: Settings) -> Step:
    """No job has these machines. Anything that is not as it should be ends them."""
    answers = [seen.proved.get(machine) for machine in entry.machines]
    why = too_old(entry, settings, seen.now) or next((f"not clean: {answer}" for answer in answers if answer), "")
    if not seen.machines.issuperset(entry.machines):
        why = "its machine is gone"
    if any(seen.state(machine) is not NodeState.OUT for machine in entry.machines):
        why = "somebody opened its node"
    if entry.state is State.PROVING and seen.now - entry.since > PROVED:
        why = f"it was not clean within {PROVED:.0f} s"
    if why:
        return to(entry, State.FINISHED, seen, why)
    if entry.state is State.KEPT:
        return Step(entry)
    if None not in answers:
        return to(entry, State.KEPT, seen)
    return Step(entry, tuple(Act(Do.PROVE, machine) for machine in entry.machines if machine not in seen.proved))
