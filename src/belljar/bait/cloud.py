"""Slurm's own way to nodes on demand: ResumeProgram makes a machine for each CLOUD node, SuspendProgram ends it.

The node is written in slurm.conf; one of its features is the name of its image. What job it is for stands in the file that slurmctld
names: https://slurm.schedmd.com/power_save.html#config. Both programs may be run twice for a node.

On several hosts: which host makes which node, where one lives, and what becomes of those of a host that does not answer. The host of
slurmctld asks the others by a command (`reach`), `belljar node ... --here`. It first asks each host what nodes it has, so one that lives
is started nowhere else; where a node is sent is on disk before. A host that does not answer makes nothing: the next one does. But a node
that was sent there before stays its own, for nobody can say whether it lives.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from belljar import api
from belljar.bait import Settings
from belljar.bait.acts import command
from belljar.bait.machines.keeper import GRACE, account_of, joining_request, last_line, secret
from belljar.errors import BadOption, BelljarError, CommandFailed, HostError
from belljar.host.commands import Finished
from belljar.host.files import private_folder, read_capped, read_json
from belljar.host.locks import locked
from belljar.model import Request, Share
from belljar.pool import JobState, JobView, Member, NodeView, Pool
from belljar.records import dataclass
from belljar.service import kept

CLOUD = "cloud-node"  # a label
LARGEST = 1 << 24
LOCK, PLACED = "lock", "placed.json"
LOOK = 30.0  # seconds a host has to say which nodes it has
MOST = 1 << 20  # bytes of an answer
FAILED = "failed: "
Ask = Callable[[tuple[str, ...], float], Awaitable[Finished]]  # a command, whatever its exit code
Names = Callable[[str], Awaitable[list[str]]]  # of a hostlist


async def resume(
    hostlist: str, file: Path | None, settings: Settings, pool: Pool, shares: tuple[Share, ...]
) -> dict[str, str]:
    """A machine for each of these nodes that has none: its id, or the reason why there is no machine. Raises BelljarError."""
    names = await hostnames(hostlist)
    mark = f"@{os.urandom(8).hex()}@"
    try:
        nodes = pool.nodes(await command(pool.query_nodes()))
        jobs = {job.number: job for job in pool.jobs(await command(pool.query(mark)), mark).values()}
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
            return f"{FAILED}{exc.message}"

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
    asks, network = f"node:{name}", job.network if job else ""
    return joining_request(
        member, settings, pool, network=network, image=image, shares=shares, labels=labels, requester=asks
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


# -- on several hosts ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Made:
    """node -> its machine, or why it has none; and node -> its host. *trouble*: a line for each host that does not answer."""

    nodes: dict[str, str]
    hosts: dict[str, str]
    trouble: tuple[str, ...] = ()


class Placement:
    """*folder*: where it is written down what was sent where."""

    def __init__(self, settings: Settings, folder: Path, ask: Ask, names: Names) -> None:
        self._settings, self._folder, self._ask, self._names = settings, private_folder(folder), ask, names
        self._there: dict[str, dict[str, str]] = {}  # host -> its nodes, with their machines
        self._silent: dict[str, str] = {}  # host -> why

    async def resume(self, nodes: list[str]) -> Made:
        """A machine for each node, somewhere. May be said twice."""
        with self._alone():
            rules, placed = await self._known(nodes)
            made = {name: self._found(name) or ("", self._why_not(name, rules, placed)) for name in nodes}
            turns = {
                name: [*filter(self._there.__contains__, rules[name])]
                for name, (_, answer) in made.items()
                if not answer
            }
            while sent := {name: hosts.pop(0) for name, hosts in turns.items() if hosts}:
                placed |= sent
                self._write(placed)
                for name, (host, answer) in (await self._send("resume", sent)).items():
                    made[name] = (host, answer)
                    if answer.startswith(FAILED) and host not in self._silent:
                        placed.pop(name)
                    else:  # it is made; or it may have begun, and nobody else does
                        turns.pop(name)
            self._write(placed | self._made(made).hosts)
        return self._made(made)

    async def suspend(self, nodes: list[str], *, forget: bool = False) -> Made:
        """Their machines end, wherever they are. *forget*: those of a host that does not answer, too, are believed to have ended."""
        with self._alone():
            _, placed = await self._known(nodes)
            made = await self._send("suspend", {name: home[0] for name in nodes if (home := self._found(name))})
            for name in nodes:
                if name not in made and not forget and (host := placed.get(name, "")) in self._silent:
                    made[name] = (host, f"{FAILED}it may live on {host}, which does not answer")
            gone = {name for name in nodes if not made.get(name, ("", ""))[1].startswith(FAILED)}
            self._write({name: host for name, host in placed.items() if name not in gone})
        return self._made(made)

    async def all(self) -> Made:
        """Every node that lives, on a host that answers."""
        await self._known(list(await self._rules()))
        return self._made({name: (host, id) for host, own in self._there.items() for name, id in own.items()})

    def _made(self, made: Mapping[str, tuple[str, str]]) -> Made:
        """*made*: node -> host, and machine or failure."""
        hosts = {name: host for name, (host, answer) in made.items() if not answer.startswith(FAILED)}
        troubles = (f"{host} does not answer: {why}" for host, why in sorted(self._silent.items()))
        return Made({name: answer for name, (_, answer) in made.items()}, hosts, tuple(troubles))

    # -- hosts ---------------------------------------------------------------------------------------------------------

    async def _known(self, nodes: list[str]) -> tuple[dict[str, tuple[str, ...]], dict[str, str]]:
        """Rules, and what was sent where; all hosts that these nodes may be on were asked."""
        rules, placed = await self._rules(), self._placed()

        async def ask(host: str) -> None:
            try:
                self._there[host] = await self._answer(host, ("list",), LOOK)
            except BelljarError as exc:
                self._silent[host] = exc.message

        homes = {placed[name] for name in nodes if name in placed}
        await asyncio.gather(*map(ask, sorted(homes.union(*(rules.get(name, ()) for name in nodes)))))
        return rules, placed

    async def _send(self, act: str, homes: Mapping[str, str]) -> dict[str, tuple[str, str]]:
        """To each host its nodes at once."""

        async def ask(host: str) -> dict[str, tuple[str, str]]:
            own = [name for name, home in homes.items() if home == host]
            try:
                answers = await self._answer(host, (act, ",".join(own)), self._settings.join)
            except BelljarError as exc:
                self._silent[host] = exc.message
                answers = dict.fromkeys(own, f"{FAILED}{exc.message}")
            silent = "" if act == "suspend" else f"{FAILED}it said nothing of it"
            return {name: (host, answers.get(name, silent).replace(FAILED, f"{FAILED}{host}: ", 1)) for name in own}

        answers = await asyncio.gather(*map(ask, sorted(set(homes.values()))))
        return {name: answer for each in answers for name, answer in each.items()}

    async def _answer(self, host: str, words: tuple[str, ...], timeout: float) -> dict[str, str]:
        """Raises CommandFailed for anything but an answer of belljar's."""
        reach = tuple(word.replace("{host}", host) for word in self._settings.reach)
        reply = await self._ask((*reach, "node", *words, "--here", "--format", "json"), timeout)
        try:
            return {str(name): str(machine) for name, machine in json.loads(reply.out[:MOST])["nodes"].items()}
        except (ValueError, TypeError, KeyError, AttributeError):
            why = last_line(reply.err) or f"exit {reply.code}"
            raise CommandFailed(f"no answer of `belljar node {words[0]}`: {why}") from None

    def _found(self, name: str) -> tuple[str, str] | None:
        return next(((host, nodes[name]) for host, nodes in self._there.items() if name in nodes), None)

    def _why_not(self, name: str, rules: Mapping[str, tuple[str, ...]], placed: Mapping[str, str]) -> str:
        if (host := placed.get(name, "")) in self._silent:
            return f"{FAILED}it may live on {host}, which does not answer; when it does not: belljar node suspend --forget {name}"
        if name not in rules:
            return f"{FAILED}no line of `placement` names it"
        return "" if set(rules[name]) & self._there.keys() else f"{FAILED}no host answers: {', '.join(rules[name])}"

    # -- what is written down ------------------------------------------------------------------------------------------

    def _alone(self) -> AbstractContextManager[object]:
        return locked(self._folder / LOCK, timeout=self._settings.join, what="place nodes")

    async def _rules(self) -> dict[str, tuple[str, ...]]:
        """node -> its hosts, in order. The first line that names a node counts."""
        rules = dict[str, tuple[str, ...]]()
        for line in reversed(self._settings.placement):
            nodes, _, hosts = line.partition("->")
            rules |= dict.fromkeys(await self._names(nodes.strip()), tuple(hosts.split()))
        return rules

    def _placed(self) -> dict[str, str]:
        """node -> the host to which it was sent last."""
        path = self._folder / PLACED
        placed: dict[str, dict[str, str]] | None = kept.read(path, dict[str, dict[str, str]])
        if placed is None and path.exists() and read_capped(path, MOST):
            hint = "Is it whole? Remove it when no cloud node lives."
            raise BadOption(f"{path}: cannot be read: where nodes were sent is not known", hint=hint)
        return (placed or {}).get("nodes", {})

    def _write(self, nodes: Mapping[str, str]) -> None:
        kept.keep(self._folder / PLACED, {"nodes": dict(nodes)}, durable=True)
