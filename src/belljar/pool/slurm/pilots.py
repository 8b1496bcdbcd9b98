"""Jobs of our own in Slurm. 22.05 and later. https://slurm.schedmd.com/sbatch.html https://slurm.schedmd.com/squeue.html"""

from __future__ import annotations

import re
import shlex
import time
from contextlib import suppress

from belljar import pool
from belljar.batch.job.terms import one_line, whole
from belljar.batch.slurm.dialect import KILL_WAIT
from belljar.model import MIB
from belljar.pool import Command, JobId, JobState, NamedJob, PilotJob
from belljar.pool.slurm.nodes import STATES

PATH = "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin"  # of a pilot; nothing else of its service's environment


class SlurmPilots(pool.Pilots):
    quantum = 60  # https://slurm.schedmd.com/sbatch.html#OPT_time: seconds are rounded up to a minute
    notice = KILL_WAIT
    limits = ("scontrol", "show", "partition", "--oneliner")

    def submit(self, job: PilotJob, script: str) -> Command:
        words = {
            "job-name": job.name, "nodes": job.nodes, "ntasks-per-node": 1, "cpus-per-task": job.cpus,
            "mem": f"{-(-job.memory // MIB)}M", "time": -(-int(job.seconds) // 60), "comment": f"belljar: for {job.owner}",
            "output": job.output, "open-mode": "append", "export": f"PATH={PATH},LANG=C.UTF-8", "partition": job.queue,
            "account": job.account, "exclude": ",".join(job.shunned),
        }  # fmt: skip
        options = (f"--{name}={value}" for name, value in words.items() if value != "")
        return ("sbatch", "--parsable", "--no-requeue", *options, script)

    def script(self, job: PilotJob) -> bytes:
        """On one node the pilot is the job itself; on several, srun starts one on each, and one's end is not the others'."""
        each = f"srun --ntasks-per-node=1 --cpus-per-task={job.cpus} --kill-on-bad-exit=0 --wait=0 --export=ALL "
        return f"#!/bin/sh\nexec {each if job.nodes > 1 else ''}{shlex.join(job.command)}\n".encode()

    def submitted(self, printed: bytes) -> JobId:
        return pool.id_printed(printed.partition(b";")[0], "[0-9]{1,18}")

    def cancel(self, job: JobId) -> Command:
        return ("scancel", job)

    def extend(self, job: JobId, seconds: float) -> Command:
        """Operators alone may. https://slurm.schedmd.com/scontrol.html#OPT_TimeLimit"""
        return ("scontrol", "update", f"JobId={job}", f"TimeLimit={-(-int(seconds) // 60)}")

    def longest(self, printed: bytes, queue: str) -> float | None:
        """Of several partitions, `a,b`, a job may start in any: the longest counts."""
        limits: list[float | None] = []
        for line in printed[: pool.LARGEST_ANSWER].decode("utf-8", "replace").splitlines():
            partition = dict(re.findall(r"(PartitionName|Default|MaxTime)=(\S+)", line))
            if partition.get("PartitionName") in queue.split(",") if queue else partition.get("Default") == "YES":
                limits.append(seconds(partition.get("MaxTime", "")))
        return pool.longest_of(limits)

    def query(self) -> Command:
        return ("squeue", "--me", "--noheader", "--states=all", "--format=%i|%T|%S|%r|%j")

    def jobs(self, printed: bytes) -> tuple[NamedJob, ...]:
        if len(printed) > pool.LARGEST_ANSWER:
            raise ValueError("squeue printed more than a list of jobs")
        rows = [line.split("|", 4) for line in printed.decode("utf-8", "replace").splitlines() if line.strip()]
        if wrong := next((row for row in rows if len(row) != 5 or whole(row[0].partition("_")[0]) is None), None):
            raise ValueError(f"squeue printed {'|'.join(wrong)[:60]!r} where a job is expected")
        return tuple(
            NamedJob(name, id, STATES.get(state, JobState.UNKNOWN), one_line(why.removeprefix("None")), _moment(start))
            for id, state, start, why, name in rows
            if pool.PILOT_NAME.fullmatch(name)
        )


def _moment(text: str) -> float:
    """Slurm tells local time without its zone; 0 for `N/A`."""
    with suppress(ValueError, OverflowError):
        return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))
    return 0.0


def seconds(text: str) -> float | None:
    """Of `D-HH:MM:SS`, which scontrol always prints whole; None for UNLIMITED."""
    match = re.fullmatch(r"(?:([0-9]{1,6})-)?([0-9]{1,4}):([0-9]{2}):([0-9]{2})", text)
    if match is None:
        return None
    days, hours, minutes, rest = (int(part or 0) for part in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + rest)


PILOTS = SlurmPilots()
