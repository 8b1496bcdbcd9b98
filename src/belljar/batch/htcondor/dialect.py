"""HTCondor: what it says to a job, and how it is answered.

condor_starter runs USER_JOB_WRAPPER as the job's user in the job's directory, with the job's program and arguments. Two
ads lie in the scratch directory: what the job asked for, and what its slot gives.
https://htcondor.readthedocs.io/en/latest/admin-manual/ep-policy-configuration.html (USER_JOB_WRAPPER)
https://htcondor.readthedocs.io/en/latest/users-manual/env-of-job.html
"""

from __future__ import annotations

import errno
import os
import re
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path

from belljar.batch import Settings
from belljar.batch.htcondor.ads import Ad, Expression, parse, string
from belljar.batch.job.terms import Command, Dialect, Ending, Job, Staged, Surroundings, Verdict
from belljar.batch.job.verdict import delay, why
from belljar.errors import NotInAJob
from belljar.model import GIB, KIB, MIB, Outcome
from belljar.records import replace

# For the ad, for `+VmImage = "..."` and its like in a submit file.
IMAGE, DISK, CHECKPOINT = "VmImage", "VmDisk", "VmCheckpoint"
# The schedd lets a job set attributes of its own that begin so (CHIRP_DELAYED_UPDATE_PREFIX); SYSTEM_PERIODIC_HOLD looks
# at it, which a shadow does once more when the job ends.
HELD = "ChirpBelljarHold"
SMALLEST_DISK = 8 * GIB  # from here on RequestDisk is meant for the machine's disk
VACATE_TIME = 600  # seconds between the soft and the hard kill, unless job or machine say less (MachineMaxVacateTime)
SCRATCH, JOB_AD, MACHINE_AD, ERROR_FILE, CHIRP_CONFIG = (
    "_CONDOR_SCRATCH_DIR", "_CONDOR_JOB_AD", "_CONDOR_MACHINE_AD", "_CONDOR_WRAPPER_ERROR_FILE", "_CONDOR_CHIRP_CONFIG",
)  # fmt: skip
# condor_drain evicts running jobs. So a closed node keeps the reason in a link, and a startd cron job publishes it for START.
# HasVM and VMOfflineReason are HTCondor's own names, and names have no case.
WORKS, CLOSED_REASON, IMAGES, POOL_IMAGES = "BelljarWorks", "BelljarClosedReason", "BelljarImages", "BelljarPoolImages"
CLOSED = "/var/lib/belljar/htcondor-closed"
OUR_WORD = b"belljar"
SHELL = "belljar-shell"  # beside the launchers
# For the job of `condor_submit -i`, which only sleeps until somebody comes: USR1 says that somebody is there.
UNTIL_LEFT = b"""trap "trap '' USR1; exec sleep infinity" USR1; sleep 180 & wait"""
NO_GPU = "10000"  # ENVIRONMENT_VALUE_FOR_UnAssignedGPUs, of every job without one where a node has some
JOB_ID = re.compile(r"([0-9]+\.[0-9]+|undefined)\Z")


class HTCondor(Dialect):
    """None of its commands counts starts: a node may not ask or write the schedd's queue. NumShadowStarts in the ad has to do."""

    name = "htcondor"

    def read(self, here: Surroundings) -> Job:
        if not here.var(JOB_AD) or not here.argv:
            raise NotInAJob(f"${JOB_AD} is not set, or there is no program to run: HTCondor did not start this")
        try:
            ad = parse(here.read(os.fsencode(here.var(JOB_AD))))
        except OSError as exc:
            raise NotInAJob(f"{here.var(JOB_AD)}: {exc.strerror}") from exc
        cluster, proc = ad.number("ClusterId"), ad.number("ProcId")
        if cluster is None or proc is None:
            raise NotInAJob(f"{here.var(JOB_AD)}: holds no ClusterId and ProcId")
        slot = parse(here.peek(os.fsencode(here.var(MACHINE_AD))))  # what it really has, and its limits are made from
        chirp = tuple(f"{name}={here.var(name)}" for name in (SCRATCH, CHIRP_CONFIG) if here.var(name))
        starts = ad.number("NumShadowStarts") or 1  # this one counted
        native = Command(here.argv[0], here.argv, unstarted=lambda exc: _unstarted(chirp, starts, here.argv[0], exc))
        return Job(
            system=self.name, id=(id := f"{cluster}.{proc}"), aliases=tuple(filter(None, [ad.text("GlobalJobId")[:300]])), name=ad.text("JobBatchName"),
            queue=ad.text("AcctGroup"), image=image_of(ad), checkpoint=ad.text(CHECKPOINT), native=native, visitor=_visitor(here.argv, ad, id),
            inside=Command(b"/bin/sh", (b"sh", b"-c", UNTIL_LEFT)) if ad.get("interactivejob") is True else Command(b"", ()),
            cpus=slot.number("Cpus") or ad.number("RequestCpus"), disk=disk_of(ad), wall=_wall(ad), grace=_grace(ad),
            memory=memory_of(slot, "Memory") or memory_of(ad, "RequestMemory"), started_before=starts - 1, signals_reach_all=False,
            inherits_ignored=True, staged=_staged(here), redirect=(ERROR_FILE.encode(),), answer=os.fsencode(here.var(ERROR_FILE)), ask_env=chirp,
        )  # fmt: skip

    def again(self, job: Job, verdict: Verdict, outcome: Outcome, tries: int, settings: Settings) -> Ending:
        reason = why(outcome, tries, verdict, settings)
        if verdict is Verdict.HOLD:
            return _held(job.ask_env, job.started_before + 1, reason, self.failed)
        # It would start again at once, so we keep it for a while.
        return replace(self._again(job, reason), delay=delay(tries, settings)) if job.answer else self.failed

    def give_back(self, job: Job, *, is_queued: bool) -> Ending:
        return Ending() if is_queued or not job.answer else self._again(job, "checkpointed")

    def _again(self, job: Job, reason: str) -> Ending:
        """The starter gives the job back for such a file."""
        files, folder = ((job.answer, reason.encode("ascii", "replace") + b"\n"),), os.path.dirname(job.answer)
        return Ending(1, files=files, opens=folder)

    def devices(self, env: Mapping[str, str]) -> dict[str, list[str]]:
        """GPUs: `CUDA0,CUDA1` by number, or `GPU-c4a646d7` by the name that condor_gpu_discovery has for it."""
        names = [name.strip().removeprefix("CUDA") for name in env.get("_CONDOR_AssignedGPUs", "").split(",")]
        return {"gpu": names} if any(names) and names != [NO_GPU] else {}

    def alive(self) -> tuple[str, ...]:
        return ("condor_status", "-constraint", of_this_host(), "-af", "Name", "JobId")

    def living(self, printed: bytes) -> frozenset[str]:
        """A line for each slot. No line at all is not an answer: a node in service has at least one."""
        rows = [line.split() for line in printed.decode("utf-8", "replace").splitlines() if line.strip()]
        if not rows or not all(len(row) == 2 and JOB_ID.match(row[1]) for row in rows):
            raise ValueError(f"condor_status printed {printed[:60]!r} where a list of slots is expected")
        return frozenset(id for _, id in rows if id != "undefined")

    def close_node(self, node: str, reason: str) -> tuple[tuple[str, ...], ...]:
        text = string(reason).strip('"')[:200]
        return (("mkdir", "-p", os.path.dirname(CLOSED)), ("ln", "-sfn", "--", text, CLOSED))

    def open_node(self, node: str) -> tuple[tuple[str, ...], ...]:
        return (("rm", "-f", CLOSED),)

    def why_closed(self, node: str) -> tuple[str, ...]:
        folder, name = os.path.split(CLOSED)
        return ("find", folder, "-maxdepth", "1", "-name", name, "-printf", "%l\\n")

    def closed_by_us(self, printed: bytes) -> bool:
        return printed.startswith(OUR_WORD)

    def epilog(self, env: Mapping[str, str], argv: tuple[str, ...]) -> tuple[str, str]:
        hint = "Run `belljar reap --batch htcondor` from a timer."
        raise NotInAJob("HTCondor runs nothing as root around a job", hint=hint)


def of_this_host() -> str:
    """A constraint, as a host without a domain may not be found by name. The same short name elsewhere does no harm."""
    short = os.uname().nodename.partition(".")[0]
    return f'regexp("^{short}([.].*)?$", Machine, "i")'


def _visitor(argv: tuple[bytes, ...], ad: Ad, id: str) -> Callable[[Path], Command] | None:
    """The sshd that the starter puts beside a job for condor_ssh_to_job: its session is a shell in the job's machine."""
    folder, is_job = os.path.dirname(argv[-1]), os.path.basename(ad.text("Cmd")) == "sshd"
    if is_job or os.path.basename(argv[0]) != b"sshd" or b"/.condor_ssh_to_job_" not in folder:
        return None

    def sshd(libexec: Path) -> Command:
        session = shlex.join([str(libexec / SHELL), f"{os.fsdecode(folder)}/env.sh", f"htcondor:{id}"])
        return Command(argv[0], (*argv, b"-o", os.fsencode(f"ForceCommand={session}")))

    return sshd


def image_of(ad: Ad) -> str:
    """What is asked for. A thing that is not a string is handed on as it is written: the rules refuse it with a sentence."""
    value = ad.get(IMAGE.lower())
    if isinstance(value, Expression):
        return value.text
    return "" if value is None else str(value)


def memory_of(ad: Ad, name: str) -> int | None:
    """In MiB there."""
    return (ad.number(name) or 0) * MIB or None


def disk_of(ad: Ad) -> int | None:
    """`+VmDisk` in MiB; or RequestDisk (KiB), the sandbox's size by default, if it is larger than an image."""
    own, asked = ad.number(DISK), ad.number("RequestDisk")
    if own:
        return own * MIB
    return asked * KIB if asked and asked * KIB >= SMALLEST_DISK else None


def _wall(ad: Ad) -> float | None:
    limits = [ad.number(name) for name in ("AllowedExecuteDuration", "AllowedJobDuration")]
    return min((float(limit) for limit in limits if limit), default=None)


def _grace(ad: Ad) -> float:
    asked = ad.number("JobMaxVacateTime")
    return float(max(min(VACATE_TIME if asked is None else asked, VACATE_TIME) - 2, 0))


def _staged(here: Surroundings) -> Staged:
    """The ads go in, and a scratch directory that is not the working directory is only for temporary files."""
    scratch = os.fsencode(here.var(SCRATCH))
    ads = here.paths(JOB_AD, MACHINE_AD)
    inside = here.cwd == scratch or here.cwd.startswith(scratch + b"/")
    return Staged(into=() if inside else ads, folders=(scratch,) if scratch and not inside else ())


def _unstarted(chirp: tuple[str, ...], starts: int, program: bytes, exc: OSError) -> Ending:
    """The starter holds a job whose program it cannot execute. Only the job's ad can ask for that from here."""
    text = f"Failed to execute '{os.fsdecode(program)}': (errno={exc.errno}: '{exc.strerror}')"
    failed = Ending(exit_code=126 if exc.errno in (errno.ENOEXEC, errno.EACCES) else 127)
    return _held(chirp, starts, text, failed)


def _held(chirp: tuple[str, ...], starts: int, reason: str, end: Ending) -> Ending:
    """*end*, after telling the job's ad if possible: a value for this start alone, for the attribute stays there."""
    value = f"ifThenElse(NumShadowStarts <= {starts}, {string(reason)}, undefined)"
    command = ("env", *chirp, "condor_chirp", "set_job_attr_delayed", HELD, value)
    return Ending(end.exit_code, end.signal, (command,), otherwise=end)


DIALECT = HTCondor()
