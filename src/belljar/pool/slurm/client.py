"""Slurm's jobs from the outside: squeue, read strictly, and the commands that hold, move and release one. 22.05 and later.

A comment may hold newlines, and so what looks like another row: only a row with the mark of this very question counts.
https://slurm.schedmd.com/squeue.html#OPT_Format
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from belljar.batch.job.terms import one_line, whole
from belljar.host.files import read_capped
from belljar.model import GIB, KIB, MIB
from belljar.pool.terms import LARGEST_ANSWER, Client, Command, JobId, JobState, JobView, Revoked, words_of

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


class SlurmClient(Client):
    """The client's side."""

    def query(self, mark: str) -> Command:
        first, *others = FIELDS
        words = [f"{first[0]}:.{first[1]}{mark}", *(f"{name}:{width}|" for name, width in others)]
        return ("squeue", "--noheader", "--all", "--array", "--states=all", f"--Format={','.join(words)}")

    def jobs(self, printed: bytes, mark: str) -> dict[JobId, JobView]:
        if len(printed) > LARGEST_ANSWER:
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

    def revoked(self, number: str, since: float, env: Mapping[str, str]) -> Revoked:
        """By slurmd's file of this host. An earlier credential of the same job may still be in it. When slurmd first knew a job is told
        by this host's clock, and is just before its prolog; when it was revoked is told by slurmctld's."""
        with suppress(OSError, ValueError, KeyError, struct.error):
            begin = int(since)
            for job, end, made in _credentials(_read(env)):
                is_time = begin - CLOCK <= end <= begin + CLOCK
                if job == int(number) and is_time and (end >= begin or begin - MADE <= made <= begin + CLOCK):
                    return Revoked.YES
            return Revoked.NO
        return Revoked.CANNOT_TELL

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
    asked, uid = words_of(comment.partition(OURS)[0], "vm", "net"), _number(fields["userid"], -1)
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


CLIENT = SlurmClient()
