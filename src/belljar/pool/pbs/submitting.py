"""Jobs of our own in OpenPBS (20 and later) and Torque (4 and later).

Neither can be told which nodes a job is not to have: one that failed a lease may come again, for as often as `lease.tries` has it.
https://github.com/openpbs/openpbs (doc/man1/qsub.1B, pbsdsh.1B, qstat.1B), https://github.com/adaptivecomputing/torque (src/cmds)
"""

from __future__ import annotations

import re
import shlex
from html import unescape
from math import ceil

from belljar.batch.job.terms import one_line
from belljar.batch.pbs.common import JOB_ID, seconds
from belljar.model import MIB
from belljar.pool.pbs.qstat import STATES, jobs_of
from belljar.pool.pilots import NAME, NamedJob, PilotJob, Pilots, account
from belljar.pool.terms import LARGEST_ANSWER, Command, JobId, JobState

# The commands need not be in a job's path. Their folder is said in pbs.conf, where OpenPBS has it.
CONF = 'conf=${PBS_CONF_FILE:-/etc/pbs.conf}; [ -r "$conf" ] && . "$conf"'


class OpenPbsPilots(Pilots):
    quantum = 1
    notice = 10.0  # a queue's `kill_delay` where the site set none

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
        job = printed.decode("ascii", "replace").strip()
        if JOB_ID.fullmatch(job) is None:
            raise ValueError(f"qsub printed {job[:60]!r} where the job's id is expected")
        return job

    def cancel(self, job: JobId) -> Command:
        return ("qdel", job)

    def extend(self, job: JobId, seconds: float) -> Command:
        """Operators alone may let a running job last longer."""
        return ("qalter", "-l", f"walltime={ceil(seconds)}", job)

    def query(self) -> Command:
        return ("qstat", "-f", "-F", "json")

    def jobs(self, printed: bytes) -> tuple[NamedJob, ...]:
        names = ("Job_Owner", "Job_Name", "job_state", "comment")
        rows = ((id, *(str(job.get(name, "")) for name in names)) for id, job in jobs_of(printed).items())
        return tuple(_named(id, *words) for id, owner, *words in rows if _is_ours(words[0], owner))

    def limits(self) -> Command:
        return ("qstat", "-Q", "-f")

    def longest(self, printed: bytes, queue: str) -> float | None:
        """For a queue that is named: the server's default one is not told here, unless it is the only one."""
        parts = re.split(r"(?m)^Queue: *(\S+)\s*$", printed[:LARGEST_ANSWER].decode("utf-8", "replace"))
        texts = dict(zip(parts[1::2], parts[2::2], strict=True))
        text = texts.get(queue, "") if queue or len(texts) != 1 else next(iter(texts.values()))
        found = re.search(r"(?m)^\s*resources_max\.walltime = (\S+)$", text)
        return seconds(found[1]) if found else None


class TorquePilots(OpenPbsPilots):
    notice = 2.0

    def _nodes(self, job: PilotJob) -> Command:
        """Memory counts for the whole job; of a job on one node Torque makes a limit of it, which counts what QEMU has of its own."""
        return ("-l", f"nodes={job.nodes}:ppn={job.cpus}", "-l", f"mem={ceil(job.memory / MIB) * job.nodes}mb")

    _each = "-u"  # once on each node, and not for each processor

    def query(self) -> Command:
        return ("qstat", "-f", "-x")

    def jobs(self, printed: bytes) -> tuple[NamedJob, ...]:
        """A server without jobs has nothing printed at all; one without an answer has qstat fail."""
        text = printed.decode("utf-8", "replace").strip()
        if len(printed) > LARGEST_ANSWER or (text and not (text.startswith("<") and text.endswith("</Data>"))):
            raise ValueError(f"qstat printed {text[:60]!r} where a list of jobs is expected")
        rows = (entry.partition("</Job>")[0] for entry in text.split("<Job>")[1:])
        names = ("Job_Owner", "Job_Id", "Job_Name", "job_state", "comment")
        words = ([_word(row, name) for name in names] for row in rows)
        return tuple(_named(*row) for owner, *row in words if _is_ours(row[1], owner))


def _is_ours(name: str, owner: str) -> bool:
    return NAME.fullmatch(name) is not None and owner.partition("@")[0] == account()


def _named(id: str, name: str, state: str, reason: str) -> NamedJob:
    """Raises ValueError."""
    if JOB_ID.fullmatch(id) is None:
        raise ValueError(f"qstat printed {id[:60]!r} where a job's id is expected")
    state = "F" if state == "C" else state  # Torque's word for one that is completed
    return NamedJob(name, id, STATES.get(state, JobState.UNKNOWN), one_line(reason))


def _word(text: str, name: str) -> str:
    found = re.search(rf"<{name}>([^<]*)</{name}>", text)
    return unescape(found[1]).strip() if found else ""


OPENPBS, TORQUE = OpenPbsPilots(), TorquePilots()
