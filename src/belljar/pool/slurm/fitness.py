"""Can machines join this Slurm as nodes, and can a bait take jobs for them? What a machine that joins (`bait check --join`) does not prove
by itself, or would not explain."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress

from belljar.errors import BelljarError
from belljar.findings import Finding, fail_if
from belljar.pool.terms import Nodes

Ask = Callable[..., str]  # what a command prints; raises BelljarError
MOST_OF_A_SCRIPT = 1 << 20
ON_ITSELF = "jobs would run on the bait itself"
HEAD = re.compile(r"(?im)^\s*(?:SlurmctldHost|ControlMachine)\s*=\s*([^\s(]+)(?:\(([^)\s]+)\))?")


def needs(
    nodes: Nodes, ask: Ask, conf: str, baits: tuple[str, ...], queue: str, feature: str, hosts: tuple[str, ...]
) -> Iterator[Finding]:  # fmt: skip
    """*conf*: the text of slurm.conf; *baits*: their names; *hosts*: lines for a machine's /etc/hosts. Raises BelljarError where slurmctld
    does not answer."""
    wrong = "it includes other files, which machines do not get" if re.search(r"(?im)^\s*include\s", conf) else ""
    yield fail_if("slurm.conf", wrong, "Name one whole slurm.conf in bait.toml: `conf`.")
    yield head(conf, hosts)
    known = nodes.nodes(ask(*nodes.query()).encode())
    config = settings_of(ask("scontrol", "show", "config"))
    for name in baits:
        wrong = "" if name in known else "slurmctld knows no such node"
        yield fail_if(f"bait {name}", wrong, f"In slurm.conf: NodeName={name} CPUs=... RealMemory=... Feature=bait")
    most = config.get("MaxNodeCount", "")
    wrong = "" if most.isdigit() and int(most) > len(known) else f"{most or 'not told'}: no node can join {len(known)}"
    yield fail_if("MaxNodeCount", wrong, "In slurm.conf: MaxNodeCount=200, then restart slurmctld.")
    wrong = _prolog(config.get("Prolog", "(null)"))
    yield fail_if("Prolog", wrong, "In slurm.conf: Prolog=..., the script of docs/bait/guide.md.")
    line = f"NodeSet={queue} Feature={feature} and PartitionName={queue} Nodes={queue} Hidden=YES OverSubscribe=EXCLUSIVE State=UP"
    yield fail_if(f"partition {queue}", _partition(ask, queue), f"In slurm.conf: {line}")


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
    rows = re.findall(r"(?m)^(\w+)(?:\[\d+\])?\s*= (.*)$", printed)
    return {key: value.strip() for key, value in reversed(rows)}


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


def _partition(ask: Ask, queue: str) -> str:
    try:
        line = ask("scontrol", "--oneliner", "--all", "show", "partition", queue)
    except BelljarError:
        return "slurmctld knows no such partition"
    is_exclusive = "OverSubscribe=EXCLUSIVE" in line.split()
    return "" if is_exclusive else "OverSubscribe is not EXCLUSIVE: another job could come onto a job's node"
