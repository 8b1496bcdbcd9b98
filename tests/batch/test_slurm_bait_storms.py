"""The bait in a storm: jobs of three images and several sizes, while the bait, slurmctld, machines and the slurmd in them are killed in
every state of a job. BELLJAR_BAIT_JOBS (100), BELLJAR_BAIT_KILLS (200) and BELLJAR_SEED say how much, and which."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path

import pytest
from tests.batch.lab.site import Site
from tests.batch.lab.worker import BAIT, IMAGE, MPI_IMAGE, OTHER_IMAGE, Worker, until
from tests.live.conftest import marked_processes
from tests.live.net_lab import Lab

from belljar.bait.decisions.step import Entry, State
from belljar.bait.journal import read
from belljar.pool import node_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(14400)]

JOBS, KILLS = (
    int(os.environ.get(f"BELLJAR_BAIT_{name}", usual)) for name, usual in (("JOBS", "100"), ("KILLS", "200"))
)
SEED = int(os.environ.get("BELLJAR_SEED", "0")) or int(time.time())
CHOICES = (IMAGE, MPI_IMAGE, OTHER_IMAGE)
SIZES = (
    ("--cpus-per-task=1", "--mem=500"), ("--cpus-per-task=1", "--mem=700"), ("--cpus-per-task=2", "--mem=900"),
    ("--nodes=2", "--ntasks-per-node=1", "--mem=500"),
)  # fmt: skip
# No kill says that a host is bad, and none may be the last that a job bears; slurmctld knows each node when it is killed.
MORE = "restarts = 1000\nfaults = 1000\ntries = 5\ndelay = 1\njoin = 120\nsettle = 6\n"
# States that a job soon leaves: for one of them is waited.
PASSING = (
    State.ARRIVED, State.VM_REQUESTED, State.VM_READY, State.MIGRATING, State.FINISHED, State.REPROCESS, State.REQUEUE, State.LOST,
)  # fmt: skip
UNSAVED = 9.0  # seconds in which slurmctld has not written down yet that a job began, or ended
UNHEARD = (
    45.0  # seconds in which Slurm has missed a node that ended; then what ran there, or just ended there, runs again
)
LONGEST = 600.0  # seconds in which some job ends, whatever is killed
# A run leaves files on the share, whose times are the host's: when it began, was last alive, and ended.
SCRIPT = """run=$HOME/runs/$SLURM_JOB_ID.$(date +%s%N)
echo $(cat /etc/worker) $SLURM_JOB_NODELIST > $run.begin
{task}
for turn in 1 2 3 4 5 6; do echo $turn > $run.alive; sleep 0.5; done
echo over > $run.end
"""
STEP = "until srun --ntasks-per-node=1 hostname > $run.hosts; do sleep 1; done"


@dataclass(frozen=True)
class Run:
    """One run of a job's script."""

    job: str
    image: str
    nodes: frozenset[str]
    began: float
    alive: float
    ended: float  # 0: it did not reach its end


@dataclass(frozen=True)
class Kill:
    what: str
    at: float
    node: str = ""  # whose machine or slurmd it was
    state: str = ""  # of the job that it was meant for


class Storm:
    """The host, its jobs, and what was killed."""

    def __init__(self, worker: Worker) -> None:
        self.worker, self.chance = worker, random.Random(SEED)
        self.jobs: dict[str, tuple[str, str]] = {}  # job -> image, and its sizes
        self.kills: list[Kill] = []
        self.crashes, self.submitted = 0, 0.0
        self.folder = worker.site.home("bjalice") / "runs"

    def submit(self) -> None:
        image, sizes = self.chance.choice(CHOICES), self.chance.choice(SIZES)
        script = SCRIPT.format(task=STEP if "--nodes=2" in sizes else "")
        job = self.worker.slurm.submit(script, f"--comment=vm={image}", "--time=30", *sizes)
        self.jobs[job], self.submitted = (image, " ".join(sizes)), time.monotonic()

    def entries(self) -> list[Entry]:
        return list(read(self.worker.state).values())

    def kill(self) -> bool:
        """One of four kinds, at a job in a state that is drawn. False: no job came into it."""
        what = self.chance.choice(("bait", "slurmctld", "machine", "slurmd"))
        found = self._find(self.chance.choice((*PASSING, None, None, None)), with_machine=what in ("machine", "slurmd"))
        if found is None:
            return False
        time.sleep(self.chance.uniform(0, 0.3))
        state, machine = found.state.value, self.chance.choice(found.machines or ("",))
        killed = getattr(self, f"_{what}")(machine)
        if killed:
            node = node_of(machine) if what in ("machine", "slurmd") else ""
            self.kills.append(Kill(what, time.time(), node, state))
        return bool(killed)

    def _find(self, wanted: State | None, *, with_machine: bool) -> Entry | None:
        """A job in this state as soon as there is one; in any that some job is in now, where none is named."""
        end = time.monotonic() + 1.5
        while time.monotonic() < end:
            found = {one.state: one for one in self.entries() if one.machines or not with_machine}
            if wanted in found or (wanted is None and found):
                return found[wanted or self.chance.choice(sorted(found))]
            time.sleep(0.02)
        return None

    def _bait(self, machine: str) -> bool:
        self.worker.kill()
        self.worker.start()
        return True

    def _slurmctld(self, machine: str) -> bool:
        if time.monotonic() - self.submitted < UNSAVED:
            return False  # it would forget the job that it was given last, bait or no bait
        self.worker.slurm.lab.stop("slurmctld", signal.SIGKILL)
        self.worker.slurm.lab.start_slurmctld()
        return True

    def _machine(self, machine: str) -> bool:
        with suppress(ProcessLookupError):
            for pid, id in marked_processes():
                if id == machine:
                    os.kill(pid, signal.SIGKILL)
                    return True
        return False

    def _slurmd(self, machine: str) -> bool:
        return self.worker.belljar("exec", machine, "--", "pkill", "-9", "-x", "slurmd", timeout=60).returncode == 0

    def supervise(self) -> None:
        """slurmctld is started again where it crashed by itself."""
        if self.worker.slurm.lab.pid("slurmctld") is None:
            self.crashes += 1
            self.worker.slurm.lab.start_slurmctld()

    def over(self) -> int:
        """How many jobs have ended, as Slurm says."""
        said = self.worker.slurm.lab.text("squeue", "-h", "--states=all", "-o", "%A %T", check=False)
        states = dict(line.split() for line in said.splitlines() if len(line.split()) == 2)
        return sum(states.get(job) in ("COMPLETED", "FAILED", "NODE_FAIL", "CANCELLED", "TIMEOUT") for job in self.jobs)

    def runs(self, job: str) -> list[Run]:
        """In the order in which they began."""
        found = []
        for begin in sorted(self.folder.glob(f"{job}.*.begin")):
            image, _, nodes = begin.read_text().strip().partition(" ")
            alive, end = begin.with_suffix(".alive"), begin.with_suffix(".end")
            last = max(_time(one) for one in (begin, alive, end))
            found.append(Run(job, image, frozenset(nodes.split(",")), _time(begin), last, _time(end)))
        return sorted(found, key=lambda run: run.began)

    def reason(self, run: Run, moment: float) -> str:
        """Which kill explains that this run was ended, or not believed to have ended, at this moment."""
        for kill in self.kills:
            if kill.node in run.nodes and kill.at < moment + UNHEARD:  # a machine serves one run
                return kill.what
            if kill.what == "slurmctld" and any(
                abs(kill.at - one) < UNSAVED for one in (run.began, moment, *self.heard(run.job))
            ):
                return kill.what
        return ""

    def heard(self, job: str) -> list[float]:
        """When slurmctld heard that a run of this job had ended: on a busy host that is many seconds later."""
        log = (self.worker.slurm.lab.folder / "log/slurmctld.log").read_text(errors="replace")
        times = re.findall(rf"(?m)^\[(\S+?)\] _job_complete: JobId={job} WEXITSTATUS", log)
        return [datetime.fromisoformat(one).timestamp() for one in times]


def _time(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


@pytest.fixture
def storm(tmp_path: Path) -> Iterator[Storm]:
    net, site = Lab(), Site("storm")
    worker = Worker(net, site, tmp_path, images=CHOICES, more=MORE, cpus=4, MinJobAge="86400")
    try:
        storm = Storm(worker)
        storm.folder.mkdir(mode=0o777)
        storm.folder.chmod(0o777)
        worker.slurm.up()
        worker.start()
        yield storm
    finally:
        shutil.copytree(worker.slurm.lab.folder / "log", tmp_path / "slurm")  # for who looks into what failed
        worker.close()
        site.close()
        net.close()


def test_jobs_of_three_images_run_to_their_end_once_whatever_is_killed(storm: Storm) -> None:
    print(f"{JOBS} jobs, {KILLS} kills, seed {SEED}")
    began = time.monotonic()
    for _ in range(JOBS):
        storm.submit()
    last, moved = 0, time.monotonic()
    while (over := storm.over()) < len(storm.jobs) or len(storm.kills) < KILLS:
        if over > last:
            last, moved = over, time.monotonic()
            print(f"{time.monotonic() - began:6.0f} s: {over} jobs over, {len(storm.kills)} kills", flush=True)
        assert time.monotonic() - moved < LONGEST, f"no job ends any more\n{storm.worker.said()}"
        if len(storm.kills) < KILLS:
            if len(storm.jobs) - over < 4:
                storm.submit()
            storm.kill()
        time.sleep(storm.chance.uniform(0.3, 2.0))
        storm.supervise()
    until(lambda: not storm.entries(), f"the bait to have closed all jobs\n{storm.worker.said()}", 300)
    report(storm, time.monotonic() - began)
    judge(storm)


def judge(storm: Storm) -> None:
    worker = storm.worker
    until(lambda: set(worker.slurm.nodes()) == {BAIT, "bait2"}, "the nodes to be gone", 60)
    until(lambda: worker.belljar.leftovers() == [], "the machines to be gone", 60)
    assert worker.json("jobs")["jobs"] == []
    for job, (image, _) in storm.jobs.items():
        record, runs = worker.slurm.lab.job(job), storm.runs(job)
        assert (record["JobState"], record["ExitCode"]) == ("COMPLETED", "0:0"), (job, runs, storm.kills)
        assert runs and runs[-1].ended and {run.image for run in runs} == {image}, (job, runs)
        for run, after in pairwise(runs):
            assert storm.reason(run, run.alive), f"it ran again: {run}, {after}, {storm.kills}"
            is_slurms = storm.reason(run, run.alive) == "slurmctld"  # it had forgotten that the first had begun
            assert run.alive <= after.began or is_slurms, f"two at the same time: {run}, {after}"


def report(storm: Storm, seconds: float) -> None:
    table = Counter((kill.what, kill.state) for kill in storm.kills)
    for (what, state), count in sorted(table.items()):
        print(f"  {what:10} {state:14} {count}")
    runs = {job: storm.runs(job) for job in storm.jobs}
    again = sum(len(one) - 1 for one in runs.values())
    both = sum(bool(first.ended) for one in runs.values() for first in one[:-1])
    late = sum(first.alive > second.began for one in runs.values() for first, second in pairwise(one))
    print(
        f"{len(storm.jobs)} jobs, {len(storm.kills)} kills {dict(Counter(kill.what for kill in storm.kills))}, {seconds:.0f} s"
    )
    print(f"{again} runs ended early and began again, {both} of them at their very end, {late} overlapping; "
          f"slurmctld crashed {storm.crashes} times by itself")  # fmt: skip
    print(dict(Counter(storm.jobs.values())))
