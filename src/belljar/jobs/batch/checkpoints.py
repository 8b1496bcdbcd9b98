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
import math
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from belljar.batch import Settings
from belljar.batch.job.terms import Dialect, Ending, Job, Standing, Verdict
from belljar.batch.job.verdict import Run
from belljar.errors import BelljarError, HostError
from belljar.hints import NoReturn
from belljar.host.files import remove_tree
from belljar.host.threads import in_thread
from belljar.host.values import duration
from belljar.jobs import complain
from belljar.jobs.batch.output import Output
from belljar.machine.checkpoints import newest, numbers
from belljar.machine.orders import Freeze, Order, Signal, Stop
from belljar.model import Cause, Outcome, OutcomeClass, Request
from belljar.records import replace

EVERY = "every="
MARGIN = 3.0  # seconds of the grace that are left for the machine's end


class Checkpoints:
    """Of one job. They hear its system's orders first; at its end they speak for the dialect."""

    give: Callable[[Order], None]  # what hears the others, and is told to freeze the machine

    def __init__(self, words: str, job: Job, dialect: Dialect, settings: Settings, run: Run) -> None:
        """Raises HostError where the site's folder is not on this node. A job's folder that is there at its first start is another
        job's, which had this id before."""
        parts = words.split("+")
        self._every = min((duration(part[len(EVERY) :]) for part in parts if part.startswith(EVERY)), default=None)
        self._on_preempt, self._on_limit = "on-preempt" in parts, "on-limit" in parts
        self._job, self._dialect, self._run = job, dialect, run
        self._lead, self._grace = settings.checkpoint_lead, settings.grace or job.grace
        top = Path(settings.checkpoint_folder)
        if not top.is_dir():
            hint = "Every node has to see it, with mode 1777; or name another one in batch.checkpoint_folder."
            raise HostError(f"{top}: the folder of checkpoints is not on this node", hint=hint)
        self._folder = top / str(os.geteuid()) / "-".join((job.system, job.id, *job.aliases)).replace("/", "_")
        if not job.started_before:
            remove_tree(self._folder)
        self.output = Output()
        # When the job is to leave: the warning, if one came, and the moment by the loop's clock at which a checkpoint has to be there.
        self._due: asyncio.Queue[tuple[Order | None, float]] = asyncio.Queue()
        self._is_told_to_end = self._was_told = False

    def asked(self, request: Request) -> Request:
        """What this start of the job asks for. Raises UnsafeFolder, CheckpointUnfit."""
        checkpoint, _ = newest(self._folder)
        restore = str(self._folder) if self._job.started_before else ""
        request = replace(request, checkpointable=True, restore=restore)
        return checkpoint.asked(request) if checkpoint else request

    # -- while the machine runs ------------------------------------------------------------------------------------------

    def hear(self, order: Order) -> None:
        """An order of the job's system: pass it on, or make a checkpoint instead."""
        number = order.number if isinstance(order, Signal) else None
        notice, ahead = self._job.notice or (signal.SIGUSR1, math.inf)
        self._is_told_to_end |= number == signal.SIGTERM
        if number == signal.SIGTERM and self._on_preempt:
            ahead = self._grace - MARGIN
        elif number not in (signal.SIGUSR1, notice) or not (self._on_preempt or self._on_limit):
            self.give(order)
            return
        self._due.put_nowait((order, asyncio.get_running_loop().time() + ahead))

    async def mind(self) -> NoReturn:
        """Make them when they are due, one after the other, as long as the machine is kept."""
        loop = asyncio.get_running_loop()
        if self._on_limit and (wall := self._job.wall) is not None:
            # At half of a limit that is hardly longer than the lead: it is to come further with each start.
            at, limit = max(wall - self._lead, wall / 2), loop.time() + wall
            loop.call_later(at, self._due.put_nowait, (None, limit))
        while True:
            try:
                async with asyncio.timeout(self._every):  # where there is one
                    warning, until = await self._due.get()
            except TimeoutError:
                await self._freeze(stop=False)
            else:
                await self._leave(warning, until)

    async def _leave(self, warning: Order | None, until: float) -> None:
        """Make a checkpoint and end the machine; or pass the warning on, TERM with what is left of the grace."""
        clock, why = asyncio.get_running_loop().time, ""
        is_over = await in_thread(self._standing) is Standing.OVER
        if not is_over and not (why := await self._freeze(stop=True, within=max(until - clock(), 0.0))):
            return
        match warning:
            case Signal(number=signal.SIGTERM) if why:
                grace = max(until + MARGIN - clock(), 0.0)
                self.give(Stop(grace, f"cancelled by TERM, not checkpointed: {why}"))
            case Signal(number=number) if number != signal.SIGUSR1 or self._job.notice:
                self.give(warning)

    async def _freeze(self, *, stop: bool, within: float = math.inf) -> str:
        """Why there is no checkpoint; "" where there is one."""
        done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.give(Freeze(self._folder, done, stop, within if within < math.inf else None))
        await asyncio.wait({done})
        why = str(done.exception() or "")
        if why and (stop or not self._was_told):
            self._was_told = True
            complain(f"not checkpointed: {why}")
        return why

    # -- at the end ------------------------------------------------------------------------------------------------------

    def has_any(self) -> bool:
        """Is there a checkpoint to go on from?"""
        return bool(numbers(self._folder))

    def tell(self, job: Job, verdict: Verdict, outcome: Outcome, tries: int, settings: Settings) -> Ending:
        """A job that was checkpointed is given back to its system. What a job leaves that is over is removed."""
        is_checkpointed = outcome.cause is Cause.CHECKPOINTED
        if is_checkpointed or verdict in (Verdict.MIRROR, Verdict.FAIL):
            has_ended = outcome.klass not in (OutcomeClass.CANCELLED, OutcomeClass.WALLTIME)
            standing = Standing.OVER if has_ended else self._standing()
            if is_checkpointed and standing is not Standing.OVER:
                return self._dialect.give_back(job, is_queued=standing is Standing.QUEUED)
            if standing is not Standing.QUEUED:
                with suppress(OSError):
                    remove_tree(self._folder)
        return self._dialect.tell(job, Verdict.MIRROR if is_checkpointed else verdict, outcome, tries, settings)

    def _standing(self) -> Standing:
        """How the job stands with its system. Where that cannot be told, a job that was told to end comes back by itself."""
        with suppress(BelljarError, ValueError):
            if command := self._dialect.ask_standing(self._job):
                return self._dialect.standing(self._job, self._run(command))
        return Standing.QUEUED if self._is_told_to_end else Standing.RUNS
