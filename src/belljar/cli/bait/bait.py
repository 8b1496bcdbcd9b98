"""`belljar bait`: worker nodes on demand, on this host; `belljar node`: ResumeProgram and SuspendProgram of Slurm's cloud nodes."""

from __future__ import annotations

import asyncio
import os
import pwd
import sys
import time
from collections.abc import Callable
from pathlib import Path

from belljar.assembly import Runtime
from belljar.bait import Order, Settings, cloud, settings
from belljar.bait.cloud import FAILED, Made, Placement, hostnames
from belljar.bait.journal import give_order, read, read_status
from belljar.bait.journal import order as ordered
from belljar.batch.job import policy
from belljar.cli.parser import Args, Verb, acts, state_folder
from belljar.cli.render import duration, show, show_findings
from belljar.errors import BadOption, BelljarError, NotPermitted, UsageError
from belljar.host import processes
from belljar.host.caller import describe
from belljar.host.commands import run_beside
from belljar.host.locks import is_locked
from belljar.jobs import complain
from belljar.jobs.shares import shares
from belljar.pool import JobView, load, node_of

AS_ROOT = "slurmctld runs this as SlurmUser: let it call belljar by sudo, as docs/batch/bait/reference.md shows (Cloud nodes)."


def run(args: Args, runtime: Runtime) -> None:
    from belljar.bait.daemon import Daemon
    from belljar.bait.machines.keeper import Machines
    from belljar.service import kept
    from belljar.service.telling import teller

    bait = settings.load(args.file)
    pool = settings.pool_of(bait)
    keeper = Machines(bait, pool, shares(bait.shares, "bait.shares: "))
    tell = teller(sys.stdout, as_json=args.format == "json")
    with kept.alone(folder := state_folder(args, runtime, "bait"), "bait"):
        asyncio.run(Daemon(bait, folder, pool, keeper, tell, _judge(runtime, bait.images[0])).run())


def _judge(runtime: Runtime, usual: str) -> Callable[[JobView], str]:
    """By the site's rules for jobs: who may use which image, and how much ([batch])."""

    def judge(job: JobView) -> str:
        try:
            user = pwd.getpwnam(job.owner)
            asker = policy.Asker.of(describe(user.pw_uid, user.pw_gid, None), job.queue)
            policy.check_allowed(job.image or usual, asker, runtime.settings.batch)
            least = policy.smallest_limit(runtime.settings.batch)  # of a wrapped job, whose limit holds its machine
            policy.check_limits(job.cpus, max(job.memory, least), job.disk or None, runtime.settings.batch)
        except UsageError as exc:
            return exc.message
        except KeyError:
            return f"its user {job.owner} is not known on this host"
        return ""

    return judge


def check(args: Args, runtime: Runtime) -> int:
    """A line for each thing a bait needs, and the remedy where it is not so; exit 1 then."""
    from belljar.bait.check import joins, needs

    def image(name: str) -> str:
        try:
            added = runtime.images.resolve(name).facts.get("added")
        except BelljarError as exc:
            return exc.message
        missing = [package for package in pool.packages if added is not None and package not in added]
        return f"it has no {' and no '.join(missing)}" if missing else ""

    bait = settings.load(args.file)
    pool = settings.pool_of(bait)
    mounts, has_addresses = shares(bait.shares, "bait.shares: "), bool(runtime.settings.network.bridge_addresses)
    results = list(needs(bait, pool, image, mounts, has_addresses=has_addresses))
    if args.join and bait.system == "slurm" and all(result.is_good for result in results):
        results.append(asyncio.run(joins(bait, pool, mounts)))
    return show_findings(results, as_=args.format)


def status(args: Args, runtime: Runtime) -> int:
    """Exit 1 where the bait takes no jobs, 2 where it is not there."""
    from belljar.service.kept import LOCK

    folder = state_folder(args, runtime, "bait")
    status, is_running = read_status(folder), is_locked(folder / LOCK)
    if status is None:
        hint = "Start it with `belljar bait run`, or name its --state."
        raise BadOption(f"{folder}: no bait has worked here", hint=hint)
    rows = {
        "bait": status.name, "running": "yes" if is_running else "no", "state": status.state, "why": status.why,
        "jobs": " ".join(f"{count} {state}" for state, count in sorted(status.jobs.items())) or "none", "next": status.waits,
        "trouble": status.error, "looked": f"{duration(time.time() - status.looked)} ago",
    }  # fmt: skip
    value = {"running": is_running, "ordered": ordered(folder), "status": status}
    show(value, ("WHAT", ""), [row for row in rows.items() if row[1]], as_=args.format)
    return 2 if not is_running else 0 if status.state == "open" else 1


def open_(args: Args, runtime: Runtime) -> None:
    give_order(state_folder(args, runtime, "bait"), Order())


def close(args: Args, runtime: Runtime) -> None:
    give_order(state_folder(args, runtime, "bait"), Order(False, args.reason))


def jobs(args: Args, runtime: Runtime) -> None:
    folder, now = state_folder(args, runtime, "bait"), time.time()
    entries, node = list(read(folder).values()), _nodes(folder)
    rows = [
        (
            entry.job, entry.state.value, duration(now - entry.since), " ".join(node(id)[0] for id in entry.machines),
            entry.tries, entry.why,
        ) for entry in entries
    ]  # fmt: skip
    show({"jobs": entries}, ("JOB", "STATE", "FOR", "NODES", "TRIES", "WHY"), rows, as_=args.format)


def nodes(args: Args, runtime: Runtime) -> None:
    folder = state_folder(args, runtime, "bait")
    seen = [(id, *_nodes(folder)(id), entry.job) for entry in read(folder).values() for id in entry.machines]
    values = [{"node": name, "machine": id, "job": job, "state": state} for id, name, state, job in seen]
    rows = [[*value.values()] for value in values]
    show({"nodes": values}, ("NODE", "MACHINE", "JOB", "STATE"), rows, as_=args.format)


def rules(args: Args, runtime: Runtime) -> None:
    from belljar.bait.networks import classes

    sys.stdout.write(classes.rules(settings.load(args.file), runtime.settings.network))


def _nodes(folder: Path) -> Callable[[str], tuple[str, str]]:
    """What node a machine is, or is to be, and the state of that."""
    status = read_status(folder)
    return lambda id: (status.nodes if status else {}).get(id, (node_of(id), ""))


def arrive(args: Args, runtime: Runtime) -> None:
    from belljar.bait.arrivals import tell

    pool, began = load("slurm"), processes.began(os.getpgrp()) or time.time()  # of the prolog itself
    tell(state_folder(args, runtime, "bait"), args.job, args.timeout, lambda: pool.revoked(args.job, began, os.environ))


# -- cloud nodes of Slurm -------------------------------------------------------------------------------------------------


def node(args: Args, runtime: Runtime) -> int:
    """Exit 1 where a node gets no machine (slurmctld then sets it down, and requeues its job), or where one may live on a host that
    does not answer."""
    bait = settings.load(args.file) if not args.here and args.file.exists() else None
    if bait is not None and bait.placement:  # hosts of the list have the machines
        made = asyncio.run(_placed(args, runtime, bait))
    elif os.geteuid() != 0:  # they are root's: anybody else would find none to end, and say nothing
        raise NotPermitted(f"cloud nodes are root's machines, and this is uid {os.geteuid()}", hint=AS_ROOT)
    else:
        made = Made(_here(args), {})
    rows = [(name, machine, made.hosts.get(name, "")) for name, machine in made.nodes.items()]
    value = {"nodes": made.nodes} | ({"hosts": made.hosts} if made.hosts else {})
    show(value, ("NODE", "MACHINE", "HOST"), rows, as_=args.format)
    failed = [f"{name}: {why.removeprefix(FAILED)}" for name, why in made.nodes.items() if why.startswith(FAILED)]
    for line in (*made.trouble, *failed):
        complain(line, "")
    return 1 if failed else 0


async def _placed(args: Args, runtime: Runtime, bait: Settings) -> Made:
    ask = lambda argv, timeout: run_beside(argv, timeout=timeout, check=False)  # noqa: E731
    place = Placement(bait, state_folder(args, runtime, "cloud"), ask, hostnames)
    if args.act == "list":
        return await place.all()
    nodes = await hostnames(args.nodes)
    return await (place.resume(nodes) if args.act == "resume" else place.suspend(nodes, forget=args.forget))


def _here(args: Args) -> dict[str, str]:
    if args.act == "list":
        return cloud.living()
    if args.act == "suspend":
        return asyncio.run(cloud.suspend(args.nodes))
    bait, path = settings.load(args.file), os.environ.get("SLURM_RESUME_FILE", "")
    file = args.resume_file or (Path(path) if path else None)
    return asyncio.run(cloud.resume(args.nodes, file, bait, load(bait.system), shares(bait.shares, "bait.shares: ")))


STATE_OPTION = "--state DIR | folder of the bait's state (default: bait/ below `paths.store`)"
ROWS = """
# run +state +format | run the service, until SIGTERM; jobs and machines go on without it
FILE ? =/etc/belljar/bait.toml | settings file (default: /etc/belljar/bait.toml)
# check +format | check everything that the service needs; exits 1 if something is missing
FILE ? =/etc/belljar/bait.toml | settings file (default: /etc/belljar/bait.toml)
--join | if all is well, also make a small machine and see it join the cluster (Slurm)
# status +state +format | show whether this host takes jobs; exits 1 if not, 2 if the service is not running
# open +state | take jobs again
# close +state | take no more jobs; those that have begun go on
--reason TEXT = | the reason that the batch system shows
# jobs +state +format | list this host's jobs and their states
# nodes +state +format | list the machines that are worker nodes, or are about to be
# rules | print firewall rules that keep network classes apart, for `nft -f -`
FILE ? =/etc/belljar/bait.toml | settings file, of which networks, closed and services are read
# arrive +state | for the batch system's prolog: hand a job over to the service, which takes it back from the batch system
JOB | the job's number
--timeout TIME =60 | fail if the service has not taken it after this time (default: 60 s)
"""
WHAT = (
    "Worker nodes on demand. A bait is a node whose jobs do not start there: belljar makes a machine for each, "
    "which joins the cluster, and moves the job to it."
)
VERBS = {"bait": Verb(WHAT, acts=acts(ROWS, globals(), state=STATE_OPTION))}
OF_CLOUD = """--file FILE =/etc/belljar/bait.toml | settings file (default: /etc/belljar/bait.toml)
--here | on this host, whatever its setting `placement` says
--state DIR | where it is written down which host has which node (default: cloud/ below `paths.store`)"""
CLOUD = """
# resume +all +format | start a machine for each of these nodes, on this host or where the setting `placement` says
NODES | node names as Slurm writes them, such as cloud[1-4]
--resume-file FILE | Slurm's file that says which job each node is for (default: $SLURM_RESUME_FILE)
# suspend +all +format | end the machines of these nodes, wherever they are
NODES | node names as Slurm writes them, such as cloud[1-4]
--forget | hosts that do not answer count as having ended these machines
# list +all +format | list running cloud nodes and their machines
"""
NODES = (
    "Start and end machines as cloud nodes of Slurm (its ResumeProgram and SuspendProgram), on this host or several."
)
VERBS |= {"node": Verb(NODES, acts=acts(CLOUD, dict.fromkeys(("resume", "suspend", "list"), node), all=OF_CLOUD))}
