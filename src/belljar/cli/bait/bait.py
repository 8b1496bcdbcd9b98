"""`belljar bait`: worker nodes on demand, on this host."""

from __future__ import annotations

import argparse
import asyncio
import os
import pwd
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from belljar.cli.parser import FORMAT, Verb, acts
from belljar.cli.render import duration, show, show_findings
from belljar.errors import BadOption, BelljarError

if TYPE_CHECKING:
    from collections.abc import Callable

    from belljar.assembly import House
    from belljar.pool import JobView

STATE = "bait"


def folder_of(args: argparse.Namespace, house: House) -> Path:
    return Path(args.state) if args.state else house.folders.store / STATE


def run(args: argparse.Namespace, house: House) -> int:
    from belljar.bait import settings
    from belljar.bait.daemon import serve
    from belljar.bait.machines.keeper import Machines
    from belljar.jobs.shares import shares
    from belljar.service.telling import teller

    bait = settings.load(args.file)
    pool = settings.pool_of(bait)
    keeper = Machines(bait, bait.name, pool, shares(bait.shares, "bait.shares: "))
    tell = teller(sys.stdout, as_json=args.format == "json")
    asyncio.run(serve(bait, folder_of(args, house), pool, keeper, tell, _judge(house, bait.images[0])))
    return 0


def _judge(house: House, usual: str) -> Callable[[JobView], str]:
    """By the site's rules for jobs: who may use which image, and how much ([batch])."""
    from belljar.batch.job import policy
    from belljar.errors import UsageError
    from belljar.host.caller import describe

    def judge(job: JobView) -> str:
        try:
            user = pwd.getpwnam(job.owner)
            account = describe(user.pw_uid, user.pw_gid, None)
            asker = policy.Asker(job.owner, (account.group, *(name for _, name in account.groups)), job.queue)
            policy.check_allowed(job.image or usual, asker, house.settings.batch)
            least = policy.smallest_limit(house.settings.batch)  # of a wrapped job, whose limit holds its machine
            policy.check_limits(job.cpus, max(job.memory, least), job.disk or None, house.settings.batch)
        except UsageError as exc:
            return exc.message
        except KeyError:
            return f"its user {job.owner} is not known on this host"
        return ""

    return judge


def check(args: argparse.Namespace, house: House) -> int:
    """A line for each thing a bait needs, and the remedy where it is not so; exit 1 then."""
    from belljar.bait import settings
    from belljar.bait.check import joins, needs
    from belljar.jobs.shares import shares

    def image(name: str) -> str:
        try:
            added = house.images.resolve(name).facts.get("added")
        except BelljarError as exc:
            return exc.message
        missing = [package for package in pool.nodes.packages if added is not None and package not in added]
        return f"it has no {' and no '.join(missing)}" if missing else ""

    bait = settings.load(args.file)
    pool = settings.pool_of(bait)
    mounts, has_addresses = shares(bait.shares, "bait.shares: "), bool(house.settings.network.bridge_addresses)
    results = list(needs(bait, pool, image, mounts, has_addresses=has_addresses))
    if args.join and bait.system == "slurm" and all(result.is_good for result in results):
        results.append(asyncio.run(joins(bait, pool, mounts)))
    return show_findings(results, as_=args.format)


def status(args: argparse.Namespace, house: House) -> int:
    """Exit 1 where the bait takes no jobs, 2 where it is not there."""
    from belljar.bait.daemon import LOCK
    from belljar.bait.status import order, read_status
    from belljar.host.locks import is_locked

    folder = folder_of(args, house)
    status, there = read_status(folder), is_locked(folder / LOCK)
    if status is None:
        raise BadOption(
            f"{folder}: no bait has worked here", hint="Start it with `belljar bait run`, or name its --state."
        )
    shown = {"running": there, "ordered": order(folder), "status": status}
    jobs = " ".join(f"{count} {state}" for state, count in sorted(status.jobs.items())) or "none"
    rows = [
        ("bait", status.name), ("running", "yes" if there else "no"), ("state", status.state), ("why", status.why),
        ("jobs", jobs), ("next", status.waits), ("trouble", status.error), ("looked", f"{duration(time.time() - status.looked)} ago"),
    ]  # fmt: skip
    show(shown, ("WHAT", ""), [row for row in rows if row[1]], as_=args.format)
    return 2 if not there else 0 if status.state == "open" else 1


def open_(args: argparse.Namespace, house: House) -> int:
    from belljar.bait import Order
    from belljar.bait.status import give_order

    give_order(folder_of(args, house), Order())
    return 0


def close(args: argparse.Namespace, house: House) -> int:
    from belljar.bait import Order
    from belljar.bait.status import give_order

    give_order(folder_of(args, house), Order(False, args.reason))
    return 0


def jobs(args: argparse.Namespace, house: House) -> int:
    from belljar.bait.journal import read

    entries, names = list(read(folder_of(args, house)).values()), _names(folder_of(args, house))
    rows = [
        (entry.job, entry.state.value, duration(time.time() - entry.since), " ".join(map(names, entry.machines)), entry.tries, entry.why)
        for entry in entries
    ]  # fmt: skip
    show({"jobs": entries}, ("JOB", "STATE", "FOR", "NODES", "TRIES", "WHY"), rows, as_=args.format)
    return 0


def nodes(args: argparse.Namespace, house: House) -> int:
    from belljar.bait.journal import read
    from belljar.bait.status import read_status

    folder = folder_of(args, house)
    status, names = read_status(folder), _names(folder)
    states = status.nodes if status else {}
    rows = [
        {"node": names(id), "machine": id, "job": entry.job, "state": states.get(names(id), "")}
        for entry in read(folder).values()
        for id in entry.machines
    ]
    show({"nodes": rows}, ("NODE", "MACHINE", "JOB", "STATE"), [tuple(row.values()) for row in rows], as_=args.format)
    return 0


def rules(args: argparse.Namespace, house: House) -> int:
    from belljar.bait import settings
    from belljar.bait.networks import classes

    sys.stdout.write(classes.rules(settings.load(args.file), house.settings.network))
    return 0


def _names(folder: Path) -> Callable[[str], str]:
    """What node a machine is, or is to be."""
    from belljar.bait.status import read_status
    from belljar.pool import node_of

    status = read_status(folder)
    return lambda id: (status.names if status else {}).get(id) or node_of(id)


def arrive(args: argparse.Namespace, house: House) -> int:
    from belljar.bait.arrivals import tell
    from belljar.host import processes
    from belljar.pool import load

    client, began = load("slurm").client, processes.began(os.getpgrp()) or time.time()  # of the prolog itself
    tell(folder_of(args, house), args.job, args.timeout, lambda: client.revoked(args.job, began, os.environ))
    return 0


STATE_OPTION = "--state DIR | folder in which the bait keeps its state; default: bait/ below `paths.store`"
ROWS = f"""
# run | be the bait of this host: until TERM; jobs and machines go on without it
FILE ? :path =/etc/belljar/bait.toml | its settings
{STATE_OPTION}
{FORMAT}
# check | is everything there that a bait needs? exit 1: no
FILE ? :path =/etc/belljar/bait.toml | its settings
--join | where all else is good, make a tiny machine and see it join (Slurm)
{FORMAT}
# status | say whether the bait takes jobs; exit 1: no, 2: it is not running
{STATE_OPTION}
{FORMAT}
# open | take jobs again
{STATE_OPTION}
# close | take no more jobs; those that are here go on
--reason TEXT = | shown as the node's reason
{STATE_OPTION}
# jobs | list the jobs that are here, with their states
{STATE_OPTION}
{FORMAT}
# nodes | list the machines that are, or become, worker nodes
{STATE_OPTION}
{FORMAT}
# rules | print the rules that keep the network classes apart, for `nft -f -`
FILE ? :path =/etc/belljar/bait.toml | settings: networks, closed, services
# arrive | from the batch system's prolog on the bait: return when the job was taken back
JOB | its number
--timeout TIME =60 | fail where the bait is silent, or cannot take it, for so long
{STATE_OPTION}
"""
FUNCTIONS = {
    "run": run, "check": check, "status": status, "open": open_, "close": close, "jobs": jobs, "nodes": nodes,
    "rules": rules, "arrive": arrive,
}  # fmt: skip
VERBS = {
    "bait": Verb(
        "Worker nodes on demand: this host attracts jobs of a batch system, makes a machine for each, which joins as a node, and moves the job there.",
        acts=acts(ROWS, FUNCTIONS),
    )
}
