"""Grid Engine from the outside, 8.1.9 and later: qstat and qhost, read strictly, and the commands that hold, move and release a job, and
that open, close and remove a node: execution hosts that machines become.

A job's image is its request `-l vm_image=NAME`, its memory `-l h_vmem=SIZE` for each slot. A job that has ended is not listed.
What a bait holds has an operator's hold, which is not its user's to take away.
https://manpages.debian.org/bookworm/gridengine-client/qstat.1.en.html

The qmaster must know a host's name and address (DNS, /etc/hosts) before its first message, and remembers for a while what it found:
so the machines of a bait have names and addresses out of a list. A host is added with the queue that takes it up, before its machine
starts; then its execd need not be on an administrative host. It is removed in the reverse order, the host last: by that it is seen
what of it a crash has left.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any

from belljar import pool
from belljar.batch.gridengine.dialect import entries, field, memory
from belljar.batch.gridengine.hooks import value
from belljar.batch.job.terms import one_line, one_node, whole
from belljar.errors import BadOption, BelljarError
from belljar.findings import Finding, fail_if
from belljar.pool import Ask, Command, JobId, JobState, JobView, Names, NodeState, NodeView
from belljar.records import replace

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@-]{0,199}")
TASK = re.compile(r"[0-9]{1,9}")
NOTICE = "belljar"  # a word of the job's context
MOST = 500  # jobs of one command
INSTANCE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}@[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
USERS = "belljar_"  # begins the name of a host's access list
BOOTSTRAP = Path("/var/lib/gridengine/default/common/bootstrap")  # of Debian's packages

PAGE = "docs/batch/bait/reference.md, Grid Engine"

JOIN = Path(__file__).with_name("join.sh").read_bytes()


class GridEnginePool(pool.Pool):
    """*queue*: the one that machines are added to; *hosts*: name -> address of those that machines may become, where a machine's id ends
    in its address; *feature*: of these nodes; *bait*: QUEUE@HOST whose prolog takes jobs back itself, by ending with 99."""

    moves_whole_arrays = True  # by `qalter -q`
    tells_reasons = False
    packages = ("gridengine-exec",)
    defaults: Mapping[str, Any] = {"conf": BOOTSTRAP, "key": Path(), "gone_after": 5.0}

    def __init__(
        self, queue: str = "belljar", hosts: Mapping[str, str] | None = None, feature: str = "", bait: str = ""
    ) -> None:
        self.queue, self.hosts, self._feature, self.bait = queue, dict(hosts or {}), feature, bait
        self._names = {_ending(address): name for name, address in self.hosts.items()}

    def of_bait(self, name: str, queue: str, feature: str, nodes: Names) -> GridEnginePool:
        if not INSTANCE.fullmatch(name):
            raise ValueError("name", f"{name[:60]!r} is not a queue of a host", 'as in name = "vm.q@wn01"')
        return GridEnginePool(queue, listed(nodes), feature, name)

    def query(self, mark: str) -> Command:
        """What users wrote comes escaped, as XML has it: no mark is needed."""
        return ("qstat", "-u", "*", "-r", "-g", "d", "-xml")

    def jobs(self, printed: bytes, mark: str) -> dict[JobId, JobView]:
        return {job.id: job for entry in entries(printed) for job in _jobs(entry, self.bait)}

    def take_back(self, job: JobView) -> tuple[Command, ...]:
        """Held first: one that is rescheduled starts again at once."""
        is_elsewhere = job.state is JobState.RUNNING and job.on != (self.bait,)
        reschedule = (("qmod", "-rj", job.id),) if is_elsewhere else ()
        return (*(() if _is_held(job) else self._hold(job.id)), *reschedule)

    def arrive(self, jobs: Sequence[JobView]) -> tuple[Command, ...]:
        return self._hold(*(job.id for job in jobs))

    def _hold(self, *jobs: JobId) -> tuple[Command, ...]:
        return tuple(("qhold", "-h", "o", *jobs[at : at + MOST]) for at in range(0, len(jobs), MOST))

    def is_back(self, job: JobView) -> bool:
        return job.state is not JobState.RUNNING or _is_held(job)

    def release(self, job: JobId) -> Command:
        return ("qrls", "-h", "o", job)

    def cancel(self, job: JobId) -> Command:
        return ("qdel", job)

    def force_end(self, job: JobId) -> Command:
        return ("qdel", "-f", job)

    def note(self, job: JobView, text: str) -> Command:
        """A word of its context, which has no blanks and commas: `qstat -j` shows it. An array has one for all its tasks."""
        words = re.sub(r"[^A-Za-z0-9._:/-]+", "_", one_line(text)).strip("_") or "refused"
        return ("qalter", "-ac", f"{NOTICE}={words}", job.number or job.id)

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

    def query_nodes(self) -> Command:
        return ("qhost", "-xml", "-q")

    def nodes(self, printed: bytes) -> dict[str, NodeView]:
        """Hosts, with the state of our queue there; and each instance of another queue by its own name, QUEUE@HOST."""
        text = printed.decode("utf-8", "replace")
        if len(printed) > pool.LARGEST_ANSWER or "<qhost" not in text[:4096] or not text.rstrip().endswith("</qhost>"):
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
        return (("qalter", "-q", f"{queue}@{one_node(nodes[0])}", job.number), self.release(job.id))

    def give_back(self, job: JobView, queue: str, delay: float, *, stays_held: bool = False) -> tuple[Command, ...]:
        """Grid Engine takes a start time of the wall clock only; its own next cycle comes later anyway."""
        alter = ("qalter", "-q", queue or "*", job.number)
        return (alter,) if stays_held else (alter, self.release(job.id))

    def joining(self, member: pool.Member, conf_file: Path, text: bytes) -> pool.Joining:
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


def _jobs(entry: str, bait: str) -> list[JobView]:
    """A job, or each task of an array that is listed by itself; tasks that wait together are one entry, `1-3:1`. One on the bait is on
    QUEUE@HOST, any other on HOST."""
    number, letters = field(entry, "JB_job_number"), field(entry, "state")
    asked = dict(re.findall(r'<hard_request name="([a-z_]+)"[^>]*>([^<]*)</hard_request>', entry))
    slots = whole(field(entry, "slots")) or 1
    instance = field(entry, "queue_name")
    queue, _, host = instance.partition("@")
    on = instance if instance == bait else host
    tasks = [task for task in field(entry, "tasks").split(",") if TASK.fullmatch(task)] or [""]
    size = memory(asked.get("h_vmem", "")) or 0
    image = asked.get("vm_image", "")
    return [
        JobView(
            id=f"{number}.{task}" if task else number, state=_state(letters), owner=_name(field(entry, "JB_owner")),
            queue=_name(queue or field(entry, "hard_req_queue").partition("@")[0]), image=image if NAME.fullmatch(image) else "",
            cpus=slots, memory=size * slots, on=(on,) if NAME.fullmatch(on) else (),
            array=(number, task) if task else ("", ""), number=number, name=field(entry, "full_job_name"), starts=1 if "R" in letters else 0, reason=one_line(letters),
        )
        for task in tasks
    ]  # fmt: skip


def _is_held(job: JobView) -> bool:
    """Its state's letters are its reason; one that runs may be held, too."""
    return "h" in job.reason


def _name(text: str) -> str:
    return text if NAME.fullmatch(text) else ""


def _state(letters: str) -> JobState:
    """https://manpages.debian.org/bookworm/gridengine-client/qstat.1.en.html: d(eletion), E(rror), h(old), r(unning),
    R(estarted), s(uspended), S(uspended), t(ransfering), T(hreshold), q(ueued), w(aiting)."""
    if not re.fullmatch(r"[dEhrRsStTqw]{1,8}", letters):
        return JobState.UNKNOWN
    if "d" in letters:
        return JobState.ENDING
    if set("rst") & set(letters) or letters in ("S", "T"):
        return JobState.RUNNING
    return JobState.HELD if set("hE") & set(letters) else JobState.WAITING


def _views(entry: str, queue: str) -> list[NodeView]:
    name = re.match(r"'([^']{1,255})'", entry)
    if name is None:
        raise ValueError("qhost printed a host without a name")
    values = dict(re.findall(r"<hostvalue name='(\w+)'>([^<]*)</hostvalue>", entry))
    queues: dict[str, dict[str, str]] = {}
    for qname, key, text in re.findall(r"<queuevalue qname='([^']+)' name='(\w+)'>([^<]*)</queuevalue>", entry):
        queues.setdefault(qname, {})[key] = text
    names = {queue: name[1], **{qname: f"{qname}@{name[1]}" for qname in queues if qname != queue}}
    return [_view(node, values, queues.get(qname, {})) for qname, node in names.items()]


def _view(node: str, values: Mapping[str, str], queue: Mapping[str, str]) -> NodeView:
    """d(isabled) by somebody, E(rror) of a prolog, u(nheard)."""
    is_busy, letters = queue.get("slots_used", "0") != "0", queue.get("state_string", "")
    is_heard = values.get("load_avg", "-") != "-" and "u" not in letters
    state = NodeState.BUSY if is_busy else NodeState.IDLE if is_heard else NodeState.AWAY
    if {"d", "E"} & set(letters):
        state = NodeState.DRAINING if is_busy else NodeState.OUT
    return NodeView(node, state, (), "Prolog error" if "E" in letters and "d" not in letters else letters)


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


POOL = GridEnginePool()
