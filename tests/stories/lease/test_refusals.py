"""What an owner is told who asks for what cannot be: the value that is wrong, and what to do; and why a lease is not even in the queue."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

from tests.stories.lease.test_service import House, knock

from belljar.lease import LeaseState

WANTED = {"image": "debian12", "seconds": 600.0}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"image": "windows"}, "windows: not among the images that may be leased: debian12*"),
    ({"type": "huge"}, "huge: no such type; there are small"),
    ({"count": 0}, "0 machines, 0 at least, 1 on a node: 1 to 1000 can be asked for, and no more at least or on a node"),
    ({"count": 3, "per_node": 4}, "3 machines, 0 at least, 4 on a node: "),
    ({"size": {"cpus": -1, "memory": 0, "disk": 0}}, "-1 processors, 536870912 bytes of memory, "),
    ({"user_data": "x" * 16385}, "user data of 16385 bytes: 16384 are the most"),
    ({"token": "x" * 65}, "a token of 65 characters: 64 are the most"),
    ({"queue": "a\0b"}, "queue 'a\\x00b': no queue is called so"),
    ({"queue": "--uid=0"}, "queue '--uid=0': no queue is called so"),
    ({"account": "theirs"}, "account, key, tags: "),
    ({"size": {"cpus": 10**30, "memory": 0, "disk": 0}}, f"{10**30} processors, 536870912 bytes of memory, "),
    ({"size": {"cpus": 1, "memory": 10**400, "disk": 0}}, "no size of a machine"),
    ({"size": {"cpus": 1, "memory": 0, "disk": 1 << 63}}, "no size of a machine"),
    ({"image": "debian12\ud800"}, "half of a character"),
]  # fmt: skip


async def test_a_refusal_names_what_is_wrong_and_queues_are_called_as_batch_systems_call_them(tmp_path: Path) -> None:
    """An account is the site's to say: one service submits for all."""
    async with House(tmp_path).up() as house:
        server = await house.opened(tmp_path / "door")
        for wrong, words in REFUSED:
            line = json.dumps({"do": "run", "wanted": WANTED | wrong}).encode() + b"\n"
            answer = await knock(tmp_path / "door", line)
            assert words in answer["message"] and "--help" in answer["hint"], answer
        for queue in ("", "batch", "long,short", "all.q@@nodes", "workq@server-1"):
            asked = {"do": "run", "wanted": WANTED | {"queue": queue}}
            answer = await knock(tmp_path / "door", json.dumps(asked).encode() + b"\n")
            assert answer["lease"]["wanted"]["queue"] == queue
        server.close()


async def test_a_time_that_is_none_is_named(tmp_path: Path) -> None:
    async with House(tmp_path).up() as house:
        server = await house.opened(tmp_path / "door")
        run = json.dumps({"do": "run", "wanted": WANTED}).encode() + b"\n"
        id = (await knock(tmp_path / "door", run))["lease"]["id"]
        await house.until(lambda: house.slurm.jobs)
        (pilot,) = house.slurm.start("1")
        await house.until(lambda: pilot.machines.living)
        for asked, words in (
            ({"do": "extend", "id": id, "seconds": 0}, "0 s more"),
            ({"do": "extend", "id": id, "seconds": -5}, "seconds: '-5': not a number from 0 on"),
            ({"do": "grow", "id": id, "count": "x"}, "count: 'x': not a number from 0 on"),
        ):
            assert words in (await knock(tmp_path / "door", json.dumps(asked).encode() + b"\n"))["message"]
        house.slurm.end("1", "CANCELLED")
        await pilot.ended()
        server.close()


async def test_why_a_job_is_not_submitted_is_told_while_it_is_tried_again(tmp_path: Path) -> None:
    async with House(tmp_path).up() as house:
        house.slurm.refuses = "Slurm backup controller in standby mode"
        id = house.ask()
        await house.until(lambda: "standby" in house.lease(id).why)
        assert house.lease(id).state is LeaseState.REQUESTED
        house.slurm.refuses = ""
        await house.until_state(id, LeaseState.QUEUED)
        await house.until(lambda: "standby" not in house.lease(id).why)


async def test_a_disk_that_takes_no_job_files_is_told_to_who_waits_and_stops_no_clusters(tmp_path: Path) -> None:
    def broken(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "jobs")

    async with House(tmp_path).up() as house:
        looks = list[int]()

        async def look() -> None:
            looks.append(1)

        house.jobs._write, house.jobs.sweep = broken, broken  # type: ignore[method-assign]
        house.daemon.after_look, house.daemon._is_swept = look, False
        id = house.ask()
        await house.until(lambda: "Permission denied" in house.lease(id).why)
        looks.clear()
        await house.until(lambda: len(looks) > 1)
