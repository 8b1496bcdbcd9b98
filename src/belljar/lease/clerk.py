"""What owners may read: why a request would be denied, what they used, how a lease went. Nothing is changed. Sums are rounded up."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from math import ceil
from typing import Any

from belljar.errors import BadRequest, BelljarError, LeaseDenied, NotPermitted, RecordsLost
from belljar.lease import Event, Instance, Lease, Wanted
from belljar.lease.decisions.margins import fitting
from belljar.lease.decisions.policy import checks, policy_of
from belljar.lease.desk import Desk, Owner, case_of
from belljar.lease.store import Book
from belljar.model import GIB, to_json

Asked = dict[str, Any]
MOST = 500  # events of one answer


def explain(desk: Desk, owner: Owner, asked: Wanted) -> list[tuple[str, bool]]:
    """Every step of the decision, in words with numbers, and whether it is met; to the first that is not."""
    lines = list[tuple[str, bool]]()

    def look(book: Book) -> None:
        terms = desk.checked(asked)
        limits, policy = desk.queue(terms.queue), policy_of(desk.policies(), owner.name, owner.group)
        sums = book.sums(owner.name, policy.since(desk.now()))
        with suppress(LeaseDenied):
            terms = desk.allowed(book, owner, terms)
        terms = desk.timed(terms, policy, sums)
        job = fitting(terms, desk.settings, limits)
        most = f"{limits.longest:.0f} s" if limits.longest else "any time"
        queue = f"queue {terms.queue}" if terms.queue else "the default queue"
        lines.append((f"{terms.nodes} nodes for {job.walltime} s; {queue} gives {most}", True))
        lines.append((f"policy {policy.name} is for {owner.name}", True))
        if terms.count < asked.count:
            lines.append((f"{terms.count} of the {asked.count} machines, and {asked.least} are enough", True))
        for check in checks(terms, policy, sums):
            lines.append((check.what, check.is_met))
            if not check.is_met:
                return
        lines.append(("its job waits for nodes", True))

    try:
        desk.store.read(look)
    except BelljarError as exc:
        lines.append((exc.message, False))
    return lines


# -- acts: they take what was asked as JSON has it, and give what JSON can say ---------------------------------------------


def usage(desk: Desk, asker: Owner, asked: Asked) -> Asked:
    """For the owner that is named, of all with `all`, else of the asker: machines that run, and with `back` those alone that ended at
    most so many seconds ago. What never ran is not there."""
    owner = "" if asked.get("all") else str(asked.get("owner") or asker.name)
    permit(owner == asker.name, asker, f"usage of {owner[:40] or 'all'}")
    now = desk.now()
    since = now - number(asked, "back") if asked.get("back") else 0.0

    def look(book: Book) -> list[Asked]:
        return [_used(book, machine, now) for machine in book.machines(owner, since) if machine.launched is not None]

    return {"machines": desk.store.read(look)}


def over(desk: Desk, asker: Owner, asked: Asked) -> Asked:
    """All machines that ended behind a position of the events ("": from the first on), and the next position; the same one where there is
    nothing new. Where these are not the records that the position is of, as they were of an older day, all are told again."""
    permit(False, asker, "records of all")
    after = str(asked.get("after") or "")
    number, _, wall = after.partition(":")

    def look(book: Book) -> Asked:
        position = int(number) if number.isdecimal() and len(number) < 19 else 0
        here = book.events(position - 1, limit=1) if position else []
        if not here or (here[0][0], str(here[0][1].wall)) != (position, wall):
            position = 0
        events = book.events(position, limit=MOST)
        machines = [_used(book, book.get(Instance, event.of), 0.0) for _, event in events if event.charged]
        return {"machines": machines, "position": f"{events[-1][0]}:{events[-1][1].wall}" if events else after}

    return desk.store.read(look)


def events(desk: Desk, owner: Owner, asked: Asked) -> Asked:
    """For a lease, behind a position, oldest first."""

    def look(book: Book) -> list[tuple[int, Event]]:
        id = case_of(book, owner, str(asked.get("lease", ""))).lease.id
        return book.events(int(number(asked, "after")), lease=id)

    return {"events": [{"position": at, **to_json(event)} for at, event in desk.store.read(look)]}


ACTS: dict[str, Callable[[Desk, Owner, Asked], Asked]] = {"usage": usage, "over": over, "events": events}


def number(asked: Asked, key: str) -> float:
    """0 where it is not said. Raises BadRequest."""
    value = asked.get(key, 0)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < 1e12:
        raise BadRequest(f"{key}: {str(value)[:40]!r}: not a number from 0 on")
    return value


def permit(is_own: bool, asker: Owner, what: str) -> None:
    """Raises NotPermitted."""
    if not is_own and not asker.rules:
        raise NotPermitted(f"{what}: {asker.name} may ask for their own; root and the service's account for others'")


def _used(book: Book, machine: Instance | None, now: float) -> Asked:
    """Of one machine, as its lease describes it. Sizes in bytes, durations in seconds."""
    lease = book.get(Lease, machine.lease) if machine is not None else None
    if machine is None or lease is None:
        raise RecordsLost("a machine has events, and is not there itself")
    size, began = machine.size, machine.launched or machine.created
    seconds = max(0, ceil(now - began)) if machine.is_live else machine.charged
    return {
        "machine": machine.id, "lease": lease.id, "owner": lease.owner, "group": lease.group,
        "image": lease.wanted.image_of(machine.index), "cpus": size.cpus, "memory": size.memory, "disk": size.disk,
        "began": began, "ended": machine.ended, "seconds": seconds, "core_seconds": size.cpus * seconds,
        "gb_seconds": -(-size.memory * seconds // GIB), "vm_minutes": -(-seconds // 60),
    }  # fmt: skip
