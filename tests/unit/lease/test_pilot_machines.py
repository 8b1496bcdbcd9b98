"""A pilot's machine that ends while its owner's key is put into it, that cannot start, and what its end is called."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from belljar import api
from belljar.errors import HostError, ImageUnknown
from belljar.guest import Streams
from belljar.lease import Cause, InstanceState
from belljar.lease.orders import MachineOrder
from belljar.lease.pilot.machines import Machines
from belljar.model import Cause as Ended
from belljar.model import Outcome, OutcomeClass


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


async def test_a_guest_that_prints_without_end_is_heard_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its agent is its owner's: what that sends in place of a host's keys does not fill the node's memory."""

    class Talkative(api.Machine):
        def __init__(self) -> None: ...

        await_running, reboots = Ending.await_running, Ending.reboots  # type: ignore[assignment]

        async def acarry(self, argv: object, streams: Streams, account: object = None) -> int:
            sinks.extend((streams.stdout, streams.stderr))
            for sink in (streams.stdout, streams.stderr):
                for _ in range(100):
                    await sink.write(b"ssh-ed25519 " + b"A" * 65536 + b"\n")  # type: ignore[union-attr]
            return 0

    sinks, changes = list[Any](), list[Any]()
    machines = Machines("r-1", 5.0, lambda _, state, **facts: changes.append(facts.get("host_keys", ())))
    await machines._run("i-1", Talkative(), MachineOrder("debian12", user_data=b"#!/bin/sh\n"))  # type: ignore[arg-type]
    assert len(sinks) == 4 and all(len(one.data) == 1 << 16 for one in sinks)
    assert [len(key) for key in changes[0]] == [1 << 16]


class Gone:
    """A machine that ends so, before its guest was up."""

    def __init__(self, cause: Ended) -> None:
        self.outcome = Outcome("0123456789ab", cause, OutcomeClass.TRANSIENT, reason="so it ended")

    async def await_running(self) -> None:
        await asyncio.Event().wait()

    async def await_end(self) -> Outcome:
        return self.outcome

    def release(self) -> None: ...


@pytest.mark.parametrize(
    ("end", "cause"),
    [
        (ImageUnknown("no image is called 'x'"), Cause.STAGING), (HostError("no room", hint=""), Cause.NODE_LOST), (OSError("disk"), Cause.NODE_LOST), (KeyError("a mistake"), Cause.INTERNAL),
        (Ended.IMAGE_FAULT, Cause.STAGING), (Ended.REFUSED, Cause.STAGING), (Ended.BOOT_FAILED, Cause.BOOT), (Ended.WALLTIME, Cause.EXPIRED),
        (Ended.NODE_FAULT, Cause.NODE_LOST), (Ended.HOST_OOM, Cause.NODE_LOST), (Ended.CANCELLED, Cause.NODE_LOST),
        (Ended.FINISHED, Cause.GUEST), (Ended.GUEST_LOST, Cause.GUEST), (Ended.GUEST_OOM, Cause.GUEST),
    ],
)  # fmt: skip
async def test_each_end_of_a_machine_has_its_cause(
    end: Exception | Ended, cause: Cause, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def start(*_: object, tied: bool) -> Gone:
        if isinstance(end, Exception):
            raise end
        return Gone(end)

    monkeypatch.setattr(api, "astart", start)
    monkeypatch.setattr(api, "logs", lambda: tmp_path)
    told, ended = list[tuple[InstanceState, Cause | None, str]](), asyncio.Event()

    def changed(_: str, state: InstanceState, *, cause: Cause | None = None, why: str = "", **more: object) -> None:
        told.append((state, cause, why))
        if state is InstanceState.TERMINATED:
            ended.set()

    Machines("r-1", 5.0, changed).start("i-1", MachineOrder("debian12"))
    async with asyncio.timeout(10):
        await ended.wait()
    assert told[0][0] is InstanceState.STAGING
    assert told[-1][:2] == (InstanceState.TERMINATED, cause)
    assert (str(end) if isinstance(end, Exception) else "so it ended") in told[-1][2]


def test_no_end_of_a_machine_is_without_a_cause() -> None:
    from belljar.lease.pilot.machines import CAUSES

    assert set(CAUSES) == set(Ended)
