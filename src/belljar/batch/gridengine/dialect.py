"""Grid Engine (8.1.9 and its successors): a job started through the queue's `starter_method`, and how it is answered.

What the user asked for with `-l` is in the job's environment, put there by the job submission verifier (jsv.py).
Limits, slots and the way to start come from the job's spool folder. Numbers and reasons are kept in the job's context
(`qalter -ac`).

Exit codes, sge_queue_conf(5): 99 requeues the job, 100 puts it into the error state (Eqw) until `qmod -cj`. A payload's
own 99 and 100 mean the same and pass unchanged.
"""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Mapping

from belljar.batch import Settings
from belljar.batch.job.terms import Command, Dialect, Ending, Job, Staged, Surroundings, Verdict, one_line, whole
from belljar.batch.job.verdict import delay, why
from belljar.errors import NotInAJob
from belljar.model import Outcome
from belljar.records import replace

NAME = "gridengine"
RESCHEDULE, APP_ERROR = 99, 100
KILL = 9  # by which Grid Engine itself ends a job
UNSTARTED = ("not-found", "not-executable")  # where the shepherd's own execvlp would have failed: Eqw
CHECKPOINT = "VM_CHECKPOINT"
IMAGE, MEMORY, WALL, DISK, RERUN = "VM_IMAGE", "BELLJAR_MEMORY", "BELLJAR_WALL", "BELLJAR_DISK", "BELLJAR_RERUN"
OF_THE_STARTER = (b"SGE_STARTER_SHELL_PATH", b"SGE_STARTER_SHELL_START_MODE", b"SGE_STARTER_USE_LOGIN_SHELL")
GRACE = 30.0  # seconds the terminate method gives between TERM and KILL; Grid Engine itself gives none
NOTICE = "vm_closed"  # a host's complex value that says why we closed it
LARGEST_LIST = 64 << 20
LARGEST_CONFIG = 1 << 20
# https://manpages.debian.org/bookworm/gridengine-common/sge_types.5.en.html: a small letter counts in thousands.
UNITS = {letter: 1000**power for power, letter in enumerate("kmgt", 1)}
UNITS |= {letter.upper(): 1024**power for power, letter in enumerate("kmgt", 1)}
SIZE = re.compile(r"([0-9]+(?:\.[0-9]*)?)([kKmMgGtT]?)")
CLOCK = re.compile(r"([0-9]{0,12}):([0-9]{0,12}):([0-9]{0,12})")


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
        spool = spool_config(here.peek(folder and folder + b"/config"))
        binary = is_binary(env, spool)
        slots = whole(spool.get("host_slots", b"").decode("latin-1")) or whole(here.var("NSLOTS")) or 1
        return Job(
            system=NAME, id=f"{number}.{task}" if task else number, name=here.var("JOB_NAME"), queue=here.var("QUEUE"),
            image=here.var(IMAGE), checkpoint=here.var(CHECKPOINT), native=native_command(here.argv, env, spool),
            script=b"" if binary else spool.get("script_file", b"") or env.get("JOB_SCRIPT", b""),
            cpus=slots, memory=_memory(here, spool, slots), disk=memory(here.var(DISK)),
            wall=seconds(here.var(WALL)), started_before=1 if here.var("RESTARTED") not in ("", "0") else 0,
            redirect=OF_THE_STARTER, grace=GRACE - 2, staged=_staged(env, folder), notice=notice(spool),
            answer=folder + b"/error" if folder else b"", reruns=here.var(RERUN) == "y",  # as Grid Engine itself does it: `-r y`
        )  # fmt: skip

    def mirror(self, job: Job, outcome: Outcome) -> Ending:
        if outcome.error in UNSTARTED:
            return _hold(job, one_line(f"belljar: {outcome.reason}"))
        return super().mirror(job, outcome) if outcome.payload_ran else Ending(exit_code=None, signal=KILL)

    def again(self, job: Job, verdict: Verdict, outcome: Outcome, tries: int, settings: Settings) -> Ending:
        """Exit 99 with the count in the job's context, also with `qsub -r n`. `qalter -a` delays whole jobs only, so an
        array's task waits in its slot. A host that cannot count holds after the second failure."""
        reason, pause = why(outcome, tries, verdict, settings), delay(tries, settings)
        if verdict is Verdict.HOLD:
            return _hold(job, reason)
        count, waiting = _note(job, tries, reason), Ending(exit_code=RESCHEDULE, delay=pause)
        undelayed = replace(waiting, commands=(count,), otherwise=_hold(job, reason) if job.started_before else waiting)
        if "." in job.id:
            return undelayed
        when = time.strftime("%Y%m%d%H%M.%S", time.localtime(outcome.ended + pause))
        # Two calls: with a verifier in place the server may allow the one (jsv_allowed_mod) and not the other.
        return Ending(RESCHEDULE, commands=(count, ("qalter", "-a", when, _number(job))), otherwise=undelayed)

    def give_back(self, job: Job, *, is_queued: bool) -> Ending:
        return Ending(RESCHEDULE)

    def count(self, job: Job) -> tuple[str, ...]:
        return ("qstat", "-j", _number(job))

    def counted(self, job: Job, printed: bytes) -> Job:
        lines = re.findall(rb"(?m)^context:[ \t]+(.*)$", printed)
        count = re.compile(rb"(?:^|,)" + _key("tries", job).encode() + rb"=([0-9]{1,6})(?:,|$)")
        tries = [int(match[1]) for line in lines if (match := count.search(line.strip()))]
        return replace(job, failed_starts=max(tries, default=0))

    def devices(self, env: Mapping[str, str]) -> dict[str, list[str]]:
        """By the name of the RSMAP complex (Univa's and Altair's): `SGE_HGR_gpu=0 1`."""
        return {name[8:].lower(): ids.split() for name, ids in env.items() if name.startswith("SGE_HGR_") and ids}

    def alive(self) -> tuple[str, ...]:
        """For every host: a filter by a host's name that the server spells otherwise would look like "all jobs gone"."""
        return ("qstat", "-u", "*", "-s", "rs", "-xml")

    def living(self, printed: bytes) -> frozenset[str]:
        jobs = set()
        for entry in entries(printed):
            number = field(entry, "JB_job_number")
            jobs |= {f"{number}.{task}" if task else number for task in field(entry, "tasks").split(",")}
        return frozenset(jobs)

    def close_node(self, node: str, reason: str) -> tuple[tuple[str, ...], ...]:
        """The reason stands in a complex value of the host (`qhost -F vm_closed`), which has no blanks."""
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
        """`$job_id $ja_task_id $job_owner` of the hook's line; the task is 0 for a job that is not an array."""
        number, task, owner = (*argv[:3], "", "", "")[:3]
        if not number.isdecimal():
            raise NotInAJob("no job of Grid Engine: the hook's line must end with $job_id $ja_task_id $job_owner")
        return f"{number}.{task}" if task.isdecimal() and task != "0" else number, owner


def _staged(env: Mapping[str, bytes], folder: bytes) -> Staged:
    """The host list and the spool folder's file a job may look at; TMPDIR, which Grid Engine made for this job."""
    hosts = {env.get("PE_HOSTFILE", b""), folder + b"/pe_hostfile" if folder else b""} - {b""}
    scratch = {env[name] for name in ("TMPDIR", "TMP") if env.get(name, b"").startswith(b"/")}
    own = {path for path in scratch if path.rpartition(b"/")[2].startswith(env.get("JOB_ID", b"-") + b".")}
    return Staged(into=tuple(sorted(hosts)), folders=tuple(sorted(own)))


def _memory(here: Surroundings, spool: Mapping[str, bytes], slots: int) -> int | None:
    """The job's memory on this host: the smaller of its limit (h_vmem) and what it reserved (the verifier's word)."""
    limit = memory(spool.get("h_vmem", b"").decode("latin-1"))
    if limit is not None and spool.get("h_vmem_is_consumable_job") != b"1":
        limit *= slots
    asked = reserved(here.var(MEMORY), slots)
    return min((size for size in (limit, asked) if size), default=None)


def reserved(asked: str, slots: int) -> int | None:
    """For the verifier's word: `SIZE` for the job, or `SIZE*` for each slot."""
    size = memory(asked.removesuffix("*"))
    return size * slots if size is not None and asked.endswith("*") else size


def _hold(job: Job, reason: str) -> Ending:
    """Exit 100: Eqw, with the reason as the shepherd's error text, which `qstat -j` shows. The count begins anew."""
    files = ((job.answer, reason.encode() + b"; "),) if job.answer else ()
    plain = Ending(APP_ERROR, files=files, otherwise=Ending(APP_ERROR))
    return replace(plain, commands=(_note(job, 0, reason),), otherwise=plain)


def _note(job: Job, tries: int, reason: str) -> tuple[str, ...]:
    """`-ac` takes NAME=VALUE with commas between: neither may stand in a value."""
    context = f"{_key('tries', job)}={tries},{_key('reason', job)}={re.sub('[,=]', ';', reason)}"
    return ("qalter", "-ac", context, _number(job))


def _number(job: Job) -> str:
    return job.id.partition(".")[0]


def _key(what: str, job: Job) -> str:
    """An array has one context for all of its tasks."""
    return f"belljar_{what}_{job.id.partition('.')[2]}".removesuffix("_")


# The starter gets the script's path (or the command of a binary job) and the user's arguments, but neither the shell's
# words nor whether it is a binary job: that is in the job's spool folder, in `config`, which the job's user may read.


def spool_config(text: bytes) -> dict[str, bytes]:
    """`KEY=VALUE` per line. A value's own newlines cannot be told from the next line's start: the first KEY counts."""
    pairs = [line.partition(b"=") for line in text[:LARGEST_CONFIG].split(b"\n")]
    return {key.decode("latin-1"): value for key, equals, value in reversed(pairs) if equals}


def memory(text: str) -> int | None:
    """A memory specifier in bytes; None for INFINITY, NONE and what is not a value."""
    if text[:2].lower() == "0x":
        return int(text, 16) if re.fullmatch(r"0[xX][0-9a-fA-F]{1,15}", text) else None
    match = SIZE.fullmatch(text)
    return int(float(match[1]) * UNITS.get(match[2], 1)) if match and len(match[1]) < 20 else None


def seconds(text: str) -> float | None:
    """A time specifier: seconds, or H:M:S with empty parts for zero; None for INFINITY and what is not a value."""
    if match := CLOCK.fullmatch(text):
        hours, minutes, rest = (int(part or "0") for part in match.groups())
        return float(hours * 3600 + minutes * 60 + rest)
    return float(text) if re.fullmatch(r"[0-9]{1,12}", text) else None


def notice(spool: Mapping[str, bytes]) -> tuple[int, float] | None:
    """(signal, seconds before the end) of a job submitted with `-notify`; the signal may be the site's (NOTIFY_KILL)."""
    after = seconds(spool.get("notify", b"").decode("latin-1"))
    kind, name = spool.get("notify_kill_type", b"1"), spool.get("notify_kill", b"").decode("latin-1").upper()
    number = {b"1": signal.SIGUSR2, b"0": getattr(signal, f"SIG{name.removeprefix('SIG')}", None)}.get(kind)
    return (int(number), after) if after and isinstance(number, signal.Signals) else None


def native_command(argv: tuple[bytes, ...], env: Mapping[str, bytes], spool: Mapping[str, bytes]) -> Command:
    """The shepherd's own command for this job without a starter method, by `shell_start_mode`.

    unix_behavior, raw_exec   the script itself, by its first line or /bin/sh
    posix_compliant           the shell with the script and the arguments
    script_from_stdin         the shell with `-s` and the arguments; the script is its standard input
    a binary job              the shell with `-c` and all words in one; with `-shell n` the command, looked for in PATH
    """
    shell = env.get("SGE_STARTER_SHELL_PATH", b"") or b"/bin/sh"
    mode = env.get("SGE_STARTER_SHELL_START_MODE", b"").lower()
    login = env.get("SGE_STARTER_USE_LOGIN_SHELL") == b"true"
    name = (b"-" if login else b"") + shell.rpartition(b"/")[2]
    is_stdin = mode == b"script_from_stdin" and argv[:1] == (b"-s",)
    arguments, file = argv[1:], spool.get("script_file", b"") if is_stdin else (argv[0] if argv else b"")
    if is_binary(env, spool) and spool.get("no_shell", b"0") != b"1":
        return Command(shell, (name, b"-c", file + b" " + b"".join(word + b" " for word in arguments)))
    if is_stdin:
        return Command(shell, (name, b"-s", *arguments))
    if mode == b"posix_compliant" and not is_binary(env, spool):
        return Command(shell, (name, file, *arguments))
    return Command(file, (file, *arguments))


def is_binary(env: Mapping[str, bytes], spool: Mapping[str, bytes]) -> bool:
    """`qsub -b y`: a command of the host, no spooled script."""
    if flag := spool.get("handle_as_binary"):
        return flag == b"1"
    return not env.get("JOB_SCRIPT", b"").endswith(b"/job_scripts/" + env.get("JOB_ID", b"-"))


def entries(printed: bytes) -> list[str]:
    """The jobs in what `qstat -xml` prints, each with its number. Raises ValueError for anything but a whole list."""
    text = printed.decode("utf-8", "replace")
    if len(printed) > LARGEST_LIST or "<job_info" not in text[:4096] or not text.rstrip().endswith("</job_info>"):
        raise ValueError("qstat printed no list of jobs, or one that was cut off")
    jobs = [entry.partition("</job_list>")[0] for entry in text.split("<job_list")[1:]]
    if any(whole(field(job, "JB_job_number")) is None for job in jobs):
        raise ValueError("qstat printed a job without a number")
    return jobs


def field(entry: str, name: str) -> str:
    """A field of a job there; "" where it has none."""
    match = re.search(rf"<{name}(?: [^>]*)?>([^<]*)</{name}>", entry)
    return match[1].strip() if match else ""


DIALECT = GridEngine()
