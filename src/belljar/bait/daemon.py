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
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

from belljar.bait import Order, Settings
from belljar.bait.advance import Act, Do, Seen, Step, advance, recover
from belljar.bait.arrivals import listening
from belljar.bait.decide import Bait, Faults, Judge, bait_now, choose, nothing, size_of
from belljar.bait.journal import Journal
from belljar.bait.keeper import Keeper, feature_of, told
from belljar.bait.states import STARTING, BaitState, Entry, State
from belljar.batch import JobState, JobView, NodeState, NodeView, Pool, node_of
from belljar.errors import BelljarError, HostError, UsageError
from belljar.host.commands import run_beside
from belljar.host.files import private_folder
from belljar.host.locks import try_lock
from belljar.host.service import kept
from belljar.host.service.systemd import serving
from belljar.host.service.telling import Tell
from belljar.host.threads import in_thread
from belljar.records import dataclass, field, replace

LOCK, ORDER, STATUS = "lock", "order.json", "status.json"
ASK = 20.0  # seconds one command of the batch system may take
SOON = 0.3  # seconds to the next look after something was done: what it does shows a moment later
WAITED = 5.0  # seconds after which a machine that is not claimed is said to wait for its image
END_AGAIN = 20.0  # seconds after which a machine that does not end is told again
TAKEN_BACK = 30.0  # seconds in which a job that arrived is off the bait
OUR_REASONS = ("belljar:", "Prolog error")  # of a bait that is closed
Run = Callable[[tuple[str, ...]], Awaitable[bytes]]


@dataclass(frozen=True)
class Status:
    """A bait at its last look. Moments are seconds since the epoch."""

    name: str
    system: str
    pid: int
    started: float
    looked: float = 0.0
    state: str = BaitState.OPEN.value
    why: str = ""
    waits: str = ""  # what the next job waits for
    error: str = ""  # why the batch system, or the journal, could not be asked
    faults: int = 0
    jobs: dict[str, int] = field(default_factory=dict)  # how many in each state
    nodes: dict[str, str] = field(default_factory=dict)  # of machines, with their states


def read_status(folder: Path) -> Status | None:
    status: Status | None = kept.read(folder / STATUS, Status)
    return status


def order(folder: Path) -> Order:
    return kept.read(folder / ORDER, Order) or Order()


def give_order(folder: Path, one: Order) -> None:
    """The bait that works in this folder obeys it at its next look, and after a restart too."""
    kept.keep(private_folder(folder) / ORDER, one, durable=True)


async def command(argv: tuple[str, ...]) -> bytes:
    """What it prints. Raises CommandMissing, CommandFailed."""
    return (await run_beside(argv, timeout=ASK)).out


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
        self._starting: dict[str, asyncio.Task[None]] = {}  # by machine
        self._ended: dict[str, str] = {}  # machine -> why
        self._ending: dict[str, float] = {}  # when each machine was last told to end
        self._complaints: dict[str, str] = {}
        self._wake, self._looking = asyncio.Event(), asyncio.Lock()

    # -- what goes on --------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        async with AsyncExitStack() as stack:
            stack.callback(self.journal.close)
            await stack.enter_async_context(listening(self.folder, self.arrived))
            self._tell("bait started", bait=self.settings.name, jobs=len(self.journal.entries))
            try:
                await serving(self._follow(), self._looks(), reload=self._wake.set)
            finally:
                for task in self._starting.values():
                    task.cancel()
                await asyncio.gather(*self._starting.values(), return_exceptions=True)
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
                self._ended[event["machine"]] = str(event.get("reason") or event.get("cause") or "it ended")
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
                    await self._all((self._pool.client.note(job, "only batch scripts run here"),), f"job {job.id}")
                    await self._all((self._pool.client.cancel(job.id),), f"job {job.id}")
                elif job is not None:
                    if job.id not in self.journal.entries:
                        self._write(Entry(job.id, State.ARRIVED, self._clock(), home=job.queue, reruns=job.reruns))
                    await self._all(self._pool.client.take_back(job), f"job {job.id}")
            await asyncio.sleep(SOON)
        return False

    # -- one look ------------------------------------------------------------------------------------------------------

    async def look(self) -> bool:
        """See, decide, write down, act. True: something was done, or is under way."""
        async with self._looking:
            seen = await self._see()
            before = dict(self.journal.entries)
            steps = [(entry, advance(entry, seen, self.settings)) for entry in before.values()]
            done = [await self._take(entry, step, seen) for entry, step in steps]
            ours = frozenset(
                one.name for one in (seen.nodes or {}).values() if feature_of(self.settings.name) in one.features
            )
            for act in recover(self.journal.entries.values(), seen, ours):
                done.append(True)
                self._tell("cleaning up", act=act.do.value, of=act.of)
                await self._do(act, None)
            if seen.jobs is not None and seen.nodes is not None:
                done.append(await self._serve_next(seen, seen.jobs, seen.nodes))
            self._write_status(seen)
            return any(done)

    async def _see(self) -> Seen:
        machines = await in_thread(self._keeper.living)
        nodes, jobs = await self._ask(self._nodes), await self._ask(self._jobs)
        wanted = {one for entry in self.journal.entries.values() for one in entry.machines}
        for id in wanted - machines - self._ended.keys() - self._starting.keys():
            if (why := await in_thread(lambda id=id: self._keeper.ended(id))) is not None:  # type: ignore[misc]
                self._ended[id] = why
        self._ended = {id: why for id, why in self._ended.items() if id in wanted}
        self._ending = {id: at for id, at in self._ending.items() if id in machines}
        return Seen(self._clock(), jobs, nodes, machines, self._ended)

    async def _jobs(self) -> dict[str, JobView]:
        mark = f"@{os.urandom(8).hex()}@"
        return self._pool.client.jobs(await self._command(self._pool.client.query(mark)), mark)

    async def _nodes(self) -> dict[str, NodeView]:
        return self._pool.nodes.nodes(await self._command(self._pool.nodes.query()))

    async def _ask(self, question: Callable[[], Awaitable[Any]]) -> Any:
        """None where the batch system does not answer, or makes no sense."""
        try:
            answer = await question()
        except (BelljarError, ValueError) as exc:
            text = told(exc) if isinstance(exc, BelljarError) else str(exc)
            self.status = replace(self.status, error=text)
            self._complain("batch system", text)
            return None
        self.status = replace(self.status, error="")
        self._complaints.pop("batch system", None)
        return answer

    async def _take(self, entry: Entry, step: Step, seen: Seen) -> bool:
        """Write the step down, then do what it says."""
        after = step.entry
        is_asked = bool(self._starting.keys() & set(after.machines))
        if is_asked and after.state is State.VM_REQUESTED and seen.now - after.since > WAITED:
            after = replace(after, state=State.IMAGE_WAIT)
        if after != entry:
            self._write(after)
        if after.state is not entry.state:
            self._count(entry, after)
        job = (seen.jobs or {}).get(after.job)
        for act in step.acts:
            await self._do(act, job, after)
        return bool(step.acts) or after.state is not entry.state

    def _count(self, entry: Entry, after: Entry) -> None:
        """Failed starts in a row; one that is its asker's fault says nothing about this host."""
        if after.state is State.VM_READY:
            self.faults = self.faults.after(False, self._clock())
        elif after.state is State.REPROCESS and entry.state in STARTING and not after.why.startswith(ASKERS):
            self.faults = self.faults.after(True, self._clock())

    async def _serve_next(self, seen: Seen, jobs: Mapping[str, JobView], nodes: Mapping[str, NodeView]) -> bool:
        """One job's turn, and the bait's own state."""
        entries, settings = self.journal.entries, self.settings
        unclaimed = [
            (entry, len(set(entry.machines) - seen.machines)) for entry in entries.values()
            if entry.state in STARTING and entry.job in jobs
        ]  # fmt: skip
        sizes = [(size_of(jobs[entry.job], settings), count) for entry, count in unclaimed]
        room = await in_thread(lambda: self._keeper.room(sum(size.cpus * count for size, count in sizes)))
        room = replace(room, memory=max(0, room.memory - sum(size.memory * count for size, count in sizes)))
        bait = bait_now(order(self.folder), room, self.faults, settings, seen.now, starting=bool(unclaimed))
        turn = choose(entries.values(), jobs, bait, room, settings, self._judge)
        for job, why in turn.wrong:
            self._write(replace(entries[job], state=State.REJECTED, since=seen.now, why=why))
        if turn.job:
            machines = tuple(os.urandom(6).hex() for _ in range(size_of(jobs[turn.job], settings).count))
            self._write(replace(entries[turn.job], state=State.VM_REQUESTED, since=seen.now, machines=machines, why=""))
        await self._show(bait, nodes)
        self.status = replace(
            self.status, state=bait.state.value, why=bait.why, waits=turn.why, faults=self.faults.count
        )
        return bool(turn.job or turn.wrong)

    async def _show(self, bait: Bait, nodes: Mapping[str, NodeView]) -> None:
        """The batch system is told whether the bait takes jobs. What somebody else closed stays closed; a prolog that failed is our own:
        no bait was there."""
        for name in (self.settings.name, *self.settings.also):
            node = nodes.get(name)
            if node is None:
                self._complain(name, f"{name}: the batch system knows no such node; see docs/bait.md")
                continue
            is_closed = node.state in (NodeState.OUT, NodeState.DRAINING)
            if not bait.is_open and not is_closed:
                await self._try(self._pool.nodes.close(name, bait.why), f"bait {name}")
            elif bait.is_open and is_closed and node.reason.startswith(OUR_REASONS):
                await self._try(self._pool.nodes.open(name), f"bait {name}")

    # -- acts ----------------------------------------------------------------------------------------------------------

    async def _do(self, act: Act, job: JobView | None, entry: Entry | None = None) -> None:
        client, nodes, settings = self._pool.client, self._pool.nodes, self.settings
        if act.do is Do.START:
            self._start(act.of, job)
        elif act.do is Do.END:
            if self._clock() - self._ending.get(act.of, 0.0) > END_AGAIN:
                self._ending[act.of] = self._clock()
                await in_thread(lambda: self._keeper.end(act.of))
        elif act.do in (Do.CLOSE, Do.LOSE):
            change = nodes.close if act.do is Do.CLOSE else nodes.lose
            await self._try(change(act.of, entry.why if entry and entry.why else "its job has ended"), act.of)
        elif act.do is Do.REMOVE:
            await self._all(nodes.remove(act.of), act.of)
        elif job is not None and entry is not None:
            members = tuple(node_of(one) for one in entry.machines)
            acts: Mapping[Do, Callable[[], Iterable[tuple[str, ...]]]] = {
                Do.TAKE_BACK: lambda: client.take_back(job),
                Do.MOVE: lambda: nodes.move(job, members, settings.queue, reruns=entry.reruns),
                Do.GIVE_BACK: lambda: (client.note(job, entry.why), *nodes.give_back(job, entry.home, settings.delay)),
                Do.REFUSE: lambda: (client.note(job, entry.why),),
            }
            await self._all(acts[act.do](), f"job {job.id}")

    def _start(self, id: str, job: JobView | None) -> None:
        """Beside all else: its image may have to be fetched."""
        if id in self._starting or job is None:
            return

        async def start() -> None:
            try:
                await self._keeper.start(job, id)
            except BelljarError as exc:
                self._ended[id] = f"{ASKERS if isinstance(exc, UsageError) else ''}{told(exc)}"
            finally:
                self._starting.pop(id, None)
                self._wake.set()

        self._starting[id] = asyncio.ensure_future(start())

    async def _all(self, commands: Iterable[tuple[str, ...]], about: str) -> None:
        """One after the other, as far as they succeed; the next look sees what is left to do."""
        for argv in commands:
            if not await self._try(argv, about):
                return

    async def _try(self, argv: tuple[str, ...], about: str) -> bool:
        try:
            await self._command(argv)
        except BelljarError as exc:
            self._complain(about, f"{' '.join(argv[:2])}: {exc.message}")
            return False
        return True

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
        with suppress(OSError, BelljarError):
            kept.keep(self.folder / STATUS, self.status)

    def _complain(self, about: str, text: str) -> None:
        """Once, until it is another."""
        if self._complaints.get(about) != text:
            self._complaints[about] = text
            self._tell("failed", about=about, why=text)


ASKERS = "refused: "  # begins the reason of a start that failed by what the job asks for
