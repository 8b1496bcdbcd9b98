"""The service: it looks at the batch system and at its pilots, decides with what is written down, writes the next state down, and acts.
It owns nothing: after a kill it goes on from what it sees."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress

from belljar.errors import BelljarError
from belljar.host.threads import in_thread
from belljar.lease import Cause, Do, KeyPair, Lease, LeaseState, MachineOrder, Order, Report, Settings, Slot, Tell
from belljar.lease.decisions.advance import advance, drained, lease_of, strays
from belljar.lease.decisions.case import Act, Case, Kind, Seen, Step
from belljar.lease.ec2.office import metadata
from belljar.lease.network import placed
from belljar.lease.service.channel import Channel
from belljar.lease.service.hearing import Hearing
from belljar.lease.service.jobs import Jobs, Rejected
from belljar.lease.store import Book, Store
from belljar.model import dumps
from belljar.pool import NamedJob as Job
from belljar.records import replace
from belljar.service.news import News
from belljar.service.streams import at_most
from belljar.service.telling import Tell as TellFunction
from belljar.service.telling import Troubles

SOONEST, SOON = 0.05, 1.0  # seconds between two looks: at least, and where something is under way
BUSY = frozenset({"requested", "claiming", "draining"})  # leases in these states are looked at soon again


class Daemon:
    """`channel` is its pilots' server."""

    def __init__(self, settings: Settings, store: Store, jobs: Jobs, site_key: bytes, tell: TellFunction,
                 clock: Callable[[], float] = time.time) -> None:  # fmt: skip
        self.settings, self.store, self._jobs, self._tell, self._clock = settings, store, jobs, tell, clock
        self.channel = Channel(site_key, self._applied, self.hear, self.wake, tell, settings.silence)
        self._write_down = Hearing(store, settings, clock)
        self._troubles = Troubles(tell)
        self._wake, self._up, self.news = asyncio.Event(), clock(), News()
        self._known: dict[str, str] = {}  # states of leases that were told
        self._live, self._is_swept = set[str](), False
        self.after_look: Callable[[], Awaitable[None]] | None = None

    def wake(self) -> None:
        """Something was asked, or has happened: the next look comes soon."""
        self._wake.set()

    async def looks(self) -> None:
        """Until it is cancelled."""
        while True:
            is_busy, began = False, asyncio.get_running_loop().time()
            with self._troubles.noted("look"):
                is_busy = await self.look()
                if self.after_look is not None:
                    await self.after_look()
            self.news.ring()
            took = asyncio.get_running_loop().time() - began
            await asyncio.sleep(min(SOON, max(SOONEST, took)))  # half of the time, at most, it looks
            await at_most(min(SOON, self.settings.cycle) if is_busy else self.settings.cycle, self._wake.wait())
            self._wake.clear()

    async def look(self) -> bool:
        """At every lease. True: something is under way."""
        jobs: tuple[Job, ...] | None = None  # where the batch system does not answer, or makes no sense
        with self._troubles.noted("batch system"):
            await self._jobs.learn()
            jobs = await self._jobs.all()
        leases = await in_thread(lambda: self.store.read(lambda book: book.find(Lease, live=1)))
        by_lease: dict[str, list[Job]] = {}
        for job in jobs or ():
            by_lease.setdefault(lease_of(job.name), []).append(job)
        is_busy, self._live = False, {lease.id for lease in leases}
        await self._write_down.answered()
        for lease in leases:
            with self._troubles.noted(lease.id):
                is_busy |= await self._advance(lease.id, None if jobs is None else tuple(by_lease.get(lease.id, ())))
        await self._cancel_strays(jobs or (), {lease.id for lease in leases})
        if not self._is_swept:
            now, settings = self._clock(), self.settings
            with self._troubles.noted("what is old"):
                await in_thread(lambda: self._jobs.sweep(self._live))
                await in_thread(lambda: self.store.write(lambda book: book.forget_consoles(now - settings.shown)))
                self._is_swept = True
        return is_busy

    async def _advance(self, id: str, jobs: tuple[Job, ...] | None) -> bool:
        now = self._clock()
        seen = Seen(now, self._up, jobs, self.channel.connected)

        def change(book: Book) -> tuple[Step, list[KeyPair]] | None:
            case = book.case(id)
            if case is None:
                return None
            step, terms = advance(case, seen, self.settings), case.lease.wanted
            book.save(case, step.case, now)
            starts = any(act.order is not None and act.order.do is Do.START for act in step.acts)
            keys = book.find(KeyPair, owner=case.lease.owner, name=terms.key) if starts and terms.key else []
            return step, keys

        if (changed := await in_thread(lambda: self.store.write(change))) is None:
            return False
        step, keys = changed
        lease = step.case.lease
        if self._known.get(id) != lease.state.value:
            self._known[id] = lease.state.value
            self._tell("lease", id=id, state=lease.state.value, owner=lease.owner, job=lease.job, why=lease.why)
        for act in step.acts:
            await self._do(act, step.case, keys)
        if not lease.is_live:
            self._known.pop(id, None)
            self._live.discard(id)
            self._is_swept = False
        return bool(step.acts) or lease.state.value in BUSY

    async def _do(self, act: Act, case: Case, keys: Iterable[KeyPair]) -> None:
        """Each may be done twice; what came of it is seen at the next look."""
        try:
            if act.kind is Kind.SUBMIT:
                job = await self._jobs.submit(case.lease)
                self._tell("submitted", id=case.lease.id, name=case.lease.job_name, job=job)
                self._wake.set()
            elif act.kind is Kind.CANCEL:
                await self._jobs.cancel(act.of)
                self._tell("cancelled", id=case.lease.id, job=act.of)
            elif act.order is not None:
                self.channel.order(act.of, self._whole(act.order, case, keys))
            self._troubles.note(f"{act.kind.value} {case.lease.id}")
        except Rejected as exc:
            await self._not_submitted(case.lease.id, str(exc), for_good=True)
        except (BelljarError, OSError, ValueError) as exc:
            self._troubles.note(f"{act.kind.value} {case.lease.id}", exc)
            if act.kind is Kind.SUBMIT:
                await self._not_submitted(case.lease.id, str(exc), for_good=False)

    async def _not_submitted(self, id: str, why: str, *, for_good: bool) -> None:
        now = self._clock()

        def change(book: Book) -> None:
            case = book.case(id)
            if case is not None and case.lease.state is LeaseState.REQUESTED:
                book.save(case, drained(case, Cause.REJECTED, why, now) if for_good else case.but(why=why), now)

        await in_thread(lambda: self.store.write(change))

    def _whole(self, order: Order, case: Case, keys: Iterable[KeyPair]) -> Order:
        """A start has the machine's request."""
        if order.do is not Do.START:
            return order
        terms, owner = case.lease.wanted, case.lease.owner
        machine = next(machine for machine in case.instances if machine.id == order.instance)
        public = tuple(key.public for key in keys)
        texts, size = metadata(case.lease, machine, public, self.settings.zone), machine.size
        request = MachineOrder(terms.image_of(machine.index), size.cpus, size.memory, size.disk, "", terms.user_data, public,
                               order.instance, owner, told=texts)  # fmt: skip
        return replace(order, request=dumps(placed(request, case, order.instance, self.settings)).decode())

    async def _cancel_strays(self, jobs: Iterable[Job], live: set[str]) -> None:
        """Jobs with our names that no live lease has."""
        others = [job for job in jobs if lease_of(job.name) not in live]
        if not others:
            return
        # A lease that was written down while the batch system was asked has its job rightly.
        now = await in_thread(lambda: self.store.read(lambda book: {lease.id for lease in book.find(Lease, live=1)}))
        for act in strays(others, now.__contains__):
            with suppress(BelljarError):
                await self._jobs.cancel(act.of)
                self._tell("cancelled", job=act.of, why="no lease of ours has it")

    # -- pilots --------------------------------------------------------------------------------------------------------

    async def _applied(self, slot: str, pilot: str) -> int:
        record = await in_thread(lambda: self.store.read(lambda book: book.get(Slot, slot)))
        return record.seq if record is not None and record.pilot == pilot else 0

    async def hear(self, report: Report) -> Iterable[Order]:
        """Write a report down; what its pilot is told."""
        if report.facts is not None:
            report = replace(report, facts=replace(report.facts, offset=report.wall - self._clock()))
        orders = await self._write_down(report)
        if report.tell is not Tell.HEARTBEAT:
            state = report.state.value if report.state else None
            self._tell(f"pilot {report.tell.value}", slot=report.slot, id=report.instance, state=state, why=report.why,
                       host=report.facts.host if report.facts else None)  # fmt: skip
            self.wake()
        return orders
