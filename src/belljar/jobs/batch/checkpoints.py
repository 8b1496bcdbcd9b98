"""A batch job that is checkpointed: its folder, when a checkpoint is made, and how its next start goes on from there.

    on-preempt   at TERM, where the system is going to start the job again
    on-limit     `batch.checkpoint_lead` before its time limit
    every=TIME   again and again; the machine goes on

With the first two USR1 is a warning as well (`sbatch --signal=B:USR1@120`, a suspension after `qsub -notify`), and so is the
notice of a system that announces its end. Where no checkpoint can be made, the others are what they always are. USR1 then
reaches no program: most would end by it.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from belljar.batch import Settings
from belljar.batch.job.terms import Dialect, Ending, Job, Standing, Verdict
from belljar.batch.job.verdict import Run
from belljar.errors import BelljarError, HostError
from belljar.guest import Streams
from belljar.host.files import private_folder, remove_tree
from belljar.host.threads import in_thread
from belljar.host.values import duration
from belljar.jobs import complain
from belljar.jobs.batch.output import Output
from belljar.journal import read
from belljar.machine import Folders
from belljar.machine.checkpoints import numbers, peek
from belljar.machine.orders import Freeze, Order, Signal, Stop, cancelled
from belljar.model import Cause, MachineId, Outcome, OutcomeClass

Give = Callable[[Order], None]
EVERY = "every="
MARGIN = 3.0  # seconds of the grace that are left for the machine's end
SOON = 1.0  # seconds that are nothing of a grace
MACHINE = "machine"  # in a job's folder: what the machine is frozen into


class Checkpoints:
    """Of one job. They hear its system's orders first; at its end they speak for the dialect."""

    def __init__(self, words: str, job: Job, dialect: Dialect, settings: Settings, folders: Folders, run: Run) -> None:
        """Raises HostError where the site's folder is not on this node. A job's folder that is there at its first start is another
        job's, which had this id before."""
        parts = words.split("+")
        self._every = min((duration(part[len(EVERY) :]) for part in parts if part.startswith(EVERY)), default=None)
        self._on_preempt, self._on_limit = "on-preempt" in parts, "on-limit" in parts
        self._job, self._dialect, self._folders, self._run = job, dialect, folders, run
        self._lead, self._grace = settings.checkpoint_lead, settings.grace or job.grace
        top = Path(settings.checkpoint_folder)
        if not top.is_dir():
            hint = "Every node has to see it, with mode 1777; or name another one in batch.checkpoint_folder."
            raise HostError(f"{top}: the folder of checkpoints is not on this node", hint=hint)
        self._folder = top / str(os.geteuid()) / "-".join((job.system, job.id, *job.aliases)).replace("/", "_")
        self._machine = self._folder / MACHINE
        self.restore = str(self._machine) if job.started_before else ""  # what this start goes on from
        if not job.started_before:
            remove_tree(self._folder)
        private_folder(self._folder)
        self._output = Output(self._folder)
        self._give: Give = lambda order: None
        self._tasks: set[asyncio.Task[None]] = set()
        self._noting: asyncio.Future[None] | None = None
        self._is_told_to_end = self._is_leaving = False

    # -- while the machine runs ------------------------------------------------------------------------------------------

    def before(self, give: Give) -> Give:
        """What is to be called instead of *give*, with each order of the job's system."""
        self._give = give
        return self._hear

    @asynccontextmanager
    async def running(self, streams: Streams) -> AsyncIterator[Streams]:
        """While the machine is kept. Gives the streams that it is to have."""
        if self._every is not None:
            self._begin(self._go_on(self._every))
        if self._on_limit and self._job.wall is not None:
            self._begin(self._leave_at(self._job.wall))
        try:
            yield self._output.streams(streams)
        finally:
            for task in list(self._tasks):
                await cancelled(task)
            if self._noting is not None:
                await self._noting

    def claimed(self, id: MachineId) -> None:
        """Its record tells by now from which checkpoint it goes on, if from any."""
        for event in read(self._folders.machine(id)):
            if event["event"] == "restored":
                number = int(Path(event["folder"]).name)
                self._output.go_on(number, peek(self._machine / str(number)).manifest.standstill)

    def _begin(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _hear(self, order: Order) -> None:
        """Pass it on, or make a checkpoint instead."""
        number = order.number if isinstance(order, Signal) and not self._is_leaving else None
        notice, ahead = self._job.notice or (signal.SIGUSR1, None)
        if number == signal.SIGTERM and self._on_preempt:
            self._begin(self._leave(order, self._grace - MARGIN))
        elif number in (signal.SIGUSR1, notice) and (self._on_preempt or self._on_limit):
            self._begin(self._leave(order, ahead))
        else:
            self._give(order)
        self._is_told_to_end |= isinstance(order, Signal) and order.number == signal.SIGTERM

    async def _leave_at(self, limit: float) -> None:
        """At half of a limit that is hardly longer than the lead: it is to come further with each start."""
        at = max(limit - self._lead, limit / 2)
        await asyncio.sleep(at)
        if not self._is_leaving:
            await self._leave(None, limit - at)

    async def _leave(self, warning: Order | None, within: float | None) -> None:
        """Make a checkpoint and end the machine; or pass the warning on, TERM with what is left of the grace."""
        loop, self._is_leaving, why = asyncio.get_running_loop(), True, ""
        begin = loop.time()
        if await in_thread(self._standing) is not Standing.OVER:
            left = None if within is None else max(within - (loop.time() - begin), 0.0)
            if not (why := await self._freeze(stop=True, within=left)):
                return
            complain(f"not checkpointed: {why}", "")
        self._is_leaving, took = False, loop.time() - begin
        number = warning.number if isinstance(warning, Signal) else None
        if warning is None or (why and number == signal.SIGUSR1 and self._job.notice is None):
            return
        if why and number == signal.SIGTERM and took > SOON:
            warning = Stop(max(self._grace - took, 0.0), f"cancelled by TERM, not checkpointed: {why}")
        self._give(warning)

    async def _go_on(self, every: float) -> None:
        is_told = False
        while True:
            await asyncio.sleep(every)
            if not self._is_leaving and (why := await self._freeze(stop=False)) and not is_told:
                is_told = True
                complain(f"not checkpointed: {why}", "")

    async def _freeze(self, *, stop: bool, within: float | None = None) -> str:
        """Why there is no checkpoint; "" where there is one."""
        done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._give(Freeze(self._machine, done, stop, within))
        await asyncio.wait({done})
        if done.cancelled():
            return "the machine ended before"
        if error := done.exception():
            return str(error)
        self._noting = asyncio.ensure_future(self._output.note(done.result()))
        await asyncio.shield(self._noting)
        return ""

    # -- at the end ------------------------------------------------------------------------------------------------------

    def has_any(self) -> bool:
        """Is there a checkpoint to go on from?"""
        return self._machine.is_dir() and bool(numbers(self._machine))

    def tell(self, job: Job, verdict: Verdict, outcome: Outcome, tries: int, settings: Settings) -> Ending:
        """A job that was checkpointed is given back to its system. What a job leaves that is over is removed."""
        is_checkpointed = outcome.cause is Cause.CHECKPOINTED
        if is_checkpointed or verdict in (Verdict.MIRROR, Verdict.FAIL):
            has_ended = outcome.klass not in (OutcomeClass.CANCELLED, OutcomeClass.WALLTIME)
            standing = Standing.OVER if has_ended else self._standing()
            if is_checkpointed and standing is not Standing.OVER:
                return self._dialect.give_back(job, is_queued=standing is Standing.QUEUED)
            if standing is not Standing.QUEUED:
                try:
                    remove_tree(self._folder)
                except OSError as exc:
                    complain(f"the job's checkpoints are still there: {exc}", "Remove them.")
        return self._dialect.tell(job, Verdict.MIRROR if is_checkpointed else verdict, outcome, tries, settings)

    def _standing(self) -> Standing:
        """How the job stands with its system. Where that cannot be told, a job that was told to end comes back by itself."""
        with suppress(BelljarError, ValueError):
            if command := self._dialect.ask_standing(self._job):
                return self._dialect.standing(self._job, self._run(command))
        return Standing.QUEUED if self._is_told_to_end else Standing.RUNS
