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
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TypeVar

from belljar.bait import NEVER, Settings
from belljar.bait.acts import ASKERS, RELEASES, Acts, Run, command
from belljar.bait.arrivals import Answer, listening
from belljar.bait.decisions import cache, decide
from belljar.bait.decisions.advance import ALTERED, ELSEWHERE, UNFIT, next_step
from belljar.bait.decisions.leaving import recover
from belljar.bait.decisions.parts import invitation
from belljar.bait.decisions.step import STARTING, Act, BaitState, Entry, Seen, State, is_moving
from belljar.bait.journal import Journal, Status, order, read_status, show_status
from belljar.bait.machines.keeper import Machines, feature_of, line_of
from belljar.errors import BelljarError
from belljar.host.threads import in_thread
from belljar.pool import JobState, JobView, NodeView, Pool
from belljar.records import replace
from belljar.service.streams import at_most
from belljar.service.systemd import serving
from belljar.service.telling import Tell, Troubles

V = TypeVar("V")
SOON = 0.3  # seconds to the next look after something was done: what it does shows a moment later
WAITED = 5.0  # seconds after which a machine that is not claimed is said to wait for its image
TAKEN_BACK = 30.0  # seconds in which a job that arrived is off the bait
UNTOLD = 5.0  # seconds in which a prolog reports a job that begins here


class Daemon:
    """Alone in its folder. `run_command` carries out a command of the batch system."""

    def __init__(
        self, settings: Settings, folder: Path, pool: Pool, keeper: Machines, tell: Tell, judge: decide.Judge, *,
        run_command: Run = command, clock: Callable[[], float] = time.time,
    ) -> None:  # fmt: skip
        self.settings, self.folder, self._pool, self._keeper, self._tell = settings, folder, pool, keeper, tell
        self._judge, self._command, self._clock = judge, run_command, clock
        self.journal = Journal(folder)
        before = read_status(folder) or Status()
        self.status = replace(before, name=settings.name, system=settings.system, pid=os.getpid(), started=clock())
        self._troubles = Troubles(tell)
        self._unnamed: dict[str, float] = {}  # node -> since when no job has named it
        self._untold: dict[str, float] = {}  # job -> since when it has been on a bait of ours
        self._wrong: dict[str, str] = {}  # questions that the batch system did not answer, and why
        self._wake, self._looking = asyncio.Event(), asyncio.Lock()
        self._acts = Acts(settings, pool, keeper, run_command, clock, self._troubles.note, self._wake.set)
        if before.state != BaitState.OPEN.value:
            self._acts.closed = set(settings.names)

    # -- what goes on --------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        async with listening(self.folder, self.arrived):
            self._tell("bait started", bait=self.settings.name, jobs=len(self.journal.entries))
            try:
                await serving(self._follow(), self._looks(), reload=self._wake.set)
            finally:
                await self._acts.cancel()
        self._tell("bait stopped", jobs=len(self.journal.entries))

    async def _looks(self) -> None:
        while True:
            is_moving, begin = False, self._clock()
            with self._troubles.noted("look"):
                is_moving = await self.look()
            soon = max(SOON, self._clock() - begin)  # a batch system that is slow to answer is asked less often
            await at_most(soon if is_moving else self.settings.cycle, self._wake.wait())
            self._wake.clear()

    async def _follow(self) -> None:
        """Ends of machines, and beginnings."""
        async for event in self._keeper.events():
            if event["event"] == "ended":
                self._wake.set()

    async def arrived(self, number: str, again: bool) -> Answer:
        """A prolog of the bait asks. *again*: it was answered that the job is off, but the node's daemon does not know it."""
        end, pause, answer = self._clock() + TAKEN_BACK, SOON / 16, Answer.NOT_YET
        while self._clock() < end:
            async with self._looking:
                jobs = await self._jobs() or {}
                job = next((job for job in jobs.values() if number in (job.number, job.id)), None)
                answer = Answer.NOT_YET
                if job is None or self._pool.has_forgotten(job):
                    pass  # when it begins anew, its node waits for this prolog
                elif self._pool.is_back(job):
                    self._wake.set()
                    if not again or job.state is JobState.ENDING:
                        return Answer.TAKEN
                    if job.state is JobState.ENDED:
                        return Answer.FAILED
                    if not self._has(job):  # it is held as before it began, which the batch system has forgotten
                        await self._acts.run(self._pool.release(job.id), f"job {job.id}")
                        again = False
                elif self._leads(job):  # else its leader takes it back
                    await self._take(job)
                    answer = Answer.FAILED
            await asyncio.sleep(pause)
            pause = min(SOON, 2 * pause)
        return answer

    async def _take(self, job: JobView) -> None:
        """From the bait. Somebody at a terminal is sent away."""
        pool, about = self._pool, f"job {job.id}"
        if not job.is_batch:
            await self._acts.run(pool.note(job, "only batch scripts run here"), about)
            await self._acts.run(pool.cancel(job.id), about)
            return
        if not self._has(job):
            given = (job.cpus, job.memory)
            self._write(
                Entry(job.id, State.ARRIVED, self._clock(), home=job.queue, reruns=job.reruns, on=job.on, given=given)
            )
        await self._acts.run_all(pool.arrive((job,)), about)

    async def _take_untold(self, jobs: Mapping[str, JobView]) -> None:
        """Jobs on a bait that no prolog reported: a node's daemon may run none for a job that it has just ended."""
        on = [job for job in jobs.values() if job.state is JobState.RUNNING and job.on and self._leads(job)]
        now, on = self._clock(), [job for job in on if not self._pool.is_back(job)]
        self._untold = {job.id: self._untold.get(job.id, now) for job in on}
        for job in on:
            if now - self._untold[job.id] >= UNTOLD:
                await self._take(job)

    def _has(self, job: JobView) -> bool:
        """It was taken back, and not given back since."""
        entry = self.journal.entries.get(job.id)
        return entry is not None and entry.leads and entry.state is not State.REQUEUE

    def _leads(self, job: JobView) -> bool:
        """For a job over several hosts, the bait of its first node does."""
        return not job.on or job.on[0] in self.settings.names

    # -- one look ------------------------------------------------------------------------------------------------------

    async def look(self) -> bool:
        """See, decide, write down, act. True: something was done, or is under way. Without the batch system's answer nothing is begun or
        ended."""
        async with self._looking:
            done = list[bool]()
            if (seen := await self._see()) is not None:
                done += [await self._go_on(job, seen) for job in tuple(self.journal.entries)]
                mark = feature_of(self.settings.name)
                ours = frozenset(node.name for node in seen.nodes.values() if mark in node.features)
                for act in recover(self.journal.entries.values(), seen, ours):
                    done.append(True)
                    self._tell("cleaning up", act=act.do.value, of=act.of)
                    await self._acts.do(act, None, Entry("", State.CLOSED, seen.now))
                await self._take_untold(seen.jobs)
                await self._gather(seen.jobs)
                done.append(await self._serve_next(seen))
                done += [is_moving(entry, seen.machines) for entry in self.journal.entries.values()]
            self._write_status(seen)
            return any(done)

    async def _see(self) -> Seen | None:
        machines = await in_thread(self._keeper.living)
        asked = self._ask("nodes", self._pool.query_nodes(), self._pool.nodes)
        nodes, jobs = await asyncio.gather(asked, self._jobs())
        if nodes is None or jobs is None:
            return None
        jobs = decide.as_given(jobs, nodes, self.journal.entries, self.settings.names)
        await self._acts.look(machines, self.journal.entries.values())
        return Seen(
            self._clock(), jobs, nodes, machines, ended=self._acts.ended, proved=self._acts.proved, node=self._pool.name_of,
            machine=self._pool.machine_of, named=self._named(jobs, nodes), saves=self._pool.saves,
        )  # fmt: skip

    def _named(self, jobs: Mapping[str, JobView], nodes: Mapping[str, NodeView]) -> frozenset[str]:
        """Nodes that a job names, or that none names for so short a time that a batch system that is killed may not remember it."""
        now, saves = self._clock(), self._pool.saves
        live = [job for job in jobs.values() if saves and job.state is not JobState.ENDED]
        ours = self.settings.queue  # anybody can name a node elsewhere
        names = {node for job in live for node in (*job.on, *(job.wants if job.queue == ours else ()))}
        self._unnamed = {node: self._unnamed.get(node, now) for node in nodes if node not in names}
        return frozenset(names | {node for node, since in self._unnamed.items() if now - since < saves})

    async def _gather(self, jobs: Mapping[str, JobView]) -> None:
        """The tasks of an array come to one bait, where they cannot be told apart by where they may run."""
        if self._pool.moves_whole_arrays and (new := decide.newcomers(self.journal.entries, jobs)):
            for job in new:
                self._write(Entry(job.id, State.ARRIVED, self._clock(), home=job.queue, reruns=job.reruns))
            await self._acts.run_all(self._pool.arrive(new), f"array {new[0].array[0]}")

    async def _act(self, act: Act, entry: Entry, jobs: Mapping[str, JobView]) -> None:
        job = jobs.get(entry.job)
        is_release = act.do in RELEASES and self._pool.moves_whole_arrays
        if not is_release or job is None or not decide.must_wait(job, jobs, self._acts.released):
            await self._acts.do(act, job, entry)

    async def _jobs(self) -> Mapping[str, JobView] | None:
        mark = f"@{os.urandom(8).hex()}@"
        return await self._ask("jobs", self._pool.query(mark), lambda printed: self._pool.jobs(printed, mark))

    async def _ask(
        self, about: str, argv: tuple[str, ...], read: Callable[[bytes], dict[str, V]]
    ) -> dict[str, V] | None:
        """None where the batch system does not answer, or makes no sense."""
        try:
            answer = read(await self._command(argv))
        except (BelljarError, ValueError) as exc:
            self._wrong[about] = line_of(exc)
            self._troubles.note("batch system", self._wrong[about])
            return None
        self._wrong.pop(about, None)
        self._troubles.note("batch system", next(iter(self._wrong.values()), ""))
        return answer

    async def _go_on(self, job: str, seen: Seen) -> bool:
        """Each step is written down, then what it says is done; so on, until there is something to wait for. True: something was done."""
        passed, is_moving = set[State](), False
        while (entry := self.journal.entries[job]).state not in passed:
            passed.add(entry.state)
            step = next_step(entry, seen, self.settings)
            after = await self._after(entry, step.entry, seen)
            if after.job != job:  # what is left of it is its machines, which are cleaned now
                self._write(after, replace(entry, state=State.CLOSED, machines=()))
            elif after != entry:
                self._write(after)
            self._count(entry, after)
            for act in step.acts:
                await self._act(act, after, seen.jobs)
            is_moving = is_moving or bool(step.acts) or after.state is not entry.state
            if step.acts or after.state is State.CLOSED:
                break
            job = after.job
        return is_moving

    async def _after(self, before: Entry, after: Entry, seen: Seen) -> Entry:
        """With what only this host knows: that an image is on its way, and what a machine said that did not join."""
        is_asked = bool(self._acts.working.keys() & set(after.machines))
        if is_asked and after.state is State.VM_REQUESTED and seen.now - after.since > WAITED:
            return replace(after, state=State.IMAGE_WAIT)
        if after.state is not State.REPROCESS or before.state is not State.VM_BOOTING:
            return after
        silent = [id for id in before.machines if id in seen.machines and seen.state(id) is None]
        lines = [await in_thread(partial(self._keeper.last_words, id)) for id in silent]
        return replace(after, why="; ".join((after.why, *dict.fromkeys(filter(None, lines)))))

    def _count(self, entry: Entry, after: Entry) -> None:
        """Failed starts in a row; one that is its asker's fault, or its image's, says nothing about this host."""
        if after.state is entry.state:
            return
        if after.state is State.VM_READY:
            self.status = replace(self.status, faults=0, failed=0.0)
        elif entry.state in STARTING and not after.why.startswith((ASKERS, ALTERED, UNFIT, ELSEWHERE)):
            has_failed = bool(set(after.machines) & self._acts.ended.keys())
            if after.state is State.REPROCESS or (has_failed and not after.leads):
                self.status = replace(self.status, faults=self.status.faults + 1, failed=self._clock())

    async def _serve_next(self, seen: Seen) -> bool:
        """One job's turn, and the bait's own state."""
        entries, settings, jobs = self.journal.entries, self.settings, seen.jobs
        starting = [entry for entry in entries.values() if entry.state in STARTING and entry.job in jobs]
        room = await self._room(starting, seen)
        free = cache.with_kept(room, entries.values())
        faults, failed, is_starting = self.status.faults, self.status.failed, bool(starting)
        bait = decide.bait_now(order(self.folder), free, faults, failed, settings, seen.now, starting=is_starting)
        turn = decide.Turn()
        if invited := invitation(entries, seen, bait, room, settings, self._judge):
            for act in invited.acts:
                await self._acts.do(act, jobs[invited.entry.job], invited.entry)
            if not invited.acts:
                self._write(invited.entry)
        else:
            turn = decide.choose(entries.values(), jobs, bait, room, settings, self._judge)
        for job, why in turn.wrong:
            self._write(replace(entries[job], state=State.REJECTED, since=seen.now, why=why))
        if turn.first:
            turn = self._give(turn, jobs[turn.first], room, seen)
        for job in filter(None, (turn.job, *turn.ending)):
            await self._go_on(job, seen)
        await self._acts.show(bait, seen.nodes)
        self.status = replace(self.status, state=bait.state.value, why=bait.why, waits=turn.why)
        return bool(turn.job or turn.wrong or turn.ending or invited)

    async def _room(self, starting: list[Entry], seen: Seen) -> decide.Room:
        """What is free of this host, without what machines take that are not claimed yet."""
        cpus = memory = 0
        for entry in starting:
            size = decide.size_of(seen.jobs[entry.job], self.settings)
            count = len(set(entry.here(self.settings.names)) - seen.machines)
            cpus, memory = cpus + size.cpus * count, memory + size.memory * count
        room = await in_thread(lambda: self._keeper.room(cpus))
        return replace(room, memory=max(0, room.memory - memory))

    def _give(self, turn: decide.Turn, job: JobView, room: decide.Room, seen: Seen) -> decide.Turn:
        """Machines to the job whose turn it is: new ones by their names, or kept ones, which change hands in one line."""
        entries, settings, entry, now = self.journal.entries, self.settings, self.journal.entries[job.id], seen.now
        terms, size = "", decide.size_of(job, settings)
        if settings.cache != NEVER and set(entry.on) <= set(settings.names):
            terms = cache.terms_of(job, self._keeper.image(job), settings)
        turn = cache.with_machines(turn, entries.values(), terms, decide.share_of(entry, job, settings), room)
        for name in turn.ending:
            self._write(replace(entries[name], state=State.FINISHED, since=now, why=f"job {job.id} needs its room"))
        if turn.kept:
            kept = entries[turn.kept]
            mine = replace(
                entry,
                state=State.VM_BOOTING,
                machines=kept.machines,
                takes=kept.takes,
                uses=kept.uses + 1,
                born=kept.born,
            )
            kept = replace(kept, state=State.CLOSED, machines=(), why=f"job {job.id} has its machines")
            self._write(replace(mine, since=now, why="", asked=decide.asked_of(job), terms=terms, on=()), kept)
        elif turn.job:
            machines = self._new_machines(size.count, seen)
            if not all(machines):
                return replace(turn, job="", why=f"{job.id} waits for a name: all of `nodes` are in use")
            entry = replace(entry, state=State.VM_REQUESTED, machines=machines, asked=decide.asked_of(job), terms=terms)
            on, takes = entry.on if len(entry.on) == len(machines) else (), (size.all_cpus, size.all_memory)
            self._write(replace(entry, since=now, why="", on=on, takes=takes, uses=0, born=now))
        return turn

    def _new_machines(self, count: int, seen: Seen) -> tuple[str, ...]:
        """Their ids; "" where no name is left."""
        known = {id for entry in self.journal.entries.values() for id in entry.machines} | seen.machines
        machines, nodes = list[str](), {*map(seen.node, known), *seen.nodes}
        for _ in range(count):
            machines.append(self._pool.new_machine(nodes))
            nodes.add(seen.node(machines[-1]))
        return tuple(machines)

    # -- what is written down ------------------------------------------------------------------------------------------

    def _write(self, *entries: Entry) -> None:
        before = dict(self.journal.entries)
        self.journal.write(*entries)
        for entry in entries:
            if entry.job not in before or before[entry.job].state is not entry.state:
                self._tell(
                    "job", job=entry.job, state=entry.state.value, machines=" ".join(entry.machines),
                    tries=entry.tries or None, why=entry.why,
                )  # fmt: skip
            if entry.state is State.CLOSED:
                self._troubles.now.pop(f"job {entry.job}", None)

    def _write_status(self, seen: Seen | None) -> None:
        error = self._troubles.now.get("batch system", "")
        self.status = replace(self.status, looked=self._clock(), error=error)
        if seen is not None:
            entries, views = self.journal.entries.values(), seen.nodes
            names = {id: seen.node(id) for entry in entries for id in entry.machines}
            nodes = {id: (name, views[name].state.value if name in views else "") for id, name in names.items()}
            self.status = replace(self.status, jobs=dict(Counter(entry.state.value for entry in entries)), nodes=nodes)
        show_status(self.folder, self.status)
