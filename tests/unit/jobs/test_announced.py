"""A job whose system announces its end by a signal, and then may fail to bring it about."""

from __future__ import annotations

import asyncio
import signal

import pytest

from belljar.jobs import attend
from belljar.jobs.attend import Announced
from belljar.machine.orders import Order, Orders, Resume, Signal

NOTICE, TERM = Signal(signal.SIGUSR2), Signal(signal.SIGTERM)


async def given(orders: Orders) -> list[Order]:
    """All that was given until now."""
    orders.give(Resume())
    found: list[Order] = []
    while (order := await orders.next()) != Resume():
        found.append(order)
    return found


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attend, "LATE", 0.0)


async def test_an_end_that_was_announced_comes_even_when_its_order_is_lost(soon: None) -> None:
    orders = Orders()
    announced = Announced(asyncio.get_running_loop(), orders, (signal.SIGUSR2, 0.01))
    announced.give(NOTICE)
    assert await given(orders) == [NOTICE]
    async with asyncio.timeout(10):
        assert await orders.next() == TERM
    announced.give(TERM)  # late, but the same one
    assert await given(orders) == []
    announced.give(TERM)
    assert await given(orders) == [TERM]


async def test_an_order_that_comes_in_time_is_the_only_one(soon: None) -> None:
    orders = Orders()
    announced = Announced(asyncio.get_running_loop(), orders, (signal.SIGUSR2, 0.01))
    for order in (NOTICE, TERM, NOTICE):  # Grid Engine repeats the notice while the end is under way
        announced.give(order)
    await asyncio.sleep(0.05)  # what is tested is time
    assert await given(orders) == [NOTICE, TERM, NOTICE]


async def test_other_signals_announce_nothing(soon: None) -> None:
    orders = Orders()
    announced = Announced(asyncio.get_running_loop(), orders, (signal.SIGUSR2, 0.0))
    announced.give(Signal(signal.SIGUSR1))
    await asyncio.sleep(0.02)  # what is tested is time
    assert await given(orders) == [Signal(signal.SIGUSR1)]
