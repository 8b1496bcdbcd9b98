"""Runs the jobs and writes down what came of each. A job is a child process of ours: `belljar run`, `sbatch --wait`, `qsub -sync y`."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from belljar.errors import BelljarError, CommandFailed
from belljar.host.commands import Finished, run_beside
from belljar.host.files import PRIVATE_FOLDER
from belljar.host.locks import locked
from belljar.host.processes import all_pids
from belljar.host.room import host_memory
from belljar.journal import Ledger
from belljar.model import MIB
from belljar.soak import Plan
from belljar.soak.report import NOISE

EVERY = 20  # jobs between two samples
PATIENCE = 5.0  # seconds until a soak that was killed has let go of its folder
# Phases of a machine's life until its payload runs.
BEFORE = ("prepare", "start", "boot", "identify", "grow", "ready", "setup")
MOST_IN_A_ROW = 20  # failures; then nothing is learnt from more
MOST_UNCLAIMED = 1000  # rows of other machines that are remembered
Row = dict[str, Any]


class Soak:
    """One run. *tell*: called with the row of each job, and how many jobs there are by then."""

    def __init__(self, plan: Plan, folder: Path, tell: Callable[[Row, int], None]) -> None:
        self._plan, self._folder, self._tell = plan, folder, tell
        self._rows, self._run, self._is_stopping = Ledger(folder), time.time(), False
        self._machines = {ledger: ledger.end() for ledger in map(Ledger, plan.ledgers)}  # how far each was read
        self._unclaimed = dict[str, Row]()  # rows of machines, by the label or the batch job they are known by
        self._done = Counter[str]()  # by context; with those that run
        self._in_a_row, self._hopeless = 0, ""  # failures; why no further job is started

    async def run(self) -> None:
        """Until the folder holds so many jobs, or a signal asks to stop. Raises LockTimeout, CommandFailed."""
        self._folder.mkdir(PRIVATE_FOLDER, parents=True, exist_ok=True)
        with locked(self._folder / "lock", timeout=PATIENCE, what="run jobs for the same folder"):
            for output in self._folder.glob("*.out"):  # of jobs that were running when a soak was killed
                output.unlink()
            self._done.update(row["context"] for row, _ in self._rows.since() if row["kind"] == "job")
            self._write({"kind": "run", "host": os.uname().nodename, "cpus": os.cpu_count(), "image": self._plan.image})
            for number in (signal.SIGINT, signal.SIGTERM):
                asyncio.get_running_loop().add_signal_handler(number, self._stop, number)
            for context in self._plan.contexts:  # a context's first start may make its template, so it does not count
                if self._is_needed():
                    await self._job("first", context, 0)
            try:
                async with asyncio.TaskGroup() as group:
                    for place in range(self._plan.at_once + self._plan.queue * (self._plan.batch != "none")):
                        group.create_task(self._work(place))
            except ExceptionGroup as errors:  # a full disk, a ledger that was cut
                raise errors.exceptions[0] from None
        if self._hopeless:
            raise CommandFailed(self._hopeless, hint="Correct that; the same command goes on with the soak.")

    def _stop(self, number: int) -> None:
        """The next such signal ends us at once."""
        self._is_stopping = True
        asyncio.get_running_loop().remove_signal_handler(number)

    def _is_needed(self) -> bool:
        return not (self._is_stopping or self._hopeless) and self._done.total() < self._plan.jobs

    async def _work(self, place: int) -> None:
        while self._is_needed():
            context = min(self._plan.contexts, key=self._done.__getitem__)
            self._done[context] += 1
            await self._job("job", context, place)

    def _write(self, row: Row) -> None:
        now = time.time()
        self._rows.append({**row, "run": self._run, "time": now}, now)

    async def _job(self, kind: str, context: str, place: int) -> None:
        """One job, from its submission to its row. What fails after a signal, which a terminal sends to our children too, has none."""
        word, plan, begin, ended = os.urandom(8).hex(), self._plan, time.time(), None
        output = self._folder.absolute() / f"{word}.out"
        try:
            ended = await run_beside(argv_of(plan, context, place, word, output), timeout=plan.longest, check=False)
            failure = _failure(ended, word, output)
        except BelljarError as exc:
            failure = exc.message
        if failure and self._is_stopping:
            return
        self._in_a_row = self._in_a_row + 1 if failure else 0
        if failure and (kind == "first" or self._in_a_row >= MOST_IN_A_ROW):
            self._hopeless = f"{context}: {failure}"
        if ended is not None and plan.batch != "none":  # sbatch and qsub print the job's id first
            first = (ended.out.decode(errors="replace").split() or [""])[0]
            word = f"{plan.batch}:{first.partition(';')[0].partition('.')[0]}"
        machine = _facts(self._machine(word))
        row = {"kind": kind, "batch": plan.batch, "context": context, "begin": begin, **machine, "failure": failure}
        self._write(row)
        if (jobs := self._done.total()) % EVERY == 0:
            self._write({"kind": "sample", "jobs": jobs, **sample(plan.folders)})
        self._tell(row, jobs)

    def _machine(self, name: str) -> Row:
        """The latest row of this name in the ledgers of machines: a job that was started again has several. Empty: there is no row."""
        for ledger, read in self._machines.items():
            for row, position in ledger.since(read):
                self._machines[ledger] = position
                self._unclaimed[dict(row.get("labels", ())).get("soak") or str(row.get("requester"))] = row
        row = self._unclaimed.pop(name, {})
        while len(self._unclaimed) > MOST_UNCLAIMED:
            del self._unclaimed[next(iter(self._unclaimed))]
        return row


def argv_of(plan: Plan, context: str, place: int, word: str, output: Path) -> list[str]:
    """The command that submits a job, which prints the word, and waits for its end. A batch system runs jobs of the same name one at a
    time: so at most `at_once` run, and the others wait."""
    name, setting = f"soak-{place % plan.at_once}", f"BELLJAR_MACHINE_CONTEXT={context}"
    if plan.batch == "slurm":
        words = [
            "sbatch",
            "--wait",
            "--parsable",
            f"--comment=vm={plan.image}",
            f"--job-name={name}",
            "--dependency=singleton",
        ]
        return [*words, f"--export=ALL,{setting}", f"--output={output}", *plan.options, f"--wrap=echo {word}"]
    if plan.batch == "gridengine":
        words = ["qsub", "-sync", "y", "-terse", "-l", f"vm_image={plan.image}", "-N", name, "-hold_jid", name]
        return [*words, "-v", setting, "-o", str(output), "-j", "y", *plan.options, "-b", "y", "echo", word]
    words = ["--image", plan.image, "--context", context, "--label", f"soak={word}", *plan.options, "--", "echo", word]
    return ["setpriv", "--pdeathsig=TERM", "--", *plan.belljar, "run", *words]


def _failure(ended: Finished, word: str, output: Path) -> str:
    """What is wrong with this end; "" where the job ended with 0 and printed its word."""
    printed = ended.out.decode(errors="replace")
    if output.exists():  # a batch system wrote it
        printed = output.read_text(errors="replace")
        output.unlink()
    if ended.code:
        lines = ended.err.decode(errors="replace").strip().splitlines() or printed.strip().splitlines()
        return f"exit {ended.code}: {lines[0] if lines else 'no message'}"
    return "" if printed.strip() == word else f"it printed {printed[:80]!r}"


def _facts(machine: Row) -> Row:
    """What the ledger has of a job's machine. `start`: seconds from belljar's beginning to the payload's; None: not known."""
    phases = machine.get("phases", {})
    start = round(sum(phases.get(name, 0.0) for name in BEFORE), 6) if "run" in phases else None
    known = {name: machine.get(name, "") for name in ("id", "class", "cause", "reason", "started", "ended")}
    return {**known, "start": start, "is_clone": machine.get("start") == "clone", "phases": phases}


def sample(folders: Iterable[Path]) -> dict[str, float]:
    """What this host holds now."""
    total, available = host_memory()
    sizes = [size for folder in folders for size in _sizes(folder)]
    open_files = int(Path("/proc/sys/fs/file-nr").read_text().split()[0])
    held = (total - available) / MIB
    return dict(zip(NOISE, (held, open_files, sum(1 for _ in all_pids()), len(sizes), sum(sizes) / MIB), strict=True))


def _sizes(folder: Path) -> Iterator[int]:
    """Bytes on disk of each file below it."""
    for where, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                yield os.lstat(os.path.join(where, name)).st_blocks * 512
