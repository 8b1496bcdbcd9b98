"""What the service asks the batch system beside jobs, and what owners ask of a machine that runs."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from tests.stories.lease.test_service import House, knock

from belljar.errors import OverLimit
from belljar.lease import Lease, LeaseState


async def test_all_jobs_are_one_question(tmp_path: Path) -> None:
    async with House(tmp_path).up() as house:
        ids = [house.ask() for _ in range(20)]
        await house.until(lambda: all(house.lease(id).state is LeaseState.QUEUED for id in ids))
        before = len(house.slurm.asked)
        house.jobs._answer = None
        await house.daemon.look()
        assert house.slurm.asked[before:] == ["squeue"]


async def test_two_that_extend_a_lease_at_once_both_have_their_time_of_the_batch_system(tmp_path: Path) -> None:
    async with House(tmp_path).up() as house:
        server = await house.opened(tmp_path / "door")
        wanted, command = b'{"do":"run","wanted":{"image":"debian12","seconds":3600}}\n', house.slurm.command
        id = (await knock(tmp_path / "door", wanted))["lease"]["id"]
        lease = lambda: house.daemon.store.read(lambda book: book.find(Lease)[0])  # noqa: E731
        await house.until(lambda: house.slurm.jobs)
        (run,) = house.slurm.start("1")
        await house.until(lambda: lease().state is LeaseState.ACTIVE and lease().job)

        async def slow(argv: tuple[str, ...]) -> bytes:
            if argv[:2] == ("scontrol", "update"):
                await asyncio.sleep(0.3)
            return await command(argv)

        house.jobs._command = slow
        longer = json.dumps({"do": "extend", "id": id, "seconds": 1800}).encode() + b"\n"
        assert await asyncio.gather(*(knock(tmp_path / "door", longer) for _ in range(2))) == [{"ok": True}] * 2
        assert lease().wanted.seconds == 3600 + 2 * 1800
        minutes = [int(argv[3].partition("=")[2]) for argv in house.slurm.limits]
        assert minutes[1] - minutes[0] == 30, minutes
        house.slurm.end("1", "CANCELLED")
        await run.ended()
        server.close()


async def test_a_lease_that_is_longer_than_its_queue_allows_is_refused_at_once_with_numbers(tmp_path: Path) -> None:
    async with House(tmp_path).up() as house:
        await house.until(lambda: house.jobs.queue("short").longest == 3600)
        with pytest.raises(OverLimit, match=r"takes [0-9]+ s of the batch system; its queue gives 3600 s") as error:
            house.ask(queue="short")
        left = int(error.value.hint.split()[2])
        house.ask(queue="short", seconds=float(left))
        with pytest.raises(OverLimit):
            house.ask(queue="short", seconds=left + 60.0)
        house.ask()


async def test_the_door_shows_what_a_pilot_sends_of_a_console_and_passes_a_reboot_on(tmp_path: Path) -> None:
    async with House(tmp_path).up() as house:
        server = await house.opened(tmp_path / "door")
        await knock(tmp_path / "door", b'{"do":"run","wanted":{"image":"debian12"}}\n')
        await house.until(lambda: house.slurm.jobs)
        (run,) = house.slurm.start("1")
        await house.until(lambda: run.machines.started)
        (machine,) = run.machines.started
        for do, answer in (("console", {"text": "login:"}), ("reboot", {"ok": True})):
            said = await knock(tmp_path / "door", json.dumps({"do": do, "id": machine}).encode() + b"\n")
            assert answer.items() <= said.items()
        await house.until(lambda: run.machines.told == [(machine, "reboot", b"")])
        server.close()
