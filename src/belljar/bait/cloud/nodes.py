"""Slurm's own way to nodes on demand: ResumeProgram makes a machine for each CLOUD node, SuspendProgram ends it.

The node is written in slurm.conf; one of its features is the name of its image. What job it is for stands in the file that slurmctld
names: https://slurm.schedmd.com/power_save.html#config. Both programs may be run twice for a node.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from belljar import api
from belljar.bait import Settings
from belljar.bait.acts import command
from belljar.bait.machines.keeper import GRACE, account_of, joining_request, secret
from belljar.errors import BadOption, BelljarError, HostError
from belljar.host.files import read_json
from belljar.model import Request, Share
from belljar.pool import JobState, JobView, Member, NodeView, Pool

CLOUD = "cloud-node"  # a label
LARGEST = 1 << 24


async def resume(
    hostlist: str, file: Path | None, settings: Settings, pool: Pool, shares: tuple[Share, ...]
) -> dict[str, str]:
    """A machine for each of these nodes that has none: its id, or the reason why there is no machine. Raises BelljarError."""
    names = await hostnames(hostlist)
    mark = f"@{os.urandom(8).hex()}@"
    try:
        nodes = pool.nodes.nodes(await command(pool.nodes.query()))
        jobs = {job.number: job for job in pool.client.jobs(await command(pool.client.query(mark)), mark).values()}
        numbers = jobs_of(read_json(file, LARGEST)) if file is not None else {}
    except ValueError as exc:
        raise HostError(str(exc), hint="Do scontrol and squeue answer here, and is the resume file whole?") from exc
    # Which job's nodes they are is told by hostlists; on another host than slurmctld's, by the jobs that have them.
    owners = {node: job for job in jobs.values() for node in job.on if job.state is JobState.RUNNING}
    owners |= {
        node: jobs[number] for number, text in numbers.items() if number in jobs for node in await hostnames(text)
    }
    there = living()

    async def machine_of(name: str) -> str:
        if name in there:
            return there[name]
        try:
            request = request_for(name, nodes.get(name), owners.get(name), settings, pool, shares)
            return (await api.astart(request, stdin=secret(settings))).id
        except BelljarError as exc:
            return f"failed: {exc.message}"

    made = await asyncio.gather(*map(machine_of, names))
    return dict(zip(names, made, strict=True))


async def suspend(hostlist: str) -> dict[str, str]:
    """The machines of these nodes end."""
    there = living()
    ended = {name: there[name] for name in await hostnames(hostlist) if name in there}
    for id in ended.values():
        api.find(id).ask("stop", grace=GRACE)
    return ended


def request_for(
    name: str, node: NodeView | None, job: JobView | None, settings: Settings, pool: Pool, shares: tuple[Share, ...]
) -> Request:
    """Raises BadOption for a node that no image is for."""
    image = next((feature for feature in node.features if feature in settings.images), "") if node is not None else ""
    if node is None or not image:
        features = ", ".join(node.features) if node is not None else "unknown to Slurm"
        raise BadOption(f"{name}: none of its features is an image of `bait.images` ({features or 'it has none'})")
    account = account_of(job) if job is not None else ()
    member = Member(name, max(node.cpus, 1), node.memory, (), account, "\n".join(settings.hosts), is_known=True)
    labels = {CLOUD: name, "owner": job.owner if job else "", "bait-job": job.id if job else ""}
    return joining_request(
        member, image, settings, pool, shares, labels, network=job.network if job else "", requester=f"node:{name}"
    )


def living() -> dict[str, str]:
    """Machines that are cloud nodes: node -> id."""
    labels = ((machine.id, machine.view.labels) for machine in api.machines())
    return {known[CLOUD]: id for id, known in labels if CLOUD in known}


def jobs_of(content: Mapping[str, Any]) -> dict[str, str]:
    """For a resume file: the job's number -> its nodes, as a hostlist. Raises BadOption."""
    hostlists, given = {}, content.get("jobs")
    for row in given if isinstance(given, list) else []:
        job = row if isinstance(row, dict) else {}
        number, nodes = job.get("job_id"), job.get("nodes_resume") or job.get("nodes")
        if not isinstance(number, int) or not isinstance(nodes, str):
            raise BadOption("the resume file of slurmctld names a job without a number or nodes")
        hostlists[str(number)] = nodes
    return hostlists


async def hostnames(hostlist: str) -> list[str]:
    """What a hostlist stands for, as Slurm itself says."""
    if not hostlist or hostlist.startswith("-"):
        raise BadOption(f"{hostlist!r} is not a list of nodes")
    return (await command(("scontrol", "show", "hostnames", hostlist))).decode("ascii", "replace").split()
