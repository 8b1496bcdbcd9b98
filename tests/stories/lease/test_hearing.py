"""What many pilots say at once is written down in few transactions, and none suffers by another."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest
from tests.stories.lease.test_service import House as WholeService

from belljar.errors import NoSpace
from belljar.lease import Console, Instance, InstanceState, LeaseState, Settings, Size, Slot, Wanted
from belljar.lease.decisions.policy import Policy
from belljar.lease.desk import Desk, Owner
from belljar.lease.orders import Do, Facts, Report, Tell
from belljar.lease.service import hearing
from belljar.lease.service.hearing import MOST, Hearing
from belljar.lease.store import Book, open_store
from belljar.model import GIB
from belljar.records import replace

T = TypeVar("T")
COUNT = 2 * MOST
NODE = Facts("node1", cpus=8, memory=32 * GIB)


class Counting:
    """A store that counts what it is asked to write, and may be full."""

    def __init__(self, folder: Path) -> None:
        self.store, self.writes, self.is_full = open_store("", folder), 0, False

    def write(self, change: Callable[[Book], T]) -> T:
        self.writes += 1
        if self.is_full:
            raise NoSpace("leases.sqlite: no space left on device")
        return self.store.write(change)

    def read(self, look: Callable[[Book], T]) -> T:
        return self.store.read(look)

    def close(self) -> None:
        self.store.close()


class House:
    def __init__(self, folder: Path, count: int = COUNT) -> None:
        self.store = Counting(folder)
        settings = Settings(images=("*",), overhead=0)
        desk = Desk(self.store, settings, lambda: (Policy("all", users=("*",)),), now=lambda: 100.0)
        self.lease = desk.run(Owner("ada"), Wanted("alma", count, size=Size(1, GIB), seconds=600.0))[0].id
        self.hear, self.store.writes = Hearing(self.store, settings, lambda: 101.0), 0

    def hello(self, rank: int, pilot: str = "p") -> Report:
        return Report(Tell.HELLO, self.lease, 1, rank, pilot, 0, 101.0, 0.5, facts=NODE)

    def slots(self) -> list[Slot]:
        return self.store.read(lambda book: book.find(Slot))


async def test_all_that_come_at_once_take_a_few_transactions(tmp_path: Path) -> None:
    house = House(tmp_path)
    answers = await asyncio.gather(*(house.hear(house.hello(rank)) for rank in range(COUNT)))
    assert {tuple(one.do for one in orders) for orders in answers} == {(Do.WAIT,)}
    assert len(house.slots()) == COUNT and house.store.writes <= 1 + COUNT // MOST + 1


async def test_those_that_come_one_shortly_after_the_other_take_one_transaction(tmp_path: Path) -> None:
    house = House(tmp_path, 20)

    async def after(turns: int) -> None:
        for _ in range(turns):
            await asyncio.sleep(0)
        await house.hear(house.hello(turns))

    await asyncio.gather(*(after(turns) for turns in range(20)))
    assert len(house.slots()) == 20 and house.store.writes == 1


async def test_a_look_comes_after_the_answers_to_all_that_was_heard(tmp_path: Path) -> None:
    async with WholeService(tmp_path, cycle=60.0).up() as house:
        id, may_write, written = house.ask(), threading.Event(), list[str]()
        await house.until_state(id, LeaseState.QUEUED)
        honest = house.disk.write

        def noted(change: Callable[[Book], T]) -> T:
            if "Hearing" in change.__qualname__:
                may_write.wait(10)
            written.append(change.__qualname__)
            return honest(change)

        house.disk.write = noted  # type: ignore[method-assign]
        hello = asyncio.ensure_future(house.daemon.hear(Report(Tell.HELLO, id, 1, 0, "p", 0, facts=NODE)))
        look = asyncio.ensure_future(house.daemon.look())
        await asyncio.wait({look}, timeout=0.1)
        assert written == []
        may_write.set()
        assert {one.do for one in await hello} <= {Do.WAIT, Do.VOID}
        await look
        assert [one.partition(".")[0] for one in written[:2]] == ["Hearing", "Daemon"]


async def test_a_disk_that_takes_nothing_holds_no_look_up_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    house, may_write, honest = House(tmp_path, 1), threading.Event(), Book.save
    monkeypatch.setattr(hearing, "PATIENCE", 0.01)
    monkeypatch.setattr(Book, "save", lambda *given: (may_write.wait(10), honest(*given)))
    hello = asyncio.ensure_future(house.hear(house.hello(0)))
    await asyncio.sleep(0)
    await house.hear.answered()
    assert not hello.done()
    may_write.set()
    await hello


async def test_two_of_one_slot_in_one_transaction_are_heard_one_after_the_other(tmp_path: Path) -> None:
    house = House(tmp_path, 2)
    first, second, third = await asyncio.gather(
        house.hear(house.hello(0)), house.hear(house.hello(1, "p")), house.hear(house.hello(1, "another"))
    )
    assert [one[0].do for one in (first, second, third)] == [Do.WAIT, Do.WAIT, Do.VOID]


async def test_one_that_cannot_be_written_down_keeps_no_other_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    house, honest = House(tmp_path, 4), Book.save

    def picky(book: Book, before: object, after: object, now: float, report: Report | None = None) -> None:
        if report is not None and report.rank == 2:
            raise ValueError("no table allows this")
        honest(book, before, after, now, report)  # type: ignore[arg-type]

    monkeypatch.setattr(Book, "save", picky)
    found = await asyncio.gather(*(house.hear(house.hello(rank)) for rank in range(4)), return_exceptions=True)
    assert [isinstance(one, ValueError) for one in found] == [False, False, True, False]
    assert [one.rank for one in house.slots()] == [0, 1, 3]


async def test_a_full_disk_is_told_to_each_and_the_next_are_heard(tmp_path: Path) -> None:
    house = House(tmp_path, 4)
    house.store.is_full = True
    found = await asyncio.gather(*(house.hear(house.hello(rank)) for rank in range(3)), return_exceptions=True)
    assert [type(one) for one in found] == [NoSpace] * 3 and house.slots() == []
    house.store.is_full = False
    assert (await house.hear(house.hello(3)))[0].do is Do.WAIT


async def test_who_is_gone_meanwhile_is_written_down_and_harms_nobody(tmp_path: Path) -> None:
    house = House(tmp_path, 3)
    waiting = [asyncio.ensure_future(house.hear(house.hello(rank))) for rank in range(3)]
    await asyncio.sleep(0)
    waiting[1].cancel()
    found = await asyncio.gather(*waiting, return_exceptions=True)
    assert isinstance(found[1], asyncio.CancelledError) and found[0] == found[2] != ()
    assert len(house.slots()) == 3


async def test_the_last_that_a_machine_wrote_is_kept(tmp_path: Path) -> None:
    house, written = House(tmp_path, 1), b"\x00\xff" * 40_000
    await house.hear(house.hello(0))
    own = house.store.read(lambda book: book.find(Instance))[0]
    house.store.write(lambda book: book.put(replace(own, slot=f"{house.lease}.1.0", state=InstanceState.STAGING)))
    who = {"instance": own.id, "state": InstanceState.BOOTING}
    await house.hear(Report(Tell.INSTANCE, house.lease, 1, 0, "p", 1, 101.0, 0.5, console=written, **who))  # type: ignore[arg-type]
    assert house.store.read(lambda book: book.get(Console, own.id)) == Console(own.id, written[-65536:], 101.0)
