"""Slurm's nodes from the outside: dynamic nodes that machines become, and baits. 22.05 and later.

A machine's slurmd registers itself (`slurmd -Z`); slurmctld then launches to the address the registration came from, at its own
SlurmdPort. https://slurm.schedmd.com/dynamic_nodes.html

A dynamic node is deleted only when it is drained and quiet, and after its slurmd has gone: slurmctld 22.05.8 crashed when one was
deleted while it still sent something there.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from belljar.batch.job.terms import one_line, one_node
from belljar.errors import BelljarError
from belljar.findings import Finding, fail_if
from belljar.model import MIB, PlainFile
from belljar.pool import terms
from belljar.pool.slurm.client import CLIENT, OURS, UPDATE
from belljar.pool.terms import Ask, Command, JobView, Joining, Member, Names, NodeState, NodeView

# `State=` is one base state and flags. https://slurm.schedmd.com/sinfo.html#SECTION_NODE-STATE-CODES
BUSY = {"ALLOCATED", "MIXED", "COMPLETING"}
ABSENT = {
    "UNKNOWN", "FUTURE", "NOT_RESPONDING", "POWERED_DOWN", "POWERING_UP", "POWERING_DOWN", "POWER_DOWN", "REBOOT_ISSUED",
}  # fmt: skip
CLOSED = {"DOWN", "DRAIN", "FAIL"}
# Lines of slurm.conf that a guest has its own of, or may not have: places on this host, and for a dynamic node those of nodes.
OF_NODES = ("nodename", "partitionname", "nodeset", "downnodes")
NOT_A_GUESTS = (
    "include", "slurmdspooldir", "slurmdpidfile", "slurmdlogfile",
    "slurmctldpidfile", "slurmctldlogfile", "statesavelocation", "jobcomploc", "prolog", "epilog", "taskprolog", "taskepilog",
    "prologslurmctld", "epilogslurmctld", "plugstackconfig", "healthcheckprogram", "jobsubmitplugins",
)  # fmt: skip
GUESTS = """SlurmdSpoolDir=/var/spool/slurmd
SlurmdPidFile=/run/slurmd.pid
SlurmdLogFile=/var/log/slurm/slurmd.log
Prolog=/run/belljar/prolog
Epilog=/run/belljar/epilog
"""
# slurmd wants control groups whatever it tracks processes by, and there is no systemd to ask for them.
CGROUPS = b"CgroupPlugin=cgroup/v2\nIgnoreSystemd=yes\n"

MOST_OF_A_SCRIPT = 1 << 20
ON_ITSELF = "jobs would run on the bait itself"
HEAD = re.compile(r"(?im)^\s*(?:SlurmctldHost|ControlMachine)\s*=\s*([^\s(]+)(?:\(([^)\s]+)\))?")
JOIN = Path(__file__).with_name("join.sh").read_bytes()


class SlurmNodes(terms.Nodes):
    """The nodes' side."""

    folders = ("/run", "/var/log", "/var/spool/slurmd", "/var/lib/munge")
    packages = ("slurmd", "munge")
    saves = 10.0  # slurmctld writes jobs down within five seconds of a change, and takes a moment for it

    def query(self) -> Command:
        return ("scontrol", "--oneliner", "--all", "show", "nodes")

    def nodes(self, printed: bytes) -> dict[str, NodeView]:
        text = printed.decode("utf-8", "replace")
        if len(printed) > terms.LARGEST_ANSWER or (text.strip() and not text.startswith(("NodeName=", "No nodes"))):
            raise ValueError(f"scontrol printed {text[:60]!r} where the list of nodes begins")
        lines = (line for line in text.splitlines() if line.strip() and not line.startswith("No nodes"))
        return {node.name: node for node in map(_node, lines)}

    def open(self, node: str) -> Command:
        return (*UPDATE, f"NodeName={one_node(node)}", "State=RESUME")

    def close(self, node: str, reason: str) -> Command:
        return (*UPDATE, f"NodeName={one_node(node)}", "State=DRAIN", f"Reason={OURS}{one_line(reason)}")

    def lose(self, node: str, reason: str) -> tuple[Command, ...]:
        return ((*UPDATE, f"NodeName={one_node(node)}", "State=DOWN", f"Reason={OURS}{one_line(reason)}"),)

    def remove(self, node: str) -> tuple[Command, ...]:
        return (("scontrol", "delete", f"NodeName={one_node(node)}"),)

    def move(self, job: JobView, nodes: tuple[str, ...], queue: str, *, reruns: bool = True) -> tuple[Command, ...]:
        """StartTime: a job that was requeued waits for the old credential to expire else, two minutes (cred_expire)."""
        where = f"ReqNodeList={','.join(map(one_node, nodes))}"
        exactly = f"NumNodes={len(nodes)}-{len(nodes)}"  # of a range Slurm would add nodes of other jobs
        update = (*UPDATE, f"JobId={job.id}", f"Partition={queue}", where, exactly, "StartTime=now")
        once = () if reruns else ((*UPDATE, f"JobId={job.id}", "Requeue=0"),)
        return (update, *once, CLIENT.release(job.id))

    def unpin(self, job: JobView, queue: str = "") -> tuple[Command, ...]:
        """Slurm 24.11 changes nothing any more of a job that wants a node which is gone: "Invalid required nodes list in job records".
        No release changes one in a partition that has fewer nodes than it asks for: so it goes home."""
        home = (f"Partition={queue}",) if queue else ()
        return ((*UPDATE, f"JobId={job.id}", *home, "ReqNodeList="),)

    def give_back(self, job: JobView, queue: str, delay: float, *, stays_held: bool = False) -> tuple[Command, ...]:
        when = f"StartTime=now+{int(delay)}"
        update = (*UPDATE, f"JobId={job.id}", f"Partition={queue}", "ReqNodeList=", when)
        return (update,) if stays_held else (update, CLIENT.release(job.id))

    def joining(self, member: Member, conf_file: Path, text: bytes) -> Joining:
        """The settings lie where they lie on the host: users' jobs may have SLURM_CONF from there."""
        known, addresses = member.hosts.split(), heads(text.decode("utf-8", "replace"), ()).items()
        resolved = (f"{it} {name}" for name, it in addresses if name not in (*known, it) and it[:4] not in ("", "127."))
        conf = f"CPUs={member.cpus} RealMemory={member.memory // MIB} Feature={','.join(member.features)}"
        env = {
            "HOSTS": "\n".join((member.hosts, *resolved)), "CONF": "" if member.is_known else conf, "JOB_ID": member.job,
            "JOB_UID": member.account[0].split(":")[2] if member.account else "", "SLURM_CONF": str(conf_file),
        }  # fmt: skip
        settings = PlainFile(bytes(conf_file), guest_conf(text, keeps_nodes=member.is_known))
        groups = PlainFile(bytes(conf_file.with_name("cgroup.conf")), CGROUPS)
        return member.joining(JOIN, env, files=(settings, groups))

    def needs(self, ask: Ask, conf: str, baits: Names, queue: str, feature: str, hosts: Names) -> Iterator[Finding]:
        """What a machine that joins (`bait check --join`) does not prove by itself, or would not explain. Raises BelljarError where slurmctld
        does not answer."""
        wrong = "it includes other files, which machines do not get" if re.search(r"(?im)^\s*include\s", conf) else ""
        yield fail_if("slurm.conf", wrong, "Name one whole slurm.conf in bait.toml: `conf`.")
        yield head(conf, hosts)
        known = self.nodes(ask(*self.query()).encode())
        config = settings_of(ask("scontrol", "show", "config"))
        for name in baits:
            wrong = "" if name in known else "slurmctld knows no such node"
            yield fail_if(f"bait {name}", wrong, f"In slurm.conf: NodeName={name} CPUs=... RealMemory=... Feature=bait")
        most = config.get("MaxNodeCount") or "not told"
        wrong = "" if most.isdigit() and int(most) > len(known) else f"{most}: no node can join {len(known)}"
        yield fail_if("MaxNodeCount", wrong, "In slurm.conf: MaxNodeCount=200, then restart slurmctld.")
        wrong = _prolog(config.get("Prolog", "(null)"))
        yield fail_if("Prolog", wrong, "In slurm.conf: Prolog=..., the script of docs/batch/bait/guide.md.")
        line = f"NodeSet={queue} Feature={feature} and PartitionName={queue} Nodes={queue} Hidden=YES OverSubscribe=EXCLUSIVE State=UP"
        yield fail_if(f"partition {queue}", _partition(ask, queue), f"In slurm.conf: {line}")


def guest_conf(text: bytes, *, keeps_nodes: bool = False) -> bytes:
    """A site's slurm.conf for a machine that joins: without places of this host, and for a dynamic node without other nodes."""
    lines, left_out = [], NOT_A_GUESTS if keeps_nodes else (*NOT_A_GUESTS, *OF_NODES)
    for line in text.decode("utf-8", "surrogateescape").splitlines():
        key = line.partition("=")[0].strip().lower()
        if (key.split() or ["#"])[0] in left_out or line.lstrip().startswith("#"):
            continue
        if key == "authinfo":  # the munged of the guest has its usual socket
            kept = [word for word in line.partition("=")[2].split(",") if not word.strip().startswith("socket=")]
            line = f"AuthInfo={','.join(kept)}" if kept else ""
        lines.append(line)
    return ("\n".join(filter(None, lines)) + "\n" + GUESTS).encode("utf-8", "surrogateescape")


def _node(line: str) -> NodeView:
    """Raises ValueError for a line that scontrol does not write."""
    match = re.match(r"NodeName=(\S+) .*?\sActiveFeatures=(\S*) .*?\sState=([A-Z_+*#~!%$@^-]+) ", line)
    if match is None:
        raise ValueError(f"scontrol printed {line[:60]!r} in the list of nodes")
    reason = re.search(r"\sReason=(.*)$", line)
    features = () if match[2] == "(null)" else tuple(match[2].split(","))
    sizes = (re.search(rf"\s{key}=([0-9]{{1,12}}) ", line) for key in ("CPUTot", "RealMemory"))
    cpus, memory = (int(size[1]) if size else 0 for size in sizes)
    why = one_line(reason[1].strip()) if reason else ""
    queues = tuple(re.sub(r".*\sPartitions=(\S*).*|.*", r"\1", line).split(","))
    return NodeView(match[1], _state(match[3]), features, why, cpus, memory * MIB, queues)


def _state(text: str) -> NodeState:
    flags = set(re.split(r"[+*#~!%$@^-]+", text))
    is_closed, is_busy = bool(flags & CLOSED), bool(flags & BUSY)
    if is_busy:
        return NodeState.DRAINING if is_closed else NodeState.BUSY
    if is_closed:
        return NodeState.OUT
    return NodeState.AWAY if flags & ABSENT or "*" in text else NodeState.IDLE


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


POOL = terms.Pool(CLIENT, SlurmNodes())
