"""Can machines join this Slurm as nodes, and can a bait take jobs for them? Read from what slurmctld says of its settings."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress

from belljar.errors import BelljarError
from belljar.findings import Finding, fail_if
from belljar.host.processes import all_pids, command_line
from belljar.pool.terms import NodeView

Ask = Callable[..., str]  # what a command prints; raises BelljarError
MOST_OF_A_SCRIPT = 1 << 20
ON_ITSELF = "jobs would run on the bait itself"
HEAD = re.compile(r"(?im)^\s*(?:SlurmctldHost|ControlMachine)\s*=\s*([^\s(]+)(?:\(([^)\s]+)\))?")
PARTITION = """NodeSet={0} Feature={1} and PartitionName={0} Nodes={0} Hidden=YES OverSubscribe=EXCLUSIVE State=UP"""


def needs(
    ask: Ask, nodes: Mapping[str, NodeView], baits: tuple[str, ...], queue: str, feature: str, conf: str
) -> Iterator[Finding]:
    """*baits*: their names; *conf*: the text of slurm.conf. Raises BelljarError where slurmctld does not answer."""
    said = settings_of(ask("scontrol", "show", "config"))
    for name in baits:
        wrong, there = "" if name in nodes else "slurmctld knows no such node", os.cpu_count() or 1
        if name in nodes and nodes[name].cpus > there:
            wrong = f"CPUs={nodes[name].cpus}, and this host has {there}"
        yield fail_if(f"bait {name}", wrong, f"In slurm.conf: NodeName={name} CPUs=... RealMemory=... Feature=bait")
        yield fail_if(f"slurmd of {name}", _daemon(name), "Start it with `-d`, and the script of docs/bait/guide.md.")
    most, select = said.get("MaxNodeCount", ""), said.get("SelectType", "")
    wrong = "" if most.isdigit() and int(most) > len(nodes) else f"{most or 'not told'}: no node can join {len(nodes)}"
    yield fail_if("MaxNodeCount", wrong, "In slurm.conf: MaxNodeCount=200, then restart slurmctld.")
    wrong = "" if select == "select/cons_tres" else f"{select or 'not told'}: its nodes cannot come and go"
    yield fail_if("SelectType", wrong, "In slurm.conf: SelectType=select/cons_tres, then restart slurmctld.")
    has_memory = any(said.get(key, "").isdigit() for key in ("DefMemPerCPU", "DefMemPerNode"))
    wrong = "" if has_memory else "not set: a job that asks for no memory is refused"
    yield fail_if("DefMemPerCPU", wrong, "In slurm.conf: DefMemPerCPU=1000, in MiB.")
    wrong = _prolog(said.get("Prolog", "(null)"))
    yield fail_if("Prolog", wrong, "In slurm.conf: Prolog=..., the script of docs/bait/guide.md.")
    wrong = _partition(ask, queue, feature, conf)
    yield fail_if(f"partition {queue}", wrong, f"In slurm.conf: {PARTITION.format(queue, feature)}")


def whole(conf: str) -> Finding:
    """What slurm.conf includes is not copied to machines with it."""
    wrong = "it includes other files, which machines do not get" if re.search(r"(?im)^\s*include\s", conf) else ""
    return fail_if("slurm.conf", wrong, "Name one whole slurm.conf in bait.toml: `conf`.")


def head(conf: str, hosts: tuple[str, ...]) -> Finding:
    """A machine finds slurmctld by the address in slurm.conf, or by a line of its own /etc/hosts."""
    addresses = heads(conf, hosts)
    wrong = "" if addresses else "slurm.conf names none"
    for name, address in addresses.items():
        wrong = wrong or ("" if address else f"{name}: this host knows no address of it")
        if address.startswith("127."):
            wrong = f"{name} is {address}: a machine would look in itself"
    name = next(iter(addresses), "NAME")
    return fail_if("SlurmctldHost", wrong, f'In bait.toml: hosts = ["ADDRESS {name}"], as machines reach it.')


def heads(conf: str, hosts: Iterable[str]) -> dict[str, str]:
    """slurmctld's hosts, with their addresses: by these lines, else as this host resolves them; "" where it cannot."""
    addresses = {name: line.split()[0] for line in hosts for name in line.split()[1:]}
    for name, address in re.findall(HEAD, conf):
        with suppress(OSError):
            addresses.setdefault(address or name, socket.gethostbyname(address or name))
    return {address or name: addresses.get(address or name, "") for name, address in re.findall(HEAD, conf)}


def settings_of(printed: str) -> dict[str, str]:
    """`Key = value` of `scontrol show config`; of a key with numbers, the first."""
    found: dict[str, str] = {}
    for line in printed.splitlines():
        if match := re.match(r"(\w+)(?:\[\d+\])?\s*= (.*)$", line):
            found.setdefault(match[1], match[2].strip())
    return found


def _prolog(path: str) -> str:
    if path == "(null)":
        return f"slurm.conf names none: {ON_ITSELF}"
    if path.endswith("*"):  # several, of which each may be ours
        return ""
    try:
        with open(path, "rb") as file:
            has_it = b"bait arrive" in file.read(MOST_OF_A_SCRIPT)
            return "" if has_it else f"{path} has no `belljar bait arrive`: {ON_ITSELF}"
    except OSError as exc:
        return f"{path}: {exc.strerror}"


def _daemon(name: str) -> str:
    """One that has slurmstepd start a job in spite of all, as slurmd 22.05 may. A slurmd that does not run here says nothing."""
    for pid in all_pids():
        words = [os.fsdecode(word) for word in command_line(pid)]
        if not words or os.path.basename(words[0]) != "slurmd":
            continue
        has_name = any(word.startswith("-N") for word in words)
        is_its = name in words or f"-N{name}" in words if has_name else name == os.uname().nodename.partition(".")[0]
        if is_its and not any(word.startswith("-d") for word in words[1:]):
            return f"pid {pid} has no `-d`: {ON_ITSELF}"
    return ""


def _partition(ask: Ask, queue: str, feature: str, conf: str) -> str:
    try:
        line = ask("scontrol", "--oneliner", "--all", "show", "partition", queue)
    except BelljarError:
        return "slurmctld knows no such partition"
    words = dict(word.partition("=")[::2] for word in line.split())
    if words.get("OverSubscribe") != "EXCLUSIVE":
        return "OverSubscribe is not EXCLUSIVE: another job could come onto a job's node"
    if words.get("RootOnly") == "YES" or words.get("AllocNodes", "ALL") != "ALL":
        return "RootOnly or AllocNodes keep the bait from moving jobs there"
    features = dict(re.findall(r"(?im)^\s*NodeSet\s*=\s*(\S+)\s.*?Feature\s*=\s*(\S+)", conf))
    if not words.get("NodeSets"):
        return "it has no NodeSet: nodes that join would not be in it"
    is_its = not features or feature in map(features.get, words["NodeSets"].split(","))
    return "" if is_its else f"none of its NodeSets has the feature {feature}, which nodes that join have"
