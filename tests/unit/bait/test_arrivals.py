"""How a prolog is told that its job is off the bait."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from belljar.bait.arrivals import SOCKET, listening, tell
from belljar.errors import HostError


async def test_a_prolog_is_answered_when_its_job_is_off_the_bait(tmp_path: Path) -> None:
    asked: list[tuple[str, bool]] = []

    async def arrived(job: str, again: bool) -> bool | None:
        asked.append((job, again))
        return job == "7"

    async with listening(tmp_path, arrived):
        assert (tmp_path / SOCKET).stat().st_mode & 0o777 == 0o600
        said = iter((False, False, True))  # by slurmd: the prolog ends when it has heard so
        await asyncio.to_thread(tell, tmp_path, "7", 5.0, lambda: next(said))
        assert next(said, None) is None
        await asyncio.to_thread(tell, tmp_path, "7", 5.0)  # of whom nobody can be asked
        with pytest.raises(HostError, match=r"did not take job 8 back within 0\.2 s: it could not"):
            await asyncio.to_thread(tell, tmp_path, "8", 0.2)
        for bad in (b'{"job": "7; rm"}\n', b'{"job": 7}\n'):
            reader, writer = await asyncio.open_unix_connection(tmp_path / SOCKET)
            writer.write(bad)
            assert json.loads(await reader.readline()) == {"taken": False}
            writer.close()
        reader, writer = await asyncio.open_unix_connection(tmp_path / SOCKET)
        writer.write(b"x" * 100_000 + b"\n")
        assert await reader.read() == b""
        writer.close()
    assert asked == [("7", False), ("7", False), ("8", False)]
    with pytest.raises(HostError, match="No such file or directory"):
        tell(tmp_path / "nowhere", "7", 0.1)


async def test_a_prolog_does_not_end_before_the_nodes_daemon_knows_that_its_job_is_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("belljar.bait.arrivals.HEARD", 0.05)
    monkeypatch.setattr("belljar.bait.arrivals.AGAIN", 0.01)
    answers = iter((True, None, False, None, None))
    asked: list[bool] = []

    async def arrived(job: str, again: bool) -> bool | None:
        asked.append(again)
        return next(answers)

    async with listening(tmp_path, arrived):
        await asyncio.to_thread(tell, tmp_path, "7", 5.0, lambda: len(asked) == 5)
        assert asked == [False, True, True, True, True]
        asked.clear()
        answers = iter((None, True, True))
        await asyncio.to_thread(
            tell, tmp_path, "7", 5.0, lambda: False
        )  # the batch system knows, and tells it to end the job
        assert asked == [False, False, True]
