"""The verbs that read ledgers, and what they share."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from belljar.assembly import Runtime
from belljar.cli.parser import Args
from belljar.errors import BelljarError
from belljar.host.privileges import User
from belljar.jobs import complain
from belljar.jobs.users import LOOK_TIMEOUT, asked_as, users_of
from belljar.monitor.outcomes import Outcomes, places
from belljar.service.metrics import Metric

LEDGER = """--ledger PLACE * @ledgers | DIR or NODE=DIR: the folder `paths.logs` of a node, or a folder with those of many nodes;
    | default: this host's, for root with those of all users of this node"""
Reader = Callable[[Mapping[str, str]], Outcomes]


def reader(args: Args, runtime: Runtime) -> Reader:
    """Makes readers of the ledgers that the verb's options name. Raises BadOption."""
    found = places(args.ledgers, runtime.folders.logs, os.uname().nodename)

    def users() -> list[tuple[User, Callable[[], Any]]]:
        chosen = [] if args.ledgers else users_of(runtime)
        return [(user, lambda user=user: runtime.of_user(user.uid, user.home).folders.logs) for user in chosen]  # type: ignore[misc]

    return lambda positions: Outcomes(found, positions, users)


def complain_of(outcomes: Outcomes) -> None:
    """What could not be read, on stderr."""
    for trouble in outcomes.troubles:
        complain(trouble, "")
    if outcomes.unreadable:
        complain(f"{outcomes.unreadable} rows of ledgers do not tell which machine ended, and were left out", "")


def host_metrics(runtime: Runtime) -> Iterator[Metric]:
    """What there is on this host now, of all its users for root."""
    sums = dict[tuple[str, str], float]()
    for user in (None, *users_of(runtime)):
        try:
            numbers = asked_as(runtime, user, numbers_of, timeout=LOOK_TIMEOUT, what="count machines")
        except BelljarError as exc:
            complain(str(exc), "")
            continue
        for name, by in numbers.items() if isinstance(numbers, dict) else ():
            for kind, number in by.items() if isinstance(by, dict) and name in GAUGES else ():
                if kind in GAUGES[name][1] and isinstance(number, int | float):
                    sums[name, kind] = sums.get((name, kind), 0) + number
    node = os.uname().nodename
    for name, (text, _) in GAUGES.items():
        values: dict[tuple[str, ...], float] = {
            (node, kind): number for (of, kind), number in sums.items() if of == name
        }
        yield Metric(f"belljar_{name}", text, ("node", "kind"), values)


def numbers_of(runtime: Any) -> dict[str, dict[str, float]]:
    """What one user has."""
    from belljar.machine.life.claim import room_now

    templates, images = runtime.hypervisor.templates(), runtime.images.images()
    room, machines = room_now(runtime.folders, runtime.settings.host), runtime.machines.list()
    own = [image for image in images if image.store == runtime.folders.store]
    return {
        "machines": {"living": sum(view.alive for view in machines), "abandoned": sum(not view.alive for view in machines)},
        "templates": {"all": len(templates)},
        "store_bytes": {"images": sum(os.stat(image.disk).st_blocks * 512 for image in own), "templates": sum(item.size for item in templates)},
        "reserved_bytes": {"memory": room.memory_reserved},
        "reserved_cpus": {"all": room.cpus_taken},
    }  # fmt: skip


GAUGES = {
    "machines": ("Machines on this host", ("living", "abandoned")),
    "templates": ("Booted guests, frozen, of which machines are cloned", ("all",)),
    "store_bytes": ("Bytes on disk", ("images", "templates")),
    "reserved_bytes": ("Bytes reserved for machines", ("memory",)),
    "reserved_cpus": ("Processors reserved for machines", ("all",)),
}
