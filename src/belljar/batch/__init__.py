"""The door of the batch room: speaks a batch system's language, as text.

    load(name)       the Dialect: what a system says to a job, and how it is answered    slurm.py, gridengine.py, ...
    load_site(name)  what a site must install, and whether it is there                   slurm_site.py, ...
    terms.py         the words the dialects have in common;  siting.py: those of the sites

A dialect reads the surroundings a job was started in and tells what they mean; what becomes of the machine is judged
once for all systems (verdict.py), and the dialect says it in the system's own words. Nothing here starts a machine.
Only programs call this room, so its words stand in modules that a run without a batch system never imports.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from belljar.model import GIB, MIB, setting

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

    default_image: str = setting("", "image of every job that names none; empty: such a job runs without a machine")
    queue_images: tuple[str, ...] = setting(
        (), "the queue (partition) is the environment: `QUEUE=IMAGE` each, for jobs that name no image"
    )
    allow: tuple[str, ...] = setting(
        ("* *",),
        "who may use which image, `WHO PATTERN` each; WHO is *, user:NAME, group:NAME or queue:NAME; PATTERN (debian*) is of the site's images, a lone * of users' own too",
    )
    max_cpus: int = setting(0, "most virtual cpus of a job's machine; 0: no limit")
    max_memory: int = setting(0, "most memory a job with a machine may ask for; 0: no limit", unit="bytes")
    max_disk: int = setting(0, "largest disk a job may ask for; 0: no limit", unit="bytes")
    scratch: int = setting(
        0,
        "size of a job's scratch disk at /scratch, or what the job asks for as disk; 0: none, and that is the machine's own disk",
        unit="bytes",
    )
    overhead: int = setting(
        224 * MIB, "what QEMU and belljar need of a job's memory limit; the guest gets the rest", unit="bytes"
    )
    overhead_percent: float = setting(5.0, "the same as a part of the limit; the larger one counts", unit="percent")
    shares: tuple[str, ...] = setting(
        ("/home:rw",),
        "what every job's machine sees: host folders, `[virtiofs:]SRC[:DST][:ro|rw]`, left out where missing; `nfs://HOST/EXPORT:DST[:ro|rw]`, which needs `machine.network`",
    )
    stage_limit: int = setting(
        GIB,
        "a working directory outside of all shares is copied in and out if it is not larger; 0: such jobs are refused",
        unit="bytes",
    )
    grace: float = setting(
        0.0,
        "time between TERM and the machine's end; 0: two seconds less than the system itself leaves",
        unit="seconds",
    )
    retries: int = setting(3, "a job whose machine could not be had is started this often, then held")
    retry_delay: float = setting(
        30.0, "least time before the second start, doubled for each further one", unit="seconds"
    )
    node_faults: int = setting(3, "after so many node faults in a row this node is closed; 0: never")
    node_passes: int = setting(2, "a closed node is opened again after so many good self-checks in a row")
    check_image: str = setting("", "image of the self-check's machine; empty: `image.default`")
    gone_after: float = setting(
        60.0, "`reap --batch` ends a machine whose job its system did not know twice, this long apart", unit="seconds"
    )
    ask_timeout: float = setting(20.0, "longest time one command of a batch system may take", unit="seconds")
    keep_env: tuple[str, ...] = setting(
        (), "variables a job's machine gets although they belong to the host (LD_PRELOAD, ...)"
    )
    drop_env: tuple[str, ...] = setting((), "further variables that stay outside; a trailing * stands for any ending")
    collect: tuple[str, ...] = setting(
        (), "guest folders that are archived with a job's records when it ends (/var/log)"
    )
    collect_limit: int = setting(64 * MIB, "largest such archive of one job; more is cut off", unit="bytes")
    hs06_per_cpu: float = setting(0.0, "HS06 of one processor, told to jobs as a machine feature; 0: not told")


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
