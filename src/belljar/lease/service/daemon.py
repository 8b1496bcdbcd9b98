"""The service: it looks at the batch system and at its pilots, decides with what is written down, writes the next state down, and acts.
It owns nothing: after a kill it goes on from what it sees.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from contextlib import suppress

from belljar.errors import BelljarError
from belljar.host.service.telling import Tell as TellFunction
from belljar.host.service.telling import Troubles
from belljar.host.threads import in_thread
from belljar.lease import (
    LARGEST_CONSOLE,
    Console,
    Do,
    Instance,
    KeyPair,
    Lease,
    MachineOrder,
    Order,
    Report,
    Settings,
    Slot,
    Tell,
)
from belljar.lease.advance import advance, lease_of, rejected, strays
from belljar.lease.case import Act, Case, Job, Kind, Seen, Step
from belljar.lease.reports import heard
from belljar.lease.service.channel import Channel
from belljar.lease.service.jobs import Jobs, Rejected
from belljar.lease.store import Book, Store
from belljar.model import dumps
from belljar.records import replace

SOON = 0.5  # seconds between two looks, at least
BUSY = frozenset({"requested", "claiming", "draining"})  # leases in these states are looked at soon again


class Daemon:
    """`channel` is its pilots' server."""

    def __init__(
        self, settings: Settings, store: Store, jobs: Jobs, site_key: bytes, tell: TellFunction,
        clock: Callable[[], float] = time.time,
    ) -> None:  # fmt: skip
        self.settings, self.store, self._jobs, self._tell, self._clock = settings, store, jobs, tell, clock
        self.channel = Channel(site_key, self._applied, self._hear, self.wake, tell, settings.silence)
        self._troubles = Troubles(tell)
        self._wake, self._up = asyncio.Event(), clock()
        self._known: dict[str, str] = {}  # states of leases that were told
        self._live, self._is_swept = set[str](), False

    def wake(self) -> None:
        """Something was asked, or has happened: the next look comes soon."""
        self._wake.set()

    async def looks(self) -> None:
        """Until it is cancelled."""
        while True:
            is_busy = False
            try:
                is_busy = await self.look()
                self._troubles.note("look")
            except (BelljarError, OSError, ValueError) as exc:
                self._troubles.note("look", exc)
            await asyncio.sleep(SOON)
            with suppress(TimeoutError):
                async with asyncio.timeout(min(2 * SOON, self.settings.cycle) if is_busy else self.settings.cycle):
                    await self._wake.wait()
            self._wake.clear()

    async def look(self) -> bool:
        """At every lease. True: something is under way."""
        jobs = await self._all_jobs()
        leases = await in_thread(lambda: self.store.read(lambda book: book.find(Lease, live=1)))
        by_lease: dict[str, list[Job]] = {}
        for job in jobs or ():
            by_lease.setdefault(lease_of(job.name), []).append(job)
        is_busy, self._live = False, {lease.id for lease in leases}
        for lease in leases:
            try:
                is_busy |= await self._advance(lease.id, None if jobs is None else tuple(by_lease.get(lease.id, ())))
                self._troubles.note(lease.id)
            except (BelljarError, OSError, ValueError) as exc:
                self._troubles.note(lease.id, exc)
        await self._cancel_strays(jobs or (), {lease.id for lease in leases})
        if not self._is_swept:
            await in_thread(lambda: self._jobs.sweep(self._live))
            self._is_swept = True
        return is_busy

    async def _advance(self, id: str, jobs: tuple[Job, ...] | None) -> bool:
        now = self._clock()
        seen = Seen(now, self._up, jobs, self.channel.connected)

        def change(book: Book) -> Step | None:
            case = book.case(id)
            if case is None:
                return None
            step = advance(case, seen, self.settings)
            book.save(case, step.case, now)
            return step

        step = await in_thread(lambda: self.store.write(change))
        if step is None:
            return False
        lease = step.case.lease
        if self._known.get(id) != lease.state.value:
            self._known[id] = lease.state.value
            self._tell("lease", id=id, state=lease.state.value, owner=lease.owner, job=lease.job, why=lease.why)
        for act in step.acts:
            await self._do(act, step.case)
        if not lease.is_live:
            self._known.pop(id, None)
            self._live.discard(id)
            self._is_swept = False
        return bool(step.acts) or lease.state.value in BUSY

    async def _do(self, act: Act, case: Case) -> None:
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
                self.channel.order(act.of, await self._whole(act.order, case))
            self._troubles.note(f"{act.kind.value} {case.lease.id}")
        except Rejected as exc:
            await self._reject(case.lease.id, str(exc))
        except (BelljarError, ValueError) as exc:
            self._troubles.note(f"{act.kind.value} {case.lease.id}", exc)

    async def _reject(self, id: str, why: str) -> None:
        now = self._clock()

        def change(book: Book) -> None:
            case = book.case(id)
            if case is not None:
                book.save(case, rejected(case, why, now), now)

        await in_thread(lambda: self.store.write(change))
        self._wake.set()

    async def _whole(self, order: Order, case: Case) -> Order:
        """A start has the machine's request."""
        if order.do is not Do.START:
            return order
        wanted, owner = case.lease.wanted, case.lease.owner
        keys = await in_thread(
            lambda: self.store.read(lambda book: book.find(KeyPair, owner=owner, name=wanted.key) if wanted.key else [])
        )
        network = dict(self.settings.networks).get(wanted.network, "none")
        request = MachineOrder(
            wanted.image, wanted.size.cpus, wanted.size.memory, wanted.size.disk, network, wanted.user_data,
            tuple(one.public for one in keys), order.instance, owner,
        )  # fmt: skip
        return replace(order, request=dumps(request).decode())

    async def _all_jobs(self) -> tuple[Job, ...] | None:
        """None where the batch system does not answer, or makes no sense."""
        try:
            found = await self._jobs.all()
        except (BelljarError, ValueError) as exc:
            self._troubles.note("batch system", exc)
            return None
        self._troubles.note("batch system")
        return found

    async def _cancel_strays(self, jobs: Iterable[Job], live: set[str]) -> None:
        """Jobs with our names that no live lease has."""
        others = [one for one in jobs if lease_of(one.name) not in live]
        if not others:
            return
        # A lease that was written down while the batch system was asked has its job rightly.
        now = await in_thread(lambda: self.store.read(lambda book: {one.id for one in book.find(Lease, live=1)}))
        for act in strays(others, now.__contains__):
            with suppress(BelljarError):
                await self._jobs.cancel(act.of)
                self._tell("cancelled", job=act.of, why="no lease of ours has it")

    # -- pilots --------------------------------------------------------------------------------------------------------

    async def _applied(self, slot: str, pilot: str) -> int:
        found = await in_thread(lambda: self.store.read(lambda book: book.get(Slot, slot)))
        return found.seq if found is not None and found.pilot == pilot else 0

    async def _hear(self, report: Report) -> Iterable[Order]:
        now = self._clock()
        if report.facts is not None:
            report = replace(report, facts=replace(report.facts, offset=report.wall - now))

        def change(book: Book) -> tuple[Order, ...]:
            case = book.case_of(report)
            answer = heard(case, report, now, self.settings)
            if answer is None:
                return (Order(Do.VOID, why="there is no such lease"),)
            book.save(case, answer.case, now, report)
            machine = book.get(Instance, report.instance) if report.console else None
            if machine is not None and machine.slot == report.slot:
                book.put(Console(machine.id, report.console[-LARGEST_CONSOLE:], now))
            return answer.orders

        orders = await in_thread(lambda: self.store.write(change))
        if report.tell is not Tell.HEARTBEAT:
            state = report.state.value if report.state else None
            self._tell(f"pilot {report.tell.value}", slot=report.slot, id=report.instance, state=state, why=report.why,
                       host=report.facts.host if report.facts else None)  # fmt: skip
            self.wake()
        return orders
