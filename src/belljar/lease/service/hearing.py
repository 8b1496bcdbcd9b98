"""What pilots say is written down before it is acknowledged. What comes while others are written down is written down together: a
thousand pilots that speak at once wait for a few transactions, not for a thousand."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from belljar.errors import BelljarError
from belljar.host.threads import in_thread
from belljar.lease import LARGEST_CONSOLE, Console, Instance, Settings
from belljar.lease.decisions.case import Case
from belljar.lease.decisions.reports import heard
from belljar.lease.orders import Do, Order, Report
from belljar.lease.store import Book, Store

MOST, PATIENCE = 256, 0.5  # reports of one transaction; seconds, at most, that a look waits for those who speak
Orders = tuple[Order, ...]


class Hearing:
    def __init__(self, store: Store, settings: Settings, clock: Callable[[], float]) -> None:
        self._store, self._settings, self._clock = store, settings, clock
        self._waiting: list[tuple[Report, asyncio.Future[Orders | Exception]]] = []
        self._work: asyncio.Task[None] | None = None

    async def __call__(self, report: Report) -> Orders:
        """It is written down; what its pilot is told. Raises BelljarError, ValueError."""
        answer: asyncio.Future[Orders | Exception] = asyncio.get_running_loop().create_future()
        self._waiting.append((report, answer))
        if self._work is None or self._work.done():
            self._work = asyncio.ensure_future(self._write_all())
        if isinstance(result := await answer, Exception):
            raise result
        return result

    async def answered(self) -> None:
        """Return when all that was heard is, or after a while where it never ends: who waits for an answer comes first."""
        if self._work is not None:
            await asyncio.wait({self._work}, timeout=PATIENCE)

    async def _write_all(self) -> None:
        while self._waiting:
            count = 0
            while count < min(len(self._waiting), MOST):  # others come in the same moment
                count = len(self._waiting)
                await asyncio.sleep(0)
            batch, self._waiting = self._waiting[:MOST], self._waiting[MOST:]
            results = await in_thread(partial(self._together, [report for report, _ in batch]))
            for (_, answer), result in zip(batch, results, strict=True):
                if not answer.done():  # else its connection is gone: it says so again by the next one
                    answer.set_result(result)

    def _together(self, reports: list[Report]) -> list[Orders | Exception]:
        """For each its orders, or why it could not be written down. One that is wrong keeps no other from it."""
        try:
            return self._store.write(lambda book: [*map(partial(self._one, book, {}), reports)])
        except (BelljarError, ValueError, OSError) as exc:
            if len(reports) == 1 or isinstance(exc, BelljarError):
                return [exc] * len(reports)
        return [result for report in reports for result in self._together([report])]

    def _one(self, book: Book, known: dict[str, Case | None], report: Report) -> Orders:
        """*known*: cases as this transaction has them."""
        now, id = self._clock(), report.lease
        case = known[id] if id in known else book.case(id)
        if case is None:
            return (Order(Do.VOID, why="there is no such lease"),)
        after, orders = heard(case, report, now, self._settings)
        book.save(case, after, now, report)
        known[id] = after
        machine = book.get(Instance, report.instance) if report.console else None
        if machine is not None and machine.slot == report.slot:
            book.put(Console(machine.id, report.console[-LARGEST_CONSOLE:], now))
        return orders
