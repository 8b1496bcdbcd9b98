"""The door of the batch room: speaks a batch system's language, as text.

    load(name)       the Dialect: what a system says to a job, and how it is answered    slurm.py, gridengine.py, ...
    load_site(name)  what a site must install, and whether it is there                   slurm_site.py, ...
    terms.py         the words the dialects have in common;  siting.py: those of the sites

A dialect reads the surroundings a job was started in and tells what they mean; what becomes of the machine is judged
once for all systems (verdict.py), and the dialect says it in the system's own words. Nothing here starts a machine.
Only programs call this room, so its words stand in modules that a run without a batch system never imports.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from belljar.model import GIB, MIB

if TYPE_CHECKING:
    from belljar.batch.install.pieces import SiteOfSystem
    from belljar.batch.job.terms import Dialect

FOLDERS = {
    "slurm": "slurm", "gridengine": "gridengine", "openpbs": "pbs.openpbs", "torque": "pbs.torque", "htcondor": "htcondor", "lsf": "lsf",
}  # fmt: skip
SYSTEMS = tuple(FOLDERS)
EXPERIMENTAL = ("lsf",)  # never met the real system
NAMED = ", ".join(f"{name} (experimental)" if name in EXPERIMENTAL else name for name in SYSTEMS)  # for --help


@dataclass(frozen=True)
class Settings:
    """`[batch]` in the settings files."""

    default_image: str = field(
        default="", metadata={"help": "image of every job that names none; empty: such a job runs without a machine"}
    )
    queue_images: tuple[str, ...] = field(
        default=(),
        metadata={"help": "the queue (partition) is the environment: `QUEUE=IMAGE` each, for jobs that name no image"},
    )
    allow: tuple[str, ...] = field(
        default=("* *",),
        metadata={
            "help": "who may use which image, `WHO PATTERN` each; WHO is *, user:NAME, group:NAME or queue:NAME; PATTERN (debian*) is of the site's images, a lone * of users' own too"
        },
    )
    max_cpus: int = field(default=0, metadata={"help": "most virtual cpus of a job's machine; 0: no limit"})
    max_memory: int = field(
        default=0, metadata={"help": "most memory a job with a machine may ask for; 0: no limit", "unit": "bytes"}
    )
    max_disk: int = field(default=0, metadata={"help": "largest disk a job may ask for; 0: no limit", "unit": "bytes"})
    scratch: int = field(
        default=0,
        metadata={
            "help": "size of a job's scratch disk at /scratch, or what the job asks for as disk; 0: none, and that is the machine's own disk",
            "unit": "bytes",
        },
    )
    overhead: int = field(
        default=224 * MIB,
        metadata={
            "help": "what QEMU and belljar need of a job's memory limit; the guest gets the rest",
            "unit": "bytes",
        },
    )
    overhead_percent: float = field(
        default=5.0, metadata={"help": "the same as a part of the limit; the larger one counts", "unit": "percent"}
    )
    shares: tuple[str, ...] = field(
        default=("/home:rw",),
        metadata={
            "help": "what every job's machine sees: host folders, `[virtiofs:]SRC[:DST][:ro|rw]`, left out where missing; `nfs://HOST/EXPORT:DST[:ro|rw]`, which needs `machine.network`"
        },
    )
    stage_limit: int = field(
        default=GIB,
        metadata={
            "help": "a working directory outside of all shares is copied in and out if it is not larger; 0: such jobs are refused",
            "unit": "bytes",
        },
    )
    grace: float = field(
        default=0.0,
        metadata={
            "help": "time between TERM and the machine's end; 0: two seconds less than the system itself leaves",
            "unit": "seconds",
        },
    )
    retries: int = field(
        default=3, metadata={"help": "a job whose machine could not be had is started this often, then held"}
    )
    retry_delay: float = field(
        default=30.0,
        metadata={"help": "least time before the second start, doubled for each further one", "unit": "seconds"},
    )
    node_faults: int = field(
        default=3, metadata={"help": "after so many node faults in a row this node is closed; 0: never"}
    )
    node_passes: int = field(
        default=2, metadata={"help": "a closed node is opened again after so many good self-checks in a row"}
    )
    check_image: str = field(default="", metadata={"help": "image of the self-check's machine; empty: `image.default`"})
    gone_after: float = field(
        default=60.0,
        metadata={
            "help": "`reap --batch` ends a machine whose job its system did not know twice, this long apart",
            "unit": "seconds",
        },
    )
    ask_timeout: float = field(
        default=20.0, metadata={"help": "longest time one command of a batch system may take", "unit": "seconds"}
    )
    keep_env: tuple[str, ...] = field(
        default=(),
        metadata={"help": "variables a job's machine gets although they belong to the host (LD_PRELOAD, ...)"},
    )
    drop_env: tuple[str, ...] = field(
        default=(), metadata={"help": "further variables that stay outside; a trailing * stands for any ending"}
    )
    collect: tuple[str, ...] = field(
        default=(), metadata={"help": "guest folders that are archived with a job's records when it ends (/var/log)"}
    )
    collect_limit: int = field(
        default=64 * MIB, metadata={"help": "largest such archive of one job; more is cut off", "unit": "bytes"}
    )
    hs06_per_cpu: float = field(
        default=0.0, metadata={"help": "HS06 of one processor, told to jobs as a machine feature; 0: not told"}
    )


def load(system: str) -> Dialect:
    """The dialect of a system. Raises BadOption for a name that is not in SYSTEMS."""
    from importlib import import_module

    _check(system)
    return cast("Dialect", import_module(f"belljar.batch.{FOLDERS[system]}.dialect").DIALECT)


def load_site(system: str) -> SiteOfSystem:
    """What a site needs for this system."""
    from importlib import import_module

    _check(system)
    return cast("SiteOfSystem", import_module(f"belljar.batch.{FOLDERS[system]}.site").SITE)


def _check(system: str) -> None:
    from belljar.errors import BadOption

    if system not in SYSTEMS:
        raise BadOption(f"{system}: no such batch system", hint=f"Known are {', '.join(SYSTEMS)}.")
