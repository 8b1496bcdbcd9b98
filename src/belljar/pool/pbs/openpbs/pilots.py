"""Jobs of our own in OpenPBS, 20 and later, and what Torque's have in common with them.

Neither can be told which nodes a job is not to have: one that failed a lease may come again, for as often as `lease.tries` has it.
https://github.com/openpbs/openpbs (doc/man1/qsub.1B, pbsdsh.1B, qstat.1B)
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from contextlib import suppress
from math import ceil
from typing import Any

from belljar import pool
from belljar.batch.job.terms import one_line
from belljar.batch.pbs.common import JOB_ID
from belljar.batch.pbs.sizes import seconds
from belljar.model import MIB
from belljar.pool import Command, JobId, JobState, NamedJob, PilotJob

# The commands need not be in a job's path. Their folder is said in pbs.conf, where OpenPBS has it.
CONF = 'conf=${PBS_CONF_FILE:-/etc/pbs.conf}; [ -r "$conf" ] && . "$conf"'


# doc/man7/pbs_job_attributes.7B: job_state
STATES = {
    **dict.fromkeys("QWT", JobState.WAITING), "H": JobState.HELD, **dict.fromkeys("RSU", JobState.RUNNING),
    "E": JobState.ENDING, **dict.fromkeys("FXM", JobState.ENDED),
}  # fmt: skip
LINE = re.compile(r'((?: {4})+|\t+)"(.*?)":\t?(\{|".*"|[^"{].*?),?')


class OpenPbsPilots(pool.Pilots):
    quantum = 1
    notice = 10.0  # a queue's `kill_delay` where the site set none
    limits = ("qstat", "-Q", "-f")

    def submit(self, job: PilotJob, script: str) -> Command:
        """For whom it is stands among its variables, which `qstat -f` shows: a comment is for operators to make."""
        owner = re.sub(r"[^A-Za-z0-9._:/@-]+", "_", one_line(job.owner))
        options = (
            "-N", job.name, *self._nodes(job), "-l", f"walltime={ceil(job.seconds)}", "-r", "n", "-j", "oe", "-o", job.output,
            "-S", "/bin/sh", "-v", f"BELLJAR_OWNER={owner}", *(("-q", job.queue) if job.queue else ()),
            *(("-A", job.account) if job.account else ()),
        )  # fmt: skip
        return ("qsub", *options, script)

    def _nodes(self, job: PilotJob) -> Command:
        size = ceil(job.memory / MIB)
        return ("-l", f"select={job.nodes}:ncpus={job.cpus}:mem={size}mb", "-l", "place=scatter")

    def script(self, job: PilotJob) -> bytes:
        """The task manager starts one on each node: they belong to the job, and get its end as the first one does. OpenPBS's gives
        them the job's variables, but for its PATH (seen with 23.06.06)."""
        pilot = shlex.join(job.command)
        if job.nodes == 1:
            return f"exec {pilot}\n".encode()
        return f'{CONF}\nexec "${{PBS_EXEC:+$PBS_EXEC/bin/}}pbsdsh" {self._each} /usr/bin/env "PATH=$PATH" {pilot}\n'.encode()

    _each = "--"

    def submitted(self, printed: bytes) -> JobId:
        return pool.id_printed(printed, JOB_ID.pattern)

    def extend(self, job: JobId, seconds: float) -> Command:
        """Operators alone may let a running job last longer."""
        return ("qalter", "-l", f"walltime={ceil(seconds)}", job)

    def query(self) -> Command:
        return ("qstat", "-f", "-F", "json")

    def jobs(self, printed: bytes) -> tuple[NamedJob, ...]:
        names = ("Job_Owner", "Job_Name", "job_state", "comment")
        rows = ((id, *(str(job.get(name, "")) for name in names)) for id, job in jobs_of(printed).items())
        return tuple(named(id, *words) for id, owner, *words in rows if is_ours(words[0], owner))

    def longest(self, printed: bytes, queue: str) -> float | None:
        """For a queue that is named: the server's default one is not told here, unless it is the only one."""
        parts = re.split(r"(?m)^Queue: *(\S+)\s*$", printed[: pool.LARGEST_ANSWER].decode("utf-8", "replace"))
        texts = dict(zip(parts[1::2], parts[2::2], strict=True))
        text = texts.get(queue, "") if queue or len(texts) != 1 else next(iter(texts.values()))
        limit = re.search(r"(?m)^\s*resources_max\.walltime = (\S+)$", text)
        return seconds(limit[1]) if limit else None


def is_ours(name: str, owner: str) -> bool:
    return pool.PILOT_NAME.fullmatch(name) is not None and owner.partition("@")[0] == pool.account()


def named(id: str, name: str, state: str, reason: str) -> NamedJob:
    """Raises ValueError."""
    pool.id_printed(id.encode(), JOB_ID.pattern)
    state = "F" if state == "C" else state  # Torque's word for one that is completed
    return NamedJob(name, id, STATES.get(state, JobState.UNKNOWN), one_line(reason))


def jobs_of(printed: bytes) -> dict[str, Mapping[str, Any]]:
    """Each job's attributes by its id, from qstat's JSON, without jobs that are not told whole. Raises ValueError.

    A value on each line, as deep as that is indented. Releases up to 23.06 do not write users' words as JSON has them (`.5`,
    backslashes), and users may nest what they like: here no words end a job, or begin another one."""
    text = printed[: pool.LARGEST_ANSWER + 1].decode("utf-8", "replace")
    if len(printed) > pool.LARGEST_ANSWER or not (text.startswith("{\n") and text.rstrip().endswith("\n}")):
        raise ValueError(f"qstat printed {text[:60]!r} where its document begins, or not all of it")
    path: list[dict[str, Any]] = [{}]
    for line in text.split("\n"):
        match = LINE.fullmatch(line)
        depth = 0 if match is None else len(match[1].replace(" " * 4, "\t"))
        # A line break in a variable's name can begin such a line, too: nothing but jobs comes after the first of them.
        if match is None or depth > len(path) or (depth == 1 and len(path) > 1):
            continue
        name, is_object = match[2], match[3] == "{"
        if depth == 2 and not is_object:
            continue
        del path[depth:]
        is_twice, value = depth == 2 and name in path[-1], {} if is_object else _plain(match[3])
        path[-1][name] = {} if is_twice else value  # which of two is the job is not known, nor is its state
        if isinstance(value, dict):
            path.append(value)
    jobs = path[0].get("Jobs", {})
    if "pbs_server" not in path[0]:
        raise ValueError(f"qstat printed {text[:60]!r} where its document begins")
    return {id: job for id, job in jobs.items() if isinstance(job, dict)} if isinstance(jobs, dict) else {}


def _plain(value: str) -> str:
    if "\\" in value:
        with suppress(ValueError, RecursionError):
            return str(json.loads(value, strict=False))
    return value[1:-1] if value.startswith('"') else value


PILOTS = OpenPbsPilots()
