"""Job after job through one process: nothing grows, every end is the expected one, the node stays in service.

Machines are fakes (soak_node.py); all the rest is what a job under Slurm goes through. What would leak in a wrapper's
short life, or in the node's folders over years, shows here as a slope.
"""

from __future__ import annotations

import gc
import json
import mmap
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from bench.common import slope
from tests.batch.soak_node import Case, Ended, FakeRuntime, Node
from tests.fakes.guest import Script

JOBS = int(os.environ.get("BELLJAR_SOAK", "20000"))
SEED = int(os.environ.get("BELLJAR_SEED", "0")) or int(time.time())
KEPT = 40  # records of ended machines; a tenth more go when there are too many
FILES_OF_A_RECORD = 6  # the folder and what lies in it, at most
POINTS = (
    "after-claim",
    "after-overlay",
    "after-spawn",
    "after-agent",
    "payload-started",
    "status-written",
    "before-stop",
)
SILENT = (("BELLJAR_QEMU_BOOT_TIMEOUT", "0.05"), ("BELLJAR_MACHINE_START", "cold"))

Sample = dict[str, float]
# By how much the fitted line may rise over the second half of the jobs: what flickers there, no more. Resident memory
# goes up in steps of a MiB while nothing more is allocated (the C library's heap), so what is allocated is counted as
# well; a hundred blocks of that are the samples themselves.
NOISE = {
    "rss_kib": 4096,
    "blocks": 300,
    "objects": 100,
    "fds": 0.5,
    "threads": 1,
    "logs": KEPT // 10 * FILES_OF_A_RECORD,
    "templates": 2,
}


# -- jobs ----------------------------------------------------------------------------------------------------------------


def term(runtime: FakeRuntime) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def qemu_dies(runtime: FakeRuntime) -> None:
    runtime.hypervisor.domains[-1].end(1 << 8)


def quick(**changes: object) -> Script:
    return replace(Script(boots_in=0.0), **changes)  # type: ignore[arg-type]


BOOT_FAILS = Case("boot fails", at=("after-spawn", qemu_dies))
NODE_FAULT = Case("node fault", is_corrupt=True)
WEIGHTS = {
    "exit": 62, "signal": 12, "cancelled": 5, "cancelled in boot": 4, "boot fails": 4, "silent": 1, "lost": 3,
    "node fault": 3, "forbidden": 2, "unknown": 2, "killed": 2,
}  # fmt: skip


def draw(chance: random.Random) -> tuple[Case, tuple[object, ...]]:
    """A case, and what is to come of it: exit code, signal, class on record, what Slurm is told."""
    (name,) = chance.choices(list(WEIGHTS), list(WEIGHTS.values()))
    code, number = chance.randrange(256), chance.choice((1, 2, 6, 9, 10, 11, 15, 24))
    again = (0, None, "transient", "requeue")
    table: dict[str, tuple[Case, tuple[object, ...]]] = {
        "exit": (Case("exit", quick(exit_code=code)), (code, None, "payload", "")),
        "signal": (Case("signal", quick(signal=number)), (None, number, "payload", "")),
        "cancelled": (
            Case("cancelled", quick(runs_for=None), at=("payload-started", term)), (None, 15, "cancelled", "")
        ),
        "cancelled in boot": (
            Case("cancelled in boot", quick(boots_in=None), at=("after-spawn", term)), (None, 15, "cancelled", "")
        ),
        "boot fails": (BOOT_FAILS, again),
        "silent": (Case("silent", quick(boots_in=None), env=SILENT), again),
        "lost": (Case("lost", quick(runs_for=None), at=("payload-started", qemu_dies)), again),
        "node fault": (NODE_FAULT, (0, None, "node", "requeue")),
        "forbidden": (Case("forbidden", image="windows"), (125, None, "user", "")),
        "unknown": (Case("unknown", image="debian99"), (125, None, "user", "")),
        "killed": (
            Case("killed", env=(("BELLJAR_TESTING_ABORT_AT", chance.choice(POINTS)),), dies=True),
            (None, None, "node", ""),
        ),
    }  # fmt: skip
    return table[name]


class Work:
    """Jobs for a node, each looked at when it has ended. Counts the node's faults by itself, to compare."""

    def __init__(self, node: Node) -> None:
        self.node, self.chance = node, random.Random(SEED)
        self.starts = self.faults = self.closings = self.jobs = 0

    def job(self) -> None:
        """One job, whatever it may be."""
        case, wanted = draw(self.chance)
        self._begin()
        self._start(case, wanted)
        if wanted[3] == "requeue":
            self._start(Case("again", quick()), (0, None, "payload", ""), restarts=1)

    def plain(self) -> None:
        """A job that ends well."""
        self._begin()
        self._start(Case("plain", quick()), (0, None, "payload", ""))

    def poison(self) -> None:
        """A job that never gets its machine: started thrice, then held."""
        self._begin()
        for restarts, told in enumerate(("requeue", "requeue", "requeuehold")):
            self._start(BOOT_FAILS, (0, None, "transient", told), restarts)

    def bad_node(self) -> None:
        """Faults enough that the node is closed; somebody puts it right."""
        for _ in range(3):
            self._begin()
            self._start(NODE_FAULT, (0, None, "node", "requeue"))

    def _begin(self) -> None:
        self.node.forget(self.jobs)
        self.jobs += 1

    def _start(self, case: Case, wanted: tuple[object, ...], restarts: int = 0) -> None:
        self.starts += 1
        talks = wanted[2] == "payload"
        case = replace(case, guest=replace(case.guest, stdout=b"up\n")) if talks else case
        ended = self.node.run(self.jobs, case, restarts)
        assert seen(ended) == wanted, (case.name, SEED, self.starts, ended)
        if wanted[2] == "payload":
            assert (ended.out, ended.err) == (b"up\n" * talks, ""), (case.name, ended)
        elif wanted[2] != "cancelled" and ended.ending is not None:
            assert ended.err.startswith("belljar: "), (case.name, ended)
        self._count(case, str(wanted[2]))

    def _count(self, case: Case, klass: str) -> None:
        self.faults = 0 if klass == "payload" else self.faults + (case is NODE_FAULT)
        self.closings += (is_closed := self.faults >= 3)
        memory = self.node.memory()
        assert (memory.faults, bool(memory.closed)) == (self.faults, is_closed), (case.name, SEED, self.starts)
        if is_closed:
            self.node.reopen()
            self.faults = 0


def seen(ended: Ended) -> tuple[object, ...]:
    if ended.ending is None:
        return (None, None, ended.klass, ended.slurm)
    return (ended.ending.exit_code, ended.ending.signal, ended.klass, ended.slurm)


# -- looking -------------------------------------------------------------------------------------------------------------


def sample(jobs: int, files: dict[str, int]) -> Sample:
    """What this process and the node's folders hold."""
    gc.collect()
    return {
        "jobs": jobs,
        "rss_kib": int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1024,
        "blocks": sys.getallocatedblocks(),
        "objects": len(gc.get_objects()),
        "fds": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        **files,
    }


def growths(samples: list[Sample]) -> dict[str, float]:
    """How far the line fitted through the second half of the samples rises from its first job to its last."""
    half = samples[len(samples) // 2 :]
    jobs = [one["jobs"] for one in half]
    return {name: slope(jobs, [one[name] for one in half]) * (jobs[-1] - jobs[0]) for name in half[0] if name != "jobs"}


def too_much(samples: list[Sample]) -> dict[str, float]:
    """What rises by more than its noise; files that stand in no list may not rise at all."""
    return {name: grown for name, grown in growths(samples).items() if grown > NOISE.get(name, 0.5)}


def soak(node: Node, jobs: int, every: int) -> tuple[Work, list[Sample]]:
    """So many jobs, with poison and a bad node among them."""
    work, samples = Work(node), []
    for number in range(jobs):
        work.job()
        if number == jobs * 3 // 4:
            work.bad_node()
        if number % every == 0:
            work.poison()
            node.forget(work.jobs)
            samples.append(sample(number, node.files()))
    return work, samples


def looks_right(work: Work, samples: list[Sample]) -> None:
    work.plain()  # who is killed or cancelled drops no old records: the next one does
    assert too_much(samples) == {}, samples
    assert work.node.closings() == work.closings >= 1, "the node is closed where its faults say so, and never else"
    ids = [json.loads(line)["id"] for line in work.node.ledger().read_bytes().splitlines()]
    assert len(ids) == len(set(ids)) == work.starts, "each start is in the ledger, once"
    folders = [path for path in (work.node.top / "logs").iterdir() if path.is_dir()]
    records = [path for path in folders if not path.name.startswith(".")]  # ".begun-HOST" is no record
    assert KEPT - KEPT // 10 <= len(records) <= KEPT + 1


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    """In memory where that can be: what is measured is not the disk."""
    shm = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="belljar-soak-", dir=shm if os.access(shm, os.W_OK) else None) as folder:
        made = Node(Path(folder), monkeypatch, KEPT)
        yield made
        made.close()


# -- tests ---------------------------------------------------------------------------------------------------------------


def test_two_hundred_jobs_of_all_kinds_end_as_they_should_and_leave_nothing(node: Node) -> None:
    looks_right(*soak(node, 200, 10))


@pytest.mark.torture
@pytest.mark.slow
@pytest.mark.timeout(8 * 3600)
def test_nothing_grows_over_thousands_of_jobs(node: Node) -> None:
    begin, processor = time.monotonic(), time.process_time()
    work, samples = soak(node, JOBS, max(JOBS // 40, 10))
    took, processor = time.monotonic() - begin, time.process_time() - processor
    print(f"{JOBS} jobs, {work.starts} starts, seed {SEED}: {took:.0f} s, {took / work.starts * 1e3:.1f} ms a start,"
          f" {processor / work.starts * 1e3:.1f} ms of processor time")  # fmt: skip
    print(
        f"ledger: {work.node.ledger().stat().st_size / work.starts:.0f} bytes a start; node closed {work.closings} times"
    )
    print(f"first sample {samples[0]}\nmiddle {samples[len(samples) // 2]}\nlast {samples[-1]}")
    print(f"growth over the second half: { ({name: round(grown, 2) for name, grown in growths(samples).items()}) }")
    looks_right(work, samples)


def fresh_memory() -> mmap.mmap:
    """Not what the C library still has from before: that is resident already."""
    area = mmap.mmap(-1, 200_000)
    area.write(bytes(200_000))
    return area


LEAKS: dict[str, Callable[[list[object], Path], object]] = {
    "rss_kib": lambda held, folder: held.append(fresh_memory()),
    "blocks": lambda held, folder: held.extend(f"{number} {len(held)}" for number in range(10)),
    "objects": lambda held, folder: held.extend([number] for number in range(10)),
    "fds": lambda held, folder: held.append(os.open(os.devnull, os.O_RDONLY)),
    "run": lambda held, folder: (folder / f"{len(list(folder.iterdir()))}").touch(),
}


@pytest.mark.parametrize("what", LEAKS)
def test_a_leak_of_one_thing_a_job_is_seen(what: str, tmp_path: Path) -> None:
    held: list[object] = []
    samples = []
    for number in range(200):
        LEAKS[what](held, tmp_path)
        if number % 10 == 0:
            samples.append(sample(number, {"run": len(list(tmp_path.iterdir()))}))
    for one in held:
        if isinstance(one, int):
            os.close(one)
    assert what in too_much(samples)
