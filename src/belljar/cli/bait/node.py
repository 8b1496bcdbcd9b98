"""`belljar node`: ResumeProgram and SuspendProgram of Slurm's cloud nodes."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from belljar.cli.parser import FORMAT, Verb, acts
from belljar.cli.render import show

if TYPE_CHECKING:
    from belljar.assembly import House


def resume(args: argparse.Namespace, house: House) -> int:
    """Exit 1 where a node gets no machine: slurmctld then sets it down, and requeues its job."""
    from belljar.bait import cloud, settings
    from belljar.batch import load
    from belljar.jobs.shares import shares

    said = settings.load(args.file)
    told = os.environ.get("SLURM_RESUME_FILE", "")
    file = args.resume_file or (Path(told) if told else None)
    made = asyncio.run(
        cloud.resume(args.nodes, file, said, load(said.system).pool, shares(said.shares, "bait.shares: "))
    )
    show({"nodes": made}, ("NODE", "MACHINE"), list(made.items()), as_=args.format)
    failed = {name: text for name, text in made.items() if text.startswith("failed: ")}
    for name, text in failed.items():
        print(f"belljar: {name}: {text.removeprefix('failed: ')}", file=sys.stderr)
    return 1 if failed else 0


def suspend(args: argparse.Namespace, house: House) -> int:
    from belljar.bait import cloud

    ended = asyncio.run(cloud.suspend(args.nodes))
    show({"nodes": ended}, ("NODE", "MACHINE"), list(ended.items()), as_=args.format)
    return 0


ROWS = f"""
# resume | make a machine for each of these nodes
NODES | as Slurm writes them: cloud[1-4]
--file FILE :path =/etc/belljar/bait.toml | settings: images, networks, shares, key
--resume-file FILE :path | which job each is for; default: what SLURM_RESUME_FILE names
{FORMAT}
# suspend | end the machines of these nodes
NODES | as Slurm writes them: cloud[1-4]
{FORMAT}
"""
VERBS = {
    "node": Verb(
        "ResumeProgram and SuspendProgram of Slurm's cloud nodes: each is a machine of this host.",
        acts=acts(ROWS, {"resume": resume, "suspend": suspend}),
    )
}
