"""The order of commands in which a guest's memory leaves it, and what becomes of the guest when a step fails."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.unit.hypervisor.test_virtiofsd import PlayedQemu, commands

from belljar.errors import BelljarError, QmpError, QmpTimeout

CAPABILITIES, PARAMETERS = "migrate-set-capabilities", "migrate-set-parameters"


async def answered(qemu: PlayedQemu, *names: str) -> list[dict[str, object]]:
    """QEMU does what it is told, so far: these commands."""
    heard: list[dict[str, object]] = []
    while len(heard) < len(names):
        for command in await commands(qemu):
            heard.append(command)
            qemu.says({"return": {}, "id": command["id"]})
    assert [command["execute"] for command in heard] == list(names)
    return heard


def tells(qemu: PlayedQemu, status: str) -> None:
    qemu.says({"event": "MIGRATION", "data": {"status": status}})


async def test_what_is_to_be_done_while_the_guest_stands_still_is_done_before_the_last_part(tmp_path: Path) -> None:
    qemu, steps = PlayedQemu(tmp_path, []), list[str]()
    qemu.said()

    async def switch() -> None:
        steps.append("switched")

    try:
        work = asyncio.ensure_future(qemu.domain.migrate("fd:x", timeout=10, with_memory=True, switch=switch))
        told, _, _ = await answered(qemu, CAPABILITIES, PARAMETERS, "migrate")
        said = {row["capability"]: row["state"] for row in told["arguments"]["capabilities"]}  # type: ignore[index]
        assert said["auto-converge"] and not said["x-ignore-shared"]  # it is slowed down until the rest is small
        tells(qemu, "active")
        assert not steps
        tells(qemu, "pre-switchover")
        (told,) = await answered(qemu, "migrate-continue")
        assert steps == ["switched"] and told["arguments"] == {"state": "pre-switchover"}
        tells(qemu, "completed")
        await asyncio.wait_for(work, 10)
    finally:
        await qemu.close()


async def test_there_may_be_several(tmp_path: Path) -> None:
    qemu = PlayedQemu(tmp_path, [])
    qemu.said()
    try:
        for _ in range(2):
            work = asyncio.ensure_future(qemu.domain.migrate("fd:x", timeout=10))
            await answered(qemu, CAPABILITIES, PARAMETERS, "migrate")
            tells(qemu, "completed")
            await asyncio.wait_for(work, 10)
    finally:
        await qemu.close()


@pytest.mark.parametrize("how", ["the switch fails", "it takes too long", "cancelled"])
async def test_one_that_is_given_up_is_cancelled_and_waited_for(tmp_path: Path, how: str) -> None:
    qemu = PlayedQemu(tmp_path, [])
    qemu.said()

    async def switch() -> None:
        if how == "the switch fails":
            raise QmpError("no room")
        await asyncio.sleep(1000)

    try:
        timeout = 0.05 if how == "it takes too long" else 10
        work = asyncio.ensure_future(qemu.domain.migrate("fd:x", timeout=timeout, with_memory=True, switch=switch))
        await answered(qemu, CAPABILITIES, PARAMETERS, "migrate")
        if how != "it takes too long":
            tells(qemu, "pre-switchover")
            await asyncio.sleep(0.02)
        if how == "cancelled":
            work.cancel()
        await answered(qemu, "migrate_cancel")
        assert not work.done()
        tells(qemu, "cancelled")
        with pytest.raises((BelljarError, asyncio.CancelledError)):
            await asyncio.wait_for(work, 10)
    finally:
        await qemu.close()


async def test_one_that_fails_says_why(tmp_path: Path) -> None:
    qemu = PlayedQemu(tmp_path, [])
    qemu.said()
    try:
        work = asyncio.ensure_future(qemu.domain.migrate("fd:x", timeout=10))
        await answered(qemu, CAPABILITIES, PARAMETERS, "migrate")
        tells(qemu, "failed")
        (question,) = await commands(qemu)
        qemu.says({"return": {"error-desc": "Broken pipe"}, "id": question["id"]})
        with pytest.raises(QmpError, match="Broken pipe"):
            await asyncio.wait_for(work, 10)
    finally:
        await qemu.close()


async def test_a_guest_goes_on_a_moment_after_its_migration(tmp_path: Path) -> None:
    qemu = PlayedQemu(tmp_path, [])
    qemu.said()
    try:
        work = asyncio.ensure_future(qemu.domain.resume())
        (first,) = await commands(qemu)
        problem = {"class": "GenericError", "desc": "Migration is not finalized yet"}
        qemu.says({"error": problem, "id": first["id"]})
        await answered(qemu, "cont")
        await asyncio.wait_for(work, 10)
    finally:
        await qemu.close()


async def test_a_migration_that_is_never_finished_is_named_at_the_deadline(tmp_path: Path) -> None:
    qemu = PlayedQemu(tmp_path, [])
    qemu.said()
    qemu.domain._timeout = 0.2
    try:
        work = asyncio.ensure_future(qemu.domain.resume())
        problem = {"class": "GenericError", "desc": "Migration is not finalized yet"}
        while not work.done():
            for command in qemu.said():
                qemu.says({"error": problem, "id": command["id"]})
            await asyncio.sleep(0)
        with pytest.raises(QmpTimeout, match=r"QEMU has not finished its migration within 0\.2 s"):
            await work
    finally:
        await qemu.close()
