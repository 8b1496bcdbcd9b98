"""Slurm, 22.05 and later: what it says to a batch job, and how it is answered.

A job comes here by one `#!` line that job_submit.lua (site.py), or its user, puts before the script:

    #!/usr/local/libexec/slurm/wrap-slurm --image=debian12 --time=60

The kernel then runs the wrapper with all that follows its path as one argument, the spooled script's path and the
user's arguments: as the user, in the job's folder, with the job's files as standard input and output.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from belljar.batch import Settings
from belljar.batch.job import verdict
from belljar.batch.job.terms import Command, Dialect, Ending, Job, Standing, Surroundings, Verdict, one_line, whole
from belljar.errors import HostError, NotInAJob
from belljar.model import MIB, Outcome
from belljar.records import replace

OURS = "belljar:"  # begins the reason of a node we closed
KILL_WAIT = 30.0  # slurm.conf KillWait, between TERM and KILL; `batch check` compares it with a site's
LIMITS = b"/proc/self/limits"
NO_LIMIT = 365 * 86400  # seconds from start to "end" of a job that has none (24.11)
SHORTEST_DELAY = 5  # seconds; a credential made in the second the old one was revoked in is refused by slurmd
LONGEST_COMMENT = 400

# States in which a job may have processes on a node. https://slurm.schedmd.com/squeue.html#SECTION_JOB-STATE-CODES
LIVING = ("RUNNING", "SUSPENDED", "STOPPED", "COMPLETING", "CONFIGURING", "SIGNALING", "STAGE_OUT", "RESIZING")
HEADER = "JOBID|ARRAY_JOB_ID|ARRAY_TASK_ID|STATE"
FORMAT = "%A|%F|%K|%T"

COUNT = re.compile(r"(?:^|\s)belljar=([0-9]{1,4})(?:[: ].*)?$", re.DOTALL)


class Slurm(Dialect):
    """The dialect."""

    name = "slurm"

    def read(self, here: Surroundings) -> Job:
        raw = here.var("SLURM_JOB_ID")
        if not raw.isdecimal() or not here.argv:
            raise NotInAJob("SLURM_JOB_ID and a script are not there: this is not a batch job of Slurm")
        script = here.argv[0]
        text = here.peek(script)[:1024]
        line = text.partition(b"\n")[0]
        is_redirected = bool(here.options) and line.startswith(b"#!") and b" --" in line
        words = line.decode("ascii", "replace") if is_redirected else ""  # whole here, where the kernel may have cut it
        asked = {**here.options, **dict(re.findall(r" --(image|checkpoint)=(\S*)", words))}
        # For a task of an array: its last task has the array's own id, and commands given that one mean all. A job submitted from
        # inside a task inherits SLURM_ARRAY_* (22.05), so the word of the redirect counts.
        array, task = here.var("SLURM_ARRAY_JOB_ID"), here.var("SLURM_ARRAY_TASK_ID")
        is_task = array.isdecimal() and task.isdecimal() and here.options.get("array", "yes") == "yes"
        ident = f"{array}_{task}" if is_task else raw
        cpus = whole(here.var("SLURM_CPUS_ON_NODE"))
        disk = whole(here.options.get("disk", ""))
        return Job(
            system=self.name, id=ident, aliases=(raw,) if ident != raw else (), name=here.var("SLURM_JOB_NAME"),
            queue=here.var("SLURM_JOB_PARTITION"), image=asked.get("image", ""), checkpoint=asked.get("checkpoint", ""), native=_native(here.argv, text if is_redirected else b""),
            inside=Command(script, here.argv), script=script, script_skips_line=is_redirected,
            cpus=cpus, memory=_memory(here, cpus or 1), disk=disk * MIB if disk else None, wall=_wall(here),
            started_before=whole(here.var("SLURM_RESTART_COUNT")) or 0, grace=KILL_WAIT - 2, signals_reach_all=False,
        )  # fmt: skip

    def tell(self, job: Job, verdict_: Verdict, outcome: Outcome, tries: int, settings: Settings) -> Ending:
        ending = super().tell(job, verdict_, outcome, tries, settings)
        if verdict_ is Verdict.FAIL and job.comment is not None:
            note = _comment(job, verdict.why(outcome, tries, verdict_, settings))
            ending = replace(ending, commands=(note,), otherwise=ending)
        return ending

    def again(self, job: Job, verdict_: Verdict, outcome: Outcome, tries: int, settings: Settings) -> Ending:
        """By the owner's own `scontrol`: it needs no exit code of its own, and takes the time of the next start. The
        tries and the reason are the job's comment, which only its owner and operators can write."""
        reason = verdict.why(outcome, tries, verdict_, settings)
        note = _comment(job, f"belljar={tries} {reason.removeprefix('belljar: ')}")
        act, delay, is_last = "requeuehold", SHORTEST_DELAY, False  # else two minutes once it is released
        if verdict_ is Verdict.REQUEUE:
            act, delay = "requeue", max(int(verdict.delay(tries, settings)), SHORTEST_DELAY)
            # A comment that cannot be written counts nothing: then Slurm's own counter bounds the tries.
            is_last = job.started_before + 1 >= max(settings.retries, 1)
        requeue, start = ("scontrol", act, job.id), ("scontrol", "update", f"JobId={job.id}", f"StartTime=now+{delay}")
        bare = self.failed if is_last else Ending(commands=(requeue,), otherwise=self.failed)
        # Once requeued, the job is back in the queue whatever fails after it: Slurm heeds no exit code of this run.
        return Ending(commands=(note, requeue, start), otherwise=bare)

    def give_back(self, job: Job, *, is_queued: bool) -> Ending:
        if is_queued:
            return Ending()
        start = ("scontrol", "update", f"JobId={job.id}", f"StartTime=now+{SHORTEST_DELAY}")
        return Ending(commands=(("scontrol", "requeue", job.id), start), otherwise=self.failed)

    def ask_standing(self, job: Job) -> tuple[str, ...]:
        return ("scontrol", "show", "job", job.id)

    def standing(self, job: Job, printed: bytes) -> Standing:
        """A job that Slurm preempts with REQUEUE has one start more by the time its script gets TERM."""
        starts = re.search(rb"(?m)^ +Requeue=([01]) Restarts=([0-9]+) ", printed)
        if starts is None:
            raise ValueError("scontrol printed no job")
        if int(starts[2]) > job.started_before:
            return Standing.QUEUED
        is_here = starts[1] == b"1" and re.search(rb"(?m)^ +JobState=RUNNING ", printed)
        return Standing.RUNS if is_here else Standing.OVER

    def count(self, job: Job) -> tuple[str, ...]:
        return ("squeue", "--noheader", "--states=all", f"--jobs={job.id}", "--format=%k")

    def counted(self, job: Job, printed: bytes) -> Job:
        comment = printed.decode("utf-8", "replace").removesuffix("\n")
        match = COUNT.search(comment)
        kept = "" if comment.strip() == "(null)" else comment
        return replace(job, comment=kept, failed_starts=int(match[1]) if match else 0)

    def devices(self, env: Mapping[str, str]) -> dict[str, list[str]]:
        """GPUs, by their numbers in gres.conf. https://slurm.schedmd.com/sbatch.html, https://slurm.schedmd.com/prolog_epilog.html"""
        names = [name for name in env.get("SLURM_JOB_GPUS", "").split(",") if name]
        if not names and env.get("SLURM_GPUS_ON_NODE", "0") != "0":
            hint = "gres.conf has to name each GPU (`File=`, or AutoDetect)."
            raise HostError("Slurm gave the job GPUs and does not tell which: no SLURM_JOB_GPUS", hint=hint)
        return {"gpu": names} if names else {}

    def alive(self) -> tuple[str, ...]:
        """For all nodes: one host may be several to Slurm, and a name it does not know would look like no jobs."""
        return ("squeue", f"--states={','.join(LIVING)}", f"--format={FORMAT}")

    def living(self, printed: bytes) -> frozenset[str]:
        header, *rows = printed.decode("ascii", "replace").splitlines() or [""]
        if header.strip() != HEADER:
            raise ValueError(f"squeue printed {header[:60]!r} where the list of jobs begins")
        jobs = set()
        for row in rows:
            fields = row.split("|")
            if len(fields) != 4 or not fields[0].isdecimal():
                raise ValueError(f"squeue printed {row[:60]!r} in the list of jobs")
            jobs |= {fields[0], *([f"{fields[1]}_{fields[2]}"] if fields[2].isdecimal() else [])}
        return frozenset(jobs)

    def close_node(self, node: str, reason: str) -> tuple[tuple[str, ...], ...]:
        text = one_line(reason.removeprefix(OURS).strip())
        return (("scontrol", "update", f"NodeName={node}", "State=DRAIN", f"Reason={OURS} {text}"),)

    def open_node(self, node: str) -> tuple[tuple[str, ...], ...]:
        return (("scontrol", "update", f"NodeName={node}", "State=RESUME"),)

    def why_closed(self, node: str) -> tuple[str, ...]:
        return ("scontrol", "show", "node", node)

    def closed_by_us(self, printed: bytes) -> bool:
        text = printed.decode("utf-8", "replace")
        state = re.search(r"^\s*State=(\S+)", text, re.MULTILINE)
        reason = re.search(r"^\s*Reason=(.*)$", text, re.MULTILINE)
        return bool(state and "DRAIN" in state[1].split("+") and reason and reason[1].startswith(OURS))

    def epilog(self, env: Mapping[str, str], argv: tuple[str, ...]) -> tuple[str, str]:
        """Epilog knows a task of an array by its own id only: an alias of the job's."""
        job, user = env.get("SLURM_JOB_ID", ""), env.get("SLURM_JOB_UID") or env.get("SLURM_JOB_USER", "")
        if not job.isdecimal() or not user:
            raise NotInAJob("SLURM_JOB_ID and SLURM_JOB_UID are not there: this is no Epilog of Slurm")
        return job, user


DIALECT = Slurm()


def _native(argv: tuple[bytes, ...], text: bytes) -> Command:
    """The script as the kernel would run it without our line, which the interpreter takes for a comment."""
    line = text.partition(b"\n")[2].partition(b"\n")[0]
    if not line.startswith(b"#!"):
        return Command(argv[0], argv)
    interpreter, _, argument = line[2:].strip(b" \t").replace(b"\t", b" ").partition(b" ")
    words = (interpreter, argument.strip()) if argument.strip() else (interpreter,)
    return Command(interpreter or argv[0], (*words, *argv) if interpreter else argv)


def _memory(here: Surroundings, cpus: int) -> int | None:
    """slurmstepd sets it as RLIMIT_RSS, which no inherited variable can change; else the smaller of the variables."""
    limit = re.search(rb"^Max resident set\s+\S+\s+(\S+)", here.peek(LIMITS), re.MULTILINE)
    if limit and limit[1].isdigit():
        return int(limit[1])
    per_node, per_cpu = whole(here.var("SLURM_MEM_PER_NODE")), whole(here.var("SLURM_MEM_PER_CPU"))
    return min((size * MIB for size in (per_node, per_cpu and per_cpu * cpus) if size), default=None)


def _wall(here: Surroundings) -> float | None:
    start, end = whole(here.var("SLURM_JOB_START_TIME")), whole(here.var("SLURM_JOB_END_TIME"))
    if start and end and start < end < start + NO_LIMIT:
        return float(end - start)
    minutes = whole(here.options.get("time", ""))
    return minutes * 60.0 if minutes else None


def _comment(job: Job, note: str) -> tuple[str, ...]:
    """A comment that could not be read is lost: `scontrol update` replaces it as a whole."""
    asked = f"vm={job.image}" if job.comment is None and job.image else ""
    words = asked or COUNT.sub("", job.comment or "").partition(OURS)[0].strip()
    return ("scontrol", "update", f"JobId={job.id}", f"Comment={one_line(f'{words} {note}'.strip(), LONGEST_COMMENT)}")
