"""What the verbs of monitoring share: readers of ledgers, and what there is on this host now, for root of all its users."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from belljar.assembly import Runtime
from belljar.bait.journal import read_status
from belljar.cli.lease.asking import DOOR, ask, watched
from belljar.cli.parser import Args
from belljar.errors import BelljarError, LibraryMissing
from belljar.host.privileges import User
from belljar.jobs import complain
from belljar.jobs.users import asked_as, users_of
from belljar.journal import Ledger
from belljar.model import to_json
from belljar.monitor import AskedLedger, Machine, Outcomes, places
from belljar.monitor.live import Host, living, paths_of, story, tail
from belljar.monitor.view import Mode, Values
from belljar.reading import from_json
from belljar.records import replace
from belljar.service import kept
from belljar.service.metrics import Metric
from belljar.vacuum.factory.state import DECISIONS, STATUS, Status

LEDGER = """--ledger PLACE * @ledgers | DIR or NODE=DIR: `paths.logs` of a node, or a folder with those of many nodes
    | (default: this host's, for root of all users)"""
SEEN = f"{LEDGER}\n{DOOR}"
MOST = 500  # machines of one user
LAST = 1 << 18  # bytes in which the last decision of a vacuum is


def reader(args: Args, runtime: Runtime) -> Callable[..., Outcomes]:
    """`Outcomes` of the ledgers that the verb's options name. Raises BadOption."""
    chosen = places(args.ledgers, runtime.folders.logs, os.uname().nodename)

    def users() -> dict[str, Ledger]:
        return {} if args.ledgers else {user.name: _ledger(runtime, user) for user in users_of(runtime)}

    return partial(Outcomes, chosen, users=users)


def _ledger(runtime: Runtime, user: User) -> Ledger:
    """A user's own."""

    def ask(look: Callable[[Ledger], Any]) -> Any:
        return asked_as(runtime, user, lambda theirs: look(Ledger(theirs.folders.logs)), what="read the ledger")

    return AskedLedger(runtime.of_user(user.uid, user.home).folders.logs, ask)


@contextmanager
def libraries() -> Iterator[None]:
    """For the import of modules that need any. Raises LibraryMissing."""
    try:
        yield
    except ImportError as exc:
        raise LibraryMissing(f"the monitor: the library {exc.name} is not installed") from exc


def complain_of(outcomes: Outcomes) -> None:
    """What could not be read, on stderr."""
    for ledger, trouble in outcomes.troubles.items():
        complain(f"{ledger}: {trouble}", "")
    if outcomes.unreadable:
        complain(f"{outcomes.unreadable} rows of ledgers do not tell which machine ended, and were left out", "")


GAUGES = {
    "machines": "Living machines",
    "machines_abandoned": "Machines whose keeper is dead",
    "templates": "Booted guests, frozen, of which machines are cloned",
    "templates_bytes": "Bytes of templates on disk",
    "images_bytes": "Bytes of images on disk",
    "reserved_memory_bytes": "Memory reserved for machines",
    "reserved_cpus": "Processors reserved for machines",
}


def host_metrics(runtime: Runtime) -> Iterator[Metric]:
    """What there is on this host now, of all its users for root."""
    sums, node = dict.fromkeys(GAUGES, 0.0), os.uname().nodename
    for user in (None, *users_of(runtime)):
        try:
            answer = asked_as(runtime, user, _numbers, what="count machines")
            numbers = from_json(dict[str, float], answer)
            sums = {name: number + max(numbers[name], 0.0) for name, number in sums.items()}
        except (BelljarError, OSError, KeyError, ValueError) as exc:  # a user may report anything
            complain(f"{user.name if user else 'this user'}: machines were not counted: {exc}", "")
    for name, text in GAUGES.items():
        yield Metric(f"belljar_{name}", text, ("node",), {(node,): sums[name]})


def _numbers(runtime: Runtime) -> dict[str, float]:
    """What one user has, by the gauges' names. Nothing is finished or cleared away."""
    from belljar.machine.life.claim import room_now

    alive, templates = [view.alive for view in runtime.machines.living()], runtime.hypervisor.templates()
    own = [image.disk for image in runtime.images.images() if image.store == runtime.folders.store]
    room = room_now(runtime.folders, runtime.settings.host)
    return {
        "machines": alive.count(True),
        "machines_abandoned": alive.count(False),
        "templates": len(templates),
        "templates_bytes": sum(template.size for template in templates),
        "images_bytes": sum(os.stat(disk).st_blocks * 512 for disk in own),
        "reserved_memory_bytes": room.memory_reserved,
        "reserved_cpus": room.cpus_taken,
    }


def host_of(args: Args, runtime: Runtime) -> Host:
    """This host, for a verb with LEDGER and --door."""
    outcomes, leased = reader(args, runtime), partial(leases, args.door) if args.door.exists() else lambda: iter(())
    return Host(os.uname().nodename, partial(look, runtime), lambda since: outcomes(since=since), leased)


def look(runtime: Runtime) -> tuple[list[Machine], list[Mode], set[Path]]:
    """The machines that live on this host, for root those of all its users, its vacuum and bait, and the paths by which a change shows."""
    node = runtime.settings.paths.node
    machines, paths = living(runtime.machines.living()), {node} if node else set[Path]()
    paths |= paths_of(runtime.folders, machines)
    for user in users_of(runtime):
        theirs = list[Machine]()
        with suppress(BelljarError, ValueError):  # a user may say anything
            rows = asked_as(
                runtime, user, lambda theirs: to_json(living(theirs.machines.living())), what="list machines"
            )
            theirs = [replace(machine, account=user.name) for machine in from_json(tuple[Machine, ...], rows)[:MOST]]
        paths |= paths_of(runtime.of_user(user.uid, user.home).folders, theirs)
        machines += theirs
    return machines, modes(runtime.folders.store), paths


def modes(store: Path) -> list[Mode]:
    """The vacuum, with the shares of its last decision, and the bait, with its jobs by state, that keep their files here."""
    folder, modes, verdicts = store / "vacuum", list[Mode](), list[Values]()
    if vacuum := kept.read(folder / STATUS, Status):
        with suppress(ValueError, IndexError):
            verdicts = json.loads(tail(folder / f"{DECISIONS}.jsonl", LAST).splitlines()[-1])["verdicts"]
        shares = tuple((of["machinetype"], of["hs06"], of["target"], of["why"]) for of in verdicts)
        name, state = f"{vacuum.factory} in {vacuum.space}", "draining" if vacuum.draining else "running"
        why = vacuum.error or vacuum.settings_error
        modes.append(Mode("vacuum", name, state, why, "HS06", vacuum.cycled, shares))
    if bait := read_status(store / "bait"):
        name, why = f"{bait.name} of {bait.system}", bait.error or bait.why or bait.waits
        jobs = tuple((state, float(count), None, "") for state, count in bait.jobs.items())
        modes.append(Mode("bait", name, bait.state, why, "jobs", bait.looked, jobs))
    return modes


def tell(runtime: Runtime, id: str) -> Values | None:
    """A machine's story, whichever user of this node has it."""
    for user in (None, *users_of(runtime)):
        with suppress(BelljarError):
            answer = asked_as(runtime, user, lambda theirs: story(theirs.folders, id), what="read records")
            if isinstance(answer, dict):
                return answer
    return None


def leases(door: Path) -> Iterator[Mode]:
    """The leases, as root or as the service's account may ask, whenever there may be news."""
    for _ in watched(door, "status", 0):
        yield leased(ask(door, "usage", all=True, back=1.0)["machines"])


def leased(machines: Iterable[Values]) -> Mode:
    """Processors of the machines of a lease service that run, by lease."""
    cpus = Counter[str]()
    for machine in machines:
        if machine["ended"] is None:
            cpus[f"{machine['lease']}: {machine['owner']}, {machine['image']}"] += machine["cpus"]
    bars = tuple((name, number, None, "") for name, number in cpus.items())
    return Mode("lease", "", "running", "", "cpus", time.time(), bars)
