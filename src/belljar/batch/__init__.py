"""The door of the batch room: batch systems, each found by its folder. Nothing here starts a machine.

    names()        of all there are
    load(name)     a System: its dialect, what its site installs, its own hooks
    job/           jobs as values: terms, rules, requests, verdicts
    install/       what a site installs: pieces, and the engine that puts them in place and takes them out
    node.py        faults of a node, machines that outlived their jobs

A dialect reads the surroundings that a job was started in. What becomes of the job is judged once for all systems
(job/verdict.py), and the dialect says it in the system's own words. A system's folder has

    __init__.py    SYSTEM, a `System`
    dialect.py     DIALECT: what it says to a job, and how it is answered (job/terms.py)
    site.py        SITE: what a site installs, and whether it is there (install/pieces.py)
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping
from enum import Enum
from importlib import import_module

from belljar.errors import BadOption
from belljar.hints import TYPE_CHECKING, cast
from belljar.model import GIB, MIB, setting
from belljar.records import dataclass, field

if TYPE_CHECKING:
    from belljar.batch.install.commands import Client
    from belljar.batch.install.pieces import SiteOfSystem
    from belljar.batch.job.policy import Asker
    from belljar.batch.job.terms import Dialect


class Pull(str, Enum):
    """From where a batch job may pull an image."""

    NEVER = "never"
    SITE_REGISTRIES = "site-registries"
    ANY = "any"


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
    pull: Pull = setting(Pull.NEVER, "may a job pull docker://HOST/NAME; it needs a rule `WHO *` of `batch.allow`, too")
    registries: tuple[str, ...] = setting(
        (), "the registries of `pull = site-registries`, `HOST[:PORT][/PATH]` each (registry.example.org/physics)"
    )
    max_cpus: int = setting(0, "most virtual cpus of a job's machine; 0: no limit")
    max_memory: int = setting(0, "most memory a job with a machine may ask for; 0: no limit", unit="bytes")
    max_disk: int = setting(0, "largest disk a job may ask for; 0: no limit", unit="bytes")
    gpus: bool = setting(
        False, "jobs that ask for GPUs get them in machines: the nodes have a class gpu in devices.toml"
    )
    scratch: int = setting(
        0, "a disk at /scratch of this or the job's size; 0: the job's size is for the machine's disk", unit="bytes"
    )
    overhead: int = setting(224 * MIB, "what QEMU and belljar need of a job's memory limit", unit="bytes")
    overhead_percent: float = setting(5.0, "the same as a part of that memory; the larger one counts", unit="percent")
    shares: tuple[str, ...] = setting(
        ("/home:rw",), "host folders that machines see, `[KIND:]SRC[:DST][:ro|rw]`; missing ones are left out"
    )
    stage_limit: int = setting(
        GIB, "largest working directory outside of shares, to be copied in and out; 0: refuse such jobs", unit="bytes"
    )
    grace: float = setting(0.0, "from TERM to a machine's end; 0: two seconds less than the system has", unit="seconds")
    retries: int = setting(3, "a job for which no machine could be started is tried this often, then held")
    retry_delay: float = setting(30.0, "least time to the second start, doubled for each further one", unit="seconds")
    node_faults: int = setting(3, "after so many node faults in a row this node is closed; 0: never")
    node_passes: int = setting(2, "a closed node is opened again after so many good self-checks in a row")
    check_image: str = setting("", "image of the self-check's machine; empty: `image.default`")
    gone_after: float = setting(
        60.0, "`reap --batch` ends a machine whose job its system did not know twice, this long apart", unit="seconds"
    )
    checkpoint: str = setting(
        "never",
        "never; on-request: jobs that ask for it; or for jobs that ask for nothing: on-preempt, on-limit, every=TIME, or several with + between",
    )
    checkpoint_folder: str = setting("", "checkpoints of jobs, on every node: a folder of mode 1777")
    checkpoint_lead: float = setting(
        120.0, "so long before its time limit a job with on-limit is checkpointed", unit="seconds"
    )
    ask_timeout: float = setting(20.0, "longest time one command of a batch system may take", unit="seconds")
    keep_env: tuple[str, ...] = setting((), "variables of the host that a job's machine gets all the same (LD_PRELOAD)")
    drop_env: tuple[str, ...] = setting((), "further variables that stay outside; a trailing * is for any ending")
    collect: tuple[str, ...] = setting((), "guest folders that are archived with a job's records at its end (/var/log)")
    collect_limit: int = setting(64 * MIB, "largest such archive of one job; more is cut off", unit="bytes")
    hs06_per_cpu: float = setting(0.0, "HS06 of one processor, which jobs get as a machine feature; 0: they do not")


@dataclass(frozen=True)
class Call:
    """A program of a system's own, called through `belljar internal hook`. What it may ask for is looked up when it does."""

    name: str
    words: tuple[str, ...]
    env: Mapping[str, str]
    settings: Callable[[], Settings]  # raises BadSetting
    asker: Callable[[], Asker]  # who runs this process
    client: Callable[[], Client]
    images: Callable[[], Collection[str] | None]  # names of the site's; None where its store cannot be seen from here


@dataclass(frozen=True)
class System:
    """One batch system."""

    package: str  # the folder's own `__name__`
    title: str  # as people write it
    hooks: Mapping[str, str] = field(default_factory=dict)  # besides prolog and epilog: name -> `module:function`
    ends_words: bool = False  # its redirect says nothing to us: all that follows the launcher's name is the job's
    node_variable: str = ""  # by which it tells its hooks its own name for this node
    untried: str = ""  # why it is called experimental

    @property
    def name(self) -> str:
        return self.package.rpartition(".")[2]

    @property
    def dialect(self) -> Dialect:
        return cast("Dialect", import_module(f"{self.package}.dialect").DIALECT)

    @property
    def site(self) -> SiteOfSystem:
        return cast("SiteOfSystem", import_module(f"{self.package}.site").SITE)

    def hook(self, name: str) -> Callable[[Call], int]:
        """Raises BadOption for one it does not have."""
        if name not in self.hooks:
            raise BadOption(f"{self.name}: has no hook {name!r}", hint=f"It has: {', '.join(self.hooks) or 'none'}.")
        module, _, function = self.hooks[name].partition(":")
        return cast("Callable[[Call], int]", getattr(import_module(f"{self.package}.{module}"), function))


def names() -> tuple[str, ...]:
    """The names of all batch systems."""
    return tuple(sorted(systems_in(__name__, __path__, "dialect.py")))


def load(name: str) -> System:
    """The system of this name; nothing of the others is imported. Raises BadOption for an unknown name."""
    package = systems_in(__name__, __path__, "dialect.py").get(name)
    if package is not None:
        return cast("System", import_module(package).SYSTEM)
    raise BadOption(f"{name!r}: no such batch system", hint=f"Known are {', '.join(names())}.")


def systems_in(package: str, path: Iterable[str], file: str) -> dict[str, str]:
    """name -> package of each folder on this path, or one level deeper, that holds the file."""
    packages = {}
    for top in path:
        for outer in os.listdir(top):
            for inner in ("", *(os.listdir(f"{top}/{outer}") if os.path.isdir(f"{top}/{outer}") else ())):
                if os.path.exists(f"{top}/{outer}/{inner}/{file}"):
                    packages[inner or outer] = ".".join(filter(None, (package, outer, inner)))
    return packages
