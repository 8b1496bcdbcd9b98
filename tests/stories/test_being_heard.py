"""TERM is heard at once, whatever takes its time: programs that hang, locks that somebody has, disks that do not answer."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.stories.conftest import Runtime

from belljar.errors import LockTimeout
from belljar.hypervisor.qemu.template.making import create_overlay
from belljar.image import Image
from belljar.machine import supervisor
from belljar.machine.cleaning import put_away
from belljar.machine.orders import Signal
from belljar.model import MIB, Cause, Outcome

LONGEST = 20.0  # real seconds
TERM = (1.0, Signal(signal.SIGTERM))


@pytest.fixture
def hanging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Put a program in the place of another that does not end before the test does."""
    fifo, programs = tmp_path / "fifo", tmp_path / "programs"
    os.mkfifo(fifo)
    programs.mkdir()
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")

    def put(name: str) -> None:
        (programs / name).write_text(f"#!/bin/sh\nread x < {fifo}\n")
        (programs / name).chmod(0o755)

    yield put
    os.close(os.open(fifo, os.O_RDWR | os.O_NONBLOCK))


def cancelled(outcome: Outcome) -> bool:
    return (outcome.cause, outcome.signal, outcome.exit_code) == (Cause.CANCELLED, signal.SIGTERM, None)


def test_while_a_scratch_disk_is_formatted(runtime: Runtime, hanging: Callable[[str], None]) -> None:
    hanging("mke2fs")
    assert cancelled(runtime.run(runtime.request(machine={"scratch": 32 * MIB}), TERM))
    assert runtime.leftovers() == []


def test_while_a_cache_is_formatted(runtime: Runtime, hanging: Callable[[str], None]) -> None:
    hanging("mke2fs")
    request = runtime.request(machine={"cache": 32 * MIB})
    assert cancelled(runtime.run(request, TERM))
    assert [one for one in runtime.leftovers() if not one.endswith("caches")] == []


async def test_while_a_templates_disk_is_made(hanging: Callable[[str], None], tmp_path: Path) -> None:
    hanging("qemu-img")
    making = asyncio.ensure_future(create_overlay(tmp_path / "disk", tmp_path / "base", MIB))
    await asyncio.sleep(0)
    making.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(making, LONGEST)


def test_while_somebody_has_the_image_for_himself(runtime: Runtime) -> None:
    may_end, undone = threading.Event(), threading.Event()

    @contextmanager
    def hold(image: Image, id: str, *, patience: float = 10.0) -> Iterator[None]:
        if not patience:
            raise LockTimeout("held")
        assert may_end.wait(LONGEST)
        yield
        undone.set()

    runtime.images.hold = hold  # type: ignore[method-assign]
    try:
        assert cancelled(runtime.run(runtime.request(), TERM))
    finally:
        may_end.set()
    assert undone.wait(LONGEST)  # what the thread got then, nobody has
    assert runtime.leftovers() == []


def test_while_its_record_is_moved_to_a_disk_that_does_not_answer(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was told in time; the record is the reaper's."""
    may_end = threading.Event()
    monkeypatch.setattr(put_away, "retire", lambda *a: may_end.wait(LONGEST))
    try:
        outcome = runtime.run(runtime.request(), (1000.0, Signal(signal.SIGTERM)))
    finally:
        may_end.set()
    assert outcome.exit_code == 0 and (runtime.folders.machine("0123456789ab") / "outcome.json").exists()


def test_while_old_records_are_dropped(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """The outcome stays what it is: the job is done."""
    may_end, loops = threading.Event(), list[asyncio.AbstractEventLoop]()

    def held(*_: object, **__: object) -> None:
        loops[0].call_soon_threadsafe(loops[0].call_later, 1000.0, runtime.orders.give, Signal(signal.SIGTERM))
        may_end.wait(LONGEST)

    monkeypatch.setattr(supervisor, "prune", held)
    runtime.at["after-claim"] = lambda: loops.append(asyncio.get_running_loop())
    try:
        outcome = runtime.run(runtime.request())
    finally:
        may_end.set()
    assert outcome.exit_code == 0 and runtime.saved_outcome()["exit_code"] == 0
