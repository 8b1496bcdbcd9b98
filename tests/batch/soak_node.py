"""A node under Slurm on which nothing is real but belljar: jobs with all that Slurm gives them, on the shipped fakes.

Each job goes the whole of the wrapper's way, `jobs/wrap.run` to its Ending, and then the epilog's, in this process:
settings, folders, locks, journal, ledger, node marks and Slurm's commands (stand-ins) are files and processes as ever.
What a process has only once is put back after each job: streams, signals, variables, limits.
"""

from __future__ import annotations

import io
import os
import resource
import shutil
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.guest import FakeGuest, Script
from tests.fakes.hypervisor import FakeHypervisor
from tests.fakes.image import FakeOverlays, FakeStore

from belljar.assembly import Runtime
from belljar.batch import load, node
from belljar.batch.install import commands as client
from belljar.batch.job.terms import Ending, Surroundings
from belljar.errors import ImageCorrupt
from belljar.host.privileges import user_of
from belljar.jobs import wrap
from belljar.jobs.batch import ending
from belljar.jobs.batch import hooks as batch_hooks
from belljar.jobs.node import Known

NODE = "n1"
# `sbatch --comment=vm=debian12 -t 5 job.sh` under Slurm 22.05.8: what the job got, its number and its folder left out.
RECORDED = {
    "SLURM_JOB_NAME": "job.sh", "SLURM_PRIO_PROCESS": "0", "SLURM_SUBMIT_HOST": "login1", "SLURM_CLUSTER_NAME": "lab",
    "SLURM_JOB_PARTITION": "batch", "SLURM_MEM_PER_CPU": "600", "SLURM_NODELIST": NODE, "SLURM_JOB_CPUS_PER_NODE": "1",
    "SLURM_NNODES": "1", "SLURM_TASKS_PER_NODE": "1", "SLURM_CONF": "/etc/slurm/slurm.conf", "SLURM_CPUS_ON_NODE": "1",
    "SLURMD_NODENAME": NODE, "SLURM_PROCID": "0", "TMPDIR": "/tmp",
    "PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8",
}  # fmt: skip
SCRIPT = b"#!/opt/belljar/libexec/wrap-slurm --array=no --image=%s --time=5\n#!/bin/bash\necho up\n"
SETTINGS = """[paths]
run = "{top}/run"
scratch = "{top}/scratch"
store = "{top}/store"
logs = "{top}/logs"
[machine]
keep_count = {kept}
[batch]
shares = ["{top}/home:rw"]
allow = ["* debian*"]
retries = 3
node_faults = 3
"""
# Slurm's memory of a job is its comment; of a node, its state. Prints and keeps as the real commands do.
STAND_INS = {
    "squeue": """#!/bin/sh
for word; do
    case "$word" in --jobs=*) cat "{top}/slurm/comment-${{word#--jobs=}}" 2>/dev/null || echo "(null)" ;; esac
done
""",
    "scontrol": """#!/bin/sh
case "$1 $2 $3" in
    "update JobId="*" Comment="*) printf '%s\\n' "${{3#Comment=}}" > "{top}/slurm/comment-${{2#JobId=}}" ;;
    "update "[Nn]ode[Nn]ame=*) printf '%s\\n' "$*" >> "{top}/slurm/nodes" ;;
    requeue*) printf '%s\\n' "$1" > "{top}/slurm/state-$2" ;;
esac
""",
}


@dataclass(frozen=True)
class Case:
    """A job and what makes it end."""

    name: str
    guest: Script = field(default_factory=lambda: Script(boots_in=0.0))
    image: str = "debian12"
    env: tuple[tuple[str, str], ...] = ()
    is_corrupt: bool = False  # the image, on this node
    at: tuple[str, Callable[[FakeRuntime], None]] | None = None  # what happens at a point of the machine's life
    dies: bool = False  # its process is killed


class FakeRuntime(Runtime):
    """All parts as a job's process has them, but image, machine and guest."""

    def __init__(self, config: Path, case: Case) -> None:
        super().__init__(str(config), commands=str(config.parent / "libexec/wrap-slurm"))
        self.case, self._is_spawned = case, False
        corrupt = {case.image: ImageCorrupt(f"{case.image}: not what was stored")} if case.is_corrupt else {}
        self.images: Any = FakeStore(failures=dict(corrupt))
        self.overlays: Any = FakeOverlays()
        self.hypervisor: Any = FakeHypervisor(config.parent / "templates")

    def of_user(self, uid: int, home: str) -> Runtime:
        return self

    def converse(self, channel: object) -> Any:
        """The job's guest; one that is booted for a template before is a good one."""
        return FakeGuest(self.case.guest if self._is_spawned else Script(boots_in=0.0))

    def _point(self, name: str) -> None:
        super()._point(name)
        self._is_spawned |= name == "after-spawn"
        if self.case.at is not None and self.case.at[0] == name:
            self.case.at[1](self)


@dataclass(frozen=True)
class Ended:
    """What became of a start of a job."""

    ending: Ending | None  # None: its process was killed
    klass: str  # of the outcome on record
    out: bytes
    err: str
    slurm: str  # what Slurm was told to do with it


class Node:
    """The node. `top` holds everything of it."""

    def __init__(self, top: Path, patch: pytest.MonkeyPatch, kept: int) -> None:
        self.top, self.config = top, top / "belljar.toml"
        for folder in ("home", "slurm", "bin", "spool", "libexec"):
            (top / folder).mkdir()
        self.config.write_text(SETTINGS.format(top=top, kept=kept))
        (top / "slurm/nodes").touch()
        for name, text in STAND_INS.items():
            (top / "bin" / name).write_text(text.format(top=top))
            (top / "bin" / name).chmod(0o755)
        programs = {name: str(top / "bin" / name) for name in STAND_INS}
        client.path_of(top / "libexec/wrap-slurm").write_bytes(client.Client("slurm", programs).as_json())
        self.user = user_of(str(os.geteuid()))
        self._out = os.open(top / "slurm-out", os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._null = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        self._endings: list[Ending] = []
        self._here: Surroundings
        # The borders of a process: what it was given, its death.
        patch.setattr(wrap, "surroundings", lambda words: self._here)
        patch.setattr(ending, "end", self._end)

    def _end(self, ending: Ending) -> int:
        self._endings.append(ending)
        return 0

    def close(self) -> None:
        os.close(self._out)
        os.close(self._null)

    # -- one start of a job ------------------------------------------------------------------------------------------

    def run(self, number: int, case: Case, restarts: int = 0) -> Ended:
        """Start it, be it to its end, and run the node's epilog. A case with `dies` is started in a child, for SIGKILL
        ends it; it leaves no Ending."""
        folder = self._spool(number, case, restarts)
        told = io.StringIO()
        with own_process(self._null, self._out), redirect_stderr(told):
            runtime = FakeRuntime(self.config, case)
            if case.dies:
                assert os.WTERMSIG(self._in_child(runtime)) == signal.SIGKILL, case.name
            else:
                wrap.run("slurm", [], runtime)
            assert not runtime.hypervisor.running, f"{case.name}: a domain is left"
            klass = self._epilog(number, runtime)
        ending = None if case.dies else self._endings.pop()
        shutil.rmtree(folder)
        return Ended(ending, klass, self._output(), told.getvalue(), self._slurm(number))

    def _in_child(self, runtime: Runtime) -> int:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # the child needs none of our threads
            child = os.fork()
        if child == 0:
            try:
                signal.alarm(60)
                wrap.run("slurm", [], runtime)
            finally:
                os._exit(1)
        return os.waitpid(child, 0)[1]

    def _spool(self, number: int, case: Case, restarts: int) -> Path:
        folder = self.top / f"spool/job{number:05}"
        folder.mkdir()
        script = folder / "slurm_script"
        script.write_bytes(SCRIPT % case.image.encode())
        home = f"{self.top}/home"
        uid = str(os.geteuid())
        env = {
            **RECORDED,
            "SLURM_JOB_ID": str(number),
            "SLURM_JOB_UID": uid,
            "HOME": home,
            "SLURM_SUBMIT_DIR": home,
            **dict(case.env),
        }
        if restarts:
            env["SLURM_RESTART_COUNT"] = str(restarts)
        self._here = Surroundings(
            (os.fsencode(script),), tuple((name.encode(), value.encode()) for name, value in env.items()), home.encode(),
            os.geteuid(), os.getegid(), tuple(os.getgroups()), {"array": "no", "image": case.image, "time": "5"},
            wrap._stdin, wrap._read,
        )  # fmt: skip
        return folder

    def _epilog(self, number: int, runtime: Runtime) -> str:
        """What `belljar internal epilog` does, without the child that becomes the user. Returns the class on record."""
        job = f"slurm:{number}"
        report = node.report_of(batch_hooks.finish(runtime, job), job)
        assert report is not None, f"no record of job {number}"
        list(batch_hooks.account(load("slurm").dialect, NODE, report, runtime))
        return report.klass

    def _output(self) -> bytes:
        out = os.pread(self._out, 1 << 16, 0)
        os.ftruncate(self._out, 0)
        return out

    def _slurm(self, number: int) -> str:
        path = self.top / f"slurm/state-{number}"
        state = path.read_text().strip() if path.exists() else ""
        path.unlink(missing_ok=True)
        return state

    def forget(self, number: int) -> None:
        """As slurmctld does with a job that is over, MinJobAge later."""
        (self.top / f"slurm/comment-{number}").unlink(missing_ok=True)

    # -- the node ------------------------------------------------------------------------------------------------------

    def memory(self) -> node.Node:
        return node.Memory(self.top / "store/batch", "slurm", NODE).read()

    def closings(self) -> int:
        """How often Slurm was told to drain the node."""
        return sum("drain" in line.lower() for line in (self.top / "slurm/nodes").read_text().splitlines())

    def reopen(self) -> None:
        """As the administrator does, or the self-check."""
        with own_process(self._null, self._out):
            Known(FakeRuntime(self.config, Case("reopen")), load("slurm").dialect, NODE).reopen()

    def files(self) -> dict[str, int]:
        """Files and folders, by what they are for."""
        folders = ("run", "scratch", "store", "templates", "slurm", "spool", "home", "logs")
        return {name: sum(1 for _ in _below(self.top / name)) for name in folders}

    def ledger(self) -> Path:
        (path,) = (self.top / "logs").glob("ledger-*.jsonl")
        return path


def _below(folder: Path) -> Iterator[str]:
    for where, folders, files in os.walk(folder):
        yield from (os.path.join(where, name) for name in (*folders, *files))


FORWARDED = tuple(getattr(signal, f"SIG{name}") for name in (
    "TERM", "INT", "HUP", "QUIT", "USR1", "USR2", "XCPU", "ALRM", "TSTP", "CONT", "TTIN", "WINCH",
))  # fmt: skip


@contextmanager
def own_process(null: int, out: int) -> Iterator[None]:
    """As in a process of its own: Slurm's streams, signals at their defaults, variables that may be cleared."""
    env, folder = dict(os.environ), os.getcwd()
    limits = {
        one: resource.getrlimit(one)
        for one in (resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE, resource.RLIMIT_DATA, resource.RLIMIT_AS)
    }
    handlers = {number: signal.signal(number, signal.SIG_DFL) for number in FORWARDED}
    streams = [os.dup(number) for number in (0, 1, 2)]
    sys.stdout.flush()
    try:
        for number, ours in enumerate((null, out, out)):
            os.dup2(ours, number)
        yield
    finally:
        for number, old in enumerate(streams):
            os.dup2(old, number)
            os.close(old)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for one, pair in limits.items():
            resource.setrlimit(one, pair)
        os.environ.clear()
        os.environ.update(env)
        os.chdir(folder)
