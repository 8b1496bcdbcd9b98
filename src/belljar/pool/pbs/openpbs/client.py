"""OpenPBS's jobs from the outside: qstat's JSON, read strictly, and the commands that hold, move and release one. 20 and later.

A job's image is its resource `vm_image`, its network class `vm_network`, its disk `vm_disk`, as the whole job asks for them or its
first chunk. A job that has ended is not listed, nor is one that the server lost; a subjob cannot be held.
https://github.com/openpbs/openpbs (doc/man1/qstat.1B, doc/man7/pbs_job_attributes.7B)
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from belljar.batch.job.terms import one_line, whole
from belljar.batch.pbs.common import JOB_ID, OURS, USER, plain
from belljar.batch.pbs.sizes import size
from belljar.pool.terms import LARGEST_ANSWER, Client, Command, JobId, JobState, JobView

SYSTEMS = "s"  # a hold that no user can release
# doc/man7/pbs_job_attributes.7B: job_state
STATES = {
    **dict.fromkeys("QWT", JobState.WAITING), "H": JobState.HELD, **dict.fromkeys("RSU", JobState.RUNNING),
    "E": JobState.ENDING, **dict.fromkeys("FXM", JobState.ENDED),
}  # fmt: skip
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}")
ARRAY = re.compile(r"([0-9]+)\[([0-9]*)\]")
OLD_FORM = "{\n    "  # of the releases that write it by themselves (src/lib/Libcmds/pbs_json.c)
LINE = re.compile(r'((?: {4})+|\t+)"(.*?)":\t?(\{|".*"|[^"{].*?),?')


class OpenPbsClient(Client):
    """The client's side."""

    def submit(self, script: str, options: tuple[str, ...] = ()) -> Command:
        return ("qsub", *options, script)

    def submitted(self, printed: bytes) -> JobId:
        job = printed.decode("ascii", "replace").strip()
        if JOB_ID.fullmatch(job) is None:
            raise ValueError(f"qsub printed {job[:60]!r} where the job's id is expected")
        return job

    def query(self, mark: str) -> Command:
        """What users wrote comes as text of JSON's: no mark is needed."""
        return ("qstat", "-t", "-f", "-F", "json")

    def jobs(self, printed: bytes, mark: str) -> dict[JobId, JobView]:
        found = document(printed, "qstat").get("Jobs", {})
        if not isinstance(found, dict):
            raise ValueError("qstat printed no list of jobs")
        views = (_job(name, facts) for name, facts in found.items())
        return {one.id: one for one in views if one is not None}

    def take_back(self, job: JobView) -> tuple[Command, ...]:
        """Held first: one that is queued again starts at once."""
        hold = ("qhold", "-h", SYSTEMS, job.id)
        return (hold, ("qrerun", job.id)) if job.state is JobState.RUNNING else (hold,)

    def arrive(self, jobs: Sequence[JobView]) -> tuple[Command, ...]:
        """Its hook on the bait gives it back itself, once it is held."""
        return tuple(("qhold", "-h", SYSTEMS, job.id) for job in jobs)

    def release(self, job: JobId) -> Command:
        return ("qrls", "-h", SYSTEMS, job)

    def cancel(self, job: JobId) -> Command:
        return ("qdel", job)

    def force_end(self, job: JobId) -> Command:
        """Its node does not answer: the server forgets it."""
        return ("qdel", "-W", "force", job)

    def note(self, job: JobView, text: str) -> Command:
        return ("qalter", "-W", f"comment={OURS} {plain(text)}", job.id)


def document(printed: bytes, program: str) -> Mapping[str, Any]:
    """Raises ValueError."""
    if len(printed) > LARGEST_ANSWER:
        raise ValueError(f"{program} printed more than a list")
    text, found = printed.decode("utf-8", "replace"), None
    with suppress(ValueError, RecursionError):
        found = None if text.startswith(OLD_FORM) else json.loads(text, strict=False, parse_float=str)
    if found is None and text.startswith("{\n") and text.rstrip().endswith("\n}"):
        found = _by_lines(text)
    if not isinstance(found, dict) or "pbs_server" not in found:
        raise ValueError(f"{program} printed {text[:60]!r} where its document begins")
    return found


def _by_lines(text: str) -> dict[str, Any]:
    """A value on each line, as deep as that is indented. Releases up to 23.06 do not write users' words as JSON has them (`.5`, backslashes),
    and what a user has nested too deeply is not read as JSON: here no words end a job, or begin another one."""
    open_ones: list[dict[str, Any]] = [{}]
    for line in text.split("\n"):
        match = LINE.fullmatch(line)
        depth = 0 if match is None else len(match[1].replace(" " * 4, "\t"))
        # A line break in a variable's name can begin such a line, too: nothing but jobs comes after the first of them.
        if match is None or depth > len(open_ones) or (depth == 1 and len(open_ones) > 1):
            continue
        name, is_object = match[2], match[3] == "{"
        if depth == 2 and not is_object:
            continue
        del open_ones[depth:]
        is_twice, value = depth == 2 and name in open_ones[-1], {} if is_object else _plain(match[3])
        open_ones[-1][name] = {} if is_twice else value  # which of two is the job is not known, nor is its state
        if isinstance(value, dict):
            open_ones.append(value)
    return open_ones[0]


def _plain(value: str) -> str:
    if "\\" in value:
        with suppress(ValueError, RecursionError):
            return str(json.loads(value, strict=False))
    return value[1:-1] if value.startswith('"') else value


def _job(id: str, facts: Any) -> JobView | None:
    """None for an array that stands for its subjobs. Raises ValueError for what is no job."""
    if (JOB_ID.fullmatch(id) is None and ARRAY.match(id) is None) or not isinstance(facts, dict):
        raise ValueError(f"qstat printed {id[:60]!r} where a job's id is expected")
    array = ARRAY.match(id)
    if array is not None and not array[2]:
        return None
    given = facts.get("Resource_List")
    asked = _asked(given if isinstance(given, dict) else {})
    holds = _text(facts, "Hold_Types")
    state = STATES.get(_text(facts, "job_state"), JobState.UNKNOWN)
    if state is JobState.RUNNING and SYSTEMS in holds:
        state = JobState.ENDING  # its hook on the bait has it given back
    owner, group = _text(facts, "euser") or _text(facts, "Job_Owner").partition("@")[0], _text(facts, "egroup")
    return JobView(
        id=id, state=state, owner=owner if USER.fullmatch(owner) else "", group=group if USER.fullmatch(group) else "",
        queue=_word(_text(facts, "queue")), image=_word(asked.get("vm_image", "")), network=_word(asked.get("vm_network", "")),
        cpus=whole(asked.get("ncpus", "")) or 1, memory=size(asked.get("mem", "")) or 0, disk=size(asked.get("vm_disk", "")) or 0,
        nodes=whole(asked.get("nodect", "")) or 1, on=_hosts(_text(facts, "exec_host")),
        array=(array[1], array[2]) if array else ("", ""), number=id.partition(".")[0], starts=whole(_text(facts, "run_count")) or 0,
        reason=one_line(_text(facts, "comment")), is_held_by_user="u" in holds, reruns=_text(facts, "Rerunable") != "False",
        is_batch=array is None and _text(facts, "interactive") != "True", selection=asked.get("select", ""),
    )  # fmt: skip


def _asked(given: Mapping[str, Any]) -> dict[str, str]:
    """Resources of the whole job, and of its first chunk what it does not have."""
    whole_job = {name: str(value) for name, value in given.items() if isinstance(value, str | int)}
    chunk = (word.partition("=") for word in whole_job.get("select", "").partition("+")[0].split(":"))
    return {name: value.strip("\"'") for name, equals, value in chunk if equals and name[:3] == "vm_"} | whole_job


def _hosts(text: str) -> tuple[str, ...]:
    """Of `vm10/0*2+vm11/0`."""
    return tuple(dict.fromkeys(one.partition("/")[0] for one in text.split("+") if one))


def _text(facts: Mapping[str, Any], name: str) -> str:
    """qstat writes as a number, or as true, what looks like one."""
    value = facts.get(name)
    return str(value) if isinstance(value, str | int) else ""


def _word(text: str) -> str:
    return text if NAME.fullmatch(text) else ""


CLIENT = OpenPbsClient()
