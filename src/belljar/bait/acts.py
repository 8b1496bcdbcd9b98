"""What a bait does: commands of the batch system, and machines that begin and end. Each may be done twice; what came of it is seen at
the next look, so a command that fails is reported, and no more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Mapping
from functools import partial
from typing import Any

from belljar.bait import Settings
from belljar.bait.decisions.decide import Bait
from belljar.bait.decisions.step import KEEPING, Act, Do, Entry
from belljar.bait.machines.keeper import Machines, line_of
from belljar.errors import BelljarError, UsageError
from belljar.host.commands import printed
from belljar.host.threads import in_thread
from belljar.pool import JobState, JobView, NodeState, NodeView, Pool

ASK = 20.0  # seconds one command of the batch system may take
END_AGAIN = 20.0  # seconds after which a machine that does not end is told again
# For a bait that is closed. The last two are Slurm's: no bait was there in a prolog; a slurmctld that was killed had forgotten a start.
OUR_REASONS = ("belljar:", "Prolog error", "Duplicate jobid")
OVER = "its job has ended"
ASKERS = "refused: "  # begins the reason of a start that failed by what the job asks for
RELEASES = (Do.MOVE, Do.GIVE_BACK)  # after these the job may start
Run = Callable[[tuple[str, ...]], Awaitable[bytes]]
command: Run = partial(printed, timeout=ASK)


class Acts:
    """*complain*: reports a failure. *wake*: what was done beside all else has come to its end.

    `closed`: baits that it closed. `working`: machines with which something is done. `ended`: machine -> why, of those that did not
    come, or have gone. `proved`: machine -> "" where it is clean, or what is not. `released`: arrays of which a task was, since the last
    look."""

    def __init__(
        self, settings: Settings, pool: Pool, keeper: Machines, run_command: Run, clock: Callable[[], float],
        complain: Callable[[str, str], None], wake: Callable[[], None],
    ) -> None:  # fmt: skip
        self._settings, self._pool, self._keeper, self._command = settings, pool, keeper, run_command
        self._clock, self._complain, self._wake = clock, complain, wake
        self.closed: set[str] = set()
        self.working: dict[str, asyncio.Task[None]] = {}  # by machine
        self.ended, self.proved = dict[str, str](), dict[str, str]()
        self.released = set[str]()
        self._made = set[str]()  # machines that a look may not have seen yet
        self._ending: dict[str, float] = {}  # when each machine was last told to end

    async def do(self, act: Act, job: JobView | None, entry: Entry) -> None:
        pool, settings, of, why = self._pool, self._settings, act.of, entry.why or OVER
        if act.do is Do.PROVE:
            self._beside(of, self._prove(of))
        elif act.do is Do.END:
            if self._clock() - self._ending.get(of, 0.0) > END_AGAIN:
                self._ending[of] = self._clock()
                await in_thread(lambda: self._keeper.end(of))
        elif act.do is Do.CLOSE:
            await self.run(pool.close(of, why), of)
        elif act.do is Do.LOSE:
            await self.run_all(pool.lose(of, why), of)
        elif act.do is Do.REMOVE:
            unpin = self._unpin(job, entry) if job and job.state is JobState.HELD else ()
            if all([await self.run(argv, of) for argv in unpin]):
                for argv in pool.remove(of):
                    await self.run(argv, of)
        elif act.do is Do.START and job is not None:
            if of not in self._made:
                self._beside(of, self._start(job, of))
        elif act.do is Do.ADMIT and job is not None:
            self._beside(of, self._admit(job, of))
        elif job is not None:
            members = tuple(map(pool.name_of, entry.machines))
            back = partial(pool.give_back, job, entry.home, settings.delay)
            is_home = job.queue != settings.queue
            acts: Mapping[Do, Callable[[], Iterable[tuple[str, ...]]]] = {
                Do.TAKE_BACK: lambda: pool.take_back(job),
                Do.MOVE: lambda: pool.move(job, members, settings.queue, reruns=entry.reruns),
                # slurmctld changes nothing else of a job in a partition that has no node left: first it goes home.
                Do.GIVE_BACK: lambda: (*back(stays_held=entry.stays_held), pool.note(job, entry.why)),
                Do.REFUSE: lambda: (*(() if is_home else back(stays_held=True)), pool.refuse(job, entry.why)),
                Do.UNPIN: lambda: self._unpin(job, entry),
                Do.NOTE: lambda: (pool.note(job, of),),
                Do.FORCE_END: lambda: (pool.force_end(job.id),),
            }
            if act.do in RELEASES:
                self.released.add(job.array[0])
            await self.run_all(acts[act.do](), f"job {job.id}")

    def _unpin(self, job: JobView, entry: Entry) -> tuple[tuple[str, ...], ...]:
        """It stays where somebody else moved it. One that goes home here to stay held has the reason in its note."""
        note = (self._pool.note(job, entry.why),) if entry.stays_held else ()
        return (*self._pool.unpin(job, entry.home if job.queue == self._settings.queue else ""), *note)

    async def show(self, bait: Bait, nodes: Mapping[str, NodeView]) -> None:
        """The batch system is told whether the bait takes jobs. What somebody else closed stays closed; a prolog that failed is our own:
        no bait was there."""
        for name in self._settings.names:
            if (node := nodes.get(name)) is None:
                self._complain(name, f"{name}: the batch system knows no such node; see docs/batch/bait/guide.md")
                continue
            is_closed, has_reasons = node.state in (NodeState.OUT, NodeState.DRAINING), self._pool.tells_reasons
            is_ours = node.reason.startswith(OUR_REASONS) or (name in self.closed and not has_reasons)
            if not is_closed:
                self.closed.discard(name)
            if not bait.is_open and not is_closed:
                await self.run(self._pool.close(name, bait.why), f"bait {name}")
                self.closed.add(name)
            elif bait.is_open and is_closed and is_ours and await self.run(self._pool.open(name), f"bait {name}"):
                self.closed.discard(name)  # whoever closes it from now on, it is not us

    async def look(self, machines: frozenset[str], entries: Collection[Entry]) -> None:
        """See why machines that an entry names have ended, and forget what was noted of others. *machines*: that live. What was proved of
        those of no job is true until they have one."""
        in_use = {id for entry in entries for id in entry.machines}
        for id in in_use - machines - self.ended.keys() - self.working.keys():
            if (why := await in_thread(partial(self._keeper.ended, id))) is not None:
                self.ended[id] = why
        idle = {id for entry in entries if entry.state in KEEPING for id in entry.machines}
        self.released.clear()
        self.ended = {id: why for id, why in self.ended.items() if id in in_use}
        self.proved = {id: why for id, why in self.proved.items() if id in idle}
        self._made &= in_use
        self._ending = {id: at for id, at in self._ending.items() if id in machines}

    async def cancel(self) -> None:
        for task in self.working.values():
            task.cancel()
        await asyncio.gather(*self.working.values(), return_exceptions=True)

    def _beside(self, id: str, work: Coroutine[Any, Any, None]) -> None:
        """Something with this machine that takes its time: all else goes on."""
        if id in self.working:
            return work.close()

        async def to_its_end() -> None:
            try:
                await work
            finally:
                self.working.pop(id, None)
                self._wake()

        self.working[id] = asyncio.ensure_future(to_its_end())
        return None

    async def _start(self, job: JobView, id: str) -> None:
        """Its image may have to be fetched."""
        try:
            for argv in self._pool.create(self._pool.name_of(id), job):
                await self.run(argv, id)
            await self._keeper.start(job, id)
            self._made.add(id)
        except (BelljarError, OSError) as exc:
            self.ended[id] = f"{ASKERS if isinstance(exc, UsageError) else ''}{line_of(exc)}"

    async def _prove(self, id: str) -> None:
        self.proved[id] = await self._keeper.prove(id)

    async def _admit(self, job: JobView, id: str) -> None:
        """A machine that takes no user is of no use: it ends, and the job has another."""
        try:
            await self._keeper.admit(job, id)
            await self.run(self._pool.open(node := self._pool.name_of(id)), node)
        except (BelljarError, OSError) as exc:
            self._complain(f"machine {id}", line_of(exc))
            await in_thread(lambda: self._keeper.end(id))

    async def run_all(self, commands: Iterable[tuple[str, ...]], about: str) -> None:
        """One after the other, as far as they succeed; the next look sees what is left to do."""
        for argv in commands:
            if not await self.run(argv, about):
                return

    async def run(self, argv: tuple[str, ...], about: str) -> bool:
        try:
            await self._command(argv)
        except BelljarError as exc:
            self._complain(about, f"{' '.join(argv[:2])}: {exc.message}")
            return False
        return True
