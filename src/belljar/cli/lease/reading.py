"""`belljar lease usage` and `events`: what leases used, and how they went."""

from __future__ import annotations

import time
from typing import Any

from belljar.assembly import House
from belljar.cli.lease.asking import DOOR, ask
from belljar.cli.parser import FORMAT, Args, acts
from belljar.cli.render import show

SUMS = ("core_seconds", "gb_seconds", "vm_minutes")
HEADS = ("CORE-SECONDS", "GB-SECONDS", "VM-MINUTES")


def usage(args: Args, house: House) -> int:
    asked = {"all": args.all, "owner": args.owner, "back": float(args.since or 0)}
    machines = ask(args.door, "usage", **asked)["machines"]
    if args.machines:
        rows = [(one["owner"], one["machine"], *(one[name] for name in SUMS)) for one in machines]
        show({"machines": machines}, ("OWNER", "MACHINE", *HEADS), rows, as_=args.format)
        return 0
    owners: dict[str, list[dict[str, Any]]] = {}
    for one in machines:
        owners.setdefault(one["owner"], []).append(one)
    sums = [
        {"owner": owner, "machines": len(found), **{name: sum(one[name] for one in found) for name in SUMS}}
        for owner, found in sorted(owners.items())
    ]
    show({"owners": sums}, ("OWNER", "MACHINES", *HEADS), [tuple(one.values()) for one in sums], as_=args.format)
    return 0


def events(args: Args, house: House) -> int:
    found: list[dict[str, Any]] = []
    while more := ask(args.door, "events", lease=args.lease, after=found[-1]["position"] if found else 0)["events"]:
        found += more
    rows = [
        (_moment(one["wall"]), one["of"], one["before"], one["after"], one["cause"] or "", one["why"]) for one in found
    ]
    show({"events": found}, ("WHEN", "WHAT", "FROM", "TO", "CAUSE", "WHY"), rows, as_=args.format)
    return 0


def _moment(wall: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(wall))


ROWS = f"""
# usage | sum up what your machines used: those that run, and those that ended
--since TIME | ended within this time, as in 30d; default: all there ever were
--machines | each machine
--owner NAME = | another's, as root or as the service's account
--all | everybody's, as root or as the service's account
{DOOR}
{FORMAT}
# events | show how a lease went: each move of it, its nodes and machines
LEASE | its id
{DOOR}
{FORMAT}"""
ACTS = acts(ROWS, {"usage": usage, "events": events})
