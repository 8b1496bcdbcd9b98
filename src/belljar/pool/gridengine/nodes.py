"""Grid Engine's nodes from the outside: execution hosts that machines become. 8.1.9 and later.

The qmaster must know a host's name and address (DNS, /etc/hosts) before its first message, and remembers for a while what it found:
so the machines of a bait have names and addresses out of a list. A host is added with the queue that takes it up, before its machine
starts; then its execd need not be on an administrative host. It is removed in the reverse order, the host last: by that it is seen
what of it a crash has left.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping
from ipaddress import IPv4Address
from pathlib import Path

from belljar.batch.gridengine.hooks import value
from belljar.batch.job.terms import one_node
from belljar.errors import BadOption, BelljarError
from belljar.findings import Finding, fail_if
from belljar.pool import terms
from belljar.pool.gridengine.client import CLIENT, GridEngineClient
from belljar.pool.terms import Ask, Command, JobView, Joining, Member, Names, NodeState, NodeView
from belljar.records import replace

INSTANCE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}@[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
USERS = "belljar_"  # begins the name of a host's access list
BOOTSTRAP = Path("/var/lib/gridengine/default/common/bootstrap")  # of Debian's packages

PAGE = "docs/batch/bait/reference.md, Grid Engine"

JOIN = Path(__file__).with_name("join.sh").read_bytes()


class GridEngineNodes(terms.Nodes):
    """The nodes' side. *queue*: the one that machines are added to; *hosts*: name -> address of those that machines may become, where a
    machine's id ends in its address; *feature*: of these nodes."""

    tells_reasons = False
    packages = ("gridengine-exec",)

    def __init__(self, queue: str = "belljar", hosts: Mapping[str, str] | None = None, feature: str = "") -> None:
        self.queue, self.hosts, self._feature = queue, dict(hosts or {}), feature
        self._names = {_ending(address): name for name, address in self.hosts.items()}

    def new_machine(self, nodes: Collection[str]) -> str:
        """Any of the free names: the qmaster may still believe that the one used last is there."""
        free = sorted(set(self.hosts) - set(nodes))
        if not free:
            return ""
        random = os.urandom(6)
        return f"{random[:4].hex()}{_ending(self.hosts[free[int.from_bytes(random[4:], 'big') % len(free)]])}"

    def name_of(self, machine: str) -> str:
        return self._names.get(machine[-4:]) or super().name_of(machine)

    def machine_of(self, node: str) -> str:
        return f"00000000{_ending(self.hosts[node])}" if node in self.hosts else super().machine_of(node)

    def address_of(self, machine: str) -> str:
        return self.hosts.get(self.name_of(machine), "")

    def query(self) -> Command:
        return ("qhost", "-xml", "-q")

    def nodes(self, printed: bytes) -> dict[str, NodeView]:
        """Hosts, with the state of our queue there; and each instance of another queue by its own name, QUEUE@HOST."""
        text = printed.decode("utf-8", "replace")
        if len(printed) > terms.LARGEST_ANSWER or "<qhost" not in text[:4096] or not text.rstrip().endswith("</qhost>"):
            raise ValueError("qhost printed no list of hosts, or one that was cut off")
        views = (view for entry in text.split("<host name=")[1:] for view in _views(entry, self.queue))
        ours = dict.fromkeys(self.hosts, (self._feature,))
        return {view.name: replace(view, features=ours.get(view.name, ())) for view in views if view.name != "global"}

    def open(self, node: str) -> Command:
        """`-cq`: a prolog that failed has set it into an error state."""
        return ("qmod", "-e", self._instances(node), "-cq", self._instances(node))

    def close(self, node: str, reason: str) -> Command:
        return ("qmod", "-d", self._instances(node))

    def _instances(self, node: str) -> str:
        return node if INSTANCE.fullmatch(node) else f"*@{one_node(node)}"

    def lose(self, node: str, reason: str) -> tuple[Command, ...]:
        """What may run again does; what may not is left to `force_end`."""
        return (self.close(node, reason), ("qmod", "-rq", self._instances(node)))

    def create(self, node: str, job: JobView) -> tuple[Command, ...]:
        """The queue takes the host up, by which it becomes one; for nobody but the job's owner."""
        host, users = one_node(node), f"{USERS}{node}"
        image = (("qconf", "-aattr", "exechost", "complex_values", f"vm_image={job.image}", host),) if job.image else ()
        return (
            ("qconf", "-aattr", "queue", "hostlist", host, self.queue),
            ("qconf", "-aattr", "queue", "slots", f"[{host}={job.cpus}]", self.queue),
            ("qconf", "-au", job.owner, users),
            ("qconf", "-aattr", "queue", "user_lists", f"[{host}={users}]", self.queue),
            *image,
        )

    def remove(self, node: str) -> tuple[Command, ...]:
        host = one_node(node)
        return (
            ("qconf", "-dattr", "queue", "hostlist", host, self.queue),
            ("qconf", "-purge", "queue", "*", f"{self.queue}@{host}"),
            ("qconf", "-dul", f"{USERS}{host}"),
            ("qconf", "-de", host),
        )

    def move(self, job: JobView, nodes: tuple[str, ...], queue: str, *, reruns: bool = True) -> tuple[Command, ...]:
        """Raises BadOption for a job of several nodes: its parallel environment would have to be the machines' own."""
        if len(nodes) != 1:
            raise BadOption(f"{job.id}: {len(nodes)} nodes: a job of Grid Engine gets one machine")
        return (("qalter", "-q", f"{queue}@{one_node(nodes[0])}", job.number), CLIENT.release(job.id))

    def give_back(self, job: JobView, queue: str, delay: float, *, stays_held: bool = False) -> tuple[Command, ...]:
        """Grid Engine takes a start time of the wall clock only; its own next cycle comes later anyway."""
        alter = ("qalter", "-q", queue or "*", job.number)
        return (alter,) if stays_held else (alter, CLIENT.release(job.id))

    def joining(self, member: Member, conf_file: Path, text: bytes) -> Joining:
        """*conf_file*: the cell's bootstrap. Raises BadOption where its daemons prove themselves by more than their addresses."""
        mode = re.search(rb"(?m)^security_mode\s+(\S+)", text)
        if mode is not None and mode[1] != b"none":
            what = f"security_mode {mode[1].decode(errors='replace')}"
            raise BadOption(f"{conf_file}: {what}: no key for it is given to machines")
        common = conf_file.parent
        env = {"SGE_ROOT": str(common.parents[1]), "SGE_CELL": common.parent.name}
        return member.joining(JOIN, env, copies=(conf_file, common / "act_qmaster"))

    def needs(self, ask: Ask, conf: str, baits: Names, queue: str, feature: str, hosts: Names) -> Iterator[Finding]:
        bait = baits[0]
        managers = ask("qconf", "-sm").split()
        yield fail_if("root manages the cell", "" if "root" in managers else "root is not a manager", "qconf -am root")
        fit = f"Only those of allocation_rule $pe_slots, each in the pe_list of both queues ({PAGE})."
        for what, look, remedy in (
            (f"bait {bait}", _bait, f"Set the prolog of {bait} ({PAGE})."),
            (f"queue {queue}", _queue, f"Make it for machines alone, without a prolog ({PAGE})."),
            ("parallel environments", _environments, fit),
        ):
            try:
                wrong = look(ask, bait, queue)
            except BelljarError as exc:
                wrong = exc.message.replace("\n", " ")
            yield fail_if(what, wrong, remedy)
        wrong = ", ".join(name for name, address in self.hosts.items() if not _is_known(ask, name, address))
        remedy = "Give the qmaster's host each name with its address, both ways: DNS, or /etc/hosts."
        yield fail_if("names of machines", f"not known by name and address: {wrong}" if wrong else "", remedy)


class GridEnginePool(terms.Pool):
    """Both sides."""

    def of_bait(self, name: str, queue: str, feature: str, nodes: Names) -> terms.Pool:
        if not INSTANCE.fullmatch(name):
            raise ValueError("name", f"{name[:60]!r} is not a queue of a host", 'as in name = "vm.q@wn01"')
        return replace(self, client=GridEngineClient(name), nodes=GridEngineNodes(queue, listed(nodes), feature))


def _views(entry: str, queue: str) -> list[NodeView]:
    name = re.match(r"'([^']{1,255})'", entry)
    if name is None:
        raise ValueError("qhost printed a host without a name")
    values = dict(re.findall(r"<hostvalue name='(\w+)'>([^<]*)</hostvalue>", entry))
    queues: dict[str, dict[str, str]] = {}
    for qname, key, text in re.findall(r"<queuevalue qname='([^']+)' name='(\w+)'>([^<]*)</queuevalue>", entry):
        queues.setdefault(qname, {})[key] = text
    names = {queue: name[1], **{qname: f"{qname}@{name[1]}" for qname in queues if qname != queue}}
    return [
        NodeView(node, _state(values, instance), (), _reason(instance))
        for qname, node in names.items()
        for instance in (queues.get(qname, {}),)
    ]


def _state(values: Mapping[str, str], queue: Mapping[str, str]) -> NodeState:
    """d(isabled) by somebody, E(rror) of a prolog, u(nheard)."""
    is_busy, letters = queue.get("slots_used", "0") != "0", queue.get("state_string", "")
    if {"d", "E"} & set(letters):
        return NodeState.DRAINING if is_busy else NodeState.OUT
    if is_busy:
        return NodeState.BUSY
    is_heard = values.get("load_avg", "-") != "-" and "u" not in letters
    return NodeState.IDLE if is_heard else NodeState.AWAY


def _reason(queue: Mapping[str, str]) -> str:
    letters = queue.get("state_string", "")
    return "Prolog error" if "E" in letters and "d" not in letters else letters


def listed(nodes: tuple[str, ...]) -> dict[str, str]:
    """name -> address of `ADDRESS NAME` each. Raises ValueError: key, what is wrong, hint."""
    hosts: dict[str, str] = {}
    for line in nodes:
        try:
            address, name = line.split()
            hosts[one_node(name)] = str(IPv4Address(address))
        except ValueError:
            hint = 'as in nodes = ["10.99.0.10 vm10"]'
            raise ValueError("nodes", f"{line[:60]!r} is not an IPv4 address and a name", hint) from None
    if not hosts:
        hint = 'as in nodes = ["10.99.0.10 vm10"]: the batch system has to find them by DNS or /etc/hosts'
        raise ValueError("nodes", "is missing", hint)
    if len({_ending(address) for address in hosts.values()}) != len(nodes):
        raise ValueError("nodes", "two names are alike, or two addresses in their last two bytes", "Name each once.")
    return hosts


def _ending(address: str) -> str:
    return f"{int(IPv4Address(address)) & 0xFFFF:04x}"


def _bait(ask: Ask, bait: str, queue: str) -> str:
    prolog = value(ask("qconf", "-sq", bait), "prolog")
    if not prolog.startswith("root@"):
        return f"its prolog is {prolog or 'NONE'}, which takes nothing back as root"
    return "" if "$job_id" in prolog and "$ja_task_id" in prolog else "its prolog is not told job and task"


def _queue(ask: Ask, bait: str, queue: str) -> str:
    prolog = value(ask("qconf", "-sq", queue), "prolog")
    return "" if prolog == "NONE" else f"its prolog is {prolog}"


def _environments(ask: Ask, bait: str, queue: str) -> str:
    """A job of several slots gets one machine."""
    ours, there = (re.split(r"[\s,]+", value(ask("qconf", "-sq", name), "pe_list")) for name in (bait, queue))
    for name in [name for name in ours if name not in ("", "NONE")]:
        rule = value(ask("qconf", "-sp", name), "allocation_rule")
        if rule != "$pe_slots":
            return f"{name}: its allocation_rule is {rule}: a job of it wants several machines, and would never start"
        if name not in there:
            return f"{name}: the queue {queue} does not have it, and a job of it would never start"
    return ""


def _is_known(ask: Ask, name: str, address: str) -> bool:
    """By this host's resolver."""
    try:
        addresses, names = ask("getent", "ahostsv4", name).split(), ask("getent", "hosts", address).split()
    except BelljarError:
        return False
    return addresses[:1] == [address] and name in names


POOL = GridEnginePool(CLIENT, GridEngineNodes(), {"conf": BOOTSTRAP, "key": Path(), "gone_after": 5.0})
