"""A pilot's machine that ends while its owner's key is put into it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from belljar.errors import HostError
from belljar.lease import Cause, InstanceState
from belljar.lease.orders import MachineOrder
from belljar.lease.pilot.machines import Machines


class Ending:
    """Its guest is up, and does not hear what it is told."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    async def await_running(self) -> None: ...

    async def reboots(self) -> AsyncIterator[None]:
        yield

    async def aexec(self, *words: Any) -> tuple[int, bytes, bytes]:
        raise self.error


class Changes(list[tuple[InstanceState, str]]):
    def __call__(self, instance: str, state: InstanceState, *, why: str = "", **facts: object) -> None:
        self.append((state, "rebooted" if facts.get("rebooted") else why))


@pytest.mark.parametrize("is_told_to_end", [False, True])
async def test_one_that_was_told_to_end_before_it_could_be_used_never_ran(is_told_to_end: bool) -> None:
    changes = Changes()
    machines = Machines("r-1", 5.0, changes)
    if is_told_to_end:
        machines._stopped["i-1"] = (Cause.USER, "released")
    await machines._run("i-1", Ending(HostError("it was closed", hint="")), MachineOrder("debian12"))  # type: ignore[arg-type]
    assert [state for state, _ in changes] == ([] if is_told_to_end else [InstanceState.RUNNING] * 2)
    assert all("did not come into it: it was closed" in why for _, why in changes[:1])
    assert [why for _, why in changes[1:]] == ([] if is_told_to_end else ["rebooted"])


async def test_a_guest_that_does_not_take_the_key_in_time_is_told_as_such() -> None:
    changes = Changes()
    await Machines("r-1", 5.0, changes)._run("i-1", Ending(TimeoutError()), MachineOrder("debian12"))  # type: ignore[arg-type]
    assert [why.rpartition(": ")[2] for _, why in changes] == ["the guest does not answer", "rebooted"]
