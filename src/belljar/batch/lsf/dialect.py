"""LSF: what it says to a job, and how it is answered.

LSF runs a job as a file of /bin/sh, in which the command stands between two marks, behind the job starter. Ours is
`exec WRAPPER; COMMAND`: the shell becomes the wrapper, which reads the command from that file, so nothing of it is
expanded on the host. What follows it in the file, by which LSF waits for background processes and makes the exit code,
belongs to it. https://www.ibm.com/docs/en/spectrum-lsf/10.1.0?topic=variables-environment-variable-reference
https://www.ibm.com/docs/en/spectrum-lsf/10.1.0?topic=lsbqueues-job-starter
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping

from belljar.batch import Settings
from belljar.batch.job.terms import Command, Dialect, Ending, Job, Staged, Surroundings, Verdict, whole
from belljar.batch.job.verdict import why
from belljar.errors import OUR_FAILURE, NotInAJob
from belljar.model import GIB, KIB, MIB, Outcome
from belljar.records import replace

# What esub.vm puts into the job's environment. Names that begin so never reach a guest.
IMAGE, MEMORY, DISK, WALL = "BELLJAR_LSF_IMAGE", "BELLJAR_LSF_MEMORY", "BELLJAR_LSF_DISK", "BELLJAR_LSF_WALL"
NOTE = "98"  # index of our message among a job's (bpost, bread); LSF has 0 to 128
KILL_INTERVAL = 10  # seconds between INT, TERM and KILL (JOB_TERMINATE_INTERVAL)
KILLED_IN = 60.0  # seconds for brequeue to end this process; it returns before
USER_INPUT = b"# LSBATCH: User input\n"
STARTER = re.compile(rb"^exec (\S*/)?wrap-lsf(?: --[^;\n]*)?;[ \t]*", re.MULTILINE)
SHELL_FILE = b"$LSB_JOBFILENAME.shell"
# A job file begins so: the shell survives TERM, INT, HUP, USR1, USR2 to tell how the command ended. An `exec` forgets that: it is said again.
TRAPS = b"$LSB_TRAPSIGS\n"
HOST_FILES = ("LSB_DJOB_HOSTFILE", "LSB_DJOB_RANKFILE", "LSB_AFFINITY_HOSTFILE")
UNITS = {"K": KIB, "M": MIB, "G": GIB, "T": 1 << 40, "P": 1 << 50}
RUNNING = ("RUN", "SSUSP", "USUSP", "PROV", "UNKWN", "ZOMBI")
STATES = (*RUNNING, "PEND", "PSUSP", "WAIT", "DONE", "EXIT")
ROW = re.compile(r"([0-9]+),([0-9]+),([A-Z]+)")
USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@+-]{0,63}\$?\Z")
MOST = 1 << 62


class Lsf(Dialect):
    """The dialect."""

    name = "lsf"

    def read(self, here: Surroundings) -> Job:
        if not here.var("LSB_JOBID").isdecimal():
            raise NotInAJob("$LSB_JOBID is not set: LSF did not start this")
        command, traps = command_of(here)
        file = os.fsencode(here.var("LSB_JOBFILENAME"))
        native = Command(b"/bin/sh", (b"/bin/sh", b"-c", traps + command, file or b"sh"))
        rusage = memory_of(here.var("LSB_EFFECTIVE_RSRCREQ"), here.options.get("unit", "MB"))
        return Job(
            system=self.name, id=id_of(here.var), name=here.var("LSB_JOBNAME"), queue=here.var("LSB_QUEUE"),
            image=here.var(IMAGE), native=native, script=file + b".shell" if command.startswith(SHELL_FILE) else b"",
            cpus=_cpus(here), memory=whole(here.var(MEMORY)) or rusage, disk=whole(here.var(DISK)) or None,
            wall=whole(here.var(WALL)) or None, started_before=1 if here.var("LSB_RESTART") == "Y" else 0,
            grace=float(KILL_INTERVAL - 2), staged=Staged(into=here.paths(*HOST_FILES)),
        )  # fmt: skip

    def mirror(self, job: Job, outcome: Outcome) -> Ending:
        """128 + S for death by signal S, as LSF's shell: one that dies by a signal is "Done" to LSF (OpenLava 3.3)."""
        ending = super().mirror(job, outcome)
        return ending if ending.signal is None else Ending(exit_code=128 + ending.signal)

    def again(self, job: Job, verdict: Verdict, outcome: Outcome, tries: int, settings: Settings) -> Ending:
        """brequeue ends the job to give it back; a job whose count cannot be kept is not given back."""
        note = ("bpost", "-i", NOTE, "-d", why(outcome, tries, verdict, settings), job.id)
        requeue = ("brequeue", *(("-H",) if verdict is Verdict.HOLD else ()), "-r", job.id)
        return Ending(OUR_FAILURE, commands=(note, requeue), delay=KILLED_IN, otherwise=self.failed)

    def count(self, job: Job) -> tuple[str, ...]:
        return ("bread", "-i", NOTE, job.id)

    def counted(self, job: Job, printed: bytes) -> Job:
        tries = re.findall(rb"belljar: try ([0-9]{1,6}) of", printed)
        return replace(job, failed_starts=int(tries[-1]) if tries else 0)

    def alive(self) -> tuple[str, ...]:
        """With ended jobs too: of none at all bjobs says so by an exit code that could mean anything."""
        host = os.uname().nodename
        return ("bjobs", "-u", "all", "-a", "-m", host, "-noheader", "-o", "jobid jobindex stat delimiter=','")

    def living(self, printed: bytes) -> frozenset[str]:
        lines = [line.strip() for line in printed.decode("utf-8", "replace").splitlines() if line.strip()]
        rows = [match for line in lines if (match := ROW.fullmatch(line)) and match[3] in STATES]
        if not lines or len(rows) != len(lines):
            raise ValueError(f"bjobs printed {printed[:60]!r} where a list of jobs is expected")
        running = [row for row in rows if row[3] in RUNNING]
        return frozenset(row[1] if row[2] == "0" else f"{row[1]}[{row[2]}]" for row in running)

    def close_node(self, node: str, reason: str) -> tuple[tuple[str, ...], ...]:
        return (("badmin", "hclose", "-C", reason, node),)

    def open_node(self, node: str) -> tuple[tuple[str, ...], ...]:
        return (("badmin", "hopen", "-C", "belljar: its self-check passed", node),)

    def why_closed(self, node: str) -> tuple[str, ...]:
        return ("bhosts", "-l", node)

    def closed_by_us(self, printed: bytes) -> bool:
        """The comment is the last administrator's; ours begins with our name."""
        comment = re.search(rb"ADMIN ACTION COMMENT:\s*\"?\s*belljar\b", printed)
        return b"closed_Adm" in printed and comment is not None

    def epilog(self, env: Mapping[str, str], argv: tuple[str, ...]) -> tuple[str, str]:
        user = env.get("LSFUSER", "") or env.get("LSB_JOB_EXECUSER", "")
        if not env.get("LSB_JOBID", "").isdecimal() or not USER.match(user):
            raise NotInAJob("$LSB_JOBID and $LSFUSER are not set: LSF did not start this hook")
        return id_of(lambda name: env.get(name, "")), user


def id_of(var: Callable[[str], str]) -> str:
    """`4711`, or `4711[3]` for the third job of an array: as bjobs, bkill and brequeue take it."""
    index = var("LSB_JOBINDEX")
    return var("LSB_JOBID") + (f"[{index}]" if index.isdecimal() and int(index) else "")


def command_of(here: Surroundings) -> tuple[bytes, bytes]:
    """(what the shell was to run, what goes before it): the rest of the job file behind our starter. Raises NotInAJob."""
    starter = "Set JOB_STARTER as `belljar batch install lsf --print` shows it."
    if here.argv:  # `WRAPPER "%USRCMD"`: LSF's shell has run a part of it, and taken quotes from the rest
        raise NotInAJob("the command came as words of the job starter, and not in the job's file", hint=starter)
    file = here.var("LSB_JOBFILENAME")
    try:
        text = here.read(os.fsencode(file)) if file else b""
    except OSError as exc:
        raise NotInAJob(f"{file}: {exc.strerror}", hint="LSF keeps a job's command there; see JOB_SPOOL_DIR.") from exc
    head, mark, rest = text.partition(USER_INPUT)
    body = rest if mark else text
    traps = TRAPS if mark and TRAPS in head else b""
    starts = [match.end() for match in STARTER.finditer(body)]
    if not starts and body.strip() and b"wrap-lsf" not in body:
        return body, traps  # a starter that was put in front of the file, not into it
    if not starts:
        raise NotInAJob(f"{file or '$LSB_JOBFILENAME'}: no command behind `exec wrap-lsf;`", hint=starter)
    # A script from bsub's standard input is a here-document with any text in it; the line that runs it comes after.
    runs_file = [start for start in starts if body.startswith(SHELL_FILE, start)]
    return body[runs_file[-1] if runs_file else starts[0] :], traps


def memory_of(requirement: str, unit: str) -> int | None:
    """Bytes that `rusage[mem=...]` reserves on a host, where the site's unit is *unit* (LSF_UNIT_FOR_LIMITS)."""
    for section in re.findall(r"rusage\[([^\]]*)\]", requirement):
        match = re.search(r"(?:^|[,:\s(])mem\s*=\s*([0-9]{1,15}(?:\.[0-9]{0,6})?)\s*([KMGTP]?)", section)
        if match:
            scale = UNITS.get(match[2] or unit[:1].upper(), MIB)
            return min(int(float(match[1]) * scale), MOST) or None
    return None


def _cpus(here: Surroundings) -> int | None:
    """For this host, which is the first of the job's."""
    words = here.var("LSB_MCPU_HOSTS").split()
    if len(words) >= 2 and words[1].isdecimal():
        return int(words[1][:9]) or None
    return whole(here.var("LSB_DJOB_NUMPROC")) or whole(here.var("LSB_MAX_NUM_PROCESSORS")) or None


DIALECT = Lsf()
