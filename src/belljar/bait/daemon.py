"""`belljar bait run`: the bait of this host. It looks at the batch system and at its machines, and for each job writes the next state
down and does what that says. It owns nothing: jobs are the batch system's, machines live on without it, and after a kill it goes on
from what it sees.

Slurm tells nobody of what happens to a job, so it is asked once in a cycle, about all jobs with one command; an arrival, an end of a
machine, and whatever was just done make the next look come at once.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

from belljar.bait import Settings
from belljar.bait.acts import ASKERS, Acts, Run, command
from belljar.bait.advance import ALTERED, ELSEWHERE, UNFIT, Seen, Step, advance, recover
from belljar.bait.arrivals import listening
from belljar.bait.decide import Faults, Judge, Turn, asked_of, bait_now, choose, nothing, size_of
from belljar.bait.journal import Journal
from belljar.bait.keeper import Keeper, feature_of, told
from belljar.bait.parts import Invitation, follow, invitation, refusal
from belljar.bait.states import STARTING, Entry, State
from belljar.bait.status import Status, order, show_status
from belljar.batch import JobState, JobView, NodeView, Pool, node_of
from belljar.errors import BelljarError, HostError
from belljar.host.files import private_folder
from belljar.host.locks import try_lock
from belljar.host.service.systemd import serving
from belljar.host.service.telling import Tell
from belljar.host.threads import in_thread
from belljar.records import replace

LOCK = "lock"
SOON = 0.3  # seconds to the next look after something was done: what it does shows a moment later
WAITED = 5.0  # seconds after which a machine that is not claimed is said to wait for its image
TAKEN_BACK = 30.0  # seconds in which a job that arrived is off the bait


async def serve(settings: Settings, folder: Path, pool: Pool, keeper: Keeper, tell: Tell, judge: Judge) -> None:
    """A bait until TERM or INT. Raises HostError where another one works in this folder."""
    lock = try_lock(private_folder(folder) / LOCK)
    if lock is None:
        raise HostError(
            f"{folder}: another bait works here", hint="One bait on each host, or each with its own --state."
        )
    try:
        await Daemon(settings, folder, pool, keeper, tell, judge).run()
    finally:
        lock.release()


class Daemon:
    """`run_command` carries out a command of the batch system."""

    def __init__(
        self, settings: Settings, folder: Path, pool: Pool, keeper: Keeper, tell: Tell, judge: Judge = nothing, *,
        run_command: Run = command, clock: Callable[[], float] = time.time,
    ) -> None:  # fmt: skip
        self.settings, self.folder, self._pool, self._keeper, self._tell = settings, folder, pool, keeper, tell
        self._judge, self._command, self._clock = judge, run_command, clock
        self.journal = Journal(folder)
        self.status = Status(settings.name, settings.system, os.getpid(), clock())
        self.faults = Faults()
        self._complaints: dict[str, str] = {}
        self._wrong: dict[str, str] = {}  # questions that the batch system did not answer, and why
        self._wake, self._looking = asyncio.Event(), asyncio.Lock()
        self._acts = Acts(settings, pool, keeper, run_command, clock, self._complain, self._wake.set)

    # -- what goes on --------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        async with AsyncExitStack() as stack:
            stack.callback(self.journal.close)
            await stack.enter_async_context(listening(self.folder, self.arrived))
            self._tell("bait started", bait=self.settings.name, jobs=len(self.journal.entries))
            try:
                await serving(self._follow(), self._looks(), reload=self._wake.set)
            finally:
                await self._acts.cancel()
        self._tell("bait stopped", jobs=len(self.journal.entries))

    async def _looks(self) -> None:
        while True:
            try:
                is_moving = await self.look()
            except (BelljarError, OSError) as exc:
                self._complain("look", told(exc) if isinstance(exc, BelljarError) else str(exc))
                is_moving = False
            with suppress(TimeoutError):
                async with asyncio.timeout(SOON if is_moving else self.settings.cycle):
                    await self._wake.wait()
            self._wake.clear()

    async def _follow(self) -> None:
        """Ends of machines, and beginnings."""
        async for event in self._keeper.events():
            if event["event"] == "ended":
                self._wake.set()

    async def arrived(self, number: str) -> bool:
        """A prolog of the bait asks: True when the job is off it."""
        end = self._clock() + TAKEN_BACK
        while self._clock() < end:
            async with self._looking:
                jobs = await self._ask(self._jobs)
                job = next((one for one in (jobs or {}).values() if number in (one.number, one.id)), None)
                if job is not None and job.state is not JobState.RUNNING:
                    self._wake.set()
                    return True
                if job is not None and not job.is_batch:
                    await self._acts.run_all(
                        (self._pool.client.note(job, "only batch scripts run here"),), f"job {job.id}"
                    )
                    await self._acts.run_all((self._pool.client.cancel(job.id),), f"job {job.id}")
                elif job is not None and not self._leads(job):
                    pass  # its leader takes it back
                elif job is not None:
                    entry = self.journal.entries.get(job.id)
                    if entry is None or not entry.leads:
                        arrived = Entry(job.id, State.ARRIVED, self._clock(), home=job.queue, reruns=job.reruns)
                        self._write(replace(arrived, on=job.on))
                    await self._acts.run_all(self._pool.client.take_back(job), f"job {job.id}")
            await asyncio.sleep(SOON)
        return False

    def _leads(self, job: JobView) -> bool:
        """Of a job over several hosts, the bait of its first node does."""
        return not job.on or job.on[0] in self.settings.names

    # -- one look ------------------------------------------------------------------------------------------------------

    async def look(self) -> bool:
        """See, decide, write down, act. True: something was done, or is under way."""
        async with self._looking:
            seen = await self._see()
            before = dict(self.journal.entries)
            steps = [(one, (advance if one.leads else follow)(one, seen, self.settings)) for one in before.values()]
            done = [await self._take(entry, step, seen) for entry, step in steps]
            ours = frozenset(
                one.name for one in (seen.nodes or {}).values() if feature_of(self.settings.name) in one.features
            )
            for act in recover(self.journal.entries.values(), seen, ours):
                done.append(True)
                self._tell("cleaning up", act=act.do.value, of=act.of)
                await self._acts.do(act, None)
            if seen.jobs is not None and seen.nodes is not None:
                done.append(await self._serve_next(seen, seen.jobs, seen.nodes))
            self._write_status(seen)
            return any(done)

    async def _see(self) -> Seen:
        machines = await in_thread(self._keeper.living)
        nodes, jobs = await self._ask(self._nodes, "nodes"), await self._ask(self._jobs)
        wanted = {one for entry in self.journal.entries.values() for one in entry.machines}
        for id in wanted - machines - self._acts.ended.keys() - self._acts.starting.keys():
            if (why := await in_thread(lambda id=id: self._keeper.ended(id))) is not None:  # type: ignore[misc]
                self._acts.ended[id] = why
        self._acts.forget(machines, frozenset(wanted))
        return Seen(self._clock(), jobs, nodes, machines, self._acts.ended)

    async def _jobs(self) -> dict[str, JobView]:
        mark = f"@{os.urandom(8).hex()}@"
        return self._pool.client.jobs(await self._command(self._pool.client.query(mark)), mark)

    async def _nodes(self) -> dict[str, NodeView]:
        return self._pool.nodes.nodes(await self._command(self._pool.nodes.query()))

    async def _ask(self, question: Callable[[], Awaitable[Any]], about: str = "jobs") -> Any:
        """None where the batch system does not answer, or makes no sense."""
        try:
            answer = await question()
        except (BelljarError, ValueError) as exc:
            text = told(exc) if isinstance(exc, BelljarError) else str(exc)
            self._wrong[about] = text
            self.status = replace(self.status, error=text)
            self._complain("batch system", text)
            return None
        self._wrong.pop(about, None)
        self.status = replace(self.status, error=next(iter(self._wrong.values()), ""))
        if not self._wrong:
            self._complaints.pop("batch system", None)
        return answer

    async def _take(self, entry: Entry, step: Step, seen: Seen) -> bool:
        """Write the step down, then do what it says."""
        after = step.entry
        is_asked = bool(self._acts.starting.keys() & set(after.machines))
        if is_asked and after.state is State.VM_REQUESTED and seen.now - after.since > WAITED:
            after = replace(after, state=State.IMAGE_WAIT)
        if after.state is State.REPROCESS and entry.state is State.VM_BOOTING:
            after = replace(after, why=after.why + await self._silent(entry, seen))
        if after != entry:
            self._write(after)
        if after.state is not entry.state:
            self._count(entry, after)
        job = (seen.jobs or {}).get(after.job)
        for act in step.acts:
            await self._acts.do(act, job, after)
        return bool(step.acts) or after.state is not entry.state

    async def _silent(self, entry: Entry, seen: Seen) -> str:
        """What the machines that did not join said last."""
        alive = [id for id in entry.machines if id in seen.machines and node_of(id) not in (seen.nodes or {})]
        said = [await in_thread(lambda id=id: self._keeper.said(id)) for id in alive]  # type: ignore[misc]
        return "".join(f"; {line}" for line in dict.fromkeys(filter(None, said)))

    def _count(self, entry: Entry, after: Entry) -> None:
        """Failed starts in a row; one that is its asker's fault, or its image's, says nothing about this host."""
        if after.state is State.VM_READY:
            self.faults = self.faults.after(False, self._clock())
        elif entry.state in STARTING and not after.why.startswith((ASKERS, ALTERED, UNFIT, ELSEWHERE)):
            has_failed = bool(set(after.machines) & self._acts.ended.keys())
            if after.state is State.REPROCESS or (has_failed and not after.leads):
                self.faults = self.faults.after(True, self._clock())

    async def _serve_next(self, seen: Seen, jobs: Mapping[str, JobView], nodes: Mapping[str, NodeView]) -> bool:
        """One job's turn, and the bait's own state."""
        entries, settings = self.journal.entries, self.settings
        unclaimed = [
            (entry, len(set(entry.here(settings.names)) - seen.machines)) for entry in entries.values()
            if entry.state in STARTING and entry.job in jobs
        ]  # fmt: skip
        sizes = [(size_of(jobs[entry.job], settings), count) for entry, count in unclaimed]
        room = await in_thread(lambda: self._keeper.room(sum(size.cpus * count for size, count in sizes)))
        room = replace(room, memory=max(0, room.memory - sum(size.memory * count for size, count in sizes)))
        bait = bait_now(order(self.folder), room, self.faults, settings, seen.now, starting=bool(unclaimed))
        if invited := invitation(entries, seen, bait, room, settings, self._judge):
            await self._accept(invited, seen)
        turn = choose(entries.values(), jobs, bait, room, settings, self._judge) if invited is None else Turn()
        for job, why in turn.wrong:
            self._write(replace(entries[job], state=State.REJECTED, since=seen.now, why=why))
        if turn.job:
            its = jobs[turn.job]
            machines = tuple(os.urandom(6).hex() for _ in range(size_of(its, settings).count))
            entry = replace(entries[its.id], state=State.VM_REQUESTED, machines=machines, asked=asked_of(its))
            on = entry.on if len(entry.on) == len(machines) else ()
            self._write(replace(entry, since=seen.now, why="", on=on))
        await self._acts.show(bait, nodes)
        self.status = replace(
            self.status, state=bait.state.value, why=bait.why, waits=turn.why, faults=self.faults.count
        )
        return bool(turn.job or turn.wrong or invited)

    async def _accept(self, invited: Invitation, seen: Seen) -> None:
        """A part of another bait's job: made here, or refused at once."""
        job = invited.job
        if invited.why:
            await self._acts.do(refusal(job, invited.machines[0], invited.why), job, Entry(job.id, State.REJECTED, 0.0))
        else:
            self._write(Entry(job.id, State.VM_REQUESTED, seen.now, invited.machines, leads=False))

    # -- what is written down ------------------------------------------------------------------------------------------

    def _write(self, entry: Entry) -> None:
        before = self.journal.entries.get(entry.job)
        self.journal.write(entry)
        if before is None or before.state is not entry.state:
            self._tell(
                "job",
                job=entry.job,
                state=entry.state.value,
                machines=" ".join(entry.machines),
                tries=entry.tries or None,
                why=entry.why,
            )
        if entry.state is State.CLOSED:
            self._complaints.pop(f"job {entry.job}", None)

    def _write_status(self, seen: Seen) -> None:
        states = [entry.state.value for entry in self.journal.entries.values()]
        members = {node_of(one) for entry in self.journal.entries.values() for one in entry.machines}
        nodes = {name: (seen.nodes or {})[name].state.value if name in (seen.nodes or {}) else "" for name in members}
        self.status = replace(
            self.status, looked=seen.now, jobs={one: states.count(one) for one in states}, nodes=nodes
        )  # fmt: skip
        show_status(self.folder, self.status)

    def _complain(self, about: str, text: str) -> None:
        """Once, until it is another."""
        if self._complaints.get(about) != text:
            self._complaints[about] = text
            self._tell("failed", about=about, why=text)
