"""Who waits for a lease asks once, and is answered when there is something new."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.stories.lease.test_service import House, knock

from belljar.cli.lease.asking import watched
from belljar.cli.lease.lease import _until_running
from belljar.errors import HostError
from belljar.lease import Lease
from belljar.lease.desk import Owner

ME = Owner.of(os.getuid())
RUN = b'{"do":"run","wanted":{"image":"debian12"}}\n'


def line(**asked: Any) -> bytes:
    return json.dumps(asked).encode() + b"\n"


@asynccontextmanager
async def queued(folder: Path) -> AsyncIterator[tuple[House, Path, str]]:
    """A service, its door, and a lease whose job waits."""
    door = folder / "door"
    async with House(folder).up() as house:
        server = await house.opened(door)
        id = (await knock(door, RUN))["lease"]["id"]
        await house.until(lambda: house.daemon.store.read(lambda book: book.find(Lease)[0].job))
        yield house, door, id
        server.close()


async def test_a_status_that_its_caller_has_is_held_until_it_is_another(tmp_path: Path) -> None:
    async with queued(tmp_path) as (house, door, id):
        found = await knock(door, line(do="status", lease=id, wait=20, tag=""))
        assert found["leases"][0]["state"] == "queued" and "tag" in found  # the first is answered at once
        held = asyncio.ensure_future(knock(door, line(do="status", lease=id, wait=20, tag=found["tag"])))
        asked = len(house.slurm.asked)
        await house.until(lambda: len(house.slurm.asked) > asked + 2)  # looks that find nothing new
        assert not held.done()
        house.desk.release(ME, id)
        house.daemon.wake()
        assert (await asyncio.wait_for(held, 10))["leases"][0]["state"] in ("draining", "cancelled")


async def test_a_status_that_stays_is_answered_when_its_caller_would_wait_no_longer(tmp_path: Path) -> None:
    async with queued(tmp_path) as (_, door, id):
        tag = (await knock(door, line(do="status", lease=id, wait=1, tag="")))["tag"]
        again = await asyncio.wait_for(knock(door, line(do="status", lease=id, wait=0.2, tag=tag)), 10)
        assert again["leases"][0]["state"] == "queued"
        assert "wait" in (await knock(door, line(do="status", wait="long")))["message"]


async def test_what_changes_something_is_done_once_whatever_its_caller_waits_for(tmp_path: Path) -> None:
    async with queued(tmp_path) as (house, door, _):
        asked = json.loads(RUN) | {"wait": 20, "tag": ""}
        await asyncio.wait_for(knock(door, line(**asked)), 10)
        await house.until(lambda: len(house.slurm.jobs) > 1)
        assert len(house.desk.leases(ME)) == 2


async def test_who_waits_sees_each_change_and_asks_no_more_often(tmp_path: Path) -> None:
    seen = list[str]()

    def follow(door: Path, id: str) -> None:
        for found in watched(door, "status", 30.0, lease=id):
            seen.append(found["leases"][0]["state"])
            if seen[-1] == "active":
                return

    async with queued(tmp_path) as (house, door, id):
        following = asyncio.ensure_future(asyncio.to_thread(follow, door, id))
        await house.until(lambda: "queued" in seen)
        (run,) = house.slurm.start("1")
        await asyncio.wait_for(following, 20)
        assert seen[-1] == "active" and len(seen) < 12, seen
        house.slurm.end("1", "CANCELLED")
        await run.ended()


async def test_who_has_waited_long_enough_is_told_how_it_stands(tmp_path: Path) -> None:
    async with queued(tmp_path) as (_, door, id):
        found = await asyncio.wait_for(asyncio.to_thread(lambda: list(watched(door, "status", 0.5, lease=id))), 10)
        assert [one["leases"][0]["state"] for one in found] == ["queued", "queued"]


async def test_who_is_content_with_fewer_machines_waits_for_no_more(tmp_path: Path) -> None:
    door = tmp_path / "door"
    async with House(tmp_path, barrier=0.3).up() as house:
        server = await house.opened(door)
        for least in (1, 0):
            wanted = {"image": "debian12", "count": 2, "least": least}
            id = (await knock(door, line(do="run", wanted=wanted)))["lease"]["id"]
            lease = lambda id=id: house.daemon.store.read(lambda book: book.get(Lease, id))  # noqa: E731
            await house.until(lambda lease=lease: lease().job)
            until_running = partial(asyncio.to_thread, _until_running, door, id, 20.0)
            waiting = asyncio.ensure_future(until_running()) if least else None
            (run, *_) = house.slurm.start(lease().job, ranks=1 if least else 2)
            if waiting is not None:
                await asyncio.wait_for(waiting, 20)
            else:
                await house.until(lambda run=run: run.machines.living)
                house.desk.terminate(ME, [next(iter(run.machines.living))])
                with pytest.raises(HostError, match="UserInitiatedShutdown"):
                    await asyncio.wait_for(until_running(), 20)
            house.desk.release(ME, id)
            await house.until(lambda lease=lease: not lease().is_live)
        server.close()
