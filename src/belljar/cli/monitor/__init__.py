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
from belljar.monitor.outcomes import Outcomes, number_of, places
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
    sums = dict.fromkeys(GAUGES, 0.0)
    for user in (None, *users_of(runtime)):
        try:
            numbers = asked_as(runtime, user, numbers_of, timeout=LOOK_TIMEOUT, what="count machines")
            sums = {name: number + number_of(numbers[name]) for name, number in sums.items()}
        except (BelljarError, OSError, KeyError, TypeError) as exc:  # a user may report anything
            complain(f"{user.name if user else 'this user'}: machines were not counted: {exc}", "")
    node = os.uname().nodename
    for name, text in GAUGES.items():
        yield Metric(f"belljar_{name}", text, ("node",), {(node,): sums[name]})


def numbers_of(runtime: Any) -> dict[str, float]:
    """What one user has."""
    from belljar.machine.life.claim import room_now

    machines, templates = runtime.machines.list(), runtime.hypervisor.templates()
    own = [image.disk for image in runtime.images.images() if image.store == runtime.folders.store]
    room = room_now(runtime.folders, runtime.settings.host)
    return {
        "machines": sum(view.alive for view in machines), "machines_abandoned": sum(not view.alive for view in machines),
        "templates": len(templates), "templates_bytes": sum(template.size for template in templates),
        "images_bytes": sum(os.stat(disk).st_blocks * 512 for disk in own),
        "reserved_memory_bytes": room.memory_reserved, "reserved_cpus": room.cpus_taken,
    }  # fmt: skip


GAUGES = {
    "machines": "Living machines",
    "machines_abandoned": "Machines whose keeper is dead",
    "templates": "Booted guests, frozen, of which machines are cloned",
    "templates_bytes": "Bytes of templates on disk",
    "images_bytes": "Bytes of images on disk",
    "reserved_memory_bytes": "Memory reserved for machines",
    "reserved_cpus": "Processors reserved for machines",
}
