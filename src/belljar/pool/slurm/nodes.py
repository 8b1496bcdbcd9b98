"""Slurm from the outside, 22.05 and later: squeue and scontrol, read strictly, and the commands that hold, move and release a job, and
that open, close and remove a node: baits, and the dynamic nodes that machines become.

A comment may hold newlines, and so what looks like another row: only a row with the mark of this very question counts.
https://slurm.schedmd.com/squeue.html#OPT_Format

A machine's slurmd registers itself (`slurmd -Z`); slurmctld then launches to the address the registration came from, at its own
SlurmdPort. https://slurm.schedmd.com/dynamic_nodes.html

A dynamic node is deleted only when it is drained and quiet, and after its slurmd has gone: slurmctld 22.05.8 crashed when one was
deleted while it still sent something there.
"""

from __future__ import annotations

import os
import re
import socket
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from belljar import pool
from belljar.batch.job.terms import one_line, one_node, whole
from belljar.batch.slurm.site import CONFIG, shown
from belljar.errors import BelljarError
from belljar.findings import Finding, fail_if
from belljar.host.files import read_capped
from belljar.model import GIB, KIB, MIB, PlainFile
from belljar.pool import Ask, Command, JobId, JobState, JobView, Names, NodeState, NodeView

# Name of the field, and its width: what fills its width may have been cut off.
FIELDS = (
    ("jobid", 12), ("arrayjobid", 12), ("arraytaskid", 12), ("state", 20), ("prioritylong", 14), ("username", 40),
    ("userid", 12), ("groupname", 40), ("partition", 80), ("numnodes", 8), ("tres-alloc", 200), ("mintmpdisk", 20),
    ("requeue", 6), ("batchflag", 9), ("hetjobid", 12), ("reservation", 80), ("feature", 200), ("nodelist", 1000), ("batchhost", 80), ("reqnodes", 1000),
    ("restartcnt", 8), ("reason", 60), ("admin_comment", 1000), ("comment", 200),
)  # fmt: skip
WIDTH = dict(FIELDS)
# https://slurm.schedmd.com/squeue.html#SECTION_JOB-STATE-CODES
STATES = {
    **dict.fromkeys(("RUNNING", "CONFIGURING", "SUSPENDED", "STOPPED", "SIGNALING", "RESIZING"), JobState.RUNNING),
    **dict.fromkeys(("COMPLETING", "STAGE_OUT"), JobState.ENDING),
    **dict.fromkeys(("PENDING", "REQUEUED", "REQUEUE_FED", "SPECIAL_EXIT"), JobState.WAITING),
    **dict.fromkeys(("REQUEUE_HOLD", "RESV_DEL_HOLD"), JobState.HELD),
    **dict.fromkeys(
        ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "OUT_OF_MEMORY", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "DEADLINE",
         "REVOKED"),
        JobState.ENDED,
    ),
}  # fmt: skip
UNITS = {"": MIB, "K": KIB, "M": MIB, "G": GIB, "T": GIB * KIB}
SIZE = re.compile(r"([0-9]{1,15})(?:\.([0-9]{1,6}))?([KMGT]?)")
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}")
RANGE = "[0-9]{1,6}(?:-[0-9]{1,6})?"
HOSTLIST = re.compile(rf"([^\[\]]*)\[({RANGE}(?:,{RANGE})*)\]([^\[\]]*)")
UPDATE = ("scontrol", "update")
OURS, LONGEST_NOTE = "belljar: ", 900
HELD_BY_USER = "JobHeldUser"  # not so one that was requeued in held state
# https://slurm.schedmd.com/job_reason_codes.html
LIMITED = ("Assoc", "BeginTime", "Dependency", "JobArrayTaskLimit", "Licenses", "MaxMemPerLimit", "QOS")
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


class SlurmPool(pool.Pool):
    """Jobs, and the nodes that machines become."""

    folders = ("/run", "/var/log", "/var/spool/slurmd", "/var/lib/munge")
    packages = ("slurmd", "munge")
    saves = 10.0  # slurmctld writes jobs down within five seconds of a change, and takes a moment for it

    def query(self, mark: str) -> Command:
        first, *others = FIELDS
        words = [f"{first[0]}:.{first[1]}{mark}", *(f"{name}:{width}|" for name, width in others)]
        return ("squeue", "--noheader", "--all", "--array", "--states=all", f"--Format={','.join(words)}")

    def jobs(self, printed: bytes, mark: str) -> dict[JobId, JobView]:
        if len(printed) > pool.LARGEST_ANSWER:
            raise ValueError("squeue printed more than a list of jobs")
        text = printed.decode("latin-1")  # squeue counts bytes
        row = re.compile(rf"^(?=.{{{WIDTH['jobid']}}}{re.escape(mark)})", re.MULTILINE)
        head, *rows = row.split(text)
        if head.strip():
            raise ValueError(f"squeue printed {head[:60]!r} where the list of jobs begins")
        return {job.id: job for job in (_job(row, mark) for row in rows)}

    def take_back(self, job: JobView) -> tuple[Command, ...]:
        if job.state is not JobState.RUNNING:
            return (("scontrol", "hold", job.id),)
        allow = () if job.reruns else ((*UPDATE, f"JobId={job.id}", "Requeue=1"),)
        return (*allow, ("scontrol", "requeuehold", job.id))

    def has_forgotten(self, job: JobView) -> bool:
        return job.state is JobState.WAITING

    def revoked(self, number: str, since: float, env: Mapping[str, str]) -> pool.Revoked:
        """By slurmd's file of this host. An earlier credential of the same job may still be in it. When slurmd first knew a job is told
        by this host's clock, and is just before its prolog; when it was revoked is told by slurmctld's."""
        with suppress(OSError, ValueError, KeyError, struct.error):
            begin = int(since)
            for job, end, made in _credentials(_read(env)):
                is_time = begin - CLOCK <= end <= begin + CLOCK
                if job == int(number) and is_time and (end >= begin or begin - MADE <= made <= begin + CLOCK):
                    return pool.Revoked.YES
            return pool.Revoked.NO
        return pool.Revoked.CANNOT_TELL

    def release(self, job: JobId) -> Command:
        return ("scontrol", "release", job)

    def cancel(self, job: JobId) -> Command:
        return ("scancel", job)

    def note(self, job: JobView, text: str) -> Command:
        return (*UPDATE, f"JobId={job.id}", f"AdminComment={OURS}{one_line(text, LONGEST_NOTE)}")

    def refuse(self, job: JobView, why: str) -> Command:
        """In the comment, behind what its user wrote there. One that was not read whole stays."""
        words = job.comment.partition(OURS)[0].strip()
        is_whole = len(job.comment) < WIDTH["comment"]
        return (*self.note(job, why), *((f"Comment={words} {OURS}{one_line(why, LONGEST_NOTE)}",) if is_whole else ()))

    def query_nodes(self) -> Command:
        return ("scontrol", "--oneliner", "--all", "show", "nodes")

    def nodes(self, printed: bytes) -> dict[str, NodeView]:
        text = printed.decode("utf-8", "replace")
        if len(printed) > pool.LARGEST_ANSWER or (text.strip() and not text.startswith(("NodeName=", "No nodes"))):
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
        return (update, *once, self.release(job.id))

    def unpin(self, job: JobView, queue: str = "") -> tuple[Command, ...]:
        """Slurm 24.11 changes nothing any more of a job that wants a node which is gone: "Invalid required nodes list in job records".
        No release changes one in a partition that has fewer nodes than it asks for: so it goes home."""
        home = (f"Partition={queue}",) if queue else ()
        return ((*UPDATE, f"JobId={job.id}", *home, "ReqNodeList="),)

    def give_back(self, job: JobView, queue: str, delay: float, *, stays_held: bool = False) -> tuple[Command, ...]:
        when = f"StartTime=now+{int(delay)}"
        update = (*UPDATE, f"JobId={job.id}", f"Partition={queue}", "ReqNodeList=", when)
        return (update,) if stays_held else (update, self.release(job.id))

    def joining(self, member: pool.Member, conf_file: Path, text: bytes) -> pool.Joining:
        """The settings lie where they lie on the host: users' jobs may have SLURM_CONF from there."""
        known, addresses = member.hosts.split(), heads(text.decode("utf-8", "replace"), ()).items()
        resolved = (f"{ip} {name}" for name, ip in addresses if name not in (*known, ip) and ip[:4] not in ("", "127."))
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
        known = self.nodes(ask(*self.query_nodes()).encode())
        config = shown(ask(*CONFIG))
        for name in baits:
            wrong = "" if name in known else "slurmctld knows no such node"
            yield fail_if(f"bait {name}", wrong, f"In slurm.conf: NodeName={name} CPUs=... RealMemory=... Feature=bait")
        most = config.get("maxnodecount", [""])[0] or "not told"
        wrong = "" if most.isdigit() and int(most) > len(known) else f"{most}: no node can join {len(known)}"
        yield fail_if("MaxNodeCount", wrong, "In slurm.conf: MaxNodeCount=200, then restart slurmctld.")
        wrong = _prolog(config.get("prolog", [""])[0])
        yield fail_if("Prolog", wrong, "In slurm.conf: Prolog=..., the script of docs/batch/bait/guide.md.")
        line = f"NodeSet={queue} Feature={feature} and PartitionName={queue} Nodes={queue} Hidden=YES OverSubscribe=EXCLUSIVE State=UP"
        yield fail_if(f"partition {queue}", _partition(ask, queue), f"In slurm.conf: {line}")


# -- jobs ---------------------------------------------------------------------------------------------------------------


def _job(row: str, mark: str) -> JobView:
    """Raises ValueError for a row that cannot be squeue's. A field that its user filled cannot move those before it."""
    number, rest = row[: WIDTH["jobid"]].strip(), row[WIDTH["jobid"] + len(mark) :]
    fields = {"jobid": number}
    for name, width in FIELDS[1:]:
        if name != "comment" and rest[width : width + 1] != "|":
            raise ValueError(f"squeue printed {row[:60]!r}: its field {name} is not {width} wide")
        fields[name], rest = rest[:width].strip(), rest[width + 1 :]
    if whole(number) is None:
        raise ValueError(f"squeue printed {number!r} where the job's number is expected")
    array, task = fields["arrayjobid"], fields["arraytaskid"]
    is_task = whole(task) is not None and whole(array) is not None
    tres = dict(pair.partition("=")[::2] for pair in fields["tres-alloc"].split(",") if "=" in pair)
    comment = fields["comment"].removeprefix("(null)")
    asked, uid = pool.words_of(comment.partition(OURS)[0], "vm", "net"), _number(fields["userid"], -1)
    return JobView(
        id=f"{array}_{task}" if is_task else number, state=_state(fields["state"], fields["prioritylong"]),
        owner=_name(fields["username"]), uid=uid, group=_name(fields["groupname"]),
        queue=_name(fields["partition"].partition(",")[0]), image=asked.get("vm", ""), network=asked.get("net", ""),
        cpus=_number(tres.get("cpu", ""), 1), memory=_size(tres.get("mem", "")), disk=_size(fields["mintmpdisk"]),
        nodes=_number(fields["numnodes"], 1), reruns=fields["requeue"] != "0", is_batch=fields["batchflag"] != "0", features=_features(fields["feature"]), on=_nodes(fields["nodelist"], fields["batchhost"]), wants=_nodes(fields["reqnodes"]), array=(array, task) if is_task else ("", ""),
        number=number, starts=_number(fields["restartcnt"], 0), reason=one_line(fields["reason"]),
        note=one_line(fields["admin_comment"].removeprefix("(null)"), WIDTH["admin_comment"]),
        is_held_by_user=fields["reason"] == HELD_BY_USER, is_limited=fields["reason"].startswith(LIMITED),
        comment=one_line(comment, WIDTH["comment"]), unmovable=_unmovable(fields, tres),
    )  # fmt: skip


def _unmovable(fields: Mapping[str, str], tres: Mapping[str, str]) -> str:
    """Nodes that are made for a job are in no reservation, have no GRES, and wait for no other component."""
    if whole(fields["hetjobid"]):
        return "it is a component of a heterogeneous job: machines are made for jobs of one component"
    if (reservation := fields["reservation"]) not in ("", "(null)"):
        return f"reservation {one_line(reservation)}: machines that are made for a job are not in it"
    return next((f"{name}: machines do not have it" for name in tres if name.startswith("gres/")), "")


def _state(state: str, priority: str) -> JobState:
    """A job that is held has the priority 0, whoever holds it and whatever its reason says."""
    known = STATES.get(state, JobState.UNKNOWN)
    return JobState.HELD if known is JobState.WAITING and priority == "0" else known


def _number(text: str, otherwise: int) -> int:
    number = whole(text)
    return otherwise if number is None else number


def _name(text: str) -> str:
    return text if NAME.fullmatch(text) else ""


def _size(text: str) -> int:
    """`1200M`, `1.50G`, `1G`; a bare number is MiB. 0 for all else."""
    match = SIZE.fullmatch(text)
    return int(float(f"{match[1]}.{match[2] or 0}") * UNITS[match[3]]) if match else 0


def _features(text: str) -> tuple[str, ...]:
    """For an expression such as `[a*2&b|c]`: its words."""
    words = re.findall(r"[A-Za-z_][A-Za-z0-9_.-]{0,99}", text) if text != "(null)" else ()
    return tuple(dict.fromkeys(words))


def _nodes(text: str, first: str = "") -> tuple[str, ...]:
    """Names, that of the node where the job's script runs before others; what stands in more than one pair of brackets stays as it is,
    for no node of ours is written so. A list that was cut off is that one: no job of ours has so many."""
    if len(text) >= WIDTH["nodelist"]:
        text = first
    parts = re.findall(r"(?:[^,\[]|\[[^]]*\])+", text) if text not in ("", "(null)") else []
    names = [name for part in parts for name in _names(part)]
    return tuple(dict.fromkeys(sorted(filter(None, names), key=lambda name: name != first)))


def _names(text: str) -> Iterator[str]:
    """`wn[01-03,07]`: wn01 and so on."""
    match = HOSTLIST.fullmatch(text)
    if match is None:
        yield text
        return
    for part in match[2].split(","):
        first, _, last = part.partition("-")
        for number in range(int(first), int(last or first) + 1):
            yield f"{match[1]}{number:0{len(first)}}{match[3]}"


# -- nodes --------------------------------------------------------------------------------------------------------------


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
    return NodeView(match[1], _node_state(match[3]), features, why, cpus, memory * MIB, queues)


def _node_state(text: str) -> NodeState:
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


def _prolog(path: str) -> str:
    if not path:
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


# -- what slurmd on this host knows of a job: the file in which it keeps the credentials that it has revoked -----------

# It writes that file when it is told to end a job, before it waits for the job's prolog; when the prolog ends it looks whether the
# job's credential is still good. The file begins with a version of Slurm's protocol (from 24.11 on) and a count of jobs; each is
# written with its number and the times at which its credential was revoked and at which slurmd first knew it.
# https://slurm.schedmd.com/slurm.conf.html#OPT_SlurmdSpoolDir

FILE, LARGEST_FILE = "cred_state", 1 << 22
PLACE = re.compile(rb"(?im)^\s*SlurmdSpoolDir\s*=\s*(\S+)")
INCLUDE = re.compile(rb"(?im)^\s*include\s")
USUAL = b"/var/spool/slurmd"
CLOCK = 3600  # seconds that a time may be off, and still be one
MADE = 1  # seconds before its prolog begins, at most, in which slurmd notes that it knows a job
OLD, NUMBERED, WITH_LIMIT = (struct.Struct(form) for form in (">IQQ8x", ">8xI8xQQ8x", ">8xI8xQQ16x"))
FORMS = {0: OLD, 42: OLD, 43: OLD, 44: NUMBERED, 45: WITH_LIMIT}  # by the version: 24.11 is 42, 26.05 is 45


def _read(env: Mapping[str, str]) -> bytes:
    """The file; empty before the first credential was revoked, when there is none. Raises OSError, ValueError, KeyError."""
    conf = read_capped(Path(env["SLURM_CONF"]), LARGEST_FILE)
    places = PLACE.findall(conf)
    if not places and INCLUDE.search(conf):
        raise ValueError("another file may name the folder")
    place = os.fsdecode(places[-1] if places else USUAL).replace("%n", env["SLURMD_NODENAME"])
    file = Path(place.replace("%h", os.uname().nodename.partition(".")[0])) / FILE
    return read_capped(file, LARGEST_FILE) if file.exists() or not file.parent.is_dir() else b""


def _credentials(content: bytes) -> Iterator[tuple[int, int, int]]:
    """Number, and when it was revoked and made known. Raises KeyError for a version that is not known, and struct.error."""
    if content:
        version = content[0]
        form, at = FORMS[version], 2 if version else 0
        (count,) = struct.unpack_from(">I", content, at)
        for number in range(count):
            yield form.unpack_from(content, at + 4 + number * form.size)


POOL = SlurmPool()
