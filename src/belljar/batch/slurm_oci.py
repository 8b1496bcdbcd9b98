"""Slurm's other way in, `sbatch --container=BUNDLE`: a step with a container is started by oci.conf's RunTimeRun.

22.05 gives that command next to nothing of the job: slurmd's own environment, slurmstepd's folder as the working
directory, and a folder SPOOL/oci-jobNNNNN-batch with the bundle's config.json, into which it wrote the script's
arguments and the variables. All else is asked of slurmctld. What comes out is what the `#!` line would have brought.
https://slurm.schedmd.com/containers.html, https://github.com/opencontainers/runtime-spec/blob/main/config.md
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from belljar.batch.terms import Surroundings
from belljar.errors import ImageNotAllowed, NotInAJob, OverLimit, SystemSilent

ANNOTATION = "belljar.image"
FOLDER = re.compile(r"(/.*)/oci-job([0-9]{5,10})-batch/*")
LARGEST_CONFIG = 4 << 20
MOST_WORDS = 100_000  # arguments, variables

# One row, the working directory last: it may hold anything. https://slurm.schedmd.com/squeue.html#OPT_Format
COLUMNS = (
    "JobID",
    "ArrayTaskID",
    "NumNodes",
    "NumCPUs",
    "TimeLimit",
    "MinTmpDisk",
    "UserName",
    "RestartCnt",
    "WorkDir",
)
FORMAT = ",".join(f"{column}:|" for column in COLUMNS)
UNITS = {"K": 1 / 1024, "M": 1.0, "G": 1024.0, "T": 1024.0**2, "": 1.0}
# Variables of a batch script without a container that config.json lacks, and the one it has too many.
OF_EVERY_SCRIPT = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_GTIDS": "0"}
NOT_OF_A_SCRIPT = ("SLURM_UMASK",)


@dataclass(frozen=True)
class Bundle:
    """What slurmstepd wrote for one batch step."""

    job: str
    script: bytes  # slurmd's copy
    args: tuple[bytes, ...]
    env: tuple[tuple[bytes, bytes], ...]
    image: str  # "" where the bundle is none of belljar's


@dataclass(frozen=True)
class Facts:
    """What slurmctld knows of the job and config.json does not tell."""

    is_task: bool  # of an array
    nodes: int
    cpus: str
    minutes: str  # "" for no limit
    disk: str  # MiB
    user: str
    restarts: int
    cwd: bytes


def bundle(here: Surroundings) -> Bundle:
    """Raises NotInAJob unless option `oci` is the folder of a batch step with a config.json as slurmstepd writes it.

    The job's number and the script's place come from the folder's name, which is slurmstepd's; the text is the user's
    in part, for it began as the bundle's."""
    place = FOLDER.fullmatch(here.options["oci"])
    if place is None:
        raise NotInAJob(
            f"{here.options['oci'][:200]}: not the folder of a batch job",
            hint="Only sbatch brings a job into a machine; srun and salloc with --container do not.",
        )
    spool, job = place[1], str(int(place[2]))
    config = _config(here, f"{spool}/oci-job{place[2]}-batch/config.json")
    process = _object(config, "process")
    args, env = _words(process, "args"), _words(process, "env")
    if not args:
        raise NotInAJob("config.json: process.args is empty")
    pairs = (word.partition(b"=") for word in env)
    image = _object(config, "annotations").get(ANNOTATION, "")
    return Bundle(
        job=job,
        script=f"{spool}/job{place[2]}/slurm_script".encode("utf-8", "surrogateescape"),
        args=args[1:],  # the first is the script's path inside of a container
        env=tuple((name, value) for name, equals, value in pairs if name and equals),
        image=image if isinstance(image, str) else "",
    )


def question(job: str) -> tuple[str, ...]:
    """The command that tells the rest."""
    return ("squeue", "--noheader", "--states=all", f"--jobs={job}", f"--Format={FORMAT}")


def facts(job: str, printed: bytes) -> Facts:
    """The row of this very job: the last task of an array has the array's number, and all tasks are listed for that.
    Raises SystemSilent where there is none."""
    for row in printed.split(b"\n"):
        fields = row.split(b"|", len(COLUMNS) - 1)
        if fields[0] != job.encode() or len(fields) != len(COLUMNS) or not fields[-1].endswith(b"|"):
            continue
        _, task, nodes, cpus, limit, disk, user, restarts = (field.decode("utf-8", "replace") for field in fields[:-1])
        cwd = fields[-1].removesuffix(b"|")
        if cwd.startswith(b"/") and all(re.fullmatch("[0-9]{1,9}", number) for number in (nodes, cpus, restarts)):
            limits = (_minutes(limit), _mebibytes(disk))
            return Facts(task.isdecimal(), int(nodes), cpus, *limits, user, int(restarts), cwd)
    raise SystemSilent(f"squeue told nothing of job {job} that can be understood: {printed[:100]!r}")


def as_redirected(here: Surroundings, found: Bundle, known: Facts | None) -> Surroundings:
    """The surroundings that job_submit.lua's line would have given this job."""
    options = {"image": found.image, "array": "no"}
    extra = dict(OF_EVERY_SCRIPT)
    if known is not None:
        options |= {"array": "yes" if known.is_task else "no", "time": known.minutes, "disk": known.disk}
        extra |= {"SLURM_CPUS_ON_NODE": known.cpus, "SLURM_JOB_USER": known.user}
        extra |= {"SLURM_RESTART_COUNT": str(known.restarts)} if known.restarts else {}
    extra |= {"SLURM_JOB_ID": found.job, "SLURM_JOB_UID": str(here.uid), "SLURM_JOB_GID": str(here.gid)}
    extra |= {name: value for name in ("SLURMD_NODENAME", "SLURM_CONF") if (value := here.var(name))}
    if not any(name == b"TMPDIR" for name, _ in found.env):
        extra["TMPDIR"] = "/tmp"
    return replace(
        here,
        argv=(found.script, *found.args),
        env=_with(found.env, extra),
        cwd=known.cwd if known is not None else b"/",
        options=options,
    )


def check(found: Bundle, known: Facts) -> None:
    """Raises ImageNotAllowed, OverLimit for what no machine can be made of."""
    if not found.image:
        raise ImageNotAllowed(
            "--container: not a bundle of belljar's",
            hint=f"Your site names its bundles; one's config.json has the annotation {ANNOTATION}.",
        )
    if known.nodes != 1:
        raise OverLimit(f"{known.nodes} nodes: a job in a machine has one")


# -- config.json -------------------------------------------------------------------------------------------------------


def _config(here: Surroundings, path: str) -> Mapping[str, object]:
    try:
        text = here.read(path.encode("utf-8", "surrogateescape"))
        if len(text) > LARGEST_CONFIG:
            raise NotInAJob(f"{path}: larger than {LARGEST_CONFIG >> 20} MiB")
        # Slurm writes the bytes of a variable as they are, be they UTF-8 or not.
        config = json.loads(text.decode("utf-8", "surrogateescape"))
    except OSError as exc:
        raise NotInAJob(f"{path}: {exc.strerror}") from exc
    except (ValueError, RecursionError) as exc:
        raise NotInAJob(f"{path}: no JSON that slurmstepd would write: {type(exc).__name__}") from exc
    if not isinstance(config, dict):
        raise NotInAJob(f"{path}: not an object")
    return config


def _object(config: Mapping[str, object], key: str) -> Mapping[str, object]:
    found = config.get(key, {})
    return found if isinstance(found, dict) else {}


def _words(process: Mapping[str, object], key: str) -> tuple[bytes, ...]:
    """A list of strings that can be arguments or variables."""
    found = process.get(key, [])
    if not isinstance(found, list) or len(found) > MOST_WORDS:
        raise NotInAJob(f"config.json: process.{key} is no list of words")
    words = []
    for word in found:
        try:
            words.append(word.encode("utf-8", "surrogateescape"))
        except (AttributeError, UnicodeEncodeError):
            raise NotInAJob(f"config.json: process.{key} has what is no text") from None
        if b"\0" in words[-1]:
            raise NotInAJob(f"config.json: process.{key} has a NUL")
    return tuple(words)


def _with(env: tuple[tuple[bytes, bytes], ...], extra: Mapping[str, str]) -> tuple[tuple[bytes, bytes], ...]:
    pairs = {name.encode(): value.encode("utf-8", "surrogateescape") for name, value in extra.items()}
    dropped = {*pairs, *(name.encode() for name in NOT_OF_A_SCRIPT)}
    return (*((name, value) for name, value in env if name not in dropped), *pairs.items())


# -- squeue ------------------------------------------------------------------------------------------------------------


def _minutes(limit: str) -> str:
    """`D-HH:MM:SS`, its first parts left out, as minutes; "" for UNLIMITED and the like."""
    match = re.fullmatch(r"(?:(\d{1,6})-)?(?:(\d{1,2}):)?(\d{1,2}):(\d{2})", limit)
    if match is None:
        return ""
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return str((days * 24 + hours) * 60 + minutes + (seconds > 0))


def _mebibytes(size: str) -> str:
    match = re.fullmatch(r"(\d{1,12}(?:\.\d{1,3})?)([KMGT]?)", size)
    return str(-int(-float(match[1]) * UNITS[match[2]] // 1)) if match else ""
