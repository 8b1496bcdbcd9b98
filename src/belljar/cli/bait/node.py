"""`belljar node`: ResumeProgram and SuspendProgram of Slurm's cloud nodes."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from belljar.assembly import Runtime
from belljar.bait import Settings, cloud, settings
from belljar.bait.cloud import FAILED, Made, Placement, hostnames
from belljar.cli.parser import Args, Verb, acts, state_folder
from belljar.cli.render import show
from belljar.errors import NotPermitted
from belljar.host.commands import Finished, run_beside
from belljar.jobs import complain
from belljar.jobs.shares import shares
from belljar.pool import load

AS_ROOT = "slurmctld runs this as SlurmUser: let it call belljar by sudo, as docs/batch/bait/reference.md shows (Cloud nodes)."


def node(args: Args, runtime: Runtime) -> int:
    """Exit 1 where a node gets no machine (slurmctld then sets it down, and requeues its job), or where one may live on a host that
    does not answer."""
    bait = _placing(args)
    made = Made(_here(args), {}) if bait is None else asyncio.run(_placed(args, runtime, bait))
    rows = [(name, machine, made.hosts.get(name, "")) for name, machine in made.nodes.items()]
    value = {"nodes": made.nodes} | ({"hosts": made.hosts} if made.hosts else {})
    show(value, ("NODE", "MACHINE", "HOST"), rows, as_=args.format)
    failed = [f"{name}: {why.removeprefix(FAILED)}" for name, why in made.nodes.items() if why.startswith(FAILED)]
    for line in (*made.trouble, *failed):
        complain(line, "")
    return 1 if failed else 0


def _placing(args: Args) -> Settings | None:
    """The settings, where hosts of a placement list have the machines. Else this host has them, and they are root's: anybody else
    would find none to end, and say nothing. Raises NotPermitted."""
    bait = settings.load(args.file) if not args.here and args.file.exists() else None
    if bait is not None and bait.placement:
        return bait
    if os.geteuid() != 0:
        raise NotPermitted(f"cloud nodes are root's machines, and this is uid {os.geteuid()}", hint=AS_ROOT)
    return None


async def _placed(args: Args, runtime: Runtime, bait: Settings) -> Made:
    async def ask(argv: tuple[str, ...], timeout: float) -> Finished:
        return await run_beside(argv, timeout=timeout, check=False)

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


OPTIONS = """--file FILE =/etc/belljar/bait.toml | settings file (default: /etc/belljar/bait.toml)
--here | on this host, whatever its setting `placement` says
--state DIR | where it is written down which host has which node (default: cloud/ below `paths.store`)"""
ROWS = """
# resume +all +format | start a machine for each of these nodes, on this host or where the setting `placement` says
NODES | node names as Slurm writes them, such as cloud[1-4]
--resume-file FILE | Slurm's file that says which job each node is for (default: $SLURM_RESUME_FILE)
# suspend +all +format | end the machines of these nodes, wherever they are
NODES | node names as Slurm writes them, such as cloud[1-4]
--forget | hosts that do not answer count as having ended these machines
# list +all +format | list running cloud nodes and their machines
"""
WHAT = "Start and end machines as cloud nodes of Slurm (its ResumeProgram and SuspendProgram), on this host or several."
VERBS = {"node": Verb(WHAT, acts=acts(ROWS, dict.fromkeys(("resume", "suspend", "list"), node), all=OPTIONS))}
