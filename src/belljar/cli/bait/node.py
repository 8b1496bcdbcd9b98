"""`belljar node`: ResumeProgram and SuspendProgram of Slurm's cloud nodes."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from belljar.cli.parser import FORMAT, Args, Verb, acts
from belljar.cli.render import show

if TYPE_CHECKING:
    from belljar.assembly import House
    from belljar.bait import Settings
    from belljar.bait.cloud.placement import Made


STATE = "cloud"
AS_ROOT = (
    "slurmctld runs this as SlurmUser: let it call belljar by sudo, as docs/bait/reference.md shows (Cloud nodes)."
)


def resume(args: Args, house: House) -> int:
    """Exit 1 where a node gets no machine: slurmctld then sets it down, and requeues its job."""
    from belljar.bait import settings
    from belljar.bait.cloud import nodes as cloud
    from belljar.jobs.shares import shares
    from belljar.pool import load

    if (placing := _placing(args)) is not None:
        return _tell(asyncio.run(_placed(args, house, placing, "resume")), args)
    bait, path = settings.load(args.file), os.environ.get("SLURM_RESUME_FILE", "")
    file = args.resume_file or (Path(path) if path else None)
    made = asyncio.run(cloud.resume(args.nodes, file, bait, load(bait.system), shares(bait.shares, "bait.shares: ")))
    return _tell(made, args)


def suspend(args: Args, house: House) -> int:
    """Exit 1 where a node may live on a host that does not answer."""
    from belljar.bait.cloud import nodes as cloud

    if (placing := _placing(args)) is not None:
        return _tell(asyncio.run(_placed(args, house, placing, "suspend")), args)
    return _tell(asyncio.run(cloud.suspend(args.nodes)), args)


def list_(args: Args, house: House) -> int:
    from belljar.bait.cloud import nodes as cloud

    if (placing := _placing(args)) is not None:
        return _tell(asyncio.run(_placed(args, house, placing, "list")), args)
    return _tell(cloud.living(), args)


def _placing(args: Args) -> Settings | None:
    """The settings, where hosts of a placement list have the machines. Else this host has them, and they are root's: anybody else
    would find none to end, and say nothing. Raises NotPermitted."""
    from belljar.bait import settings
    from belljar.errors import NotPermitted

    bait = settings.load(args.file) if not args.here and args.file.exists() else None
    if bait is not None and bait.placement:
        return bait
    if os.geteuid() != 0:
        raise NotPermitted(f"cloud nodes are root's machines, and this is uid {os.geteuid()}", hint=AS_ROOT)
    return None


async def _placed(args: Args, house: House, bait: Settings, act: str) -> Made:
    """On the hosts of the placement list."""
    from belljar.bait.cloud.nodes import hostnames
    from belljar.bait.cloud.placement import Placement
    from belljar.host.commands import Finished, run_beside

    async def ask(argv: tuple[str, ...], timeout: float) -> Finished:
        return await run_beside(argv, timeout=timeout, check=False)

    place = Placement(bait, Path(args.state) if args.state else house.folders.store / STATE, ask, hostnames)
    if act == "list":
        return await place.all()
    nodes = await hostnames(args.nodes)
    return await (place.resume(nodes) if act == "resume" else place.suspend(nodes, forget=args.forget))


def _tell(made: Made | dict[str, str], args: Args) -> int:
    """Nodes and their machines; what failed, a line each."""
    nodes, hosts, trouble = (made, {}, ()) if isinstance(made, dict) else (made.nodes, made.hosts, made.trouble)
    shown = {"nodes": nodes} | ({"hosts": hosts} if hosts else {})
    rows = [(name, machine, hosts.get(name, "")) for name, machine in nodes.items()]
    show(shown, ("NODE", "MACHINE", "HOST"), rows, as_=args.format)
    failed = {name: text for name, text in nodes.items() if text.startswith("failed: ")}
    for line in (*trouble, *(f"{name}: {text.removeprefix('failed: ')}" for name, text in failed.items())):
        print(f"belljar: {line}", file=sys.stderr)
    return 1 if failed else 0


FILE_OPTION = "--file FILE =/etc/belljar/bait.toml | settings: images, networks, shares, key, placement"
HERE_OPTION = "--here | on this host, whatever `placement` says"
STATE_OPTION = "--state DIR | where it is written down which host has which node; default: cloud/ below `paths.store`"
ROWS = f"""
# resume | make a machine for each of these nodes, here or where `placement` says
NODES | as Slurm writes them: cloud[1-4]
{FILE_OPTION}
{HERE_OPTION}
{STATE_OPTION}
--resume-file FILE | which job each is for; default: what SLURM_RESUME_FILE names
{FORMAT}
# suspend | end the machines of these nodes, wherever they are
NODES | as Slurm writes them: cloud[1-4]
{FILE_OPTION}
{HERE_OPTION}
{STATE_OPTION}
--forget | a host that does not answer has ended what it had of them
{FORMAT}
# list | list the cloud nodes that live, and their machines
{FILE_OPTION}
{HERE_OPTION}
{STATE_OPTION}
{FORMAT}
"""
VERBS = {
    "node": Verb(
        "ResumeProgram and SuspendProgram of Slurm's cloud nodes: each is a machine of this host, or of those in a placement list.",
        acts=acts(ROWS, {"resume": resume, "suspend": suspend, "list": list_}),
    )
}
