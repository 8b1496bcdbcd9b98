"""Seen from outside: the end of each machine and all that happens, told by the kernel, whatever was missed."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from belljar.errors import HostError, NoSuchMachine
from belljar.host.files import private_folder
from belljar.host.processes import boot_id
from belljar.host.watch import IN_Q_OVERFLOW, Happened, Watch
from belljar.journal import JOURNAL, Event, Ledger
from belljar.machine import LOCK, OUTCOME, Folders
from belljar.machine.cleaning.reaper import Reaper, Undone
from belljar.machine.outside.registry import Machines
from belljar.model import Cause

KEEPER = "import fcntl, os, sys; f = open(sys.argv[1], 'r+'); fcntl.flock(f, fcntl.LOCK_EX); print(os.getpid(), flush=True); sys.stdin.read()"
ROW = {"cause": "finished", "class": "payload", "exit_code": 0}


class PaperReaper(Reaper):
    """Finishes as the real one does, where there was no QEMU."""

    def __init__(self, folders: Folders) -> None:
        self.folders, self.finished = folders, list[str]()
        self.trouble = ""

    def finish(self, id: str) -> list[Undone]:
        self.finished.append(id)
        if self.trouble:
            return [Undone(id, "not finished", error=self.trouble)]
        end(self.folders, id, cause="node-fault", **{"class": "node"})
        return []


@pytest.fixture
def folders(tmp_path: Path) -> Folders:
    made = Folders(tmp_path / "run", tmp_path / "scratch", tmp_path / "store", tmp_path / "logs")
    private_folder(made.machines)
    private_folder(made.logs)
    return made


def begin(folders: Folders, id: str, pid: int | None = None) -> Path:
    folder = folders.machine(id)
    folder.mkdir()
    (folder / LOCK).touch(0o600)
    journal(folder, "claim", pid=pid or os.getpid(), boot=boot_id())
    return folder


def journal(folder: Path, event: str, **facts: Any) -> None:
    with open(folder / JOURNAL, "a") as file:
        file.write(json.dumps({"time": 1.0, "event": event, **facts}) + "\n")


def end(folders: Folders, id: str, **facts: Any) -> None:
    """As a keeper puts its machine away."""
    row = {"id": id, **ROW, **facts}
    (folders.machine(id) / OUTCOME).write_text(json.dumps(row))
    Ledger(folders.logs).append(row, time.time())
    os.rename(folders.machine(id), folders.ended(id))


def kept(folders: Folders, id: str) -> subprocess.Popen[bytes]:
    """A machine whose lock is held by a process, the one that claimed it."""
    folder = folders.machine(id)
    folder.mkdir()
    (folder / LOCK).touch(0o600)
    keeper = subprocess.Popen(
        [sys.executable, "-IS", "-c", KEEPER, str(folder / LOCK)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert keeper.stdout is not None
    journal(folder, "claim", pid=int(keeper.stdout.readline()), boot=boot_id())
    return keeper


def close(keeper: subprocess.Popen[bytes]) -> None:
    keeper.kill()
    keeper.communicate()


# -- the end of one -----------------------------------------------------------------------------------------------------


async def test_the_end_of_each_of_many_machines_is_told(folders: Folders) -> None:
    machines = Machines(folders, PaperReaper(folders))
    ids = [f"{number:012x}" for number in range(20)]
    keepers = {id: kept(folders, id) for id in ids[:3]}
    locks = {id: lock_of(folders, id) for id in ids[3:]}
    waiting = {id: asyncio.ensure_future(machines.ended(id)) for id in ids}
    await asyncio.sleep(0)
    for id in reversed(ids):
        assert not waiting[id].done()
        end(folders, id, exit_code=int(id, 16))
        close(keepers[id]) if id in keepers else os.close(locks[id])
        assert (await asyncio.wait_for(waiting[id], 20)).exit_code == int(id, 16)


def lock_of(folders: Folders, id: str, pid: int | None = None) -> int:
    """A machine whose lock is held by an open file of ours."""
    import fcntl

    descriptor = os.open(begin(folders, id, pid) / LOCK, os.O_RDWR)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    return descriptor


async def test_who_follows_one_machine_keeps_no_journal_of_another_open(folders: Folders) -> None:
    ids = [f"{number:012x}" for number in range(20)]
    for id in ids[:10]:
        begin(folders, id)
    stream = Machines(folders, PaperReaper(folders)).events(of=ids[3])
    before, coming = len(os.listdir("/proc/self/fd")), aiter(stream)
    told = [await anext(coming)]
    for id in ids[10:]:
        begin(folders, id)
    journal(folders.machine(ids[3]), "rebooted")
    told.append(await asyncio.wait_for(anext(coming), 20))
    assert [(one["machine"], one["event"]) for one in told] == [(ids[3], "claim"), (ids[3], "rebooted")]
    assert len(os.listdir("/proc/self/fd")) == before + 1
    await coming.aclose()


async def test_a_keeper_that_is_killed_is_noticed_and_its_machine_finished(folders: Folders) -> None:
    reaper = PaperReaper(folders)
    keeper = kept(folders, "aaaaaaaaaaaa")
    waiting = asyncio.ensure_future(Machines(folders, reaper).ended("aaaaaaaaaaaa"))
    while not waiting.done() and keeper.poll() is None:
        await asyncio.sleep(0)
        keeper.kill()
    outcome = await asyncio.wait_for(waiting, 20)
    assert outcome.cause is Cause.NODE_FAULT and reaper.finished == ["aaaaaaaaaaaa"]
    close(keeper)


async def test_what_cannot_be_finished_is_told(folders: Folders) -> None:
    reaper = PaperReaper(folders)
    reaper.trouble = "QEMU does not go away"
    begin(folders, "aaaaaaaaaaaa")
    with pytest.raises(HostError, match="QEMU does not go away"):
        await Machines(folders, reaper).ended("aaaaaaaaaaaa")


async def test_an_end_of_long_ago_is_told_at_once_from_its_record_or_the_ledger(folders: Folders) -> None:
    machines = Machines(folders, PaperReaper(folders))
    begin(folders, "aaaaaaaaaaaa")
    end(folders, "aaaaaaaaaaaa", exit_code=4)
    assert (await machines.ended("aaaaaaaaaaaa")).exit_code == 4
    for path in folders.ended("aaaaaaaaaaaa").iterdir():
        path.unlink()
    assert (await machines.ended("aaaaaaaaaaaa")).exit_code == 4
    with pytest.raises(NoSuchMachine):
        await machines.ended("bbbbbbbbbbbb")


async def test_waiting_leaves_no_descriptor_behind(folders: Folders) -> None:
    machines = Machines(folders, PaperReaper(folders))
    keeper = kept(folders, "aaaaaaaaaaaa")
    before = sorted(os.listdir("/proc/self/fd"))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await machines.ended("aaaaaaaaaaaa")
    assert sorted(os.listdir("/proc/self/fd")) == before
    close(keeper)


# -- all that happens ---------------------------------------------------------------------------------------------------


async def next_of(events: AsyncIterator[Event]) -> tuple[str, str, object]:
    event = await asyncio.wait_for(anext(events), 20)
    return event["machine"], event["event"], event.get("state")


async def test_machines_come_grow_and_go(folders: Folders) -> None:
    begin(folders, "aaaaaaaaaaaa")
    events = aiter(Machines(folders, PaperReaper(folders)).events())
    assert await next_of(events) == ("aaaaaaaaaaaa", "claim", None)
    folder = begin(folders, "bbbbbbbbbbbb")
    assert await next_of(events) == ("bbbbbbbbbbbb", "claim", None)
    journal(folder, "state", state="running")
    assert await next_of(events) == ("bbbbbbbbbbbb", "state", "running")
    journal(folder, "state", state="done")
    end(folders, "bbbbbbbbbbbb")
    assert await next_of(events) == ("bbbbbbbbbbbb", "state", "done")
    assert await next_of(events) == ("bbbbbbbbbbbb", "ended", None)
    begin(folders, "cccccccccccc")  # so short a life that it is over before anybody looks
    end(folders, "cccccccccccc", exit_code=5)
    assert await next_of(events) == ("cccccccccccc", "claim", None)
    event = await anext(events)
    assert (event["event"], event["exit_code"], event["cause"]) == ("ended", 5, "finished")
    await events.aclose()  # type: ignore[attr-defined]


async def test_ends_are_told_from_where_one_stopped(folders: Folders) -> None:
    machines = Machines(folders, PaperReaper(folders))
    for id in ("aaaaaaaaaaaa", "bbbbbbbbbbbb"):
        begin(folders, id)
        end(folders, id)
    events = aiter(machines.events(since=""))
    first = await anext(events)
    assert first["machine"] == "aaaaaaaaaaaa"
    await events.aclose()  # type: ignore[attr-defined]
    events = aiter(machines.events(since=first["position"]))
    assert await next_of(events) == ("bbbbbbbbbbbb", "ended", None)
    await events.aclose()  # type: ignore[attr-defined]


async def test_when_the_kernel_had_no_room_for_all_everything_is_looked_at_again(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = Machines(folders, PaperReaper(folders)).events()
    events = aiter(stream)
    begin(folders, "aaaaaaaaaaaa")
    assert await next_of(events) == ("aaaaaaaaaaaa", "claim", None)
    read = Watch.read

    def overflown(watch: Watch) -> list[Happened]:
        return [Happened(-1, IN_Q_OVERFLOW, "")] if read(watch) else []

    monkeypatch.setattr(Watch, "read", overflown)
    journal(folders.machine("aaaaaaaaaaaa"), "state", state="running")
    begin(folders, "bbbbbbbbbbbb")
    end(folders, "aaaaaaaaaaaa")
    told = [await next_of(events) for _ in range(3)]
    assert told == [
        ("aaaaaaaaaaaa", "state", "running"), ("bbbbbbbbbbbb", "claim", None), ("aaaaaaaaaaaa", "ended", None),
    ]  # fmt: skip
    await events.aclose()  # type: ignore[attr-defined]


async def test_five_hundred_machines_that_do_nothing_cost_nothing(folders: Folders) -> None:
    """One descriptor for what happens to all of them, and no work between two events."""
    machines = Machines(folders, PaperReaper(folders))
    keeper = kept(folders, "f" * 12)
    ids = [f"{number:012x}" for number in range(500)]
    holders = [lock_of(folders, id, keeper.pid) for id in ids]
    waiting = [asyncio.ensure_future(machines.ended(id)) for id in ids]
    events = aiter(machines.events())
    for _ in range(501):
        await next_of(events)
    coming = asyncio.ensure_future(anext(events))
    await asyncio.wait(waiting, timeout=0)  # each has looked once, and waits now
    begun, used = time.monotonic(), time.process_time()
    await asyncio.wait({coming, *waiting}, timeout=1.0)
    assert time.monotonic() - begun >= 1.0 and time.process_time() - used < 0.02
    end(folders, ids[250])
    os.close(holders.pop(250))
    assert (await asyncio.wait_for(waiting[250], 20)).id == ids[250]
    assert (await asyncio.wait_for(coming, 20))["machine"] == ids[250]
    for one in waiting:
        one.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    await events.aclose()  # type: ignore[attr-defined]
    close(keeper)
    for holder in holders:
        os.close(holder)
