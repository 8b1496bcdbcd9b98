"""Grid Engine (8.1.9 and its successors): a job started through the queue's `starter_method`, and how it is answered.

What the user asked for with `-l` reaches no job: the job submission verifier (gridengine_jsv.py) writes it into the job's
environment. Limits, slots and the way to start come from the job's spool folder. Numbers and reasons are kept in the
job's context (`qalter -ac`), which lives in the server until the job is gone.

Exit codes, sge_queue_conf(5): 99 puts the job back into the queue, 100 puts it into the error state (Eqw) until somebody
clears it with `qmod -cj`. A payload's own 99 and 100 mean the same and pass unchanged.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

from belljar.batch import Settings
from belljar.batch.gridengine import spool as gridengine_spool
from belljar.batch.job.terms import Dialect, Ending, Job, Staged, Surroundings, Verdict, whole
from belljar.batch.job.verdict import delay, has_begun, why
from belljar.errors import OUR_FAILURE, NotInAJob
from belljar.model import Outcome

NAME = "gridengine"
RESCHEDULE, APP_ERROR = 99, 100
KILL = 9
UNSTARTED = ("not-found", "not-executable")  # where the shepherd's own execvlp would have failed: Eqw
IMAGE, MEMORY, WALL, DISK, RERUN = "VM_IMAGE", "BELLJAR_MEMORY", "BELLJAR_WALL", "BELLJAR_DISK", "BELLJAR_RERUN"
OF_THE_STARTER = (b"SGE_STARTER_SHELL_PATH", b"SGE_STARTER_SHELL_START_MODE", b"SGE_STARTER_USE_LOGIN_SHELL")
GRACE = 30.0  # seconds the terminate method gives between TERM and KILL; Grid Engine itself gives none
NOTICE = "vm_closed"  # a host's complex value that says why we closed it
LARGEST_LIST = 64 << 20


@dataclass(frozen=True)
class GridEngineJob(Job):
    """A job, and what only its answer needs."""

    number: str = ""
    task: str = ""  # "" where it is no array
    spool: bytes = b""
    reruns: bool = False  # the user asked for `-r y`: it may begin a second time
    forbids_reschedule: bool = False  # qmaster_params FORBID_RESCHEDULE: 99 is an exit code like any other
    forbids_error: bool = False  # FORBID_APPERROR: so is 100


class GridEngine(Dialect):
    """The dialect."""

    name = NAME

    def read(self, here: Surroundings) -> Job:
        env = {key.decode("latin-1"): value for key, value in reversed(here.env)}
        number, task = here.var("JOB_ID"), here.var("SGE_TASK_ID")
        if not number.isdecimal() or not here.argv or "SGE_STARTER_SHELL_PATH" not in env:
            raise NotInAJob("no job of Grid Engine: started without JOB_ID and SGE_STARTER_SHELL_PATH")
        task = task if task.isdecimal() else ""
        folder = env.get("SGE_JOB_SPOOL_DIR", b"")
        spool = _spool(here, folder)
        binary = gridengine_spool.is_binary(env, spool)
        slots = whole(spool.get("host_slots", b"").decode("latin-1")) or whole(here.var("NSLOTS")) or 1
        return GridEngineJob(
            system=NAME, id=f"{number}.{task}" if task else number, name=here.var("JOB_NAME"), queue=here.var("QUEUE"),
            image=here.var(IMAGE), native=gridengine_spool.native(here.argv, env, spool),
            script=b"" if binary else spool.get("script_file", b"") or env.get("JOB_SCRIPT", b""),
            cpus=slots, memory=_memory(here, spool, slots), disk=gridengine_spool.memory(here.var(DISK)),
            wall=gridengine_spool.seconds(here.var(WALL)), started_before=1 if here.var("RESTARTED") not in ("", "0") else 0,
            redirect=OF_THE_STARTER, grace=GRACE - 2, staged=_staged(env, folder), notice=gridengine_spool.notice(spool),
            number=number, task=task, spool=folder, reruns=here.var(RERUN) == "y",
            forbids_reschedule=spool.get("forbid_reschedule") == b"1", forbids_error=spool.get("forbid_apperror") == b"1",
        )  # fmt: skip

    # -- the answer ----------------------------------------------------------------------------------------------------

    def tell(self, job: Job, verdict: Verdict, outcome: Outcome, tries: int, settings: Settings) -> Ending:
        """Where the site forbids 99, what should be requeued is held; where it forbids 100, a hold of the user's own kind
        (`qrls` lets it go) takes the place of the error state; where it forbids both, the job fails.

        A job that had begun when its machine was lost fails unless it was submitted with `-r y`, as Grid Engine itself
        reruns no other job (but by its queue's word, which no node knows)."""
        assert isinstance(job, GridEngineJob)
        if verdict is Verdict.MIRROR and outcome.error in UNSTARTED:
            return _hold(job, why(outcome, tries, verdict, settings))
        if verdict is Verdict.MIRROR:
            return _mirror(outcome)
        if verdict is not Verdict.FAIL and has_begun(outcome) and not job.reruns:
            return Ending(exit_code=OUR_FAILURE)
        reason = why(outcome, tries, verdict, settings)
        if verdict is Verdict.REQUEUE and not job.forbids_reschedule:
            return _requeue(job, tries, reason, delay(tries, settings), outcome.ended)
        if verdict in (Verdict.REQUEUE, Verdict.HOLD):
            return _hold(job, reason)
        return Ending(exit_code=OUR_FAILURE)

    def count(self, job: Job) -> tuple[str, ...]:
        assert isinstance(job, GridEngineJob)
        return ("qstat", "-j", job.number)

    def counted(self, job: Job, printed: bytes) -> Job:
        assert isinstance(job, GridEngineJob)
        lines = re.findall(rb"(?m)^context:[ \t]+(.*)$", printed)
        key = _tries(job).encode()
        numbers = [re.search(rb"(?:^|,)" + key + rb"=([0-9]{1,6})(?:,|$)", line.strip()) for line in lines]
        return replace(job, failed_starts=max((int(number[1]) for number in numbers if number), default=0))

    # -- what lives ----------------------------------------------------------------------------------------------------

    def alive(self) -> tuple[str, ...]:
        """Of every host: a filter by a host's name that the server spells otherwise would look like "all jobs gone"."""
        return ("qstat", "-u", "*", "-s", "rs", "-xml")

    def living(self, printed: bytes) -> frozenset[str]:
        text = printed[: LARGEST_LIST + 1]
        if len(text) > LARGEST_LIST or b"<job_info" not in text[:4096] or not text.rstrip().endswith(b"</job_info>"):
            raise ValueError("not a whole list of jobs")
        found = set()
        for entry in text.split(b"<job_list")[1:]:
            number = re.search(rb"<JB_job_number>([0-9]+)</JB_job_number>", entry)
            if number is None:
                raise ValueError("a job without a number in the list")
            tasks = re.search(rb"<tasks>([0-9:,-]+)</tasks>", entry)
            for task in tasks[1].split(b",") if tasks else (b"",):
                found.add((number[1] + (b"." + task if task else b"")).decode())
        return frozenset(found)

    # -- the node ------------------------------------------------------------------------------------------------------

    def close_node(self, node: str, reason: str) -> tuple[tuple[str, ...], ...]:
        """The reason stands in a complex value of the host, which `qhost -F vm_closed` shows: Grid Engine has no
        other place for one. A value has no blanks."""
        words = re.sub(r"[^A-Za-z0-9._:/-]+", "_", reason.removeprefix("belljar:"))[:120].strip("_") or "closed"
        closing = ("qmod", "-d", f"*@{node}")
        return (("qconf", "-mattr", "exechost", "complex_values", f"{NOTICE}=belljar:{words}", node), closing)

    def open_node(self, node: str) -> tuple[tuple[str, ...], ...]:
        return (("qmod", "-e", f"*@{node}"), ("qconf", "-dattr", "exechost", "complex_values", NOTICE, node))

    def why_closed(self, node: str) -> tuple[str, ...]:
        return ("qconf", "-se", node)

    def closed_by_us(self, printed: bytes) -> bool:
        values = re.search(rb"(?m)^complex_values((?:.*\\\n)*.*)$", printed)
        return values is not None and re.search(rb"[\s,]" + NOTICE.encode() + rb"=belljar:", values[1]) is not None

    def epilog(self, env: Mapping[str, str], argv: tuple[str, ...]) -> tuple[str, str]:
        """`$job_id $ja_task_id $job_owner` of the hook's line: its environment is the user's. The task is 0 for a job
        that is no array."""
        number, task, owner = (*argv[:3], "", "", "")[:3]
        if not number.isdecimal():
            raise NotInAJob("no job of Grid Engine: the hook's line must end with $job_id $ja_task_id $job_owner")
        return f"{number}.{task}" if task.isdecimal() and task != "0" else number, owner


def _spool(here: Surroundings, folder: bytes) -> dict[str, bytes]:
    try:
        return gridengine_spool.config(here.read(folder + b"/config")) if folder else {}
    except OSError:
        return {}


def _staged(env: Mapping[str, bytes], folder: bytes) -> Staged:
    """The host list and the spool folder's file a job may look at; TMPDIR, which Grid Engine made for this job."""
    hosts = {env.get("PE_HOSTFILE", b""), folder + b"/pe_hostfile" if folder else b""} - {b""}
    scratch = {env[name] for name in ("TMPDIR", "TMP") if env.get(name, b"").startswith(b"/")}
    own = {path for path in scratch if path.rpartition(b"/")[2].startswith(env.get("JOB_ID", b"-") + b".")}
    return Staged(into=tuple(sorted(hosts)), folders=tuple(sorted(own)))


def _memory(here: Surroundings, spool: Mapping[str, bytes], slots: int) -> int | None:
    """The job's memory on this host: the smaller of what it is limited to (h_vmem) and what it reserved (the verifier's
    word, `SIZE` for the job or `SIZE*` for each slot)."""
    limit = gridengine_spool.memory(spool.get("h_vmem", b"").decode("latin-1"))
    if limit is not None and spool.get("h_vmem_is_consumable_job") != b"1":
        limit *= slots
    reserved = reserved_memory(here.var(MEMORY), slots)
    return min((size for size in (limit, reserved) if size), default=None)


def reserved_memory(asked: str, slots: int) -> int | None:
    """Of the verifier's word: `SIZE` for the job, or `SIZE*` for each slot."""
    size = gridengine_spool.memory(asked.removesuffix("*"))
    return size * slots if size is not None and asked.endswith("*") else size


def _mirror(outcome: Outcome) -> Ending:
    """As the payload ended. One that was ended before it could say how ends as Grid Engine's own kill would end it."""
    if outcome.payload_ran:
        return Ending(exit_code=outcome.exit_code, signal=outcome.signal)
    return Ending(signal=KILL)


def _requeue(job: GridEngineJob, tries: int, reason: str, pause: float, ended: float) -> Ending:
    """Exit 99, with the count in the job's context. `qalter -a` delays the next start of a whole job only, so an array's
    task waits where it is. A host that may not speak to the server cannot count: there the second failure holds.

    `qsub -r n` changes nothing here: Grid Engine requeues such a job at 99 too, and the payload had not begun."""
    context = _context((_tries(job), str(tries)), (_reason(job), reason))
    waiting = Ending(exit_code=RESCHEDULE, delay=pause)
    uncounted = _hold(job, reason) if job.started_before else waiting
    if job.task:
        return replace(waiting, commands=(("qalter", "-ac", context, job.number),), otherwise=uncounted)
    count = ("qalter", "-ac", context, job.number)
    undelayed = replace(waiting, commands=(count,), otherwise=uncounted)
    when = time.strftime("%Y%m%d%H%M.%S", time.localtime(ended + pause))
    # Two calls: with a verifier in place the server may allow the one (jsv_allowed_mod) and not the other.
    return Ending(exit_code=RESCHEDULE, commands=(count, ("qalter", "-a", when, job.number)), otherwise=undelayed)


def _hold(job: GridEngineJob, reason: str) -> Ending:
    """Exit 100: Eqw, with the reason as the shepherd's error text, which `qstat -j` shows. The count begins anew."""
    context = _context((_tries(job), "0"), (_reason(job), reason))
    counted = (("qalter", "-ac", context, job.number),)
    if job.forbids_error and job.forbids_reschedule:
        return Ending(exit_code=OUR_FAILURE, commands=counted, otherwise=Ending(exit_code=OUR_FAILURE))
    if job.forbids_error:
        held = (*counted, ("qalter", "-h", "u", job.id))
        return Ending(exit_code=RESCHEDULE, commands=held, otherwise=Ending(exit_code=OUR_FAILURE))
    files = ((job.spool + b"/error", reason.encode() + b"; "),) if job.spool else ()
    silent = Ending(exit_code=APP_ERROR)
    plain = replace(silent, files=files, otherwise=silent)
    return replace(plain, commands=counted, otherwise=plain)


def _context(*pairs: tuple[str, str]) -> str:
    """`-ac` takes NAME=VALUE with commas between: neither may stand in a value."""
    return ",".join(f"{name}={re.sub('[,=]', ';', value)}" for name, value in pairs)


def _tries(job: GridEngineJob) -> str:
    """An array has one context for all of its tasks."""
    return f"belljar_tries_{job.task}" if job.task else "belljar_tries"


def _reason(job: GridEngineJob) -> str:
    return f"belljar_reason_{job.task}" if job.task else "belljar_reason"


DIALECT = GridEngine()
